"""Methods that change the tokens of unlabelled sentences learn the same on two workers as on one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from cluster.world import World
from stages.batches import own_share, row_seeds
from stages.encoder import Encoder, EncoderConfig
from stages.methods.base import Batch, Method
from stages.methods.registry import MethodConfig
from tests import tiny
from tests.processes import in_processes

ROWS, STEPS = 6, 3
OPTIONS: list[dict[str, Any]] = [
    {"name": "wsscse", "generator": "shared"},
    {"name": "wsscse", "generator": "own"},
    {"name": "esimcse", "queue_length": 15, "momentum": 0.7},
    {"name": "consert", "first": "none"},                      # cutoff is drawn on each worker, as dropout is
]


def build(folder: str, options: dict[str, Any]) -> Method:
    torch.manual_seed(3)
    encoder = Encoder.load(folder, EncoderConfig(name=folder, pooling="cls"), dropout=0.0)
    method: Method = TypeAdapter(MethodConfig).validate_python(options).build(encoder)
    return method.train()


def share(method: Method, step: int, world: World) -> Batch:
    """This worker's rows, augmented as the loop does it."""
    own = own_share(np.arange(ROWS), world)
    plain = tiny.batch(ROWS, seed=step)
    batch = Batch(plain.input_ids[own], plain.attention_mask[own])
    return method.augment(batch, own_share(row_seeds(ROWS, step, 1), world), tiny.tokenizer())


def learnt(world: World, folder: str, options: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of some steps of gradient descent; weights and the method's state after them."""
    method = build(folder, options)
    losses = []
    for step in range(STEPS):
        method.zero_grad()
        loss, _ = method(share(method, step, world), world)
        loss.backward()
        losses.append(world.mean(loss.detach()).item())
        with torch.no_grad():
            for parameter in method.parameters():
                assert parameter.grad is not None
                parameter -= 0.02 * world.mean(parameter.grad)
    state = {**method.state_dict(), **method.resume_state()}
    return losses, {name: value.numpy() for name, value in state.items()}


def of_all(world: World, folder: str) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    return [learnt(world, folder, options) for options in OPTIONS]


@pytest.mark.cluster
def test_two_workers_learn_what_one_learns_and_hold_the_same(tmp_path: Path) -> None:
    folder = tiny.save_masked_lm(tmp_path)
    (alone,), (together, other) = in_processes(1, of_all, folder), in_processes(2, of_all, folder)
    for options, wanted, found, others in zip(OPTIONS, alone, together, other, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-4), options
        for name, value in wanted[1].items():
            np.testing.assert_allclose(found[1][name], value, rtol=1e-3, atol=1e-4, err_msg=f"{options} {name}")
            assert np.array_equal(found[1][name], others[1][name]), f"{options} {name}"
