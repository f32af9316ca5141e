"""The training loop on real engines: what it writes, what it keeps, and that stopping it changes nothing."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.world import Solo, World
from stages.artifacts import Corpus
from stages.context import STOP, Context
from stages.encoder import Encoder, EncoderConfig, load_tokenizer
from stages.evaluate.validation import Validation, ValidationFile
from stages.methods.apincse import APINCSEConfig
from stages.train import Run, Task, TrainConfig, TrainJob, check_train, learning_rate, train, train_worker
from tests import tiny
from tests.processes import in_processes

SPEED = "sentences_per_second"
LONG = {"steps": 14, "eval_every": 4, "checkpoint_every": 4, "log_every": 1}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def job(bert: str, tmp_path: Path) -> TrainJob:
    """With dropout, and a queue that is full at step 3 and goes round."""
    method = APINCSEConfig(name="apincse", queue_length=20, neighbours=4)
    validation = ValidationFile(path=tiny.scored_pairs(tmp_path / "pairs.jsonl"))
    config = TrainConfig(method=method, batch_size=8, learning_rate=1e-3, dropout=0.1, validation=validation)
    encoder = EncoderConfig(name=bert, max_length=16)
    return TrainJob(train=config, encoder=encoder, evaluation_data=None, seed=0)


def with_train(job: TrainJob, **changes: Any) -> TrainJob:
    return job.model_copy(update={"train": job.train.model_copy(update=changes)})


def task(job: TrainJob, out: Path, sentences: int = 100, workers: int = 1, strategy: str = "ddp") -> Task:
    folder = out.parent / f"corpus-{sentences}"
    if not folder.exists():
        tiny.corpus(folder, sentences)
    out.mkdir(exist_ok=True)
    return Task(job, folder, Context(out, ClusterConfig(workers=workers, strategy=strategy, device="cpu")))


def run(
    world: World,
    task: Task,
    die_after: int | None = None,
    die_in_checkpoint: int | None = None,
    die_at_the_end: bool = False,
    stop_after: int | None = None,
    nonfinite_at: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """``train_worker``, of which the last rank may be killed; returns the weights at the end."""
    with pytest.MonkeyPatch.context() as patch:
        last = world.rank == world.size - 1
        kept: dict[str, torch.Tensor] = {}
        steps: list[int] = []

        def log_step(self: Run, position: Any, *others: Any) -> None:
            Run_log_step(self, position, *others)
            if last and position.step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if position.step == stop_after:
                (task.context.out / STOP).touch()

        def save(self: Run, position: Any) -> None:
            if last and position.step == die_in_checkpoint:
                self.engine.save = lambda _folder: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            Run_save(self, position)

        def batch(self: Run, step: int) -> Any:
            if not steps:
                self.engine.model.register_forward_hook(spoil)
            steps.append(step)
            return Run_batch(self, step)

        def spoil(_model: Any, _inputs: Any, output: Any) -> Any:
            return (output[0] * torch.nan, output[1]) if steps[-1] in nonfinite_at else output

        def finish(self: Run, position: Any) -> None:
            kept.update(self.engine.weights())
            if die_at_the_end:
                self._drop_encoders = lambda but: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            Run_finish(self, position)

        Run_log_step, Run_save, Run_batch, Run_finish = Run.log_step, Run.save, Run.batch, Run.finish
        if nonfinite_at:
            patch.setattr(Run, "batch", batch)
        patch.setattr(Run, "log_step", log_step)
        patch.setattr(Run, "save", save)
        patch.setattr(Run, "finish", finish)
        train_worker(task, world)
        return kept


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_speed(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != SPEED} for line in lines(out)]


def best(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "best.json").read_text())
    return found


def test_a_run_logs_steps_and_validations_as_they_come(job: TrainJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    in_processes(1, run, task(with_train(job, steps=7, log_every=3, eval_every=3, warmup=0.5), out))
    logged = [line for line in lines(out) if "loss" in line]
    validated = [line for line in lines(out) if "validation_spearman" in line]
    assert [line["step"] for line in logged] == [3, 6, 7]
    assert [line["step"] for line in validated] == [0, 3, 6, 7]
    for line in logged:
        assert line["learning_rate"] == learning_rate(line["step"] - 1, 7, 1e-3, 0.5)
        assert {"loss_instance", "loss_negative", "positive_cosine", "negative_cosine", "queue_fill"} <= line.keys()
        assert {"gradient_norm", SPEED, "negative_layer/1", "negative_layer/3"} <= line.keys()
        parts = line["loss_instance"] + line["loss_negative"] + line.get("loss_augmented", 0)
        assert line["loss"] == pytest.approx(parts, rel=1e-5)
    assert [line["queue_fill"] for line in logged] == [1.0, 1.0, 1.0]
    scores = [line["validation_spearman"] for line in validated[1:]]
    assert [line["best_validation_spearman"] for line in validated[1:]] == [max(scores[:n]) for n in (1, 2, 3)]
    assert json.loads((out / "progress.json").read_text())["done"] == 7


def test_the_learning_rate_rises_and_falls_linearly() -> None:
    assert [learning_rate(step, 4, 1.0, 0.0) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    rates = [learning_rate(step, 10, 1.0, 0.4) for step in range(10)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert all(0 < learning_rate(step, 5, 1.0, 1.0) <= 1 for step in range(5))


def test_epochs_are_counted_in_whole_batches(job: TrainJob, tmp_path: Path) -> None:
    in_processes(1, run, task(with_train(job, epochs=2, eval_every=100), tmp_path / "out", sentences=30))
    assert lines(tmp_path / "out")[-1]["step"] == 6


def score(folder: Path, job: TrainJob) -> float:
    assert job.train.validation is not None
    validation = Validation.read(job.train.validation, None, load_tokenizer(str(folder)), 16)
    return validation.spearman(Encoder.load(str(folder)), torch.device("cpu"), Solo())


def test_the_weights_that_validate_best_are_kept_and_patience_ends_the_run(job: TrainJob, tmp_path: Path) -> None:
    out = tmp_path / "out"                                     # the rate rises until it destroys the encoder
    job = with_train(job, steps=60, eval_every=2, patience=3, warmup=1.0, learning_rate=0.5)
    in_processes(1, run, task(job, out))
    validated = [line for line in lines(out) if line["step"] and "validation_spearman" in line]
    scores = [line["validation_spearman"] for line in validated]
    assert best(out)["best_score"] == max(scores)
    assert best(out)["best_step"] == validated[scores.index(max(scores))]["step"]
    assert validated[-1]["step"] == best(out)["best_step"] + 3 * 2 < 60
    assert score(out / "encoder", job) == pytest.approx(max(scores), abs=0.1) != scores[-1]


def assert_stopped_and_resumed_alike(
    job: TrainJob, tmp_path: Path, workers: int = 1, strategy: str = "ddp", **stop: Any
) -> None:
    """A run that was killed and started again ends, bit for bit, as one that never stopped."""
    whole = task(with_train(job, **LONG), tmp_path / "whole", 100, workers, strategy)
    stopped = task(with_train(job, **LONG), tmp_path / "stopped", 100, workers, strategy)
    wanted = in_processes(workers, run, whole)
    with pytest.raises((ChildProcessError, RuntimeError)):     # the killed rank's, or what its peers then raise
        in_processes(workers, partial(run, **stop), stopped)
    assert not (stopped.context.out / "best.json").exists()
    found = in_processes(workers, run, stopped)
    for rank in range(workers):
        assert found[rank].keys() == wanted[rank].keys()
        assert [name for name in wanted[rank] if not torch.equal(found[rank][name], wanted[rank][name])] == []
    assert without_speed(stopped.context.out) == without_speed(whole.context.out)
    assert best(stopped.context.out) == best(whole.context.out)
    for file in ("model.safetensors", "pooling.safetensors"):
        paths = [each.context.out / "encoder" / file for each in (stopped, whole)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.cluster
@pytest.mark.parametrize(("workers", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "zero3")])
def test_a_killed_run_goes_on_as_if_never_stopped(
    workers: int, strategy: str, job: TrainJob, tmp_path: Path
) -> None:
    assert_stopped_and_resumed_alike(job, tmp_path, workers, strategy, die_after=10)


@pytest.mark.cluster
def test_a_checkpoint_cut_short_is_not_taken_for_one(job: TrainJob, tmp_path: Path) -> None:
    assert_stopped_and_resumed_alike(job, tmp_path, workers=2, die_in_checkpoint=8)


def test_a_run_killed_before_its_first_checkpoint_starts_anew(job: TrainJob, tmp_path: Path) -> None:
    assert_stopped_and_resumed_alike(job, tmp_path, die_after=3)


def test_a_run_killed_when_the_best_encoder_was_in_place_ends_with_it(job: TrainJob, tmp_path: Path) -> None:
    job = with_train(job, steps=9, eval_every=2, checkpoint_every=8, warmup=1.0, learning_rate=0.5)
    whole, stopped = (task(job, tmp_path / name) for name in ("whole", "stopped"))
    in_processes(1, run, whole)
    assert best(whole.context.out)["best_step"] < 8            # so the rerun, from step 8, does not save it again
    with pytest.raises(ChildProcessError):
        in_processes(1, partial(run, die_at_the_end=True), stopped)
    in_processes(1, run, stopped)
    assert best(stopped.context.out) == best(whole.context.out)
    paths = [each.context.out / "encoder" / "model.safetensors" for each in (stopped, whole)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_run_that_ended_before_it_was_committed_is_not_trained_again(job: TrainJob, tmp_path: Path) -> None:
    here = task(with_train(job, steps=2), tmp_path / "out")
    in_processes(1, run, here)
    trained = train(here.job, Corpus(here.corpus, 100), here.context)      # without Ray: it has nothing to start
    assert (trained.best_step, trained.best_score) == (2, best(here.context.out)["best_score"])


@pytest.mark.cluster
@pytest.mark.parametrize(("workers", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "zero3")])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(
    workers: int, strategy: str, job: TrainJob, tmp_path: Path
) -> None:
    here = task(with_train(job, steps=6, log_every=1), tmp_path / "out", workers=workers, strategy=strategy)
    weights = in_processes(workers, partial(run, nonfinite_at=(2, 3)), here)
    assert all(value.isfinite().all() for value in weights[0].values())
    logged = [line for line in lines(here.context.out) if "loss" in line]
    assert [line.get("nonfinite_steps", 0) for line in logged] == [0, 0, 1, 2, 2, 2]
    assert [line["loss"] is not None for line in logged] == [True] * 6     # what the method logs was finite


def test_gradients_that_are_no_numbers_stop_the_run_and_leave_the_batch(job: TrainJob, tmp_path: Path) -> None:
    job = with_train(job, steps=9, max_nonfinite=1)
    with pytest.raises(FloatingPointError, match=r"the gradient of step 4 is not finite, the 2\. in a row; lower"):
        in_processes(1, partial(run, nonfinite_at=(2, 3)), task(job, tmp_path / "out"))
    batch = load_file(tmp_path / "out" / "nonfinite-step-00000004-worker-0.safetensors")
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert len(batch["input_ids"]) == 8


def test_an_encoder_that_gives_one_direction_to_all_is_no_reason_to_stop(job: TrainJob, tmp_path: Path) -> None:
    folder = tmp_path / "blank"
    shutil.copytree(job.encoder.name, folder)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if "LayerNorm" not in name:
            value.zero_()
        elif name.endswith("bias"):
            value.copy_(torch.arange(float(len(value))))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    blank = EncoderConfig(name=str(folder), max_length=16)
    in_processes(1, run, task(with_train(job.model_copy(update={"encoder": blank}), steps=2), tmp_path / "out"))
    assert lines(tmp_path / "out")[0] == {"step": 0, "validation_spearman": None}
    assert best(tmp_path / "out")["best_step"] == 2


def test_a_line_of_metrics_cut_short_by_a_kill_comes_again(job: TrainJob, tmp_path: Path) -> None:
    whole, stopped = (task(with_train(job, **LONG), tmp_path / name) for name in ("whole", "stopped"))
    in_processes(1, run, whole)
    with pytest.raises(ChildProcessError):
        in_processes(1, partial(run, die_after=10), stopped)
    with (stopped.context.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    in_processes(1, run, stopped)
    assert without_speed(stopped.context.out) == without_speed(whole.context.out)


def test_the_two_newest_checkpoints_are_kept(job: TrainJob, tmp_path: Path) -> None:
    here = task(with_train(job, steps=9, checkpoint_every=2, eval_every=100), tmp_path / "out")
    in_processes(1, run, here)
    assert sorted(folder.name for folder in (here.context.out / "checkpoints").iterdir()) == [
        "step-00000006", "step-00000008",
    ]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "ddp"), (1, "ddp")), ((2, "zero2"), (1, "zero2")), ((2, "zero3"), (4, "zero3")), ((1, "ddp"), (2, "zero1"))],
)
def test_any_workers_and_any_strategy_go_on_from_any_checkpoint(
    before: tuple[int, str], after: tuple[int, str], job: TrainJob, tmp_path: Path
) -> None:
    job = with_train(job, **LONG, dropout=0.0)
    (wanted,) = in_processes(1, run, task(job, tmp_path / "whole"))
    out = tmp_path / "out"
    in_processes(before[0], partial(run, stop_after=7), task(job, out, workers=before[0], strategy=before[1]))
    found = in_processes(after[0], run, task_again(job, out, *after))[0]
    for name, value in wanted.items():
        if not name.endswith("key.bias"):                      # has no gradient but rounding, which Adam blows up
            assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=0.1), name
    assert [line["step"] for line in lines(out)] == [line["step"] for line in lines(tmp_path / "whole")]


def task_again(job: TrainJob, out: Path, workers: int, strategy: str) -> Task:
    (out / STOP).unlink()
    return task(job, out, workers=workers, strategy=strategy)


@pytest.mark.cluster
def test_a_run_that_was_asked_to_stop_saves_its_last_step_and_goes_on_alike(job: TrainJob, tmp_path: Path) -> None:
    job = with_train(job, **LONG)
    whole, stopped = (task(job, tmp_path / name, workers=2) for name in ("whole", "stopped"))
    wanted = in_processes(2, run, whole)[0]
    assert in_processes(2, partial(run, stop_after=6), stopped) == [{}, {}]
    assert (stopped.context.out / "checkpoints" / "step-00000006").is_dir()
    found = in_processes(2, run, task_again(job, stopped.context.out, 2, "ddp"))[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert without_speed(stopped.context.out) == without_speed(whole.context.out)


@pytest.mark.parametrize("damage", ["changed", "cut short", "missing", "no seal"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, job: TrainJob, tmp_path: Path) -> None:
    job = with_train(job, **LONG)
    whole, stopped = (task(job, tmp_path / name) for name in ("whole", "stopped"))
    (wanted,) = in_processes(1, run, whole)
    with pytest.raises(ChildProcessError):
        in_processes(1, partial(run, die_after=9), stopped)
    newest = stopped.context.out / "checkpoints" / "step-00000008"
    weights = newest / "engine.safetensors"
    match damage:
        case "changed":
            weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-9])
        case "missing":
            weights.unlink()
        case _:
            (newest / "digests.json").unlink()
    (found,) = in_processes(1, run, stopped)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert without_speed(stopped.context.out) == without_speed(whole.context.out)


def test_a_run_of_damaged_checkpoints_alone_starts_anew(job: TrainJob, tmp_path: Path) -> None:
    job = with_train(job, **LONG)
    whole, stopped = (task(job, tmp_path / name) for name in ("whole", "stopped"))
    in_processes(1, run, whole)
    with pytest.raises(ChildProcessError):
        in_processes(1, partial(run, die_after=9), stopped)
    for position in (stopped.context.out / "checkpoints").glob("*/position.json"):
        position.unlink()
    in_processes(1, run, stopped)
    assert without_speed(stopped.context.out) == without_speed(whole.context.out)


def test_a_corpus_smaller_than_a_batch_is_refused(job: TrainJob, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has 7 sentences, fewer than train\.batch_size=8"):
        train(job, Corpus(tmp_path, 7), Context(tmp_path))


def refusal(job: TrainJob, **cluster: Any) -> str:
    with pytest.raises(InputError) as error:
        check_train(job, ClusterConfig(**cluster))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_job_that_can_run_names_its_validation_file(job: TrainJob) -> None:
    assert job.train.validation is not None
    assert check_train(job, ClusterConfig(workers=2)) == {job.train.validation.path: [job.train.validation.path]}


def test_a_batch_that_does_not_split_over_the_workers_is_refused(job: TrainJob) -> None:
    assert "train.batch_size=8 does not split over cluster.workers=3; use a multiple of 3" in refusal(job, workers=3)


def test_more_tokens_than_the_encoder_has_positions_are_refused(job: TrainJob) -> None:
    longer = job.model_copy(update={"encoder": job.encoder.model_copy(update={"max_length": 17})})
    assert "encoder.max_length=17 is more than the 16 positions" in refusal(longer)


def test_one_head_upon_another_is_refused(job: TrainJob) -> None:
    headed = with_train(job, method=APINCSEConfig(name="apincse", queue_length=20, neighbours=4, mlp="train-only"))
    headed = headed.model_copy(update={"encoder": job.encoder.model_copy(update={"head": "mlp"})})
    assert "would put one head upon the other; set train.method.mlp=none" in refusal(headed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_length": 7}, "queue_length=7 is shorter than train.batch_size=8"),
        ({"queue_length": 16, "neighbours": 16}, "neighbours=16 is not less than"),
        ({"negative_layer": 4}, "may be argmax or 1 to 3"),
    ],
)
def test_what_the_method_cannot_mean_is_refused(options: dict[str, Any], message: str, job: TrainJob) -> None:
    assert message in refusal(with_train(job, method=APINCSEConfig(name="apincse", **options)))


def test_an_encoder_of_two_layers_is_refused(job: TrainJob, tmp_path: Path) -> None:
    shallow = job.encoder.model_copy(update={"name": tiny.save_bert(tmp_path / "shallow", depth=2)})
    assert "has 2 layers; APINCSE needs at least 3" in refusal(job.model_copy(update={"encoder": shallow}))


def test_a_validation_file_that_is_missing_is_refused(job: TrainJob, tmp_path: Path) -> None:
    gone = ValidationFile(path=str(tmp_path / "gone.jsonl"))
    assert "gone.jsonl" in refusal(with_train(job, validation=gone))
