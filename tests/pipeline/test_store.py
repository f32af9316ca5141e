import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.errors import InputError
from pipeline.store import Digests, Lock, Store, stage_key

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


def digest(path: Path) -> str:
    return Digests(path.parent / "no-memory.json").of([str(path)])


def key(config: dict[str, object], source: Path | None = None, /, **changes: object) -> str:
    sources = {} if source is None else {str(source): digest(source)}
    parts = {"name": "corpus", "version": 1, "config": config, "sources": sources, "inputs": ["abc"]}
    return stage_key(**(parts | changes))                      # type: ignore[arg-type]


def test_a_key_is_of_the_content_of_files_whatever_their_path_and_time(tmp_path: Path) -> None:
    here, there = tmp_path / "here.txt", tmp_path / "elsewhere" / "there.txt"
    there.parent.mkdir()
    here.write_text("a sentence")
    there.write_text("a sentence")
    os.utime(there, (0, 0))
    assert key({"path": str(here)}, here) == key({"path": str(there)}, there)
    there.write_text("another sentence")
    assert key({"path": str(here)}, here) != key({"path": str(there)}, there)


def test_a_key_is_of_all_files_of_a_folder_and_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("1")
    (folder / "inner" / "b.txt").write_text("2")
    first = key({"path": str(folder)}, folder)
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert key({"path": str(moved)}, moved) == first
    (moved / "a.txt").write_text("2")
    (moved / "inner" / "b.txt").write_text("1")                # the same contents under swapped names
    assert key({"path": str(moved)}, moved) != first


@pytest.mark.parametrize(
    "change", [{"config": {"n": 2}}, {"version": 2}, {"inputs": ["abd"]}, {"inputs": []}, {"name": "train"}]
)
def test_a_key_is_of_the_config_the_version_and_the_inputs(change: dict[str, object]) -> None:
    assert key({"n": 1}) == key({"n": 1})
    assert key({"n": 1}, **change) != key({"n": 1})


def test_a_key_does_not_depend_on_the_order_of_fields() -> None:
    assert key({"a": 1, "b": {"c": 1, "d": 2}}) == key({"b": {"d": 2, "c": 1}, "a": 1})


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    file, memory = tmp_path / "text.txt", tmp_path / "memory.json"
    file.write_text("one")
    digests = Digests(memory)
    first = digests.of([str(file)])
    digests.remember()
    assert str(file) in memory.read_text()
    file.write_text("more")
    assert Digests(memory).of([str(file)]) != first


def test_a_commit_renames_the_partial_folder_and_its_manifest_has_a_digest_of_every_file(store: Store) -> None:
    entry = store.entry("corpus", "k1")
    (entry.partial / "inner").mkdir(parents=True)
    (entry.partial / "inner" / "part.txt").write_text("content")
    (entry.partial / "progress.json").write_text("{}")
    assert entry.manifest is None
    store.commit(entry, {"name": "corpus"})
    assert not entry.partial.exists()
    assert entry.manifest is not None
    assert entry.manifest["name"] == "corpus"
    assert set(entry.manifest["files"]) == {"inner/part.txt"}
    assert entry.manifest["files"]["inner/part.txt"]["bytes"] == 7
    assert len(entry.manifest["files"]["inner/part.txt"]["xxh128"]) == 32


def test_the_result_is_of_the_files_and_not_of_the_log(store: Store) -> None:
    def result(key: str, text: str, log: str) -> str:
        entry = store.entry("corpus", key)
        entry.partial.mkdir()
        (entry.partial / "part.txt").write_text(text)
        (entry.partial / "log.txt").write_text(log)
        return str(store.commit(entry, {})["result"])

    first = result("k1", "content", "at nine")
    assert result("k2", "content", "at ten") == first
    assert result("k3", "contents", "at nine") != first


def test_a_commit_over_a_finished_stage_replaces_it(store: Store) -> None:
    entry = store.entry("corpus", "k1")
    for text in ("old", "new"):
        entry.partial.mkdir()
        (entry.partial / "part.txt").write_text(text)
        if text == "new":
            assert (entry.folder / "part.txt").read_text() == "old"
        store.commit(entry, {})
    assert (entry.folder / "part.txt").read_text() == "new"
    assert [path.name for path in store.folder.iterdir()] == ["corpus-k1"]


def test_a_root_that_is_a_url_is_refused() -> None:
    with pytest.raises(InputError, match=r"^root=s3://bucket/runs is a URL; set root to a folder, which all machines"):
        Store("s3://bucket/runs")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(InputError, match=r"root cannot be written \(.*\); set root to a folder where you may write"):
        Store(tmp_path / "root")


def test_a_root_on_a_device_without_write_access_is_refused() -> None:
    with pytest.raises(InputError, match=r"^root=/proc/nowhere cannot be written \(.*\); set root to a folder"):
        Store("/proc/nowhere")                                 # where even root may not write


HOLD = """
import sys, time
from pathlib import Path
from pipeline.store import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.readline()
lock.release()
"""


@contextmanager
def holding(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock until it gets a line."""
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_that_another_process_holds_says_which(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".corpus-k1.lock")
    with holding(tmp_path / ".corpus-k1.lock") as process:
        assert not lock.acquire()
        assert lock.holder == f"process {process.pid} on {os.uname().nodename}"
        process.communicate("\n")
        assert lock.acquire()
        assert lock.holder.startswith(f"process {os.getpid()} ")
    lock.release()


def test_a_killed_process_gives_its_lock_back(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".corpus-k1.lock")
    with holding(tmp_path / ".corpus-k1.lock") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lock.acquire()
    lock.release()


def test_manifests_are_plain_json(store: Store) -> None:
    entry = store.entry("corpus", "k1")
    entry.partial.mkdir()
    store.commit(entry, {"seconds": 1.5})
    assert json.loads((entry.folder / "manifest.json").read_text())["seconds"] == 1.5


def test_what_a_crash_left_can_be_discarded(store: Store) -> None:
    entry = store.entry("corpus", "k1")
    store.discard_partial(entry)
    entry.partial.mkdir()
    (entry.partial / "half.txt").write_text("")
    store.discard_partial(entry)
    assert not entry.partial.exists()
    shutil.rmtree(store.root)


def test_finished_work_that_lost_a_file_or_its_manifest_is_not_taken_for_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry = store.entry("corpus", "0123")
    entry.partial.mkdir()
    (entry.partial / "part-0.parquet").write_text("rows")
    store.commit(entry, {"artifact": {}, "seconds": 1.0, "inputs": {}})
    assert entry.manifest is not None
    (entry.folder / "part-0.parquet").write_text("")
    assert entry.manifest is None
    (entry.folder / "part-0.parquet").write_text("rows")
    (entry.folder / "manifest.json").write_text("[]")
    assert entry.manifest is None


def test_a_spoilt_memory_of_digests_is_computed_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    before = Store(tmp_path).digests().of([str(tmp_path / "file")])
    (tmp_path / "store" / ".digests.json").write_text("[1]")
    assert Store(tmp_path).digests().of([str(tmp_path / "file")]) == before
