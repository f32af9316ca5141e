"""What methods that learn from labelled pairs share."""

import logging

import torch
from torch import Tensor

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import Batch, Method, Metrics, full_precision

log = logging.getLogger(__name__)


class PairMethod(Method):
    """A method whose loss needs both sentences of each pair and the pair's label."""

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode all sentences in one pass, then leave autocast for the loss."""
        assert batch.labels is not None
        both = self.encoder(batch.input_ids, batch.attention_mask).embedding
        with full_precision(both.device):
            first, second = both.chunk(2)
            return self.loss(first, second, batch.labels, batch, world)

    def loss(
        self, first: Tensor, second: Tensor, labels: Tensor, batch: Batch, world: World
    ) -> tuple[Tensor, Metrics]:
        """() loss of this worker's (n, D) pairs with (n,) labels, and what to log."""
        raise NotImplementedError


class RankingMethod(PairMethod):
    """A method that ranks the pairs of the whole global batch by their labels.

    Such a loss is no mean over pairs, so every worker gathers all pairs and computes the loss of the global batch.
    A batch whose labels are all equal has nothing to rank: it is counted, and training goes on.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        self.unordered = 0                                     # batches so far whose labels were all equal

    def loss(
        self, first: Tensor, second: Tensor, labels: Tensor, batch: Batch, world: World
    ) -> tuple[Tensor, Metrics]:
        """The loss of all workers' pairs, the same on each."""
        pairs = world.gather(torch.stack([first, second], dim=1))                  # (N, 2, D)
        labels = world.gather(labels)
        loss, metrics = self.rank(pairs[:, 0], pairs[:, 1], labels, self._text_ids(batch, world))
        if bool((labels == labels[0]).all()):
            self._count(world)
        return loss, metrics | {"loss": loss.detach(), "batches_without_order": labels.new_tensor(self.unordered)}

    def rank(self, first: Tensor, second: Tensor, labels: Tensor, text_ids: Tensor) -> tuple[Tensor, Metrics]:
        """() loss of all N pairs, and what to log; ``text_ids`` (2N,) has the first sentences' before the others'."""
        raise NotImplementedError

    @staticmethod
    def _text_ids(batch: Batch, world: World) -> Tensor:
        assert batch.text_ids is not None
        return world.gather(batch.text_ids.reshape(2, -1).T).T.flatten()

    def _count(self, world: World) -> None:
        if self.unordered == 0 and world.rank == 0:
            log.warning("a batch has equal labels only, so there is nothing to rank; see batches_without_order")
        self.unordered += 1

    def resume_state(self) -> dict[str, Tensor]:
        """The count."""
        return {"unordered": torch.tensor(self.unordered)}

    def load_resume_state(self, state: dict[str, Tensor]) -> None:
        """Take up the count."""
        self.unordered = int(state["unordered"])


def check_ranking(batch_size: int) -> None:
    """Refuse a batch in which there is nothing to rank.

    Raises:
        InputError: the batch is a single pair.
    """
    if batch_size < 2:
        raise InputError("train.batch_size=1 has no two pairs to rank; use at least 2")
