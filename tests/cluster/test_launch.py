import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.launch import check_room, map_tasks, root_cause, train_on_workers
from cluster.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = ClusterConfig(device="cpu", cpus_per_worker=1)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of code in a process that no test has started Ray in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | environment, text=True, capture_output=True, timeout=400
    )


def slow_square(number: int) -> int:
    time.sleep(0.02 * (8 - number))                            # the first is done last
    return number**2


def refuse_three(number: int) -> int:
    if number == 3:
        raise InputError(f"number={number}: it must not be 3")
    return number


def die_once(marker: str) -> int:
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_without_ray_items_are_mapped_inline() -> None:
    done = python(
        "import os\n"
        "from cluster.launch import map_tasks\n"
        "from cluster.config import ClusterConfig\n"
        "print(set(map_tasks(lambda _: os.getpid(), range(3), ClusterConfig())) == {os.getpid()})\n"
    )
    assert done.stdout == "True\n", done.stderr


def test_an_address_without_a_cluster_is_refused_in_one_line() -> None:
    done = python(
        "from cluster.launch import start_ray\n"
        "from cluster.errors import InputError\n"
        "try:\n    start_ray()\n"
        "except InputError as error:\n    print(error)\n",
        RAY_ADDRESS="127.0.0.1:1",
    )
    assert done.stdout.startswith("RAY_ADDRESS=127.0.0.1:1: no Ray cluster takes us there ("), done.stderr
    assert done.stdout.endswith("; start it, correct RAY_ADDRESS, or unset it to run on this machine\n")
    assert done.stdout.count("\n") == 1


def test_the_root_cause_of_what_is_not_wrapped_is_itself() -> None:
    error = ValueError("x")
    assert root_cause(error) is error


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestTasks:
    def test_results_come_in_the_order_of_the_items(self) -> None:
        assert list(map_tasks(slow_square, range(8), CPU)) == [number**2 for number in range(8)]

    def test_an_error_comes_unwrapped(self) -> None:
        with pytest.raises(InputError, match=r"^number=3: it must not be 3$"):
            list(map_tasks(refuse_three, range(6), CPU))

    def test_a_killed_process_is_replaced(self, tmp_path: Path) -> None:
        (pid,) = map_tasks(die_once, [str(tmp_path / "died")], CPU)
        assert (tmp_path / "died").exists()
        assert pid != os.getpid()


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestRoom:
    def test_as_many_workers_as_fit_are_welcome(self) -> None:
        check_room(CPU.model_copy(update={"workers": 2}))

    def test_too_many_are_refused_at_once_where_no_node_can_join(self) -> None:
        started = time.monotonic()
        with pytest.raises(InputError) as caught:
            check_room(CPU.model_copy(update={"workers": 3}))
        assert str(caught.value) == (
            "cluster.workers=3 need 3 CPUs, but this machine has 2 CPUs; "
            "lower cluster.workers or cluster.cpus_per_worker, or set RAY_ADDRESS to a larger cluster"
        )
        assert time.monotonic() - started < CPU.placement_timeout / 2

    def test_an_equal_share_of_too_few_cores_is_one_each(self) -> None:
        with pytest.raises(InputError, match=r"^cluster.workers=3 need 3 CPUs, but"):
            check_room(CPU.model_copy(update={"workers": 3, "cpus_per_worker": "auto"}))

    def test_a_cluster_is_given_time_to_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "ray://a-cluster")   # the one that is joined already
        started = time.monotonic()
        with pytest.raises(InputError, match=r"the Ray cluster has 2 CPUs \(waited 2 s for more, cluster.placement_ti"):
            check_room(CPU.model_copy(update={"workers": 3, "placement_timeout": 2.0}))
        assert 2 <= time.monotonic() - started < 60
        requests = ray.util.placement_group_table().values()
        assert {request["state"] for request in requests} <= {"REMOVED"}

    def test_gpus_that_are_not_there_are_named(self) -> None:
        with pytest.raises(InputError, match=r"need 1 CPU and 1 GPU, but .* has 2 CPUs and 0 GPUs; set cluster.device"):
            check_room(ClusterConfig(device="gpu", cpus_per_worker=1))


def wait_or_fail(task: dict[str, Any], world: World) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    attempt(task, world)
    if world.rank == 1:
        raise task["error"]
    world.barrier()


def wait_or_die_once(task: dict[str, Any], world: World) -> None:
    if len(attempt(task, world)) == 1 and world.rank == 1:
        time.sleep(5)                                          # in its first moment Ray takes a death for its own fault
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
    (Path(task["folder"]) / f"done-{world.rank}").touch()


def attempt(task: dict[str, Any], world: World) -> list[Path]:
    """Note that the function was called; all calls of this rank so far."""
    folder = Path(task["folder"])
    (folder / f"attempt-{world.rank}-{os.getpid()}").touch()
    return list(folder.glob(f"attempt-{world.rank}-*"))


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestTraining:
    two = CPU.model_copy(update={"workers": 2, "max_failures": 3})

    def test_what_a_worker_refuses_is_not_tried_again(self, tmp_path: Path) -> None:
        task = {"folder": tmp_path, "error": InputError("encoder.name=x: mend it")}
        with pytest.raises(InputError) as caught:
            train_on_workers(wait_or_fail, task, self.two, "refused", tmp_path / "ray")
        assert str(caught.value) == "encoder.name=x: mend it"
        assert "raised by training worker 1:\nTraceback" in caught.value.__notes__[0]
        assert len(list(tmp_path.glob("attempt-1-*"))) == 1

    def test_an_error_that_may_pass_comes_unwrapped_when_patience_ends(self, tmp_path: Path) -> None:
        once = self.two.model_copy(update={"max_failures": 0})
        task = {"folder": tmp_path, "error": OSError("no route to host")}
        with pytest.raises(OSError, match="no route to host"):
            train_on_workers(wait_or_fail, task, once, "failed", tmp_path / "ray")

    def test_a_group_that_lost_a_worker_starts_again(self, tmp_path: Path) -> None:
        train_on_workers(wait_or_die_once, {"folder": tmp_path}, self.two, "killed", tmp_path / "ray")
        assert {file.name for file in tmp_path.glob("done-*")} == {"done-0", "done-1"}
        assert len(list(tmp_path.glob("attempt-0-*"))) == 2    # the healthy one starts again as well
