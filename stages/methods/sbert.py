"""SBERT: a softmax classifier over both embeddings of a pair and their difference."""

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import Batch, MethodSettings, Metrics
from stages.methods.functional import difference_features
from stages.methods.pairs import PairMethod


class SBERTConfig(MethodSettings):
    """SBERT with its classification objective, arXiv:1908.10084."""

    name: Literal["sbert"]
    classes: Annotated[int, Field(ge=2)] = 2                   # steps of the labels' range: 6 for scores of 0 to 5

    def build(self, encoder: Encoder) -> "SBERT":
        """The module to train."""
        return SBERT(encoder, self)


class SBERT(PairMethod):
    """Cross-entropy of a pair's class under softmax(W [u; v; |u - v|]); W is for training alone."""

    def __init__(self, encoder: Encoder, config: SBERTConfig) -> None:
        super().__init__(encoder)
        self.config = config
        self.classifier = nn.Linear(3 * encoder.dimension, config.classes)

    def loss(
        self, first: Tensor, second: Tensor, labels: Tensor, batch: Batch, world: World
    ) -> tuple[Tensor, Metrics]:
        """The mean over this worker's pairs; that over workers is the global mean."""
        features = difference_features(first, second)
        logits = self.classifier(features.to(self.classifier.weight.dtype)).float()
        classes = (labels * (self.config.classes - 1)).round().long()
        loss = F.cross_entropy(logits, classes)
        accuracy = (logits.argmax(dim=-1) == classes).float().mean()
        return loss, {"loss": loss.detach(), "train_accuracy": accuracy}
