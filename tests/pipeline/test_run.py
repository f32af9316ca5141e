import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline import run as run_module
from tests import tiny
from tests.command import RUN, Command, command, cpu_seconds, run

CONFIG = """
corpus: {{source: {{kind: text, path: {folder}/corpus.txt}}}}
encoder: {{name: {folder}/encoder, max_length: 12}}
train:
  method: {{queue_length: 32, neighbours: 4}}
  batch_size: 16
  steps: 2
cluster: {{workers: 2}}
evaluate: {{allow_partial: true}}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, toy.yaml, and what it names."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.yaml").write_text(CONFIG.format(folder=folder))
    (folder / "corpus.txt").write_text("".join(f"word{at} word1 word2 word3 word4\n" for at in range(40)))
    tiny.save_bert(folder / "encoder")
    tiny.save_bert(folder / "shallow", depth=2)
    for name in ("empty.txt", "nothing/notes.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    (folder / "table.csv").write_text("one,two\nword1,word2\n")
    (folder / "latin.txt").write_bytes(b"word1 word2 word3 word4\ncaf\xe9 word2 word3 word4\n")
    for name, rows in {
        "sts": ["3.5\tword1\tword2", "1\tword3\tword4"],
        "no-number": ["3.5\tword1\tword2", "good\tword3\tword4"],
    }.items():
        benchmark = folder / name / "STS" / "STSBenchmark"
        benchmark.mkdir(parents=True)
        for split in ("dev", "test"):
            lines = [f"genre\tfile\tyear\t{at}\t{row}\n" for at, row in enumerate(rows)]
            (benchmark / f"sts-{split}.csv").write_text("".join(lines))
    sts12 = folder / "sts" / "STS" / "STS12-en-test"
    sts12.mkdir()
    for subset in ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"):
        (sts12 / f"STS.input.{subset}.txt").write_text("word1\tword2\nword3\tword4\n")
        (sts12 / f"STS.gs.{subset}.txt").write_text("5\n")
    return folder


@pytest.fixture
def _signals() -> Iterator[None]:
    """``main`` handles SIGTERM for good."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def options(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def test_help_is_enough_to_start_and_quick(tmp_path: Path) -> None:
    with cpu_seconds(2):
        done = run(tmp_path, "--help")
    assert done.process.returncode == 0
    for word in ("--config", "--set", "--plan", "--until", "--fresh", "demo", "RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        assert word in done.stdout
    assert "train.learning_rate=1e-4" in done.stdout


def test_a_plan_is_printed_from_any_folder_and_nothing_is_started(toy: Path, tmp_path: Path) -> None:
    arguments = ("--config", toy / "toy.yaml", "--set", "root=here", "--plan")
    done = run(tmp_path, *arguments, RAY_ADDRESS="127.0.0.1:1", MLFLOW_TRACKING_URI="http://127.0.0.1:1")
    assert (done.process.returncode, done.stderr) == (0, "")
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header == ["stage", "key", "status", "needs"]
    names = [row[0] for row in rows]
    assert (names[0], names[-1]) == ("corpus", "after")
    assert {name: (status, " ".join(needs)) for name, _, status, *needs in rows} == {
        "corpus": ("run", "-"), "before": ("run", "-"), "train": ("run", "corpus"), "after": ("run", "train, corpus"),
    }  # fmt: skip
    assert all(len(key) == 16 for _, key, *_ in rows)
    left = {path.relative_to(tmp_path) for path in (tmp_path / "here").rglob("*")}
    assert left == {Path("here/store"), Path("here/store/.digests.json")}

    part = run(tmp_path, *arguments, "--until", "train")
    assert [line.split() for line in part.stdout.splitlines()[1:]] == [rows[0], rows[names.index("train")]]


BAD_INPUT = {                                                  # overrides -> the one line, from its start
    "corpus.source.path={toy}/none.txt": "corpus.source.path={toy}/none.txt: there is no such file",
    "corpus.source.path={toy}/empty.txt": "corpus.source.path={toy}/empty.txt: the file is empty",
    "corpus.source.path={toy}/nothing": "corpus.source.path={toy}/nothing is a folder without files ending in .txt",
    "corpus.source.path={toy}/nothing/*.txt": "corpus.source.path={toy}/nothing/*.txt: there is no such file",
    "corpus.source.kind=csv corpus.source.path={toy}/table.csv": "{toy}/table.csv: no column 'text'; it has one, two",
    "train.lerning_rate=1": "unknown key train.lerning_rate; did you mean train.learning_rate?",
    "train.batch_size=17": "train.batch_size=17 does not split over cluster.workers=2; use a multiple of 2",
    "train.method.queue_length=8": "train.method.queue_length=8 is shorter than train.batch_size=16",
    "train.method.neighbours=32": "train.method.neighbours=32 is not less than train.method.queue_length=32",
    "train.method.negative_layer=4": "train.method.negative_layer=4 is no intermediate layer",
    "encoder.name={toy}/shallow": "the encoder has 2 layers; APINCSE needs at least 3",
    "encoder.max_length=17": "encoder.max_length=17 is more than the 16 positions",
    "encoder.name={toy}/nowhere": "encoder.name='{toy}/nowhere' is no folder with a config.json",
    "evaluate.data={toy}/nowhere": "evaluate.data={toy}/nowhere is no folder in SentEval layout",
    "evaluate.data={toy}/sts evaluate.sts=STS13": "{toy}/sts/STS/STS13-en-test/STS.input.FNWN.txt: no such file",
    "evaluate.data={toy}/sts evaluate.sts=STS12":
        "{toy}/sts/STS/STS12-en-test/STS.input.MSRpar.txt has 2 pairs but {toy}/sts/STS/STS12-en-test/STS.gs.MSRpar",
    "evaluate.data={toy}/no-number evaluate.sts=STS-B":
        "{toy}/no-number/STS/STSBenchmark/sts-test.csv, line 2: the score 'good' is no number",
    "root=/proc/nowhere": "root=/proc/nowhere cannot be written",
    "root=s3://bucket/runs": "root=s3://bucket/runs is a URL; set root to a folder",
}  # fmt: skip


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_ends_in_one_line_before_anything_is_written(
    toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: str
) -> None:
    changes = [f"root={tmp_path / 'runs'}", *overrides.format(toy=toy).split()]
    status = run_module.main(["--config", str(toy / "toy.yaml"), *options(*changes)])
    out, err = capfd.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith(f"error: {BAD_INPUT[overrides].format(toy=toy)}")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert {path.name for path in (tmp_path / "runs").rglob("*")} <= {"store"}


def test_an_encoder_that_the_hub_does_not_give_ends_in_one_line(tmp_path: Path) -> None:
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = run(tmp_path, "--plan", *options("encoder.name=nobody/nothing"), **unreachable)
    assert done.process.returncode == 2
    assert done.stderr == (
        "error: encoder.name='nobody/nothing' is no folder with a config.json and no model that the hub gives here; "
        "it may be a local folder, a hub name or all-MiniLM-L6-v2\n"
    )


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("arguments", [["--until", "corpsu"], ["--fresh", "trian"]])
def test_a_stage_that_is_not_there_names_those_that_are(
    toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run_module.main(["--config", str(toy / "toy.yaml"), *options(f"root={tmp_path}"), *arguments]) == 2
    assert capfd.readouterr().err == (
        f"error: there is no stage '{arguments[1]}'; this config has corpus, train, before, after\n"
    )


def test_the_command_that_goes_on_leaves_out_fresh() -> None:
    given = run_module.parser().parse_args(
        ["--fresh", "train", "before", "--config", "my file.yaml", "--set", "seed=[1, 2]", "--until", "train"]
    )
    assert run_module._again(given).endswith(
        " --config 'my file.yaml' --set 'seed=[1, 2]' --until train"
    )


@pytest.mark.cluster
class TestWithRay:
    def test_bad_input_that_only_shows_while_running_ends_in_the_same_way(self, toy: Path, tmp_path: Path) -> None:
        done = run(
            tmp_path, "--config", toy / "toy.yaml", "--until", "corpus", *options(f"corpus.source.path={toy}/latin.txt")
        )
        assert done.process.returncode == 2, done.stderr
        *progress, error = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert f"{toy}/latin.txt" in error
        assert "line 2" in error
        assert not [line for line in progress if not line.startswith(("toy: starting Ray", "corpus: "))]

    def test_more_workers_than_there_is_room_for_are_refused(self, toy: Path, tmp_path: Path) -> None:
        done = run(
            tmp_path, "--config", toy / "toy.yaml", *options("cluster.workers=500", "train.batch_size=500",
            "train.method.queue_length=500"),
        )  # fmt: skip
        assert done.process.returncode == 2, done.stderr
        assert done.stderr.splitlines()[1].startswith("error: cluster.workers=500 need 500 CPUs, but this machine has ")
        assert not (tmp_path / "runs" / "mlflow.db").exists()

    def test_a_failure_says_which_stage_where_to_look_and_how_to_go_on(self, toy: Path, tmp_path: Path) -> None:
        arguments = ("--config", toy / "toy.yaml", "--until", "corpus", "--set", "corpus.min_words=2")
        with command(tmp_path, *arguments, "--fresh", "corpus") as started:
            started.wait_until(lambda: stage_processes(started, "corpus"))
            stage_processes(started, "corpus")[0].kill()       # as the system does when memory runs out
            assert started.wait() == 1, started.stderr
        error, log, left, again = started.stderr.splitlines()[-4:]
        assert error.startswith("error: stage corpus failed: WorkerCrashedError: ")
        partial = Path(left.removeprefix("what it left: "))
        assert partial.is_dir()
        assert partial.parent == tmp_path / "runs" / "store"
        assert log == f"log: {partial}/log.txt"
        assert again == (
            f"to go on: {sys.executable} {RUN} --config {toy}/toy.yaml --set corpus.min_words=2 --until corpus"
        )

    @pytest.mark.parametrize(
        ("number", "said"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")], ids=["SIGTERM", "Ctrl-C"]
    )
    def test_a_signal_stops_everything_and_the_end_says_how_to_go_on(
        self, toy: Path, tmp_path: Path, number: signal.Signals, said: str
    ) -> None:
        arguments = ("--config", toy / "toy.yaml", "--until", "corpus")
        with command(tmp_path, *arguments) as started:
            started.wait_until(lambda: "corpus: started" in started.stderr)
            started.interrupt(number)
            assert started.wait() == 128 + number
        last = started.stderr.splitlines()[-1]
        assert last == f"{said}; to go on: {sys.executable} {RUN} {' '.join(map(str, arguments))}"
        started.assert_nothing_is_left()


def stage_processes(started: Command, stage: str) -> list[psutil.Process]:
    """The process in which a stage runs."""
    found = []
    for process in psutil.Process(started.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [process] if process.cmdline()[:1] == [f"ray::{stage}"] else []
    return found
