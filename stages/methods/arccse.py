"""ArcCSE's pair-wise part: SimCSE with an angle added between the two views of a sentence."""

import math
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field, PositiveFloat
from torch import Tensor

from cluster.world import World
from stages.encoder import Encoder, Encoding
from stages.methods.base import MLP, MethodSettings, Metrics, TwoViewMethod, own_rows
from stages.methods.functional import angular_margin_info_nce


class ArcCSEConfig(MethodSettings):
    """ArcCSE, ACL 2022, its pair-wise loss alone: no triplets of masked sentences."""

    name: Literal["arccse"]
    temperature: PositiveFloat = 0.05
    margin: Annotated[float, Field(ge=0, lt=90)] = 10.0        # m, degrees; 0 is SimCSE
    mlp: MLP = "train-only"

    def build(self, encoder: Encoder) -> "ArcCSE":
        """The module to train."""
        return ArcCSE(encoder, self)


class ArcCSE(TwoViewMethod):
    """The additive angular margin contrastive loss over the global batch."""

    def __init__(self, encoder: Encoder, config: ArcCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """Cross-entropy of this worker's anchors against the gathered second views, their own turned away by m."""
        anchors, positives = (F.normalize(self.head(view.embedding), dim=-1) for view in (first, second))
        targets = own_rows(world, len(anchors), anchors.device)
        margin = math.radians(self.config.margin)
        loss = angular_margin_info_nce(anchors, world.gather(positives), targets, self.config.temperature, margin)
        cosine = (anchors * positives).sum(dim=-1).mean()
        return loss, {"loss": loss.detach(), "positive_cosine": cosine.detach()}
