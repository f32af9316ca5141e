"""Finished work, found by a key of everything that decides it."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cluster.errors import InputError
from stages.artifacts import file_digest


@dataclass(frozen=True)
class Entry:
    """One stage's place in the store."""

    folder: Path                                               # of the finished work
    partial: Path                                              # of work under way; what a crash leaves
    lock: Path

    @property
    def manifest(self) -> dict[str, Any] | None:
        """What was committed here; None if nothing was, or what lies there is damaged."""
        try:
            manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
            sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
            whole = all((self.folder / name).stat().st_size == size for name, size in sizes.items())
            return manifest if whole else None
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None


class Store:
    """``root/store``: a folder ``STAGE-KEY`` for each finished stage.

    A folder of that name is whole: it was written as ``STAGE-KEY.partial`` and renamed at the end.
    """

    def __init__(self, root: str | Path) -> None:
        """Find or make the store of a root folder.

        Raises:
            InputError: root is a URL, or cannot be written.
        """
        if "://" in str(root):
            raise InputError(f"root={root} is a URL; set root to a folder, which all machines of the cluster share")
        self.root = Path(root).expanduser().absolute()
        self.folder = self.root / "store"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"root={root} cannot be written ({error.strerror}); set root to a folder where you may write"
            ) from error

    def entry(self, stage: str, key: str) -> Entry:
        """Where a stage of this key lies, finished or not."""
        name = f"{stage}-{key}"
        return Entry(self.folder / name, self.folder / f"{name}.partial", self.folder / f".{name}.lock")

    def commit(self, entry: Entry, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest with a digest of every file, then rename over what lay there; the driver's alone.

        Returns:
            The manifest with all ``files`` and their ``result``: one digest of them, logs aside.
        """
        (entry.partial / "progress.json").unlink(missing_ok=True)
        files = {
            str(file.relative_to(entry.partial)): {"bytes": file.stat().st_size, "xxh128": file_digest(file)}
            for file in sorted(entry.partial.rglob("*"))
            if file.is_file()
        }
        result = hashlib.sha256(json.dumps([item for item in files.items() if item[0] != "log.txt"]).encode())
        whole = {**manifest, "result": result.hexdigest()[:16], "files": files}
        aside = entry.partial / "manifest.json.tmp"
        aside.write_text(json.dumps(whole, indent=2) + "\n")
        aside.rename(entry.partial / "manifest.json")
        replaced = entry.folder.with_name(f".replaced-{os.getpid()}-{entry.folder.name}")
        if entry.folder.exists():                              # the stage was run again
            entry.folder.rename(replaced)
        entry.partial.rename(entry.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return whole

    def discard_partial(self, entry: Entry) -> None:
        """Delete what a crash left."""
        if entry.partial.exists():
            shutil.rmtree(entry.partial)

    def digests(self) -> "Digests":
        """Content digests of input files, remembered between runs."""
        return Digests(self.folder / ".digests.json")


class Lock:
    """A lock file that says who holds it; it falls with its process."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)
        self._who = path.with_suffix(".who")

    def acquire(self) -> bool:
        """Take the lock if it is free; never waits."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        self._who.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        return True

    def release(self) -> None:
        """Give it back."""
        self._who.unlink(missing_ok=True)
        self._lock.release()

    @property
    def holder(self) -> str:
        """Who holds it, for a message."""
        return self._who.read_text() if self._who.is_file() else "another process"


class Digests:
    """Digests of files and folders, computed again only when size or time of change differ."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError):         # none yet, or spoilt: all can be computed again
            self._known.update(json.loads(memory.read_text()))
        self._fresh = False

    def of(self, paths: Sequence[str]) -> str:
        """Digest of the content of files and of all files in folders, and of their names where they are several.

        Names count from the folder that all share: where that lies does not matter.
        """
        files = sorted(file for path in map(Path, paths) for file in ([path] if path.is_file() else path.rglob("*")))
        files = [file for file in files if file.is_file()]
        shared = os.path.commonpath(files) if files else ""
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{os.path.relpath(file, shared)}\0{self._file(file)}\0".encode())
        return digest.hexdigest()

    def _file(self, file: Path) -> str:
        status = file.stat()
        known_as = f"{file.absolute()}|{status.st_size}|{status.st_mtime_ns}"
        if known_as not in self._known:
            self._known[known_as] = file_digest(file)
            self._fresh = True
        return self._known[known_as]

    def remember(self) -> None:
        """Keep what was computed for the next run."""
        if self._fresh:
            aside = self._memory.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps(self._known))
            aside.replace(self._memory)


def stage_key(
    name: str, version: int, config: Mapping[str, Any], sources: Mapping[str, str], inputs: Sequence[str]
) -> str:
    """16 hex digits of everything that decides a stage's result, wherever it lies.

    Args:
        name: of the stage.
        version: of its code, raised by hand when results change.
        config: its whole config.
        sources: what the config calls some local data -> digest of them; the name itself does not count.
        inputs: the keys of the stages that it needs.
    """

    def by_content(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: by_content(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [by_content(inner) for inner in value]
        return sources.get(value, value) if isinstance(value, str) else value

    identity = [name, version, by_content(config), sorted(sources.values()), list(inputs)]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
