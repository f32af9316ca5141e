"""Every method learns the same however many workers compute it, under every strategy, and however it is cut up."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.world import World
from stages.context import Context
from stages.encoder import Encoder, EncoderConfig
from stages.evaluate.validation import ValidationFile
from stages.methods import generator
from stages.methods.registry import LABELLED, METHODS, MethodConfig
from stages.train import Run, Task, TrainConfig, TrainJob, check_train, learning_rate
from tests import tiny
from tests.processes import in_processes

pytestmark = pytest.mark.cluster

STEPS = 20
BATCH = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "apincse": {"queue_length": 24, "neighbours": 4},
    "cluster-ns": {"clusters": 4},
    "consert": {"first": "none"},                              # cutoff is drawn by each worker, as dropout is
    "is-cse": {"queue_length": 24, "neighbours": 4},
    "rankcse": {"teacher": "ENCODER"},
    "wsscse": {"fill": "argmax"},                              # what is sampled is drawn by each worker, too
}
Weights = dict[str, torch.Tensor]


@cache
def folder() -> Path:
    """An encoder with a masked-LM head, and rows of every kind."""
    made = Path(mkdtemp(prefix="exactness-"))
    tiny.save_masked_lm(made / "ENCODER")
    tiny.corpus(made / "sentences", 60)
    for kind, members in {"scored-pairs": 2, "triplets": 3}.items():
        sentences = tiny.token_lists(60 * members, seed=3)
        rows = [sentences[at * members : (at + 1) * members] for at in range(60)]
        ids = np.arange(60 * members).reshape(60, members)
        labels = pa.array([None if members == 3 else at % 6 / 5 for at in range(60)], pa.float32())
        (made / kind).mkdir()
        table = pa.table({
            "input_ids": pa.array(rows, pa.list_(pa.list_(pa.int32()))),
            "text_ids": pa.array(ids.tolist(), pa.list_(pa.int64())),
            "label": labels,
        })  # fmt: skip
        pq.write_table(table, made / kind / "part-00000.parquet")
    tiny.scored_pairs(made / "pairs.jsonl")
    return made


def job(name: str, where: Path, **changes: Any) -> tuple[TrainJob, Path]:
    """A job without dropout, and its corpus."""
    options = json.loads(json.dumps(OPTIONS.get(name, {})).replace("ENCODER", str(where / "ENCODER")))
    method = TypeAdapter[Any](MethodConfig).validate_python({"name": name, **options})
    train = TrainConfig(
        method=method, batch_size=BATCH, steps=STEPS, learning_rate=1e-3, dropout=0.0,
        validation=ValidationFile(path=str(where / "pairs.jsonl")), **changes,
    )  # fmt: skip
    encoder = EncoderConfig(name=str(where / "ENCODER"), pooling="mean" if name != "apincse" else "layer-attention")
    kind = LABELLED.get(name, ("sentences",))[0]
    return TrainJob(train=train, encoder=encoder, evaluation_data=None, seed=0), where / kind


def in_float64(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    loaded = load(*arguments, **options)
    model, *others = loaded if isinstance(loaded, tuple) else (loaded,)
    return (model.double(), *others) if others else model.double()


def learn(world: World, names: list[str], where: Path, strategy: str, double: bool, at_once: int | None) -> list[Any]:
    """The weights and the method's state after all steps, for each method."""
    from accelerate.state import AcceleratorState

    found = []
    for name in names:
        AcceleratorState._reset_state(True)
        with pytest.MonkeyPatch.context() as patch:
            if double:
                patch.setattr(Encoder, "load", partial(in_float64, Encoder.load))
                patch.setattr(generator, "load_masked_lm", partial(in_float64, generator.load_masked_lm))
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)      # losses leave lower precisions by it
                torch.set_default_dtype(torch.float64)
            configured, corpus = job(name, where, micro_batch_size=at_once)
            cluster = ClusterConfig(workers=world.size, strategy=strategy, device="cpu")  # type: ignore[arg-type]
            run = Run.prepare(Task(configured, corpus, Context(where, cluster)), world)
            run.method.train()
            for step in range(STEPS):
                loss, _ = run.engine.model(run.batch(step), world)
                run.engine.step(loss, learning_rate(step, STEPS, 1e-3, 0.0))
        weights = {key: value.clone() for key, value in run.method.state_dict().items()} if double else None
        found.append((weights or run.engine.weights(), run.method.resume_state()))
    return found


@cache
def learned(
    workers: int, strategy: str = "ddp", double: bool = False, at_once: int | None = None,
    names: tuple[str, ...] = METHODS,
) -> dict[str, list[tuple[Weights, Weights]]]:
    """Method -> what each rank ends with."""
    ranks = in_processes(workers, learn, list(names), folder(), strategy, double, at_once)
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(names)}


def farthest(found: Weights, wanted: Weights) -> float:
    """The greatest difference of a tensor relative to its norm."""
    assert found.keys() == wanted.keys()
    with_gradients = [key for key in wanted if not key.endswith("key.bias")]   # these have but rounding, in attention
    return max(
        float((found[key] - wanted[key]).norm() / wanted[key].norm().clamp(min=0.1)) for key in with_gradients
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_learn_what_one_learns_to_the_last_digits_of_float64(name: str, workers: int) -> None:
    (alone, state), *_ = learned(1, double=True)[name]
    ranks = learned(workers, double=True)[name]
    for weights, held in ranks:
        assert farthest(weights, alone) < 1e-9
        assert all(torch.equal(held[key], ranks[0][1][key]) for key in held)
        assert held.keys() == state.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_sharded_optimizer_learns_what_one_process_learns(name: str) -> None:
    """To 1e-5, or, where rounding grows faster, no farther than float32 itself is from float64."""
    (alone, _), *_ = learned(1)[name]
    (exact, _), *_ = learned(1, double=True)[name]
    for weights, _ in learned(2, "zero2")[name]:
        assert farthest(weights, alone) < max(1e-5, 2 * farthest(alone, exact))


CACHED = tuple(name for name in METHODS if name != "consert")


@pytest.mark.parametrize("name", CACHED)
def test_gradient_caching_changes_nothing(name: str) -> None:
    (alone, _), *_ = learned(1, double=True)[name]
    for weights, _ in learned(2, double=True, at_once=3, names=CACHED)[name]:
        assert farthest(weights, alone) < 1e-9


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradient_caching_changes_nothing_where_the_optimizer_is_sharded(strategy: str) -> None:
    names = ("apincse", "simcse")
    plain, cached = (learned(2, strategy, at_once=at_once, names=names) for at_once in (None, 3))
    for name in names:
        assert farthest(cached[name][0][0], plain[name][0][0]) < 1e-5


def test_a_method_that_changes_whole_batches_refuses_gradient_caching() -> None:
    configured, _ = job("consert", folder(), micro_batch_size=3)
    with pytest.raises(InputError, match="micro_batch_size=3 would cut up; set it to null"):
        check_train(configured, ClusterConfig())
