"""One run of an experiment: plan, execute, report, track."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from cluster.errors import InputError
from cluster.launch import check_room, start_ray, stop_ray, with_device
from pipeline.config import Config
from pipeline.dag import Outcome, StageError, execute, plan
from pipeline.display import Display
from pipeline.graph import graph
from pipeline.store import Lock, Store
from stages import pictures, report, tracking
from stages.context import Context
from stages.environment import environment


class Experiment:
    """A config, its planned stages, and the folder ``ROOT/NAME`` with what a reader looks for."""

    def __init__(self, config: Config, until: str | None = None, fresh: Sequence[str] = ()) -> None:
        self.config = config
        self.store = Store(_root(config.root))
        self.partial = until is not None and until != "after"
        self.folder = self.store.root / config.name
        self._plan = partial(plan, graph(config), self.store, until, fresh)
        self.planned = self._plan()

    def print_plan(self) -> None:
        """The stages in order, their keys, and whether each would run."""
        table = Table("stage", "key", "status", "needs", box=None, padding=(0, 2, 0, 0))
        for item in self.planned:
            todo = "go on" if item.entry.partial.is_dir() and not item.fresh else "run"
            table.add_row(
                item.stage.name, item.key, "cached" if item.cached else todo, ", ".join(item.stage.needs) or "-"
            )
        _console().print(table)

    def run(self, again: str) -> int:
        """Execute what the store has not, print the scores, and leave the run's folder.

        Args:
            again: the command that goes on after a failure.

        Returns:
            The exit status.

        Raises:
            InputError: bad input that showed only while running.
        """
        lock = Lock(self.store.folder / f".run-{self.config.name}.lock")
        said = False
        while not lock.acquire():
            if not said:
                print(f"waiting for {lock.holder}, which runs {self.config.name} in this root", file=sys.stderr)
                said = True
            time.sleep(0.5)
        try:
            if said:
                self.planned = self._plan()                    # the other run may have done it all
            return self._run_locked(again)
        finally:
            lock.release()

    def _run_locked(self, again: str) -> int:
        if all(item.cached for item in self.planned):
            outcomes = execute(self.planned, self.store, lambda folder: Context(out=folder), _Quiet())
            if self.partial:
                return self._tell(outcomes, None)
            old_summary = _read_json(self.folder / "summary.json")
            if self._is_current(old_summary):
                summary = {**old_summary, "stages": _stages(outcomes)}
                _write_json(self.folder / "summary.json", summary)
                return self._tell(outcomes, summary)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._ray():
            return self._run_and_report(again)

    def _run_and_report(self, again: str) -> int:
        track = self._start_tracking()
        try:
            outcomes = self._execute(track)
        except BaseException as error:
            if track:
                tracking.fail_run(*track, str(error) or type(error).__name__)
            if not isinstance(error, StageError):
                raise
            print(
                f"error: stage {error.stage} failed: {error}\nlog: {error.log}\n"
                f"what it left: {error.partial}\nto go on: {again}",
                file=sys.stderr,
            )
            return 1
        self._link({outcome.name: Path(outcome.path) for outcome in outcomes})
        if self.partial:
            return self._tell(outcomes, None)
        summary = self._summarise(outcomes, track)
        self._report(outcomes, summary, track)
        return self._tell(outcomes, summary)

    @contextmanager
    def _ray(self) -> Iterator[None]:
        """Ray, with room for the workers, if there is anything to run."""
        if all(item.cached for item in self.planned):
            yield
            return
        print(f"{self.config.name}: starting Ray", file=sys.stderr)
        start_ray()
        try:
            trains = any(item.stage.name == "train" and not item.cached for item in self.planned)
            check_room(self.config.cluster if trains else self.config.cluster.model_copy(update={"workers": 1}))
            yield
        finally:
            stop_ray()

    def _execute(self, track: tuple[str, str] | None) -> list[Outcome]:
        self._link({item.stage.name: item.entry.partial for item in self.planned if not item.cached})
        cluster = with_device(self.config.cluster)
        with Display() as display:
            return execute(
                self.planned,
                self.store,
                lambda folder: Context(folder, cluster, track, self.store.folder / "embeddings"),
                display,
            )

    def _link(self, folders: Mapping[str, Path]) -> None:
        """``ROOT/NAME/STAGE`` leads to the stage's folder in the store, also while it runs."""
        for name, target in folders.items():
            link = self.folder / name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / target.relative_to(self.store.root), target_is_directory=True)

    def _start_tracking(self) -> tuple[str, str] | None:
        """Open the MLflow run; one that an interrupted run of the same plan left is taken up again."""
        if not self.config.tracking.enabled or self.partial:
            return None
        record = self.folder / "mlflow.json"
        left = _read_json(record) or {}                        # what the run before said of itself
        uri = tracking.tracking_uri(self.store.root)
        same = left.get("keys") == self._keys() and left.get("tracking_uri") == uri
        run_name = f"{self.config.name}-{time.strftime('%Y-%m-%d-%H%M%S')}"
        run_id = tracking.start_run(
            uri, self.config.name, run_name, self.store.root, left.get("run_id") if same and left.get("open") else None
        )
        tags = {
            **environment(),
            "stages": self._keys(),
            "data": {Path(path).name: digest for item in self.planned for path, digest in item.sources.items()},
            "method": self.config.train.method.name if self.config.train else "none",
            "backbone": self.config.encoder.name,
            "protocol": self.config.evaluate.protocol if self.config.evaluate.transfer_tasks else None,
        }
        try:
            tracking.log_config(uri, run_id, self.config.model_dump(mode="json"), tags)
        except tracking.TrackingError as error:
            raise InputError(f"{error}; mend MLflow, or set tracking.enabled=false") from error
        _write_json(record, {"tracking_uri": uri, "run_id": run_id, "keys": self._keys(), "open": True})
        return uri, run_id

    def _keys(self) -> dict[str, str]:
        return {item.stage.name: item.key for item in self.planned}

    def _is_current(self, summary: Mapping[str, Any] | None) -> bool:
        """Whether the summary that lies there is of this very plan, and MLflow has it all."""
        if summary is None or {stage["name"]: stage["key"] for stage in summary["stages"]} != self._keys():
            return False
        record = _read_json(self.folder / "mlflow.json") or {}
        return not self.config.tracking.enabled or (record.get("keys") == self._keys() and not record["open"])

    def _summarise(self, outcomes: Sequence[Outcome], track: tuple[str, str] | None) -> dict[str, Any]:
        """``summary.json``."""
        folders = {outcome.name: Path(outcome.path) for outcome in outcomes}
        scores: dict[str, Any] = {"after": next(iter(_read_json(folders["after"] / "scores.json").values()))}
        if "before" in folders:
            scores = {"before": _read_json(folders["before"] / "scores.json"), **scores}
        mlflow = None
        if track:
            mlflow = {"tracking_uri": track[0], "experiment": self.config.name, "run_id": track[1]}
        return {
            "name": self.config.name,
            "config": self.config.model_dump(mode="json"),
            "stages": _stages(outcomes),
            "scores": scores,
            "mlflow": mlflow,
            "environment": environment(),
        }

    def _report(self, outcomes: Sequence[Outcome], summary: Mapping[str, Any], track: tuple[str, str] | None) -> None:
        """Write tables and pictures into the run's folder, and send everything to MLflow."""
        folders = {outcome.name: Path(outcome.path) for outcome in outcomes}
        config_file = self.folder / "config.yaml"
        config_file.write_text(yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False))
        table = self.folder / "scores.md"
        table.write_text(report.markdown(summary["scores"]))
        files = [config_file, table, *self._pictures(folders, summary["scores"])]
        trained = "train" in folders
        if trained:
            link = self.folder / "encoder"
            link.unlink(missing_ok=True)
            link.symlink_to(Path("train") / "encoder", target_is_directory=True)
        files.append(_write_json(self.folder / "summary.json", summary))
        if track:
            self._track(track, files, folders if trained else {}, summary)

    def _track(
        self, track: tuple[str, str], files: Sequence[Path], folders: Mapping[str, Path], summary: Mapping[str, Any]
    ) -> None:
        print("logging to MLflow", file=sys.stderr)
        try:
            if "train" in folders:
                tracking.replay(*track, folders["train"] / "metrics.jsonl")
            tracking.finish_run(
                *track,
                summary,
                files,
                encoder=folders["train"] / "encoder" if "train" in folders else None,
                registered_name=self.config.name if self.config.tracking.register_model else None,
                tags={
                    "incomplete_data": "; ".join(report.warnings(summary["scores"])),
                    "evaluation_sentences_in_corpus": ", ".join(
                        f"{task} {count}" for task, count in report.seen(summary["scores"]).items()
                    ),
                },
            )
        except tracking.TrackingError as error:
            print(f"warning: {error}; run the same command again once MLflow answers", file=sys.stderr)
            return
        record = self.folder / "mlflow.json"
        _write_json(record, {**_read_json(record), "open": False})

    def _pictures(self, folders: Mapping[str, Path], scores: Mapping[str, Any]) -> list[Path]:
        pairs = {"after" if "before" in folders else "encoder": next(folders["after"].glob("pairs-*.parquet"))}
        best = report.best_baseline(scores)
        if best is not None:
            pairs = {f"before, {best}": folders["before"] / f"pairs-{best}.parquet", **pairs}
        draw: dict[str, Callable[[Path], None]] = {
            "sts-bars.png": partial(pictures.sts_bars, scores, self.config.encoder.name),
            "cosine-against-gold.png": partial(pictures.cosine_against_gold, pairs),
            "cosine-by-gold-band.png": partial(pictures.cosine_by_gold_band, pairs),
            "layer-similarity.png": partial(pictures.layer_similarity, scores),
        }
        if "train" in folders:
            draw["loss.png"] = partial(pictures.loss_curve, folders["train"] / "metrics.jsonl")
        for name, picture in draw.items():
            picture(self.folder / name)
        return [self.folder / name for name in draw]

    def _tell(self, outcomes: Sequence[Outcome], summary: Mapping[str, Any] | None) -> int:
        """Print the end of the run."""
        out = _console()
        if summary is not None:
            for table in report.score_tables(summary["scores"]):
                out.print(report.rich_table(table))
            for note in report.notes(summary["scores"]):
                out.print(note, markup=False)
        stages = ", ".join(
            f"{outcome.name} {outcome.status}" + (f" {outcome.seconds:.0f} s" if outcome.status == "ran" else "")
            for outcome in outcomes
        )
        out.print(f"stages   {stages}", soft_wrap=True)
        if summary is None:
            out.print(f"store    {outcomes[-1].path}", soft_wrap=True)
            return 0
        out.print(f"folder   {self.folder}", soft_wrap=True)
        if summary["mlflow"]:
            uri, run_id = summary["mlflow"]["tracking_uri"], summary["mlflow"]["run_id"]
            opened = f"make ui, or: mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite") else uri
            out.print(f"MLflow   {opened}   (run {run_id})", soft_wrap=True)
        return 0


class _Quiet(Display):
    """Shows nothing: reading the store takes no time."""

    def finished(self, outcome: Outcome) -> None:
        """Nothing to say."""


def _stages(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What became of the stages, for ``summary.json``."""
    return [{name: value for name, value in asdict(outcome).items() if name != "manifest"} for outcome in outcomes]


def _console() -> Console:
    """Standard output, with room for the table where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _write_json(file: Path, value: Mapping[str, Any]) -> Path:
    """Write aside and rename, so that a crash leaves the old file or the new one."""
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    aside.replace(file)
    return file


def _root(root: str) -> str:
    """Where a relative root lies: here, but in a submitted job, whose folder is a copy that vanishes, at home."""
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if not in_job or "://" in root or Path(root).expanduser().is_absolute():
        return root
    at_home = Path.home() / root
    print(f"root={root} is relative; this job keeps it at {at_home}, for its own folder vanishes", file=sys.stderr)
    return str(at_home)


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None

