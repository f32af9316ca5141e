"""Stages as a graph: planned from their keys, executed as Ray tasks, committed by the driver. Knows no stage."""

import graphlib
import importlib
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel

from cluster.errors import InputError
from cluster.launch import root_cause
from pipeline.store import Entry, Lock, Store, stage_key
from stages.context import STOP, Context

POLL = 0.3                                                     # seconds between looks at the running stages
SAVING = 60.0                                                  # seconds that a stage has to save what it has
STOPPING = 10.0                                                # seconds that cancelled stages have to end


@dataclass(frozen=True)
class Stage:
    """One step: ``function(config, *artifacts of needs, context=...) -> artifact``."""

    name: str
    function: Callable[..., Any]
    config: BaseModel                                          # all of it enters the key
    needs: tuple[str, ...] = ()
    reads: Mapping[str, Sequence[str]] = field(default_factory=dict)   # what the config calls some local data -> its
                                                               # files and folders; their content enters the key
    also: str = ""                                             # whatever else decides the result
    indifferent: tuple[str, ...] = ()                          # dotted fields of the config that do not
    version: int = 1                                           # raise it when the code's results change
    stoppable: bool = False                                    # it heeds the STOP file
    cpus: float = 0.0                                          # of the stage's own process; its tasks and workers
                                                               # claim theirs beside it


@dataclass(frozen=True)
class Planned:
    """A stage, its key, and whether the store has it."""

    stage: Stage
    key: str
    entry: Entry
    cached: bool
    fresh: bool                                                # to be run again even if the store has it
    sources: Mapping[str, str]                                 # what the config calls some data -> their digest


@dataclass
class Outcome:
    """What became of a stage."""

    name: str
    key: str
    status: str                                                # ran | cached
    seconds: float
    path: str
    manifest: dict[str, Any] = field(repr=False)


class StageError(RuntimeError):
    """A stage failed while running."""

    def __init__(self, stage: str, entry: Entry, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}".splitlines()[0])
        self.stage = stage
        self.log = entry.partial / "log.txt"
        self.partial = entry.partial


def plan(
    stages: Sequence[Stage], store: Store, until: str | None = None, fresh: Iterable[str] = ()
) -> list[Planned]:
    """Give every stage its key, in an order in which they can run; nothing but digests is written.

    Args:
        stages: in any order.
        store: where finished work lies.
        until: the last stage wanted; what it does not need is left out.
        fresh: stages to run again, and with them what depends on them.

    Raises:
        InputError: ``until`` or ``fresh`` names no stage.
    """
    by_name = {stage.name: stage for stage in stages}
    fresh = tuple(fresh)
    for name in (*fresh, *([until] if until else [])):
        if name not in by_name:
            raise InputError(f"there is no stage {name!r}; this config has {', '.join(by_name)}")
    wanted = _with_needs(until, by_name) if until else set(by_name)
    digests = store.digests()
    planned: dict[str, Planned] = {}
    order = graphlib.TopologicalSorter({name: by_name[name].needs for name in by_name if name in wanted})
    for name in order.static_order():
        stage = by_name[name]
        sources = {called: digests.of(paths) for called, paths in stage.reads.items() if paths}   # none: it is remote
        config = _without(stage.config.model_dump(mode="json"), stage.indifferent)
        decisive = sources | ({"also": stage.also} if stage.also else {})
        key = stage_key(name, stage.version, config, decisive, [planned[need].key for need in stage.needs])
        entry = store.entry(name, key)
        needs = [planned[need] for need in stage.needs]
        again = name in fresh or any(need.fresh for need in needs)
        manifests = {need.stage.name: need.entry.manifest for need in needs if need.cached}
        results = {need: manifest["result"] for need, manifest in manifests.items() if manifest}
        planned[name] = Planned(stage, key, entry, not again and _is_made_of(entry, results), again, sources)
    digests.remember()
    return list(planned.values())


def _is_made_of(entry: Entry, results: Mapping[str, str]) -> bool:
    """Whether the store has the stage, made of these very results of its needs.

    Keys alone do not tell: a --fresh training has the old key, and may have been interrupted before what depends
    on it ran again. Where a --fresh run was interrupted itself, its partial folder lies beside the old result.
    """
    manifest = entry.manifest
    if manifest is None or entry.partial.is_dir():
        return False
    return all(manifest["inputs"].get(need) == result for need, result in results.items())


def _without(config: dict[str, Any], dotted: Iterable[str]) -> dict[str, Any]:
    """The config less some of its fields."""
    for field_path in dotted:
        *parents, last = field_path.split(".")
        inner = config
        for parent in parents:
            inner = inner[parent]
        del inner[last]
    return config


def _with_needs(name: str, by_name: Mapping[str, Stage]) -> set[str]:
    return {name}.union(*(_with_needs(need, by_name) for need in by_name[name].needs))


class Watcher:
    """Told what happens; the terminal's display is one."""

    def running(self, stage: str, partial: Path) -> None:
        """A stage started, and writes into ``partial``."""

    def waiting(self, stage: str, holder: str) -> None:
        """Another run holds the stage's lock."""

    def stopping(self, stage: str) -> None:
        """A stage was asked to save what it has and end."""

    def poll(self) -> None:
        """Called a few times a second."""

    def finished(self, outcome: Outcome) -> None:
        """A stage is in the store."""


def execute(
    planned: Sequence[Planned], store: Store, context: Callable[[Path], Context], watcher: Watcher
) -> list[Outcome]:
    """Run what is not in the store, independent stages at once, and commit each as it ends.

    Args:
        planned: from :func:`plan`.
        store: where results are committed.
        context: makes a stage's surroundings from its folder.
        watcher: told what happens.

    Raises:
        InputError: a stage refused its input; its partial folder stays.
        StageError: a stage failed; its partial folder stays, for the same command to go on from.
    """
    execution = _Execution(planned, store, context, watcher)
    try:
        while execution.unfinished:
            execution.start_ready()
            execution.collect()
            watcher.poll()
    except KeyboardInterrupt:
        execution.let_save()
        raise
    finally:
        execution.abandon()
    return [execution.outcomes[item.stage.name] for item in planned]


class _Execution:
    """The state of :func:`execute`: what is ready, running and done."""

    def __init__(
        self, planned: Sequence[Planned], store: Store, context: Callable[[Path], Context], watcher: Watcher
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._planned = {item.stage.name: item for item in planned}
        self._store, self._context, self._watcher = store, context, watcher
        self._sorter = graphlib.TopologicalSorter({item.stage.name: item.stage.needs for item in planned})
        self._sorter.prepare()
        self._ready: list[str] = []
        self._running: dict[Any, tuple[Planned, Lock, float]] = {}     # Ray task -> stage, its lock, time of start
        self._told: set[str] = set()                                   # stages said to be waiting

    @property
    def unfinished(self) -> bool:
        return self._sorter.is_active()

    def start_ready(self) -> None:
        """Start every stage whose needs are met and whose lock is free; take from the store what is there."""
        self._ready += self._sorter.get_ready()
        for name in list(self._ready):
            item = self._planned[name]
            if self._has(item):
                self._ready.remove(name)
                self._finish(_from_store(item))
                continue
            lock = Lock(item.entry.lock)
            if not lock.acquire():
                if name not in self._told:
                    self._told.add(name)
                    self._watcher.waiting(name, lock.holder)
                continue
            self._ready.remove(name)
            if self._has(item):                                        # another run made it meanwhile
                lock.release()
                self._finish(_from_store(item))
                continue
            inputs = [self._artifact(need) for need in item.stage.needs]
            task = _start(item, self._store, inputs, self._context(item.entry.partial))
            self._running[task] = (item, lock, time.monotonic())
            self._watcher.running(name, item.entry.partial)

    def collect(self) -> None:
        """Commit what has ended, after waiting a moment for something to end."""
        if not self._running:
            if self._ready:                                            # only other runs' locks to wait for
                time.sleep(POLL)
            return
        done = ray.wait(list(self._running), timeout=POLL)[0]
        failed: list[Exception] = []
        for task in done:                                              # what succeeded is kept before anything raises
            item, lock, started = self._running[task]
            try:
                artifact = _result(task, item)
                self._finish(_commit(item, self._store, artifact, self._results(item), time.monotonic() - started))
            except (InputError, StageError) as error:
                failed.append(error)
            finally:
                del self._running[task]
                lock.release()
        if failed:
            raise failed[0]

    def let_save(self) -> None:
        """Ask the running stages that can to save what they have, and wait until they have ended."""
        stoppable = {task: item for task, (item, _, _) in self._running.items() if item.stage.stoppable}
        for item in stoppable.values():
            (item.entry.partial / STOP).touch()
            self._watcher.stopping(item.stage.name)
        if stoppable:
            ray.wait(list(stoppable), num_returns=len(stoppable), timeout=SAVING)

    def abandon(self) -> None:
        """Stop what still runs; its partial folders stay."""
        for task in self._running:
            ray.cancel(task, force=True)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=STOPPING)
        for _, lock, _ in self._running.values():                      # free only when nobody writes there any more
            lock.release()

    def _has(self, item: Planned) -> bool:
        return not item.fresh and _is_made_of(item.entry, self._results(item))

    def _results(self, item: Planned) -> dict[str, str]:
        return {need: self.outcomes[need].manifest["result"] for need in item.stage.needs}

    def _artifact(self, name: str) -> Any:
        outcome = self.outcomes[name]
        return load_artifact(outcome.manifest, Path(outcome.path))

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self._watcher.finished(outcome)
        self._sorter.done(outcome.name)


def _start(item: Planned, store: Store, inputs: Sequence[Any], context: Context) -> Any:
    if item.fresh:
        store.discard_partial(item.entry)                      # finished work stays until it can be replaced
    for leftover in ("progress.json", STOP):                   # of a run that was killed
        (context.out / leftover).unlink(missing_ok=True)
    context.out.mkdir(parents=True, exist_ok=True)
    stage = item.stage
    remote = _run_stage.options(num_cpus=stage.cpus, name=stage.name)
    return remote.remote(stage.function, stage.config, inputs, context)


@ray.remote(max_retries=0)  # type: ignore[untyped-decorator]
def _run_stage(function: Callable[..., Any], config: BaseModel, inputs: Sequence[Any], context: Context) -> Any:
    if not context.out.is_dir():
        raise InputError(
            f"{context.out} does not exist on this node; root must be a folder that all nodes of the cluster share"
        )
    handler = logging.FileHandler(context.out / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        return function(config, *inputs, context=context)
    except BaseException:
        with (context.out / "log.txt").open("a") as log:
            log.write(traceback.format_exc())
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _result(task: Any, item: Planned) -> Any:
    try:
        return ray.get(task)
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, InputError):
            raise InputError(str(cause)) from None
        raise StageError(item.stage.name, item.entry, cause) from error


def _commit(item: Planned, store: Store, artifact: Any, inputs: Mapping[str, str], seconds: float) -> Outcome:
    kind = type(artifact)
    values = {name: value for name, value in asdict(artifact).items() if name != "folder"}
    manifest = {
        "name": item.stage.name,
        "key": item.key,
        "version": item.stage.version,
        "config": item.stage.config.model_dump(mode="json"),
        "inputs": inputs,                                      # the results of the needs
        "artifact": {"type": f"{kind.__module__}:{kind.__qualname__}", **values},
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    committed = store.commit(item.entry, manifest)
    return Outcome(item.stage.name, item.key, "ran", seconds, str(item.entry.folder), committed)


def _from_store(item: Planned) -> Outcome:
    manifest = item.entry.manifest
    assert manifest is not None
    return Outcome(item.stage.name, item.key, "cached", manifest["seconds"], str(item.entry.folder), manifest)


def load_artifact(manifest: Mapping[str, Any], folder: Path) -> Any:
    """The artifact that a stage returned, its folder being where it lies now."""
    values = dict(manifest["artifact"])
    module, _, name = values.pop("type").partition(":")
    kind = getattr(importlib.import_module(module), name)
    return kind(folder=folder, **{item.name: values[item.name] for item in fields(kind) if item.name != "folder"})


def read_progress(partial: Path) -> dict[str, Any] | None:
    """What a running stage last said of its progress."""
    try:
        progress: dict[str, Any] = json.loads((partial / "progress.json").read_text())
    except (OSError, ValueError):
        return None
    return progress
