"""SNCSE, DiffCSE and SG-OPT over several workers: what each draws and learns is what one alone does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from cluster.world import World
from stages.batches import row_seeds
from stages.methods import sg_opt
from stages.methods.base import Batch, Method
from stages.methods.registry import MethodConfig
from tests import tiny
from tests.methods.test_diffcse import save_generator
from tests.methods.test_sncse import SENTENCES, batch_of, tokenizer
from tests.processes import in_processes

Found = tuple[dict[str, float], dict[str, np.ndarray]]


def own_rows(batch: Batch, world: World) -> Batch:
    """This worker's rows, padded to the longest of them."""
    ids, mask = (t.chunk(world.size)[world.rank] for t in (batch.input_ids, batch.attention_mask))
    longest = int(mask.sum(dim=1).max())
    return Batch(ids[:, :longest], mask[:, :longest])


def one_step(world: World, options: dict[str, Any]) -> Found:
    """Metrics and gradients of the global batch, averaged over workers as an engine does."""
    torch.manual_seed(1)
    learner: Method = TypeAdapter(MethodConfig).validate_python(options).build(tiny.encoder("mean", dropout=0.0))
    seeds = row_seeds(len(SENTENCES), 0, 42).reshape(world.size, -1)[world.rank]
    loss, metrics = learner(learner.augment(own_rows(batch_of(*SENTENCES), world), seeds, tokenizer()), world)
    loss.backward()
    gradients = {
        name: world.mean(parameter.grad).numpy()
        for name, parameter in learner.named_parameters()
        if parameter.grad is not None
    }
    return {name: world.mean(value).item() for name, value in metrics.items()}, gradients


def steps(world: World, every: list[dict[str, Any]]) -> list[Found]:
    sg_opt.PROJECTION = 24                                     # of 4096, whose gradients would take long to compare
    return [one_step(world, options) for options in every]


@pytest.mark.cluster
def test_two_workers_have_the_loss_metrics_and_gradients_of_one(tmp_path: Path) -> None:
    generator = save_generator(tmp_path)
    every: list[dict[str, Any]] = [
        {"name": "sncse", "temperature": 0.5, "margin_weight": 1.0, "least_margin": 0.25},
        {"name": "diffcse", "generator": generator, "temperature": 0.5, "replaced_weight": 1.0},
        {"name": "sg-opt", "temperature": 0.1},
    ]
    (alone,), (together, other) = in_processes(1, steps, every), in_processes(2, steps, every)
    for options, wanted, found, others in zip(every, alone, together, other, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-6), options["name"]
        assert found[0] == others[0]
        assert found[1].keys() == wanted[1].keys()
        for name, one in wanted[1].items():
            close = 1e-5 * max(1.0, np.abs(one).max())
            np.testing.assert_allclose(found[1][name], one, rtol=1e-4, atol=close, err_msg=name)
