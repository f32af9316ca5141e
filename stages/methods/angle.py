"""AnglE: pairs ranked by angles in complex space beside cosines, and found among the batch's sentences."""

from typing import Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from cluster.errors import InputError
from stages.encoder import Encoder
from stages.methods.base import MethodSettings, Metrics
from stages.methods.functional import angle_scores, in_batch_loss, ranking_loss
from stages.methods.pairs import RankingMethod, check_ranking


class AnglEConfig(MethodSettings):
    """AnglE, arXiv:2309.12871; a part whose weight is 0 is not computed."""

    name: Literal["angle"]
    cosine_weight: NonNegativeFloat = 1.0                      # w1
    in_batch_weight: NonNegativeFloat = 1.0                    # w2
    angle_weight: NonNegativeFloat = 1.0                       # w3
    cosine_temperature: PositiveFloat = 0.05
    in_batch_temperature: PositiveFloat = 0.05
    angle_temperature: PositiveFloat = 1.0

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse a batch of one pair, and a loss of no part.

        Raises:
            InputError: with the setting to change.
        """
        check_ranking(batch_size)
        if self.cosine_weight == self.in_batch_weight == self.angle_weight == 0:
            raise InputError(
                "train.method.cosine_weight, in_batch_weight and angle_weight are all 0; set one of them higher"
            )

    def build(self, encoder: Encoder) -> "AnglE":
        """The module to train."""
        return AnglE(encoder, self)


class AnglE(RankingMethod):
    """l = w1 l_cos + w2 l_ibn + w3 l_angle, equation 9; a pair is alike in l_ibn where its label is 1."""

    def __init__(self, encoder: Encoder, config: AnglEConfig) -> None:
        super().__init__(encoder)
        self.config = config

    def rank(self, first: Tensor, second: Tensor, labels: Tensor, text_ids: Tensor) -> tuple[Tensor, Metrics]:
        """The weighted sum of the parts that have a weight."""
        config = self.config
        cosines = F.cosine_similarity(first, second, dim=-1)
        loss, metrics = cosines.new_zeros(()), {"cosine": cosines.detach().mean()}
        if config.cosine_weight > 0:
            part = ranking_loss(cosines, labels, 1 / config.cosine_temperature)
            loss, metrics["loss_cosine"] = loss + config.cosine_weight * part, part.detach()
        if config.in_batch_weight > 0:
            units = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
            part = in_batch_loss(*units, text_ids, labels == 1, config.in_batch_temperature)
            loss, metrics["loss_in_batch"] = loss + config.in_batch_weight * part, part.detach()
        if config.angle_weight > 0:
            part = ranking_loss(angle_scores(first, second), labels, 1 / config.angle_temperature)
            loss, metrics["loss_angle"] = loss + config.angle_weight * part, part.detach()
        return loss, metrics
