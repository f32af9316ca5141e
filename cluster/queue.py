"""The first-in-first-out neighbourhood, equal on every worker because every worker pushes the gathered batch."""

import torch
from torch import Tensor


class Queue:
    """A ring of the last ``length`` vectors; float32, without gradients, no part of an exported encoder."""

    def __init__(self, length: int, dimension: int) -> None:
        self.length = length
        self.pushed = 0                                        # vectors ever pushed
        self._ring = torch.zeros(length, dimension)

    @property
    def rows(self) -> Tensor:
        """(F, D) the F vectors held at present, F = min(pushed, length); ring order, not age."""
        return self._ring[: min(self.pushed, self.length)]

    @property
    def full(self) -> bool:
        """Whether every place has been filled once."""
        return self.pushed >= self.length

    def push(self, vectors: Tensor) -> Tensor:
        """Replace the oldest vectors.

        Args:
            vectors: (N, D), the same on every worker, in global batch order; N <= length.

        Returns:
            (N,) int64, the rows where they now lie.
        """
        if self._ring.device != vectors.device:
            self._ring = self._ring.to(vectors.device)
        places = (self.pushed + torch.arange(len(vectors), device=vectors.device)) % self.length
        self._ring[places] = vectors.detach().float().nan_to_num(0, 0, 0)      # a bad step must not spoil later ones
        self.pushed += len(vectors)
        return places

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return {"queue": self._ring.cpu().clone(), "queue_pushed": torch.tensor(self.pushed)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from ``state()``."""
        self._ring = state["queue"].clone()
        self.pushed = int(state["queue_pushed"])
