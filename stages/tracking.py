"""MLflow: one experiment a config name, one run a run of the pipeline, the encoder as a registered model.

Only this module knows MLflow, and imports it when first used: a run that reads everything from the store
does without its second of import. ``metrics.jsonl`` and ``summary.json`` are the record; MLflow is a view of
them, so live metrics may be lost on the way (``LiveMetrics``) and are completed at the end (``replay``).
"""

import json
import logging
import math
import os
import queue
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel

from cluster.errors import InputError, first_line

logger = logging.getLogger(__name__)

SQLITE = "sqlite:///"
MAX_PARAM = 6000                                               # characters, MLflow's limits
MAX_TAG = 8000
Point = tuple[int, int, dict[str, float]]                      # step, milliseconds since the epoch, metrics


class TrackingConfig(BaseModel, extra="forbid", frozen=True):
    """Whether and what to tell MLflow."""

    enabled: bool = True
    register_model: bool = True                                # copy the encoder into MLflow under the config's name;
                                                               # false saves the disk of many runs' copies


class TrackingError(RuntimeError):
    """MLflow did not take what it was given; the run's folder has it all the same."""


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI if set, else an SQLite file in the root; always absolute, for workers change directory.

    Raises:
        InputError: MLFLOW_TRACKING_URI is a plain folder, which MLflow no longer takes.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"{SQLITE}{root.absolute() / 'mlflow.db'}"
    if uri.startswith(SQLITE):
        return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}"
    if urlsplit(uri).scheme in ("", "file") and uri != "databricks":
        raise InputError(
            f"MLFLOW_TRACKING_URI={uri} is a folder, which MLflow no longer takes; "
            "use http(s)://HOST:PORT, sqlite:////absolute/file.db or another database URI, or unset it"
        )
    return uri


def start_run(uri: str, experiment: str, run_name: str, root: Path, run_id: str | None = None) -> str:
    """Create a run, or reopen the one that an interrupted run of the pipeline left.

    Args:
        uri: as from ``tracking_uri``.
        experiment: its name; created, or restored from MLflow's bin, where necessary.
        run_name: shown in MLflow's list.
        root: without a tracking server, artifacts go to ``root/mlartifacts/EXPERIMENT``.
        run_id: the run to reopen; where it is gone, a new one is created.

    Returns:
        The run's id; its status is RUNNING.

    Raises:
        InputError: MLflow does not answer there.
    """
    try:
        client = _client(uri)
        experiment_id = _experiment(client, uri, experiment, root)
        if run_id is not None and _exists(client, run_id):
            client.update_run(run_id, status="RUNNING")
            if "failure" in client.get_run(run_id).data.tags:
                client.delete_tag(run_id, "failure")
            return run_id
        created: str = client.create_run(experiment_id, run_name=run_name).info.run_id
    except _mlflow_errors() as error:
        raise InputError(
            f"MLflow cannot be used at {uri} ({first_line(error)}); start the server, "
            "correct or unset MLFLOW_TRACKING_URI, or set tracking.enabled=false"
        ) from error
    return created


def log_config(uri: str, run_id: str, config: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
    """Log the config as parameters and everything else that a run should be found by as tags.

    Args:
        uri: as from ``tracking_uri``.
        run_id: the run.
        config: nested; its parameters are named as ``--set`` names them (``train.method.name``).
        tags: nested as well (``{"packages": {"torch": ...}}`` becomes ``packages.torch``); None is left out.

    MLflow's parameters cannot be changed. Where a reopened run was started with another value (say another
    number of workers), the parameter stays and the tag ``now.PARAMETER`` has the value in force.

    Raises:
        TrackingError: MLflow did not take them.
    """
    from mlflow.entities import Param, RunTag

    with _speaking_of(uri, "the config"):
        client = _client(uri)
        before = client.get_run(run_id).data.params
        params = {name: text[:MAX_PARAM] for name, text in _flatten_text(config).items()}
        labels = {name: text[:MAX_TAG] for name, text in _flatten_text(tags).items() if text != "null"}
        labels |= {f"now.{name}": text for name, text in params.items() if before.get(name, text) != text}
        if "git.commit" in labels:
            labels["mlflow.source.git.commit"] = labels["git.commit"]      # MLflow's own column
        client.log_batch(
            run_id,
            params=[Param(name, text) for name, text in params.items() if name not in before],
            tags=[RunTag(name, text) for name, text in labels.items()],
        )


class LiveMetrics:
    """Metrics for whoever watches a training run; used by rank 0.

    ``log`` never waits and never raises: a thread sends what has gathered every ``interval`` seconds. What
    MLflow does not take, or what a full buffer has no room for, is counted in ``lost`` and reported once;
    ``replay`` sends it afterwards from ``metrics.jsonl``.
    """

    def __init__(self, tracking: tuple[str, str] | None, interval: float = 2.0, capacity: int = 10_000) -> None:
        """Send to ``tracking``, an MLflow URI and a run id; None: nowhere. ``capacity``: steps that may wait."""
        self.lost = 0                                          # steps that MLflow has not got
        self._tracking = tracking
        self._interval = interval
        self._waiting: queue.Queue[Point] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        if tracking is not None:
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue one step's numbers; nested mappings become ``outer/inner``, what is no number is left out."""
        if self._tracking is None:
            return
        try:
            self._waiting.put_nowait((step, _now(), _numbers({"train": metrics})))
        except queue.Full:
            self._lose(1, "they come faster than MLflow takes them")

    def close(self, timeout: float = 15.0) -> None:
        """Send what waits, for at most ``timeout`` seconds."""
        self._closing.set()
        if self._tracking is not None:
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _send_all(self) -> None:
        assert self._tracking is not None
        log: _MetricLog | None = None
        while not self._closing.wait(self._interval) or not self._waiting.empty():
            points = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
            if not points:
                continue
            try:
                log = log or _MetricLog(*self._tracking)
                log.send(points)
            except Exception as error:                         # whatever it is, training goes on
                self._lose(len(points), first_line(error))

    def _lose(self, steps: int, why: str) -> None:
        if self.lost == 0:
            logger.warning("live metrics do not reach MLflow (%s); they are in metrics.jsonl", why)
        self.lost += steps


def replay(uri: str, run_id: str, metrics_file: Path) -> int:
    """Send the logged steps that the run does not have yet.

    Args:
        uri: as from ``tracking_uri``.
        run_id: the run.
        metrics_file: the training stage's ``metrics.jsonl``.

    Returns:
        How many values were sent.

    Raises:
        TrackingError: MLflow did not take them.
    """
    points = [(record["step"], _now(), _numbers({"train": record})) for record in read_metrics(metrics_file)]
    with _speaking_of(uri, "the training metrics"):
        return _MetricLog(uri, run_id).send(points)


def read_metrics(metrics_file: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``, one a step, in order of their steps.

    Records of the same step are merged, the later line winning: training and validation write a line each,
    and a resumed run may log a step again. A line cut off by a crash is passed over.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def finish_run(
    uri: str,
    run_id: str,
    summary: Mapping[str, Any],
    files: Iterable[Path] = (),
    encoder: Path | None = None,
    registered_name: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> str | None:
    """Log what came out, and close the run as FINISHED. A second call adds nothing twice.

    Args:
        uri: as from ``tracking_uri``.
        run_id: the run.
        summary: ``summary.json``; its scores become the metrics ``after/STS12/spearman``,
            ``before/cls/avg_spearman`` and so on, its stages ``seconds/STAGE``.
        files: artifacts: config, summary, tables, pictures.
        encoder: folder of the trained encoder, logged as a model that takes sentences; None: there is none.
        registered_name: the model's name in the registry, where its newest version is ``models:/NAME@latest``;
            None: the encoder stays in the run's folder alone.
        tags: what to find the run by; empty ones are left out.

    Returns:
        The model's URI for ``mlflow.pyfunc.load_model``; None without a model.

    Raises:
        TrackingError: MLflow did not take it.
    """
    with _speaking_of(uri, "the results"):
        client = _client(uri)
        _MetricLog(uri, run_id).send(_summary_points(summary))
        for name, text in (tags or {}).items():
            if text:
                client.set_tag(run_id, name, text[:MAX_TAG])
        for file in files:
            client.log_artifact(run_id, str(file))
        model_uri: str | None = client.get_run(run_id).data.tags.get("model")
        if encoder is not None and registered_name is not None and model_uri is None:
            with _active_run(uri, run_id):
                model_uri = _log_model(encoder)
                _register(client, _name(registered_name).replace("/", "_"), model_uri, run_id)
            client.set_tag(run_id, "model", model_uri)
        client.set_terminated(run_id, "FINISHED")
    return model_uri


def fail_run(uri: str, run_id: str, reason: str) -> None:
    """Close the run as FAILED, the reason in the tag ``failure``; never raises, for something else just did."""
    try:
        client = _client(uri)
        client.set_tag(run_id, "failure", reason[:MAX_TAG])
        client.set_terminated(run_id, "FAILED")
    except Exception as error:
        logger.warning("MLflow was not told of the failure (%s)", first_line(error))


class _MetricLog:
    """Sends each metric at most once a step, however often it is given, also from another process."""

    def __init__(self, uri: str, run_id: str) -> None:
        self._client = _client(uri)
        self._run_id = run_id
        self._sent: dict[str, set[int]] = {}                   # metric -> steps that MLflow has

    def send(self, points: Iterable[Point]) -> int:
        """Log what MLflow does not have; the number of values that were new."""
        from mlflow.entities import Metric

        new: dict[tuple[str, int], Any] = {}
        for step, milliseconds, values in points:
            for name, value in values.items():
                if step not in self._steps(name):
                    new[name, step] = Metric(name, value, milliseconds, step)
        self._client.log_batch(self._run_id, metrics=list(new.values()))
        for name, step in new:
            self._sent[name].add(step)
        return len(new)

    def _steps(self, name: str) -> set[int]:
        if name not in self._sent:
            self._sent[name] = {metric.step for metric in self._client.get_metric_history(self._run_id, name)}
        return self._sent[name]


def _client(uri: str) -> Any:
    """A client for the URI.

    The variables are MLflow's; whoever sets them keeps their values. Nothing here is worth MLflow's own four
    minutes of patience with a server that is away, and a training pipeline reports to nobody unasked.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")             # seconds
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.WARNING)

    return MlflowClient(uri)


def _experiment(client: Any, uri: str, name: str, root: Path) -> str:
    """The id of the experiment of this name."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
    server = urlsplit(uri).scheme in ("http", "https", "databricks") or uri == "databricks"
    location = None if server else (root.absolute() / "mlartifacts" / _name(name)).as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _log_model(encoder: Path) -> str:
    """Log an encoder's folder to the active run, with the code and the packages that load it; the model's URI."""
    import numpy as np
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    hidden = json.loads((encoder / "config.json").read_text())["hidden_size"]
    signature = ModelSignature(
        inputs=Schema([ColSpec("string")]),                    # unnamed: lists, arrays and any column will do
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, hidden))]),
    )
    with tempfile.TemporaryDirectory() as code:
        packages, requirements = _collect_code("stages.served_model", Path(code))
        info = pyfunc.log_model(
            name="encoder",
            loader_module="stages.served_model",
            data_path=str(encoder),
            code_paths=[str(package) for package in packages],
            pip_requirements=requirements,
            signature=signature,
            input_example=["A man is playing a guitar.", "Someone plays an instrument."],
        )
    return str(info.model_uri)


def _collect_code(module: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Copy a module of ours, and what it imports of ours, into a folder.

    Returns:
        The packages copied, and the pip requirements of what else is imported, pinned to what is installed
        here (without local labels such as ``+cpu``, which no index has).
    """
    root = Path(__file__).parent.parent
    finder = ModuleFinder(path=[str(root)])                    # sees our packages alone; the rest is "bad"
    finder.import_hook(module)
    for found in finder.modules.values():
        source = Path(str(found.__file__))                     # type: ignore[attr-defined]
        target = folder / source.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    imported = {name.partition(".")[0] for name in finder.badmodules} - set(sys.stdlib_module_names)
    owners = packages_distributions()
    distributions = sorted({owners[name][0] for name in imported if name in owners})
    return sorted(folder.iterdir()), [f"{name}=={version(name).partition('+')[0]}" for name in distributions]


def _register(client: Any, name: str, model_uri: str, run_id: str) -> None:
    """Make the model the newest version of the name."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    client.create_model_version(name, model_uri, run_id, model_id=model_uri.removeprefix("models:/"))


@contextmanager
def _active_run(uri: str, run_id: str) -> Iterator[None]:
    """Make the run MLflow's active one, which logging a model needs, and put MLflow's globals back afterwards."""
    import mlflow

    before, path = os.environ.get("MLFLOW_TRACKING_URI"), sys.path
    mlflow.set_tracking_uri(uri)                               # changes the variable, too
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        sys.path = path                                        # MLflow tried the model, with its code in front
        mlflow.set_tracking_uri(None)
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


@contextmanager
def _speaking_of(uri: str, what: str) -> Iterator[None]:
    """Turn MLflow's errors into one line."""
    try:
        yield
    except _mlflow_errors() as error:
        raise TrackingError(f"MLflow at {uri} did not take {what}: {first_line(error)}") from error


def _mlflow_errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError)


def _summary_points(summary: Mapping[str, Any]) -> list[Point]:
    """The summary's scores and times as metrics; a curve over layers has the layer as its step."""
    scores = summary["scores"]
    named = _told_apart({f"before/{pooling}": score for pooling, score in scores.get("before", {}).items()})
    named["after"] = scores["after"]
    values: dict[str, Any] = {"seconds": {stage["name"]: stage["seconds"] for stage in summary["stages"]}}
    curves: list[Point] = []
    for name, score in named.items():
        geometry = dict(score.get("geometry", {}))
        layers = geometry.pop("layer_similarity", [])
        curves += [
            (layer, _now(), _numbers({name: {"layer_similarity": cosine}})) for layer, cosine in enumerate(layers)
        ]
        whole = {key: value for key, value in score.items() if not isinstance(value, Mapping)}
        whole["geometry"] = geometry
        for kind in ("sts", "transfer", "similarity"):         # a set of the user's may be called geometry
            for task, part in score.get(kind, {}).items():
                whole[f"{kind}/{task}" if task in whole else task] = _measures(part)
        values[name] = whole
    return [(0, _now(), _numbers(values)), *curves]


def _measures(part: Any) -> Any:
    """A task's scores without the counts and the subsets; an average as it is."""
    if not isinstance(part, Mapping):
        return part
    return {key: value for key, value in part.items() if key not in ("n", "subsets") and not key.startswith("n_")}


def _told_apart(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same under names that MLflow takes; mean@1+12 becomes mean_1_12, and a second such name mean_1_12_2."""
    apart: dict[str, Any] = {}
    for name, value in named.items():
        tried, place = _name(name), 1
        while tried in apart:
            place += 1
            tried = f"{_name(name)}_{place}"
        apart[tried] = value
    return apart


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested mappings to ``outer/inner``; keep numbers, leave out all else, and the step itself."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat |= _numbers(value, name)
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            flat[_name(name)] = float(value)
    return flat


def _flatten_text(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to ``outer.inner``; values as they stand in YAML (true, null, [1, 2])."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat |= _flatten_text(value, name)
        else:
            flat[_name(name)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _name(text: str) -> str:
    """A name that MLflow takes: letters, digits, ``_ - . /`` and spaces, no empty or dotted path parts."""
    parts = re.sub(r"[^\w\-./ ]", "_", text).split("/")
    return "/".join(part for part in parts if part.strip(". "))[:250] or "_"


def _now() -> int:
    return math.floor(time.time() * 1000)
