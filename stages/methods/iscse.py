"""IS-CSE: SimCSE, and the same again with positives smoothed by their neighbours in a queue."""

import math
from typing import Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from cluster.world import World
from stages.encoder import Encoder, Encoding
from stages.methods.base import MLP, Batch, Metrics, own_rows
from stages.methods.functional import info_nce
from stages.methods.neighbourhood import NeighbourhoodMethod, NeighbourhoodSettings


class ISCSEConfig(NeighbourhoodSettings):
    """IS-CSE, arXiv:2305.07424."""

    name: Literal["is-cse"]
    schedule: Literal["constant", "cosine"] = "constant"       # of alpha, the weight of the smoothed loss
    alpha: NonNegativeFloat = 0.1                              # constant: the weight
    alpha_start: NonNegativeFloat = 0.005                      # cosine: the weight at first
    alpha_end: NonNegativeFloat = 0.05                         # cosine: the weight from half of training on
    mlp: MLP = "train-only"

    def build(self, encoder: Encoder) -> "ISCSE":
        """The module to train."""
        return ISCSE(encoder, self)

    def weight(self, done: float) -> float:
        """Alpha after a part of all steps; half a cosine wave reaches ``alpha_end`` at the middle of training."""
        if self.schedule == "constant":
            return self.alpha
        return self.alpha_end + (self.alpha_start - self.alpha_end) * math.cos(math.pi * min(done, 0.5))


class ISCSE(NeighbourhoodMethod):
    """l = l_I + alpha l_P; l_P begins when the queue has been filled once."""

    def __init__(self, encoder: Encoder, config: ISCSEConfig) -> None:
        super().__init__(encoder, config, config.mlp)
        self.config = config
        self.alpha = config.weight(0.0)                        # of the present step

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Weigh the smoothed loss as far as training has come."""
        self.alpha = self.config.weight(batch.done)
        return super().forward(batch, world)

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """Both losses of this worker's anchors, against the global batch."""
        anchors, positives = (F.normalize(self.head(view.embedding), dim=-1) for view in (first, second))
        targets = own_rows(world, len(anchors), anchors.device)
        all_positives = world.gather(positives)
        own_places = self.queue.push(all_positives)[targets]

        loss = info_nce(anchors, all_positives, targets, self.config.temperature)
        metrics: Metrics = {
            "loss_instance": loss,
            "positive_cosine": (anchors * positives).sum(dim=-1).mean(),
            "queue_fill": self.queue_fill(anchors),
            "alpha": anchors.new_tensor(self.alpha),
        }
        if self.queue.full:
            smoothed = self.augmented_loss(anchors, positives, positives, own_places, targets, world)
            loss, metrics["loss_augmented"] = loss + self.alpha * smoothed, smoothed
        return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}
