"""ClusterNS: SimCSE with the next cluster's centroid as hard negative, and a margin for the own cluster's sentences."""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import Encoder, Encoding
from stages.methods.base import MLP, MethodSettings, Metrics, TwoViewMethod, own_rows
from stages.methods.clusters import (
    assigned,
    bidirectional_margin_loss,
    moved_centroids,
    scattered_centroids,
    second_nearest,
)
from stages.methods.functional import hard_negative_info_nce, info_nce


class ClusterNSConfig(MethodSettings):
    """ClusterNS, arXiv:2305.09892, with its values for BERT-base."""

    name: Literal["cluster-ns"]
    temperature: PositiveFloat = 0.05
    clusters: Annotated[int, Field(ge=2)] = 128                # K
    momentum: Annotated[float, Field(gt=0, le=1)] = 1e-3       # gamma, of the centroids
    start_cosine: Annotated[float, Field(ge=-1, le=1)] = 0.4   # clusters begin when the batch's mean cosine is as low
    negative_weight: NonNegativeFloat = 1.0                    # mu, of hard negatives in the denominator; 0: none
    margin_weight: NonNegativeFloat = 1e-3                     # lambda, of the margin loss
    alpha: NonNegativeFloat = 0.0                              # least and
    beta: NonNegativeFloat = 0.3                               # greatest difference in cosine of a false negative
    mlp: MLP = "train-only"

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse more clusters than a batch can begin, and margins without room between them.

        Raises:
            InputError: with the setting to change.
        """
        method = "train.method"
        if self.clusters > batch_size:
            raise InputError(
                f"{method}.clusters={self.clusters} is more than train.batch_size={batch_size}, whose sentences are "
                f"the first centroids; it may be 2 to {batch_size}"
            )
        if self.alpha > self.beta:
            raise InputError(
                f"{method}.alpha={self.alpha:g} is more than {method}.beta={self.beta:g}; it may be 0 to {self.beta:g}"
            )

    def build(self, encoder: Encoder) -> "ClusterNS":
        """The module to train."""
        return ClusterNS(encoder, self)


class ClusterNS(TwoViewMethod):
    """l = l_CL + lambda l_BML; plain SimCSE until the clusters begin.

    Centroids are moved by the gathered batch, so that they are the same on every worker.
    """

    def __init__(self, encoder: Encoder, config: ClusterNSConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config
        self.centroids: Tensor | None = None                   # (K, D), none before the clusters begin

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """Both losses of this worker's anchors, against the global batch."""
        raw, positives = self.head(first.embedding), F.normalize(self.head(second.embedding), dim=-1)
        anchors = F.normalize(raw, dim=-1)
        targets = own_rows(world, len(anchors), anchors.device)
        all_points, all_positives = world.gather(raw.detach()), world.gather(positives)
        metrics: Metrics = {"positive_cosine": (anchors * positives).sum(dim=-1).mean()}

        if self.centroids is None:
            metrics["batch_cosine"] = self._begin(all_points, all_positives.detach(), world)
            loss = info_nce(anchors, all_positives, targets, self.config.temperature)
        else:
            centroids = moved_centroids(self.centroids.to(anchors.device), all_points, self.config.momentum)
            self.centroids = centroids
            contrast = self._contrast(anchors, all_points, all_positives, targets, centroids)
            clusters = assigned(all_points, centroids)
            shared = clusters[targets][:, None] == clusters[None, :]               # (n, N)
            shared = shared.scatter(1, targets[:, None], False)
            cosines = anchors @ all_positives.T
            margin = bidirectional_margin_loss(cosines, targets, shared, self.config.alpha, self.config.beta)
            loss = contrast + self.config.margin_weight * margin
            metrics |= {"loss_contrast": contrast, "loss_margin": margin, "batch_cosine": cosines.mean()}
            metrics["false_negatives"] = shared.sum(dim=1).float().mean()
        metrics["clusters_begun"] = anchors.new_tensor(self.centroids is not None)
        return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}

    def _begin(self, all_points: Tensor, all_positives: Tensor, world: World) -> Tensor:
        """() mean cosine of the global batch; where it is low enough, the next step has clusters."""
        cosines = F.normalize(all_points, dim=-1) @ all_positives.T
        mean = world.mean(cosines.mean())                      # to the last bit, so that all begin at one step
        if mean <= self.config.start_cosine:
            self.centroids = scattered_centroids(all_points, cosines, self.config.clusters)
        return mean

    def _contrast(
        self, anchors: Tensor, all_points: Tensor, all_positives: Tensor, targets: Tensor, centroids: Tensor
    ) -> Tensor:
        """l_CL: every anchor meets the hard negatives of all anchors."""
        temperature, weight = self.config.temperature, self.config.negative_weight
        if weight == 0:
            return info_nce(anchors, all_positives, targets, temperature)
        negatives = F.normalize(second_nearest(all_points, centroids), dim=-1)
        return hard_negative_info_nce(anchors, all_positives, negatives, targets, temperature, temperature, weight)

    def resume_state(self) -> dict[str, Tensor]:
        """The centroids, of which there are 0 before the clusters begin."""
        return {"centroids": torch.zeros(0) if self.centroids is None else self.centroids.cpu().clone()}

    def load_resume_state(self, state: dict[str, Tensor]) -> None:
        """Take up the centroids."""
        self.centroids = state["centroids"].clone() if len(state["centroids"]) else None
