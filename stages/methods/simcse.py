"""SimCSE: two dropout views of a sentence, or the first two of a triplet, find each other in the batch."""

from typing import Literal

import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor

from cluster.world import World
from stages.encoder import Encoder, Encoding
from stages.methods.base import MLP, Batch, Method, MethodSettings, Metrics, TwoViewMethod, full_precision, own_rows
from stages.methods.functional import hard_negative_info_nce, info_nce


class SimCSEConfig(MethodSettings):
    """Unsupervised SimCSE, arXiv:2104.08821."""

    name: Literal["simcse"]
    temperature: PositiveFloat = 0.05
    mlp: MLP = "train-only"

    def build(self, encoder: Encoder) -> "SimCSE":
        """The module to train."""
        return SimCSE(encoder, self)


class SimCSE(TwoViewMethod):
    """The loss of equation 1 over the global batch."""

    def __init__(self, encoder: Encoder, config: SimCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """Cross-entropy of this worker's anchors against the gathered second views."""
        anchors, positives = (F.normalize(self.head(view.embedding), dim=-1) for view in (first, second))
        targets = own_rows(world, len(anchors), anchors.device)
        loss = info_nce(anchors, world.gather(positives), targets, self.config.temperature)
        cosine = (anchors * positives).sum(dim=-1).mean()
        return loss, {"loss": loss.detach(), "positive_cosine": cosine.detach()}


class SupervisedSimCSEConfig(MethodSettings):
    """Supervised SimCSE, arXiv:2104.08821, without the head that the paper keeps at test."""

    name: Literal["simcse-supervised"]
    temperature: PositiveFloat = 0.05
    mlp: MLP = "none"

    def build(self, encoder: Encoder) -> "SupervisedSimCSE":
        """The module to train."""
        return SupervisedSimCSE(encoder, self)


class SupervisedSimCSE(Method):
    """The loss of equation 5: every contradiction of the global batch is a negative of every anchor."""

    def __init__(self, encoder: Encoder, config: SupervisedSimCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode all sentences of the triplets in one pass, then leave autocast for the loss."""
        embeddings = self.encoder(batch.input_ids, batch.attention_mask).embedding
        with full_precision(embeddings.device):
            compared = self.head(embeddings)
            anchors, positives, negatives = F.normalize(compared, dim=-1).chunk(3)
            return self.loss(anchors, positives, negatives, world)

    def loss(self, anchors: Tensor, positives: Tensor, negatives: Tensor, world: World) -> tuple[Tensor, Metrics]:
        """Cross-entropy of this worker's (n, D) anchors against all workers' positives and negatives."""
        targets = own_rows(world, len(anchors), anchors.device)
        temperature = self.config.temperature
        loss = hard_negative_info_nce(
            anchors, world.gather(positives), world.gather(negatives), targets, temperature, temperature
        )
        metrics = {
            "positive_cosine": (anchors * positives).sum(dim=-1).mean(),
            "negative_cosine": (anchors * negatives).sum(dim=-1).mean(),
        }
        return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}
