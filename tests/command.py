"""The command as a process of its own, as users run it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "pipeline" / "run.py"
PATIENCE = 900.0                                               # seconds for what takes a few on free cores
OURS = ("RAY_", "MLFLOW_", "APINCSE_")                         # variables that change what the command does


@dataclass
class Command:
    """A started ``python pipeline/run.py``; its output goes to files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    started: list[psutil.Process] = field(default_factory=list)        # Ray's processes, as far as seen

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE)

    def wait_until(self, happened: Callable[[], object], every: float = 0.02) -> None:
        """Return as soon as something has happened while the command runs."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, f"ended too early:\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"it never happened:\n{self.stdout}\n{self.stderr}"
            time.sleep(every)

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal, Ctrl-C as a terminal does: to the command and its children alike."""
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def assert_nothing_is_left(self) -> None:
        """All processes that ran when it was interrupted end, too."""
        assert self.started
        _, alive = psutil.wait_procs(self.started, timeout=120)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def command(folder: Path, *arguments: object, **environment: str) -> Iterator[Command]:
    """Start the command in a folder outside of the checkout; it is killed at the end if it still runs."""
    number = len(list(folder.glob("command-*.out")))
    out, err = folder / f"command-{number}.out", folder / f"command-{number}.err"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, RUN, *map(str, arguments)],
            cwd=folder, env=clean | environment, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
    try:
        yield Command(process, out, err)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def run(folder: Path, *arguments: object, **environment: str) -> Command:
    """Run it to its end."""
    with command(folder, *arguments, **environment) as started:
        started.wait()
    return started


@contextmanager
def cpu_seconds(at_most: float) -> Iterator[None]:
    """Children of this process use no more; unlike time by the clock, this does not depend on who else computes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= at_most
