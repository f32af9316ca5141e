"""SimCSE: two dropout views of a sentence find each other in the batch."""

from typing import Literal

import torch.nn.functional as F
from pydantic import BaseModel, PositiveFloat
from torch import Tensor

from cluster.world import World
from stages.encoder import Encoder, Encoding
from stages.methods.base import MLP, Metrics, TwoViewMethod, own_rows
from stages.methods.functional import info_nce


class SimCSEConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Unsupervised SimCSE, arXiv:2104.08821."""

    name: Literal["simcse"]
    temperature: PositiveFloat = 0.05
    mlp: MLP = "train-only"

    def check(self, depth: int, batch_size: int) -> None:
        """Any encoder and batch will do."""

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
