"""Every engine, on real processes, against plain PyTorch in one."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from cluster.config import ClusterConfig
from cluster.engine import DDPEngine, DeepSpeedEngine, Engine, PlainEngine, build_engine
from cluster.world import Solo, World
from stages.batches import own_share
from stages.evaluate.validation import SharedSentences, Validation
from stages.methods.apincse import APINCSEConfig
from stages.methods.base import Batch, Method
from stages.methods.simcse import SimCSEConfig
from tests import tiny
from tests.processes import in_processes

BATCH, STEPS, MORE = 8, 5, 2
CLIPPING = 1.0                                                 # less than the gradients' norms here, so it acts

MethodName = Literal["apincse", "simcse"]
METHODS: dict[str, Any] = {
    "apincse": APINCSEConfig(name="apincse", queue_length=20, neighbours=4),   # full at step 3, then around twice
    "simcse": SimCSEConfig(name="simcse"),
}


@dataclass
class Trained:
    """What is left after a few steps."""

    engine: type
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    queue: torch.Tensor | None
    spearman: float
    went_on: dict[str, torch.Tensor]                           # weights after ``MORE`` steps
    went_on_again: dict[str, torch.Tensor]                     # the same, after loading what was saved before them


def train(world: World, name: MethodName, strategy: str, precision: str, folder: Path) -> Trained:
    """Train, validate, save, go on, load, go on again."""
    method: Method = METHODS[name].build(tiny.encoder(dropout=0.0))
    # An eps above the rounding noise of gradients that are zero in exact arithmetic: of keys' biases, for one.
    optimizer = AdamW(method.parameters(), eps=1e-4, weight_decay=0.01)
    engine: Engine
    if strategy == "plain":
        engine = PlainEngine(method, optimizer, CLIPPING)
    else:
        cluster = ClusterConfig(workers=world.size, strategy=strategy, precision=precision, device="cpu")
        engine = build_engine(method, optimizer, CLIPPING, cluster, world, BATCH // world.size)

    def steps(first: int, last: int) -> tuple[list[float], list[float]]:
        losses, norms = [], []
        method.train()
        for step in range(first, last):
            whole = tiny.batch(BATCH, seed=step)
            rows = own_share(np.arange(BATCH), world)
            loss, _ = engine.model(Batch(whole.input_ids[rows], whole.attention_mask[rows]), world)
            losses.append(float(world.mean(loss)))
            norms.append(engine.step(loss, 1e-2 / (step + 1)))
        return losses, norms

    losses, norms = steps(0, STEPS)
    weights = engine.weights()
    queue = method.resume_state().get("queue")
    method.eval()
    spearman = scored_pairs().spearman(method.encoder, engine.device, world)
    engine.save(folder)
    state = method.resume_state()
    world.barrier()
    steps(STEPS, STEPS + MORE)
    went_on = engine.weights()
    engine.load(folder)
    method.load_resume_state(state)
    steps(STEPS, STEPS + MORE)
    return Trained(type(engine), losses, norms, weights, queue, spearman, went_on, engine.weights())


def scored_pairs() -> Validation:
    """Pairs of 25 sentences, a number that two ranks cannot share evenly."""
    random = np.random.default_rng(0)
    first, second = random.integers(25, size=(2, 40))
    return Validation(SharedSentences(tiny.token_lists(25, seed=9), pad=0), first, second, random.normal(size=40))


@cache
def trained(name: MethodName, strategy: str = "plain", workers: int = 1, precision: str = "fp32") -> list[Trained]:
    """What each rank ends with; computed once for all tests."""
    folder = Path(mkdtemp())
    try:
        if strategy == "plain":
            return [train(Solo(), name, strategy, precision, folder)]
        return in_processes(workers, train, name, strategy, precision, folder)
    finally:
        shutil.rmtree(folder)


ENGINES = [("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero2", 1), ("zero2", 2), ("zero3", 2)]
every_engine = pytest.mark.parametrize(("strategy", "workers"), ENGINES)
both_methods = pytest.mark.parametrize("name", ["apincse", "simcse"])
pytestmark = pytest.mark.cluster


def assert_equal_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == torch.float32
        difference = (found[name] - value).abs().max().item()
        assert difference <= relative * max(0.1, value.abs().max().item()), name    # biases start at 0


@every_engine
@both_methods
def test_workers_learn_what_one_process_learns(name: MethodName, strategy: str, workers: int) -> None:
    (alone,) = trained(name)
    start = METHODS[name].build(tiny.encoder(dropout=0.0)).state_dict()
    assert max((alone.weights[key] - start[key]).abs().max() for key in start) > 5e-3
    for rank in trained(name, strategy, workers):
        assert rank.engine is (DDPEngine if strategy == "ddp" else DeepSpeedEngine)
        assert rank.losses == pytest.approx(alone.losses, rel=1e-5)
        assert_equal_weights(rank.weights, alone.weights, 1e-5)


@every_engine
def test_the_reported_norm_is_of_the_unclipped_mean_gradient(strategy: str, workers: int) -> None:
    (alone,) = trained("apincse")
    assert min(alone.norms) > CLIPPING
    for rank in trained("apincse", strategy, workers):
        assert rank.norms == pytest.approx(alone.norms, rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_queues_are_bit_equal_on_all_ranks(strategy: str) -> None:
    first, second = trained("apincse", strategy, 2)
    assert first.queue is not None
    assert torch.equal(first.queue, second.queue)
    (alone,) = trained("apincse")
    torch.testing.assert_close(first.queue, alone.queue, rtol=0, atol=1e-5)


@every_engine
def test_an_encoder_in_training_validates_as_in_one_process(strategy: str, workers: int) -> None:
    (alone,) = trained("apincse")
    scores = [rank.spearman for rank in trained("apincse", strategy, workers)]
    assert len(set(scores)) == 1
    assert scores[0] == pytest.approx(alone.spearman, abs=0.05)  # a swap of two close ranks


@pytest.mark.parametrize(("strategy", "workers"), [("plain", 1), *ENGINES])
@both_methods
def test_what_was_saved_goes_on_bit_for_bit(name: MethodName, strategy: str, workers: int) -> None:
    for rank in trained(name, strategy, workers):
        assert any(not torch.equal(rank.went_on[key], rank.weights[key]) for key in rank.weights)
        assert_equal_weights(rank.went_on_again, rank.went_on, 0.0)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_bf16_stays_near_float32(strategy: str) -> None:
    (alone,) = trained("apincse")
    first, second = trained("apincse", strategy, 2, "bf16")
    assert torch.equal(first.queue, second.queue)
    assert np.isfinite(first.losses).all()
    assert first.losses[0] == pytest.approx(alone.losses[0], rel=0.2)
    assert first.norms[0] == pytest.approx(alone.norms[0], rel=0.2)
    for rank in (first, second):
        assert rank.weights.keys() == alone.weights.keys()
        assert all(value.isfinite().all() and value.dtype == torch.float32 for value in rank.weights.values())


def without_a_compiler(world: World, folder: Path) -> None:
    os.environ["PATH"] = os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "empty")
    train(world, "simcse", "zero2", "fp32", folder)


def test_deepspeed_on_a_cpu_needs_no_compiler(tmp_path: Path) -> None:
    in_processes(2, without_a_compiler, tmp_path)
    assert not (tmp_path / "empty").exists()
