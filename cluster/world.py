"""The processes that train together, seen from one of them."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class World(Protocol):
    """What a training step needs to know of its peers."""

    rank: int
    size: int

    def gather(self, tensor: Tensor) -> Tensor:
        """(B, ...) on each rank -> (size*B, ...) in rank order; gradients flow back to every rank's rows."""
        ...

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks, without gradients."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        ...


class Solo:
    """A world of one process."""

    rank = 0
    size = 1

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: there is no other rank."""
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the detached tensor."""
        return tensor.detach()

    def broadcast(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def barrier(self) -> None:
        """Return at once."""


class TorchWorld:
    """The default process group of torch.distributed, which must be initialised."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's rows in rank order, differentiably; equal shapes on all ranks."""
        gathered: Tensor = _AllGather.apply(tensor)  # type: ignore[no-untyped-call]
        return gathered

    def mean(self, tensor: Tensor) -> Tensor:
        """All-reduce to the mean, without gradients."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def broadcast(self, value: Any) -> Any:
        """Send any picklable value from rank 0 to all."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Block until every rank is here."""
        dist.barrier()


class _AllGather(torch.autograd.Function):
    """All-gather whose backward sums, over ranks, the gradients that reached this rank's rows.

    With the gradients of W ranks averaged afterwards, as DDP and ZeRO do, local anchors against gathered
    candidates give exactly the gradient of the global mean loss: no factor W is missing or needed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = tensor.shape[0]
        gathered = tensor.new_empty((dist.get_world_size() * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        start = dist.get_rank() * ctx.rows
        return total[start : start + ctx.rows]
