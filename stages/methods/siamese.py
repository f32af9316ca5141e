"""Siamese BERT: a similarity out of the mean Manhattan distance, held against the label."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import Batch, MethodSettings, Metrics
from stages.methods.functional import manhattan_similarity
from stages.methods.pairs import PairMethod


class SiameseConfig(MethodSettings):
    """One encoder for both sentences; ``encoder.pooling`` of cls or mean is the papers' choice."""

    name: Literal["siamese"]

    def build(self, encoder: Encoder) -> "Siamese":
        """The module to train."""
        return Siamese(encoder)


class Siamese(PairMethod):
    """The mean of (exp(-mean |u - v|) - y)^2."""

    def loss(
        self, first: Tensor, second: Tensor, labels: Tensor, batch: Batch, world: World
    ) -> tuple[Tensor, Metrics]:
        """The mean over this worker's pairs; that over workers is the global mean."""
        similarities = manhattan_similarity(first, second)
        loss = F.mse_loss(similarities, labels)
        return loss, {"loss": loss.detach(), "similarity": similarities.detach().mean()}
