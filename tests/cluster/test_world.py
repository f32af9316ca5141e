"""Several gloo processes against one: what they exchange, and the gradients that flow through it."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.world import Solo, World
from stages.batches import own_share
from stages.methods.base import own_rows
from stages.methods.functional import hard_negative_info_nce
from tests.processes import in_processes

BATCH = 12


def exchange(world: World) -> dict[str, Any]:
    """Every collective, once."""
    mine = torch.arange(4.0).reshape(2, 2) + 10 * world.rank
    world.barrier()
    return {
        "gathered": world.gather(mine),
        "integers": world.gather(torch.tensor([world.rank])),
        "transposed": world.gather(mine.T),
        "mean": world.mean(mine.requires_grad_()),
        "broadcast": world.broadcast({"rank": world.rank} if world.rank == 0 else None),
    }


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_values_in_rank_order(size: int) -> None:
    parts = [torch.arange(4.0).reshape(2, 2) + 10 * rank for rank in range(size)]
    for found in in_processes(size, exchange):
        assert torch.equal(found["gathered"], torch.cat(parts))
        assert found["integers"].tolist() == list(range(size))
        assert torch.equal(found["transposed"], torch.cat([part.T for part in parts]))
        assert torch.equal(found["mean"], torch.stack(parts).mean(dim=0))
        assert not found["mean"].requires_grad
        assert found["broadcast"] == {"rank": 0}


def test_one_process_exchanges_with_itself() -> None:
    found = exchange(Solo())
    assert torch.equal(found["gathered"], found["mean"])
    assert found["broadcast"] == {"rank": 0}


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(BATCH, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)


def embeddings(world: World) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weight that is learnt, and three unit vectors for each sentence of this rank's share."""
    x, weight = inputs()
    weight.requires_grad_()
    mine = x[torch.from_numpy(own_share(np.arange(BATCH), world))]
    anchors, positives, negatives = (F.normalize((mine + shift) @ weight, dim=-1) for shift in (0.0, 0.1, -1.0))
    return weight, anchors, positives, negatives


def local_anchors(world: World) -> tuple[Tensor, Tensor]:
    """The loss of a rank's own anchors against everybody's candidates, as the methods here compute it."""
    weight, anchors, positives, negatives = embeddings(world)
    targets = own_rows(world, len(anchors), anchors.device)
    loss = hard_negative_info_nce(anchors, world.gather(positives), world.gather(negatives), targets, 0.05, 1.0)
    loss.backward()
    return world.mean(loss), world.mean(weight.grad)


def global_loss(world: World) -> tuple[Tensor, Tensor]:
    """The loss of all anchors, computed on every rank, as losses must be that are no means over anchors."""
    weight, *parts = embeddings(world)
    anchors, positives, negatives = (world.gather(part) for part in parts)
    loss = hard_negative_info_nce(anchors, positives, negatives, torch.arange(BATCH), 0.05, 1.0)
    loss.backward()
    return world.mean(loss), world.mean(weight.grad)


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compute", [local_anchors, global_loss])
def test_gradients_averaged_over_ranks_are_those_of_one_process(compute: Any, size: int) -> None:
    loss, gradient = compute(Solo())
    for found_loss, found_gradient in in_processes(size, compute):
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-12)
