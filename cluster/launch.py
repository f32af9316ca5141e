"""Ray: starting it, what it has room for, tasks in order, and groups of training workers."""

import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayTaskError

from cluster.config import ClusterConfig
from cluster.errors import InputError, first_line
from cluster.world import Solo, TorchWorld, World

Item = TypeVar("Item")
Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parent.parent


DETERMINISTIC = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, ArithmeticError, MemoryError,
)  # fmt: skip
"""What a worker raises again however often it is tried, InputError included; lost peers show as RuntimeErrors."""


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine.

    Raises:
        InputError: there is no cluster at RAY_ADDRESS, or it does not let us in.
        ConnectionError: Ray does not start here.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if not _joined():
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]      # workers run this checkout, installed or not
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            ray.init(address="local", include_dashboard=False, **quiet)    # not some head that runs here, too
            return
        _knock(os.environ["RAY_ADDRESS"])
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ           # then the job's working directory is the code
        code = {"working_dir": str(ROOT), "excludes": ["/runs/", "/.venv/", "/.git/"]}
        ray.init(runtime_env={} if in_job else code, **quiet)
    except Exception as error:                                         # Ray raises bare ones, too
        if _joined():
            raise InputError(
                f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: no Ray cluster takes us there ({first_line(error)}); "
                "start it, correct RAY_ADDRESS, or unset it to run on this machine"
            ) from error
        raise ConnectionError(
            f"Ray does not start on this machine ({first_line(error)}); see /tmp/ray/session_latest/logs, "
            "and whether other work leaves it processors, memory and disk"
        ) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_terminate)                # Ray puts its own in place


def _knock(address: str) -> None:
    """See that somebody listens; Ray itself would try for many minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():                                        # it may be `auto`, too
        socket.create_connection((host, int(port)), timeout=20).close()


def _joined() -> bool:
    """Whether the cluster is another's, to which nodes may be added, rather than this machine alone."""
    return bool(os.environ.get("RAY_ADDRESS"))


def stop_ray() -> None:
    """Leave the cluster, or shut it down where it was started here."""
    ray.shutdown()


def uses_gpu(config: ClusterConfig) -> bool:
    """Whether work goes to GPUs: as configured, or, for ``auto``, if the cluster has any."""
    if config.device == "auto":
        return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    return config.device == "gpu"


def with_device(config: ClusterConfig) -> ClusterConfig:
    """The config with ``auto`` replaced by what this cluster has, for processes that see only their own machine."""
    return config.model_copy(update={"device": "gpu" if uses_gpu(config) else "cpu"})


def cpus_per_worker(config: ClusterConfig) -> int:
    """Cores of one training worker: as configured; or 4 beside a GPU; or as many as let all workers find room."""
    if config.cpus_per_worker != "auto":
        return config.cpus_per_worker
    if uses_gpu(config):
        return 4
    share = max(1, int(ray.cluster_resources().get("CPU", 1)) // config.workers)
    return next((cpus for cpus in range(share, 1, -1) if _has_room({"CPU": cpus}, config.workers)), 1)


def check_room(config: ClusterConfig) -> None:
    """Make sure that all workers fit on the cluster, nodes that an autoscaler adds in time included.

    Without training, one worker's room is enough: ``config`` has ``workers=1`` then.

    Raises:
        InputError: they do not, after ``placement_timeout`` seconds.
    """
    needed = worker_resources(config)
    if _has_room(needed, config.workers) or (_joined() and _has_room_in_time(needed, config)):
        return
    has = {name: float(ray.cluster_resources().get(name, 0)) for name in needed}
    remedies = ["lower cluster.workers or cluster.cpus_per_worker"]
    if has.get("GPU") == 0:
        remedies = ["set cluster.device to cpu or auto"]
    waited = f" (waited {config.placement_timeout:g} s for more, cluster.placement_timeout)" if _joined() else ""
    raise InputError(
        f"cluster.workers={config.workers} need {_describe(needed, config.workers)}, but "
        f"{'the Ray cluster' if _joined() else 'this machine'} has {_describe(has, 1)}{waited}; "
        f"{', '.join([*remedies, 'or add nodes' if _joined() else 'or set RAY_ADDRESS to a larger cluster'])}"
    )


def _has_room_in_time(needed: dict[str, float], config: ClusterConfig) -> bool:
    """Ask for room and wait: an autoscaler, which sees the request, may add nodes."""
    request = ray.util.placement_group([needed] * config.workers)
    deadline = time.monotonic() + config.placement_timeout
    try:
        while time.monotonic() < deadline:
            if _has_room(needed, config.workers):
                return True
            time.sleep(0.5)
        return False
    finally:
        ray.util.remove_placement_group(request)


def worker_resources(config: ClusterConfig) -> dict[str, float]:
    """What one training worker claims of Ray."""
    claims: dict[str, float] = {"CPU": cpus_per_worker(config)}
    return claims | ({"GPU": 1} if uses_gpu(config) else {})


def _has_room(needed: dict[str, float], workers: int) -> bool:
    """Whether the living nodes can hold the workers, each whole on one node."""
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            places += int(min(node["Resources"].get(name, 0) // amount for name, amount in needed.items()))
    return places >= workers


def _describe(resources: dict[str, float], times: int) -> str:
    counts = {name: amount * times for name, amount in resources.items()}
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in counts.items())


def root_cause(error: BaseException) -> BaseException:
    """The error that a task raised, out of whatever Ray wrapped it in."""
    while True:
        failures = getattr(error, "worker_failures", None)             # of Ray Train
        if failures:
            error = next(iter(failures.values()))
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            wrapped = [getattr(error, name, None) for name in ("controller_failure", "_base_exc")]     # of Ray Train
            inner = next((each for each in wrapped if isinstance(each, BaseException)), None)
            if inner is None:
                return error
            error = inner


def map_tasks(function: Callable[[Item], Result], items: Sequence[Item], config: ClusterConfig) -> Iterator[Result]:
    """Apply a function to each item as Ray tasks of one core or one GPU; inline where Ray does not run.

    Args:
        function: top-level, so that workers can import it; its result depends on the item alone.
        items: small and picklable.
        config: decides between cores and GPUs.

    Returns:
        The results in the order of the items.

    Raises:
        Whatever ``function`` raises, unwrapped.
    """
    if not ray.is_initialized():
        yield from map(function, items)
        return
    remote = _call_on_gpu if uses_gpu(config) else _call
    in_flight: deque[Any] = deque()
    waiting = iter(items)
    room = 2 * int(ray.cluster_resources().get("CPU", 1))              # more would only fill the queue
    try:
        while True:
            while len(in_flight) < room and (item := next(waiting, _END)) is not _END:
                in_flight.append(remote.remote(function, item))
            if not in_flight:
                return
            yield ray.get(in_flight.popleft())
    except RayTaskError as error:
        raise root_cause(error) from None
    finally:
        for task in in_flight:
            ray.cancel(task)


_END: Any = object()


@ray.remote(num_cpus=1, max_retries=3)  # type: ignore[untyped-decorator]
def _call(function: Callable[[Any], Any], item: Any) -> Any:
    torch.set_num_threads(1)
    return function(item)


# A process that has used one GPU stays with it, and keeps its memory: so each call has a process of its own.
@ray.remote(num_cpus=1, num_gpus=1, max_calls=1, max_retries=3)  # type: ignore[untyped-decorator]
def _call_on_gpu(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def train_on_workers(
    function: Callable[[Any, World], None], payload: Any, config: ClusterConfig, name: str, storage: Path
) -> None:
    """Run ``function(payload, world)`` on ``config.workers`` Ray Train workers until all have returned.

    A group that lost a worker starts again, ``config.max_failures`` times; the function finds its own checkpoint.
    An error that would come again is not tried again.

    Args:
        function: top-level.
        payload: picklable, the same for all workers.
        config: number, device and patience.
        name: of the Ray Train run; must be new, since Ray resumes a finished run of the same name.
        storage: absolute folder for Ray Train's own records.

    Raises:
        Whatever a worker raised, unwrapped.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpu = uses_gpu(config)
    failure = storage / f"{name}.failure"
    storage.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={
            "function": function, "payload": payload, "threads": cpus_per_worker(config), "workers": config.workers,
            "failure": failure, "on_gpu": on_gpu,
        },
        scaling_config=ScalingConfig(
            num_workers=config.workers, use_gpu=on_gpu, resources_per_worker=worker_resources(config)
        ),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout_s=int(config.collective_timeout)
        ),
        run_config=RunConfig(
            name=name, storage_path=str(storage), failure_config=FailureConfig(max_failures=config.max_failures)
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        if not failure.exists():
            raise root_cause(error) from error
    if failure.exists():
        raise cloudpickle.loads(failure.read_bytes())


def _train_worker(arguments: dict[str, Any]) -> None:
    """Run the function, unless it failed for good.

    Ray Train tries again after any error, whatever it is. So one that would come again is left in a file, and the
    second try, which finds it, ends at once.
    """
    failure: Path = arguments["failure"]
    if failure.exists():
        return
    if not failure.parent.is_dir():
        raise InputError(
            f"{failure.parent} does not exist on {socket.gethostname()}; root must be a folder that all nodes of the "
            "cluster share"
        )
    if arguments["on_gpu"]:
        from ray.train.torch import get_device

        torch.cuda.set_device(get_device())
    torch.set_num_threads(arguments["threads"])
    world: World = TorchWorld() if arguments["workers"] > 1 else Solo()
    try:
        arguments["function"](arguments["payload"], world)
    except DETERMINISTIC as error:
        error.add_note(f"raised by training worker {world.rank}:\n{traceback.format_exc()}")
        aside = failure.with_suffix(f".{world.rank}")
        aside.write_bytes(cloudpickle.dumps(error))
        aside.replace(failure)
        raise
