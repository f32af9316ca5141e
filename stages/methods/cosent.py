"""CoSENT: cosines of pairs in the order of their labels."""

from typing import Literal

import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor

from stages.encoder import Encoder
from stages.methods.base import MethodSettings, Metrics
from stages.methods.functional import ranking_loss
from stages.methods.pairs import RankingMethod, check_ranking


class CoSENTConfig(MethodSettings):
    """CoSENT, IEEE/ACM TASLP 32 (2024)."""

    name: Literal["cosent"]
    scale: PositiveFloat = 20.0                                # lambda: 1 / temperature

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse a batch of one pair."""
        check_ranking(batch_size)

    def build(self, encoder: Encoder) -> "CoSENT":
        """The module to train."""
        return CoSENT(encoder, self)


class CoSENT(RankingMethod):
    """log(1 + sum exp(lambda (cos_q - cos_p))) over all pairs of the global batch with y_p > y_q."""

    def __init__(self, encoder: Encoder, config: CoSENTConfig) -> None:
        super().__init__(encoder)
        self.config = config

    def rank(self, first: Tensor, second: Tensor, labels: Tensor, text_ids: Tensor) -> tuple[Tensor, Metrics]:
        """The loss over cosines."""
        cosines = F.cosine_similarity(first, second, dim=-1)
        return ranking_loss(cosines, labels, self.config.scale), {"cosine": cosines.detach().mean()}
