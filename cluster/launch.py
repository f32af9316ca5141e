"""Ray: starting it, what it has room for, tasks in order, and groups of training workers."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayTaskError

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.world import Solo, TorchWorld, World

Item = TypeVar("Item")
Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parent.parent


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    joins = "RAY_ADDRESS" in os.environ
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if joins:
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ           # then the job's working directory is the code
        code = {"working_dir": str(ROOT), "excludes": ["/runs/", "/.venv/", "/.git/"]}
        ray.init(runtime_env={} if in_job else code, **quiet)
    else:
        ray.init(include_dashboard=False, **quiet)


def stop_ray() -> None:
    """Leave the cluster, or shut it down where it was started here."""
    ray.shutdown()


def uses_gpu(config: ClusterConfig) -> bool:
    """Whether work goes to GPUs: as configured, or, for ``auto``, if the cluster has any."""
    if config.device == "auto":
        return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    return config.device == "gpu"


def cpus_per_worker(config: ClusterConfig) -> int:
    """Cores of one training worker: as configured, or an equal share of the cluster's (4 beside a GPU)."""
    if config.cpus_per_worker != "auto":
        return config.cpus_per_worker
    return 4 if uses_gpu(config) else max(1, int(ray.cluster_resources().get("CPU", 1)) // config.workers)


def check_room(config: ClusterConfig) -> None:
    """Make sure that all workers fit on the cluster, nodes that an autoscaler adds in time included.

    Raises:
        InputError: they do not, after ``placement_timeout`` seconds.
    """
    needed = worker_resources(config)
    if _has_room(needed, config.workers):
        return
    request = ray.util.placement_group([needed] * config.workers)      # an autoscaler sees this and adds nodes
    deadline = time.monotonic() + config.placement_timeout
    while time.monotonic() < deadline:
        if _has_room(needed, config.workers):
            break
        time.sleep(0.5)
    ray.util.remove_placement_group(request)
    if not _has_room(needed, config.workers):
        has = {name: float(ray.cluster_resources().get(name, 0)) for name in needed}
        raise InputError(
            f"cluster.workers={config.workers} need {_describe(needed, config.workers)}, but the Ray cluster has "
            f"{_describe(has, 1)}; lower cluster.workers or cluster.cpus_per_worker, or add nodes "
            f"(waited {config.placement_timeout:g} s, cluster.placement_timeout)"
        )


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
    return " and ".join(f"{amount * times:g} {name}s" for name, amount in resources.items())


def root_cause(error: BaseException) -> BaseException:
    """The error that a task raised, out of whatever Ray wrapped it in."""
    while True:
        failures = getattr(error, "worker_failures", None)             # of Ray Train
        if failures:
            error = next(iter(failures.values()))
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            inner = getattr(error, "_cause", None) or getattr(error, "original_exception", None)
            if not isinstance(inner, BaseException):
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
    remote = _call.options(num_cpus=1, num_gpus=1 if uses_gpu(config) else 0)
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


@ray.remote(max_retries=3)  # type: ignore[untyped-decorator]
def _call(function: Callable[[Any], Any], item: Any) -> Any:
    torch.set_num_threads(1)
    return function(item)


def train_on_workers(
    function: Callable[[Any, World], None], payload: Any, config: ClusterConfig, name: str, storage: Path
) -> None:
    """Run ``function(payload, world)`` on ``config.workers`` Ray Train workers until all have returned.

    A group that lost a worker starts again, ``config.max_failures`` times; the function finds its own checkpoint.

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
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={
            "function": function, "payload": payload, "threads": cpus_per_worker(config), "workers": config.workers,
        },
        scaling_config=ScalingConfig(
            num_workers=config.workers, use_gpu=on_gpu, resources_per_worker=worker_resources(config)
        ),
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=int(config.collective_timeout)),
        run_config=RunConfig(
            name=name, storage_path=str(storage), failure_config=FailureConfig(max_failures=config.max_failures)
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise root_cause(error) from error


def _train_worker(arguments: dict[str, Any]) -> None:
    torch.set_num_threads(arguments["threads"])
    world: World = TorchWorld() if arguments["workers"] > 1 else Solo()
    arguments["function"](arguments["payload"], world)
