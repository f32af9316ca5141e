import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import InputError
from pipeline.dag import Outcome, Planned, Stage, StageError, Watcher, execute, load_artifact, plan
from pipeline.store import Store
from stages.context import Context
from tests.pipeline.toy import PATIENCE, Text, stage

ROOT = Path(__file__).resolve().parent.parent.parent

DIAMOND = (stage("d", "b", "c"), stage("c", "a"), stage("b", "a"), stage("a"))      # a first, then b and c, then d


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def statuses(planned: Iterable[Planned]) -> dict[str, str]:
    """What the plan says of each stage."""
    return {item.stage.name: "cached" if item.cached else "run" for item in planned}


def run(
    stages: Sequence[Stage],
    store: Store,
    until: str | None = None,
    fresh: Iterable[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Outcome]:
    planned = plan(stages, store, until, fresh)
    outcomes = execute(planned, store, lambda folder: Context(out=folder), watcher or Watcher())
    return {outcome.name: outcome for outcome in outcomes}


def ran(outcomes: dict[str, Outcome]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome.status == "ran"}


def text(outcome: Outcome) -> str:
    return (Path(outcome.path) / "text.txt").read_text()


def test_a_plan_is_in_an_order_in_which_the_stages_can_run_and_runs_none(store: Store) -> None:
    planned = plan(DIAMOND, store)
    names = [item.stage.name for item in planned]
    assert names[0] == "a"
    assert set(names[1:3]) == {"b", "c"}
    assert names[3] == "d"
    assert statuses(planned) == dict.fromkeys(names, "run")
    assert not list(store.folder.glob("[a-d]-*"))


def test_a_key_changes_with_what_a_stage_needs_and_with_nothing_else(store: Store) -> None:
    before = {item.stage.name: item.key for item in plan(DIAMOND, store)}
    after = {item.stage.name: item.key for item in plan((*DIAMOND[:2], stage("b", "a", text="B"), DIAMOND[3]), store)}
    assert {name for name in before if before[name] != after[name]} == {"b", "d"}


def test_remote_data_count_by_name_and_local_data_by_content(store: Store, tmp_path: Path) -> None:
    def key(text: str, files: list[Path]) -> str:
        reading = replace(stage("a", text=text), reads={text: [str(file) for file in files]})
        return plan([reading], store)[0].key

    (tmp_path / "x.txt").write_text("same")
    (tmp_path / "y.txt").write_text("same")
    assert key("s3://x", []) != key("s3://y", [])
    assert key("x", [tmp_path / "x.txt"]) == key("y", [tmp_path / "y.txt"])


@pytest.mark.parametrize("options", [{"until": "e"}, {"fresh": ["a", "e"]}])
def test_a_stage_that_does_not_exist_names_those_that_do(store: Store, options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^there is no stage 'e'; this config has d, c, b, a$"):
        plan(DIAMOND, store, **options)                        # type: ignore[arg-type]


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    def test_what_is_finished_is_not_run_again_and_artifacts_come_from_manifests(self, store: Store) -> None:
        first = run(DIAMOND, store)
        assert ran(first) == {"a", "b", "c", "d"}
        assert text(first["d"]) == "abacd"
        assert statuses(plan(DIAMOND, store)) == dict.fromkeys("abcd", "cached")
        again = run(DIAMOND, store)
        assert ran(again) == set()
        for outcome in again.values():
            artifact = load_artifact(outcome.manifest, Path(outcome.path))
            assert artifact == Text(Path(outcome.path), len(text(outcome)))

        changed = run((stage("d", "b", "c", text="D"), *DIAMOND[1:]), store)
        assert ran(changed) == {"d"}
        assert text(changed["d"]) == "abacD"
        assert ran(run(DIAMOND, store)) == set()               # the old result is still there

    def test_until_leaves_out_what_a_stage_does_not_need(self, store: Store) -> None:
        assert set(run(DIAMOND, store, until="b")) == {"a", "b"}
        assert ran(run(DIAMOND, store)) == {"c", "d"}

    def test_fresh_runs_a_stage_and_its_dependents_again(self, store: Store) -> None:
        run(DIAMOND, store)
        assert ran(run(DIAMOND, store, fresh=["b"])) == {"b", "d"}

    def test_what_was_made_of_an_older_result_is_run_again(self, store: Store, tmp_path: Path) -> None:
        chain = (stage("a", fails_without=str(tmp_path / "luck")), stage("b", "a"))
        (tmp_path / "luck").touch()
        run(chain, store)
        run(chain, store, until="a", fresh=["a"])              # equal to the first
        assert statuses(plan(chain, store)) == {"a": "cached", "b": "cached"}
        (tmp_path / "luck").unlink()
        with pytest.raises(StageError):
            run(chain, store, until="a", fresh=["a"])
        assert statuses(plan(chain, store)) == {"a": "run", "b": "cached"}
        (tmp_path / "luck").touch()
        gone_on = run(chain, store, until="a")
        assert text(gone_on["a"]) == "a!"                      # from where the fresh run failed
        assert statuses(plan(chain, store)) == {"a": "cached", "b": "run"}
        assert text(run(chain, store)["b"]) == "a!b"

    def test_a_fresh_run_keeps_the_old_result_until_the_new_one_is_there(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "luck").touch()
        lucky = [stage("a", fails_without=str(tmp_path / "luck"))]
        old = run(lucky, store)["a"]
        (tmp_path / "luck").unlink()
        with pytest.raises(StageError):
            run(lucky, store, fresh=["a"])
        assert text(old) == "a"

    def test_independent_branches_run_at_the_same_time(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "meeting").mkdir()
        meeting = {"meets": str(tmp_path / "meeting")}
        both = (stage("b", "a", **meeting), stage("c", "a", **meeting))
        outcomes = run((stage("a"), *both, stage("d", "b", "c")), store)
        assert text(outcomes["d"]) == "abacd"                  # each of b and c has seen the other

    def test_a_stage_that_fails_names_its_log_and_keeps_its_partial_folder(self, store: Store, tmp_path: Path) -> None:
        stages = (stage("a"), stage("b", "a", fails_without=str(tmp_path / "luck")), stage("c", "b"))
        with pytest.raises(StageError, match=r"^RuntimeError: out of luck$") as caught:
            run(stages, store)
        error = caught.value
        assert error.stage == "b"
        assert "Traceback" in error.log.read_text()
        assert "RuntimeError: out of luck\nand of lines" in error.log.read_text()
        assert (error.partial / "half.txt").read_text() == "ab"

        (tmp_path / "luck").touch()
        outcomes = run(stages, store)
        assert ran(outcomes) == {"b", "c"}
        assert text(outcomes["c"]) == "ab!c"                   # it went on from the half

    def test_a_refusal_in_a_stage_keeps_its_one_line(self, store: Store) -> None:
        with pytest.raises(InputError, match=r"^toy.text=x is no text; write y$"):
            run([stage("a", refuses=True)], store)
        assert not list(store.folder.glob("a-????????????????"))

    def test_the_others_are_stopped_when_a_stage_fails(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "meeting").mkdir()
        meeting = {"meets": str(tmp_path / "meeting")}
        stages = (stage("bad", **meeting, refuses=True), stage("slow", **meeting, hangs=True))
        with pytest.raises(InputError):
            run(stages, store)
        (pid,) = store.folder.glob("slow-*.partial/pid")
        wait_until_gone(int(pid.read_text()))

    def test_a_stage_that_another_run_holds_is_waited_for_and_its_result_used(self, store: Store) -> None:
        (item,) = plan([stage("a")], store)
        item.entry.partial.mkdir()
        (item.entry.partial / "text.txt").write_text("the other's")
        with subprocess.Popen(
            [sys.executable, "-c", OTHER_RUN, str(store.root), item.key], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as other:  # fmt: skip
            assert other.stdout is not None
            assert other.stdout.readline() == "holds\n"
            told = []

            def waiting(name: str, holder: str) -> None:
                told.append((name, holder))
                assert other.stdin is not None
                other.stdin.write("\n")
                other.stdin.close()                            # now let it commit

            outcomes = run([stage("a")], store, watcher=watcher(waiting))
        assert told == [("a", f"process {other.pid} on {os.uname().nodename}")]
        assert outcomes["a"].status == "cached"
        assert text(outcomes["a"]) == "the other's"


OTHER_RUN = """
import sys
from pathlib import Path
from pipeline.store import Lock, Store
store = Store(Path(sys.argv[1]))
entry = store.entry("a", sys.argv[2])
lock = Lock(entry.lock)
assert lock.acquire()
print("holds", flush=True)
sys.stdin.readline()
artifact = {"type": "tests.pipeline.toy:Text", "length": 11}
store.commit(entry, {"name": "a", "inputs": {}, "seconds": 1.0, "artifact": artifact})
lock.release()
"""


def watcher(waiting: Callable[[str, str], None]) -> Watcher:
    told = Watcher()
    told.waiting = waiting                                     # type: ignore[method-assign]
    return told


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.1)
