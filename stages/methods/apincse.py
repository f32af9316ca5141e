"""APINCSE: layer-wise attention pooling, augmented positives from a neighbourhood, inter-layer negatives."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import Encoder, Encoding, Layers
from stages.methods.base import MLP, Metrics, own_rows
from stages.methods.functional import hard_negative_info_nce, info_nce, nearest_layer, own_negative_info_nce
from stages.methods.neighbourhood import NeighbourhoodMethod, NeighbourhoodSettings


class APINCSEConfig(NeighbourhoodSettings):
    """The method's parameters, and the readings that its paper leaves open."""

    name: Literal["apincse"]
    instance_weight: NonNegativeFloat = 1.0                    # w_I, equation 20
    augmented_weight: NonNegativeFloat = 1.0                   # w_P
    negative_weight: NonNegativeFloat = 1.0                    # w_N
    anchor_norm: Literal["unit", "raw"] = "unit"               # of the live positive in equations 13-14
    include_self: bool = False                                 # let a positive retrieve the copy just pushed
    queue_warmup: Literal["full", "none"] = "full"             # full: no augmented loss before the queue is full
    negative_layer: Literal["argmax"] | Annotated[int, Field(ge=1)] = "argmax"  # M: one of 1..T-1
    negative_temperature: bool = True                          # divide the negatives' cosines by the temperature too
    negatives: Literal["batch", "own"] = "batch"               # hard negatives of the whole batch, or an anchor's own
    detach_negative: bool = False                              # no gradients into the hard negatives
    mlp: MLP = "none"                                          # train-only: SimCSE's head, for the -LAST ablation

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse what cannot be meant.

        Args:
            depth: layers T of the encoder.
            batch_size: sentences in the global batch.

        Raises:
            InputError: with the one setting to change.
        """
        super().check(depth, batch_size)
        method = "train.method"
        if depth < 3:
            raise InputError(
                f"the encoder has {depth} layers; APINCSE needs at least 3, to choose a hard negative among layers "
                f"between the first and the last"
            )
        if self.negative_layer != "argmax" and self.negative_layer >= depth:
            raise InputError(
                f"{method}.negative_layer={self.negative_layer} is no intermediate layer of this encoder; "
                f"it may be argmax or 1 to {depth - 1}"
            )

    def build(self, encoder: Encoder) -> "APINCSE":
        """The module to train."""
        return APINCSE(encoder, self)


class APINCSE(NeighbourhoodMethod):
    """l = w_I l_I + w_P l_P + w_N l_N, equation 20."""

    def __init__(self, encoder: Encoder, config: APINCSEConfig) -> None:
        super().__init__(encoder, config, config.mlp)
        self.config = config

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """The weighted sum of the three losses of this worker's anchors, against the global batch."""
        config = self.config
        raw_positives = self.head(second.embedding)
        anchors = F.normalize(self.head(first.embedding), dim=-1)
        positives = F.normalize(raw_positives, dim=-1)
        targets = own_rows(world, len(anchors), anchors.device)
        all_positives = world.gather(positives)

        instance = info_nce(anchors, all_positives, targets, config.temperature)
        loss = config.instance_weight * instance
        metrics: Metrics = {
            "loss_instance": instance,
            "positive_cosine": (anchors * positives).sum(dim=-1).mean(),
        }
        if config.augmented_weight > 0:
            own_places = self.queue.push(all_positives)[targets]
            metrics["queue_fill"] = self.queue_fill(anchors)
            if self.queue.full or config.queue_warmup == "none":
                live = positives if config.anchor_norm == "unit" else raw_positives
                excluded = None if config.include_self else own_places
                augmented = self.augmented_loss(anchors, positives, live, excluded, targets, world)
                loss = loss + config.augmented_weight * augmented
                metrics["loss_augmented"] = augmented
        if config.negative_weight > 0:
            chosen, negatives = self._hard_negatives(first.layers)
            negative = self._negative(anchors, all_positives, negatives, targets, world)
            loss = loss + config.negative_weight * negative
            metrics["loss_negative"] = negative
            metrics["negative_cosine"] = (anchors * negatives).sum(dim=-1).mean()
            for layer in range(1, self.encoder.depth):
                metrics[f"negative_layer/{layer}"] = (chosen == layer).float().mean()
        return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}

    def _hard_negatives(self, layers: Layers) -> tuple[Tensor, Tensor]:
        """(n,) the layer chosen for each sentence and (n, d) its unit [CLS] vectors, equations 16-17."""
        n = layers.cls.shape[1]
        chosen = (
            nearest_layer(layers.cls.detach())
            if self.config.negative_layer == "argmax"
            else torch.full((n,), self.config.negative_layer, device=layers.cls.device)
        )
        negatives = F.normalize(layers.cls[chosen, torch.arange(n, device=chosen.device)].float(), dim=-1)
        return chosen, negatives.detach() if self.config.detach_negative else negatives

    def _negative(
        self, anchors: Tensor, all_positives: Tensor, negatives: Tensor, targets: Tensor, world: World
    ) -> Tensor:
        """l_N, equations 18-19."""
        temperature = self.config.temperature
        negative_temperature = temperature if self.config.negative_temperature else 1.0
        if self.config.negatives == "own":
            return own_negative_info_nce(anchors, all_positives, negatives, targets, temperature, negative_temperature)
        gathered = world.gather(negatives)
        return hard_negative_info_nce(anchors, all_positives, gathered, targets, temperature, negative_temperature)
