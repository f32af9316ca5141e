"""The demo, shortened, as a job of a cluster of its own whose token authentication is on."""

import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent

START = 300                                                    # seconds for a head that is up in ten on free cores
PATIENCE = 900                                                 # seconds for a job that takes one minute on free cores

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(START + PATIENCE)]


@dataclass(frozen=True)
class Head:
    """A running head node."""

    address: str                                               # of the job server
    environment: dict[str, str]                                # RAY_AUTH_TOKEN included
    folder: Path                                               # Ray's temporary files

    def submit(self, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """``ray job submit`` from the checkout, as the README has it; waits for the job's end."""
        environment = self.environment | ({} if token is None else {"RAY_AUTH_TOKEN": token})
        command = [str(BIN / "ray"), "job", "submit", "--address", self.address, "--working-dir", ".", "--"]
        return subprocess.run(
            [*command, "python", "pipeline/run.py", *arguments],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE,
        )  # fmt: skip

    def jobs(self) -> list[dict[str, object]]:
        """All jobs that were ever submitted."""
        bearer = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers=bearer)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: list[dict[str, object]] = json.load(answer)
        return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; not of those that the system hands out, for Ray takes some only after a while."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head with two CPUs that shares neither ports nor files with other Rays of this machine."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))          # short: sockets lie in it
    gcs, jobs, client, agent, agent_grpc, metrics = free_ports(6)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_", "APINCSE_"))
    } | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",              # the job's `python`
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0", f"--temp-dir={folder}",
        f"--port={gcs}", f"--dashboard-port={jobs}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}", "--min-worker-port=0", "--max-worker-port=0",
        f"--object-store-memory={300 * 2**20}",
    ]  # fmt: skip
    log = folder / "start.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
    try:
        started = Head(f"http://127.0.0.1:{jobs}", environment, folder)
        _wait_for_job_server(started, process, log)
        yield started
    finally:
        _stop(process)
        print(log.read_text())                                 # seen where a test failed
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_job_server(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            head.jobs()
            return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"no job server after {START} s:\n{log.read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End this head alone, and a job that still runs; `ray stop` would end every Ray of the machine."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()                                        # with --block, it takes its daemons along
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for left in [process, *psutil.wait_procs(started, timeout=3)[1]]:
        with suppress(psutil.NoSuchProcess):
            left.kill()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store's folder, which outlives the job's working directory."""
    return tmp_path_factory.mktemp("job") / "runs"


@pytest.fixture(scope="module")
def arguments(root: Path) -> list[str]:
    """The demo in four steps on few sentences."""
    corpus = root.parent / "sentences.txt"
    corpus.write_text("".join(f"Train number {n} leaves the station at {n % 24} o'clock.\n" for n in range(80)))
    settings = {
        "name": "jobtest",
        "root": root,
        "corpus.source.kind": "text",
        "corpus.source.path": corpus,
        "corpus.sample": 64,
        "encoder.max_length": 16,
        "train.steps": 4,
        "train.batch_size": 8,
        "train.eval_every": 4,
        "train.method.queue_length": 16,
        "train.method.neighbours": 4,
        "tracking.register_model": "false",
    }
    return ["--config", "demo", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


@pytest.fixture(scope="module")
def first_job(head: Head, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The first submission, ended."""
    return head.submit(*arguments)


def stages(root: Path) -> dict[str, str]:
    """What became of each stage."""
    summary = json.loads((root / "jobtest" / "summary.json").read_text())
    return {stage["name"]: stage["status"] for stage in summary["stages"]}


def test_a_wrong_token_is_refused(head: Head, arguments: list[str]) -> None:
    refused = head.submit(*arguments, token="not-the-token")
    assert refused.returncode != 0
    assert "authentication" in refused.stdout.lower()
    assert head.jobs() == []


def test_a_submitted_job_trains_and_scores(first_job: subprocess.CompletedProcess[str], root: Path) -> None:
    assert first_job.returncode == 0, first_job.stdout
    assert stages(root) == dict.fromkeys(("corpus", "before", "train", "after"), "ran")
    summary = json.loads((root / "jobtest" / "summary.json").read_text())
    assert set(summary["scores"]["before"]) == {"cls", "mean", "first-last-mean"}
    for scores in (*summary["scores"]["before"].values(), summary["scores"]["after"]):
        assert 0 < scores["sts"]["avg_spearman"] <= 100        # MiniLM, hardly trained, knows sentences
    assert summary["mlflow"]["run_id"]
    assert (root / "jobtest" / "encoder" / "config.json").is_file()


def test_the_job_runs_the_uploaded_code_and_no_more_is_uploaded(
    first_job: subprocess.CompletedProcess[str], head: Head
) -> None:
    (upload,) = (head.folder / "session_latest" / "runtime_resources" / "working_dir_files").glob("_ray_pkg_*/")
    assert (upload / "pipeline" / "run.py").is_file()
    assert not {".venv", ".git", "runs"} & {entry.name for entry in upload.iterdir()}
    assert sum(file.stat().st_size for file in upload.rglob("*") if file.is_file()) < 10 * 2**20


def test_the_same_job_again_finds_everything_in_the_store(
    first_job: subprocess.CompletedProcess[str], head: Head, arguments: list[str], root: Path
) -> None:
    again = head.submit(*arguments)
    assert again.returncode == 0, again.stdout
    assert stages(root) == dict.fromkeys(("corpus", "before", "train", "after"), "cached")
