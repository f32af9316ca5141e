"""Training: the loop that every method shares."""

import json
import logging
import math
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.config import ClusterConfig
from cluster.engine import Engine, build_engine
from cluster.errors import InputError
from cluster.launch import train_on_workers
from cluster.memory import explained_memory
from cluster.world import World
from stages import checkpoints
from stages.artifacts import Corpus, LabelledRows, TrainedEncoder
from stages.batches import TokenisedSentences, global_rows, own_share, row_seeds, to_device
from stages.checkpoints import Position
from stages.context import Context, Progress
from stages.encoder import Encoder, EncoderConfig, check_encoder, load_tokenizer, max_positions
from stages.evaluate.config import GRADED_SAMPLE, TRANSFER_TASKS, TransferTasks, tasks_of
from stages.evaluate.transfer import load_transfer, transfer_files
from stages.evaluate.validation import TransferMonitor, Validation, ValidationFile, validation_files
from stages.methods.apincse import APINCSEConfig
from stages.methods.base import Batch, Method
from stages.methods.registry import MethodConfig
from stages.tracking import LiveMetrics

log = logging.getLogger(__name__)

SAVES_MEMORY = (
    "lower train.micro_batch_size (gradient caching: the same gradients), train.batch_size or encoder.max_length, "
    "set cluster.precision=bf16 on a GPU, or share the optimizer's memory among more workers by cluster.strategy=zero2"
)


class TrainConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """All that decides the weights; where they are computed is ClusterConfig's matter."""

    method: MethodConfig = APINCSEConfig(name="apincse")
    batch_size: PositiveInt = 64                               # rows (sentences, pairs, triplets) per optimizer step,
                                                               # all workers together
    steps: PositiveInt | None = None                           # optimizer steps; null: as many as `epochs` make
    epochs: PositiveInt = 1                                    # passes over the corpus, where `steps` is null
    learning_rate: PositiveFloat = 3e-5                        # at its peak; falls linearly to 0
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.0          # fraction of all steps in which it rises from 0
    weight_decay: NonNegativeFloat = 0.0
    gradient_clipping: PositiveFloat = 1.0                     # greatest norm of the gradient
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1         # of hidden states and attention
    log_every: PositiveInt = 10                                # steps
    eval_every: PositiveInt = 125                              # steps between validations
    patience: PositiveInt | None = None                        # validations without a new best before stopping
    checkpoint_every: PositiveInt = 125                        # steps between points from which a rerun goes on
    keep_checkpoints: PositiveInt = 2                          # newest ones kept while training
    micro_batch_size: PositiveInt | None = None                # sequences a worker encodes at once; null: all. A few
                                                               # save memory for a second forward pass (GradCache)
    max_nonfinite: NonNegativeInt = 3                          # steps in a row that are skipped because their gradient
                                                               # is not finite; one more stops the run
    validation: ValidationFile | None = None                   # scored pairs; null: STS-B dev, or the graded sample's
    transfer: TransferTasks = "none"                           # tasks whose dev accuracy is logged at each validation,
                                                               # by the fast protocol of 5 folds

    @property
    def transfer_tasks(self) -> tuple[str, ...]:
        """The transfer tasks to watch."""
        return tasks_of(self.transfer, TRANSFER_TASKS)


class TrainJob(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The train stage's whole input, beside the corpus."""

    train: TrainConfig
    encoder: EncoderConfig
    evaluation_data: str | None                                # SentEval folder whose STS-B dev validates
    seed: int


@dataclass(frozen=True)
class Task:
    """What each training worker is sent."""

    job: TrainJob
    corpus: Path
    context: Context


def check_train(job: TrainJob, cluster: ClusterConfig) -> dict[str, list[str]]:
    """Refuse, before anything runs, what would fail or mislead after hours.

    Returns:
        What the config calls the validation data -> its files.

    Raises:
        InputError: with the setting to change.
    """
    if job.train.batch_size % cluster.workers:
        raise InputError(
            f"train.batch_size={job.train.batch_size} does not split over cluster.workers={cluster.workers}; "
            f"use a multiple of {cluster.workers}, or another number of workers"
        )
    if job.train.method.needs_whole_weights and cluster.strategy == "zero3":
        raise InputError(
            f"train.method.name={job.train.method.name} needs all weights on every worker, which "
            "cluster.strategy=zero3 does not keep there; set it to ddp, zero1 or zero2"
        )
    if job.train.method.needs_whole_batches and job.train.micro_batch_size is not None:
        raise InputError(
            f"train.method.name={job.train.method.name} changes a whole batch at once, which "
            f"train.micro_batch_size={job.train.micro_batch_size} would cut up; set it to null"
        )
    if job.encoder.head == "mlp" and getattr(job.train.method, "mlp", "none") == "train-only":
        raise InputError(
            "encoder.head=mlp and train.method.mlp=train-only would put one head upon the other; set "
            "train.method.mlp=none to keep the head at test, or encoder.head=none to drop it there"
        )
    positions = max_positions(job.encoder.name)
    if job.encoder.max_length > positions:
        raise InputError(
            f"encoder.max_length={job.encoder.max_length} is more than the {positions} positions of "
            f"{job.encoder.name}; it may be 3 to {positions}"
        )
    job.train.method.check_encoder(job.encoder)
    job.train.method.check(check_encoder(job.encoder.name).num_hidden_layers, job.train.batch_size)
    if job.train.transfer_tasks and job.evaluation_data is None:
        raise InputError(
            "train.transfer watches transfer tasks, but evaluate.data is null; set evaluate.data to a folder in "
            "SentEval layout, or train.transfer to none"
        )
    files = validation_files(job.train.validation, job.evaluation_data)
    if job.train.validation is not None:
        reads = {job.train.validation.path: files}
    else:
        reads = {job.evaluation_data or GRADED_SAMPLE: files}
    for task in job.train.transfer_tasks:
        load_transfer(str(job.evaluation_data), task, "fast")
        watched = map(str, transfer_files(str(job.evaluation_data), task))
        reads.setdefault(str(job.evaluation_data), []).extend(watched)
    return reads


def train(job: TrainJob, corpus: Corpus | LabelledRows, context: Context) -> TrainedEncoder:
    """Train an encoder on Ray Train workers; the weights that validate best end in ``context.out/encoder``.

    Raises:
        InputError: the corpus has fewer rows than one batch, or the workers do not fit on the cluster.
    """
    rows, of = (corpus.sentences, "sentences") if isinstance(corpus, Corpus) else (corpus.rows, "rows")
    if rows < job.train.batch_size:
        raise InputError(
            f"the corpus has {rows} {of}, fewer than train.batch_size={job.train.batch_size}; "
            f"add text or lower the batch size"
        )
    finished = context.out / "best.json"
    if not finished.is_file():                                 # else it ended just before it could be committed
        name = f"{context.out.name}-{time.time_ns()}"          # a name used before would resume a finished run
        records = context.out / "ray"
        workers = context.cluster.workers
        note = "starting a worker" if workers == 1 else f"starting {workers} workers"
        context.progress.update(0, None, "steps", note)
        train_on_workers(train_worker, Task(job, corpus.folder, context), context.cluster, name, records)
        if not finished.is_file():
            raise InterruptedError("training was stopped, and has a checkpoint of its last step")
        shutil.rmtree(records, ignore_errors=True)
        shutil.rmtree(context.out / "checkpoints", ignore_errors=True)
    result = json.loads(finished.read_text())
    return TrainedEncoder(context.out, result["best_step"], result["best_score"])


@explained_memory(SAVES_MEMORY)
def train_worker(task: Task, world: World) -> None:
    """The training loop, run by every worker alike."""
    config = task.job.train
    _tell(task, world, "loading encoder and sentences")
    run = Run.prepare(task, world)
    position = run.resume()
    if position.step == 0:
        run.record({"step": 0, "validation_spearman": run.validate(), **run.watch()})
    for step in range(position.step, run.steps):
        if config.patience is not None and position.without_improvement >= config.patience:
            break
        run.method.train()
        batch = run.batch(step)
        loss, metrics = run.engine.model(batch, world)
        rate = learning_rate(step, run.steps, config.learning_rate, config.warmup)
        norm = run.engine.step(loss, rate)
        position.step = step + 1
        run.count_nonfinite(position, norm, batch)
        run.log_step(position, metrics, rate, norm)
        if position.step % config.eval_every == 0 or position.step == run.steps:
            run.keep_if_best(position, run.validate())
        stopping = run.asked_to_stop()
        if (position.step % config.checkpoint_every == 0 or stopping) and position.step < run.steps:
            run.save(position)
            if stopping:
                return
    run.finish(position)


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up from 0 over ``warmup * steps`` steps, then linear decay to 0; ``step`` counts from 0."""
    rising = warmup * steps
    if step < rising:
        return peak * (step + 1) / (rising + 1)
    return peak * (steps - step) / max(1.0, steps - rising)


@dataclass
class Run:
    """What the loop works on."""

    task: Task
    world: World
    method: Method
    engine: Engine
    sentences: TokenisedSentences
    validation: Validation
    transfer: TransferMonitor
    tokenizer: PreTrainedTokenizerFast
    steps: int
    live: LiveMetrics
    progress: Progress
    started: float = field(default_factory=time.monotonic)
    validating: float = 0.0                                    # seconds spent on validation, which are no training
    logged: tuple[int, float] = (0, 0.0)                       # step and seconds of training at the last log line

    @classmethod
    def prepare(cls, task: Task, world: World) -> "Run":
        """Load everything; weights start equal on all ranks, dropout differs between them."""
        job, config = task.job, task.job.train
        torch.manual_seed(job.seed)
        encoder = Encoder.load(job.encoder.name, job.encoder, config.dropout)
        encoder.at_once = config.micro_batch_size
        method = config.method.build(encoder)
        optimizer = torch.optim.AdamW(method.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        share = config.batch_size // world.size
        engine = build_engine(method, optimizer, config.gradient_clipping, task.context.cluster, world, share)
        sentences = TokenisedSentences.read(task.corpus)
        tokenizer, positions = load_tokenizer(job.encoder.name), max_positions(job.encoder.name)
        tracked = task.context.tracking if world.rank == 0 else None
        run = cls(
            task,
            world,
            method,
            engine,
            sentences,
            Validation.read(config.validation, job.evaluation_data, tokenizer, positions),
            TransferMonitor.read(config.transfer_tasks, job.evaluation_data, tokenizer, positions),
            tokenizer=tokenizer,
            steps=config.steps or config.epochs * (len(sentences) // config.batch_size),
            live=LiveMetrics(tracked),
            progress=task.context.progress,
        )
        run._seed_workers(step=0)
        return run

    def batch(self, step: int) -> Batch:
        """This worker's share of a step's global batch, augmented by the method; ``step`` counts from 0."""
        size, seed = self.task.job.train.batch_size, self.task.job.seed
        rows = own_share(global_rows(len(self.sentences), size, step, seed), self.world)
        plain = replace(self.sentences.batch(rows, self.tokenizer.pad_token_id), done=step / self.steps)
        seeds = own_share(row_seeds(size, step, seed), self.world)
        return to_device(self.method.augment(plain, seeds, self.tokenizer), self.engine.device)

    def validate(self) -> float | None:
        """Spearman (x 100) of the validation pairs, every rank encoding its share; None where it is undefined."""
        began = time.monotonic()
        self.method.eval()
        try:
            return self.validation.spearman(self.method.encoder, self.engine.device, self.world)
        except InputError as error:                            # all embeddings alike; the best so far remains
            log.warning("validation: %s", error)
            return None
        finally:
            self.validating += time.monotonic() - began

    def watch(self) -> dict[str, float]:
        """The dev accuracies of ``train.transfer``; they choose nothing."""
        began = time.monotonic()
        self.method.eval()
        found = self.transfer.accuracies(self.method.encoder, self.engine.device, self.world)
        self.validating += time.monotonic() - began
        return found

    def count_nonfinite(self, position: Position, norm: float, batch: Batch) -> None:
        """Count a step that the engine skipped because its gradient, of norm ``norm``, is not finite.

        Raises:
            FloatingPointError: there were more than ``max_nonfinite`` in a row; each worker's batch is kept.
        """
        if math.isfinite(norm):
            position.nonfinite_in_a_row = 0
            return
        position.nonfinite += 1
        position.nonfinite_in_a_row += 1
        log.warning("the gradient of step %d is not finite; the step is skipped", position.step)
        if position.nonfinite_in_a_row > self.task.job.train.max_nonfinite:
            kept = self.task.context.out / f"nonfinite-step-{position.step:08d}-worker-{self.world.rank}.safetensors"
            tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
            save_file(checkpoints.apart(tensors), kept)
            raise FloatingPointError(
                f"the gradient of step {position.step} is not finite, the {position.nonfinite_in_a_row}. in a row; "
                f"lower train.learning_rate, or set cluster.precision=fp32; its batch is kept in {kept}"
            )

    def asked_to_stop(self) -> bool:
        """Whether the command has to end; all workers hear it after the same step."""
        asked = self.world.rank == 0 and self.task.context.asked_to_stop
        return bool(self.world.mean(torch.tensor(float(asked))) > 0)

    def log_step(self, position: Position, metrics: dict[str, Tensor], rate: float, norm: float) -> None:
        """Average over ranks and record, every ``log_every`` steps."""
        step = position.step
        if step % self.task.job.train.log_every and step != self.steps:
            return
        means = self.world.mean(torch.stack([metrics[name].float() for name in sorted(metrics)])).tolist()
        now = self._training_seconds()
        before, then = self.logged
        sentences = (step - before) * self.task.job.train.batch_size * self.sentences.members
        speed = sentences / max(now - then, 1e-9)
        self.logged = (step, now)
        values = dict(zip(sorted(metrics), means, strict=True))
        if position.nonfinite:
            values["nonfinite_steps"] = float(position.nonfinite)
        self.record(
            {"step": step, **values, "learning_rate": rate, "gradient_norm": norm, "sentences_per_second": speed}
        )
        if self.world.rank == 0:
            note = f"loss {values['loss']:.3f}, {speed:.0f} sentences/s"
            self.progress.update(step, self.steps, "steps", note)

    def _training_seconds(self) -> float:
        return time.monotonic() - self.started - self.validating

    def record(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and MLflow, from rank 0; what is no number is null."""
        if self.world.rank == 0:
            values = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
            with (self.task.context.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")
            self.live.log(values["step"], {name: value for name, value in values.items() if name != "step"})

    def keep_if_best(self, position: Position, score: float | None) -> None:
        """Keep the encoder if it validates better than all before it."""
        best_so_far = -math.inf if position.best_score is None else position.best_score
        better = position.best_step == 0 or (score is not None and score > best_so_far)
        position.without_improvement = 0 if better else position.without_improvement + 1
        if better:
            position.best_step, position.best_score = position.step, score
            self.save_encoder(position.step)
        best = position.best_score
        self.record({
            "step": position.step, "validation_spearman": score, "best_validation_spearman": best, **self.watch(),
        })

    def save_encoder(self, step: int) -> None:
        """Write the encoder as ``encoder-STEP``; every rank helps to gather the weights."""
        prefix = "encoder."
        weights = {
            name.removeprefix(prefix): value
            for name, value in self.engine.weights().items()
            if name.startswith(prefix)
        }
        if self.world.rank == 0:
            target = self._kept_encoder(step)
            aside = target.with_suffix(".partial")
            shutil.rmtree(aside, ignore_errors=True)
            self.method.encoder.save(aside, self.tokenizer, weights)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)

    def save(self, position: Position) -> None:
        """Write a checkpoint aside, then rename it; the newest are kept."""
        out = self.task.context.out
        position.workers = self.world.size
        aside = self.world.broadcast(checkpoints.begin(out, position.step) if self.world.rank == 0 else None)
        self.engine.save(aside)
        save_file(_random_state(), aside / f"random-{self.world.rank}.safetensors")
        self.world.barrier()
        if self.world.rank == 0:
            save_file(checkpoints.apart(self.method.resume_state()), aside / "method.safetensors")
            checkpoints.seal(aside, position)
            newest = list(checkpoints.newest_first(out))
            kept = newest[: self.task.job.train.keep_checkpoints]
            for old in newest[len(kept) :]:
                shutil.rmtree(old)
            self._drop_encoders(but={checkpoints.read_position(folder).best_step for folder in kept})

    def _kept_encoder(self, step: int) -> Path:
        return self.task.context.out / f"encoder-{step:08d}"

    def _drop_encoders(self, but: set[int]) -> None:
        for folder in self.task.context.out.glob("encoder-*"):
            if folder not in {self._kept_encoder(step) for step in but}:
                shutil.rmtree(folder)

    def resume(self) -> Position:
        """Go on from the newest checkpoint that is intact, if there is one.

        Any number of workers goes on from any: data, weights, optimizer and the method's state are the same. Only
        the random numbers of dropout belong to a worker; other workers draw new ones.
        """
        out = self.task.context.out
        newest = self.world.broadcast(checkpoints.newest_intact(out) if self.world.rank == 0 else None)
        if newest is None:
            if self.world.rank == 0:
                (out / "metrics.jsonl").unlink(missing_ok=True)
                self._drop_encoders(but=set())
            _tell(self.task, self.world, "validating before the first step")
            return Position()
        position = checkpoints.read_position(newest)
        self.engine.load(newest)
        self.method.load_resume_state(load_file(newest / "method.safetensors"))
        if position.workers == self.world.size:
            _set_random_state(load_file(newest / f"random-{self.world.rank}.safetensors"))
        else:
            self._seed_workers(position.step)
        if self.world.rank == 0:
            self._drop_encoders(but=set(range(position.step + 1)))
            _drop_later_lines(out / "metrics.jsonl", position.step)
            log.info("going on from step %d", position.step)
            if position.workers != self.world.size:
                log.warning("%d workers go on where %d were: dropout draws anew", self.world.size, position.workers)
        self.logged = (position.step, self._training_seconds())
        _tell(self.task, self.world, f"going on from step {position.step}")
        return position

    def _seed_workers(self, step: int) -> None:
        """Let dropout differ between workers, and after a change of their number."""
        entropy = np.random.SeedSequence([self.task.job.seed, self.world.rank, step])
        torch.manual_seed(int(entropy.generate_state(1)[0]))

    def finish(self, position: Position) -> None:
        """Leave the best encoder as ``encoder``, and say which step it is of."""
        out = self.task.context.out
        if self.world.rank == 0:
            kept = self._kept_encoder(position.best_step)
            if kept.is_dir():                                  # else a run that was killed right here has renamed it
                shutil.rmtree(out / "encoder", ignore_errors=True)
                kept.rename(out / "encoder")
            self._drop_encoders(but=set())
            aside = out / "best.json.tmp"
            aside.write_text(json.dumps({"best_step": position.best_step, "best_score": position.best_score}))
            aside.replace(out / "best.json")
            self.live.close()
        self.world.barrier()


def _tell(task: Task, world: World, note: str) -> None:
    """Say what takes time before there are steps to count."""
    if world.rank == 0:
        task.context.progress.update(0, None, "steps", note)


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _drop_later_lines(metrics: Path, step: int) -> None:
    """Forget what was logged after the checkpoint: those steps come again."""
    kept = []
    for line in metrics.read_text().splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:    # without an end: a kill cut it short
            break
        kept.append(line)
    aside = metrics.with_suffix(".tmp")
    aside.write_text("".join(kept))
    aside.replace(metrics)
