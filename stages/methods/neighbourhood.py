"""What APINCSE and IS-CSE share: positives drawn towards their neighbours in a queue of earlier ones."""

import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from cluster.errors import InputError
from cluster.queue import Queue
from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import MLP, MethodSettings, TwoViewMethod
from stages.methods.functional import augmented_positives, info_nce, nearest


class NeighbourhoodSettings(MethodSettings):
    """The queue and how neighbours are taken from it."""

    temperature: PositiveFloat = 0.05
    queue_length: PositiveInt = 1024                           # L
    neighbours: PositiveInt = 16                               # k
    beta: PositiveFloat = 2.0                                  # the neighbourhood's softmax temperature

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse a queue too short for a batch or for the neighbours.

        Raises:
            InputError: with the one setting to change.
        """
        method = "train.method"
        if self.queue_length < batch_size:
            raise InputError(
                f"{method}.queue_length={self.queue_length} is shorter than train.batch_size={batch_size}, of which "
                f"every sentence is pushed at each step; use a queue_length of at least {batch_size}"
            )
        if self.neighbours >= self.queue_length:
            raise InputError(
                f"{method}.neighbours={self.neighbours} is not less than {method}.queue_length={self.queue_length}; "
                f"it may be 1 to {self.queue_length - 1}"
            )


class NeighbourhoodMethod(TwoViewMethod):
    """A method with a queue of normalised positives, equal on every worker."""

    def __init__(self, encoder: Encoder, settings: NeighbourhoodSettings, mlp: MLP) -> None:
        super().__init__(encoder, mlp)
        self.settings = settings
        self.queue = Queue(settings.queue_length, encoder.dimension)

    def augmented_loss(
        self, anchors: Tensor, positives: Tensor, live: Tensor, excluded: Tensor | None, targets: Tensor, world: World
    ) -> Tensor:
        """l_P: find each anchor's positive after every positive has been averaged with its neighbours.

        Args:
            anchors: (n, D) unit vectors.
            positives: (n, D) unit vectors, by which neighbours are found.
            live: (n, D), the positives as they enter the average.
            excluded: (n,) places in the queue that a positive must not find, or None.
            targets: (n,) rows of this worker's anchors in the global batch.
            world: the peers.

        Returns:
            () mean over this worker's anchors.

        Source: APINCSE, equations 10-15; IS-CSE, section 3, arXiv:2305.07424.
        """
        neighbours = nearest(positives.detach(), self.queue.rows, self.settings.neighbours, excluded)
        augmented = F.normalize(augmented_positives(live, neighbours, self.settings.beta), dim=-1)
        return info_nce(anchors, world.gather(augmented), targets, self.settings.temperature)

    def queue_fill(self, like: Tensor) -> Tensor:
        """() part of the queue that is filled."""
        return like.new_tensor(len(self.queue.rows) / self.queue.length)

    def resume_state(self) -> dict[str, Tensor]:
        """The queue."""
        return self.queue.state()

    def load_resume_state(self, state: dict[str, Tensor]) -> None:
        """Take up the queue."""
        self.queue.load_state(state)
