"""The files behind a path, local or remote, and chunks of whole lines out of them."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import fsspec

from cluster.errors import InputError

CHUNK = 2 * 2**20                                              # bytes that one task works on
PART = 64 * 2**20                                              # bytes of a plain file that one task reads

SUFFIXES = {
    "text": (".txt", ".text"),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
"""What a file is called that a folder is searched for; all but Parquet may end in .gz besides."""


@dataclass(frozen=True)
class FilePart:
    """The lines of a file that begin in [start, end); end None: the file's end."""

    path: str
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file, as they are in it."""

    path: str
    start: int                                                 # of the part, in bytes
    line: int                                                  # of the part: number of the first line, from 1
    data: bytes

    def locate(self, index: int) -> str:
        """The file and number, counted from 1, of the line at an index of these, counted from 0."""
        line = self.line + index
        if self.start:                                         # only an error needs it: count what is before
            with Path(self.path).open("rb") as file:
                for at_once in range(0, self.start, CHUNK):
                    line += file.read(min(CHUNK, self.start - at_once)).count(b"\n")
        return f"{self.path}, line {line}"


def is_url(path: str) -> bool:
    """Whether fsspec has to fetch it."""
    return "://" in path


def find_files(kind: str, path: str) -> list[str]:
    """The files that a file name, glob, folder or URL stands for, sorted; local ones as absolute paths.

    Raises:
        InputError: there are none.
    """
    if is_url(path):
        return _find_remote(kind, path)
    place = Path(path).expanduser().absolute()
    if place.is_file():
        return [str(place)]
    if place.is_dir():
        found = _matching(kind, [str(file) for file in place.rglob("*") if file.is_file()])
        if not found:
            raise InputError(
                f"corpus.source.path={path} is a folder without files {_names(kind)}; it holds {_some(place)}"
            )
        return found
    root = Path(place.anchor)
    found = sorted(str(file) for file in root.glob(str(place.relative_to(root))) if file.is_file())
    if not found:
        here = f"; {place.parent} holds {_some(place.parent)}" if place.parent.is_dir() else ""
        raise InputError(f"corpus.source.path={path}: there is no such file{here}")
    return found


def _find_remote(kind: str, url: str) -> list[str]:
    if url.startswith(("http://", "https://")):                        # no folders there, and ? is no wildcard
        return [url]
    try:
        system, path = fsspec.core.url_to_fs(url)
        found = _matching(kind, system.find(path)) if system.isdir(path) else sorted(system.glob(path))
    except Exception as error:                                 # each of fsspec's file systems has errors of its own
        raise InputError(f"corpus.source.path={url} cannot be read: {error}") from error
    if not found:
        raise InputError(f"corpus.source.path={url} leads to no files; a folder is searched for {_names(kind)}")
    return [system.unstrip_protocol(file) for file in found]


def _matching(kind: str, files: list[str]) -> list[str]:
    endings = _endings(kind)
    return sorted(file for file in files if file.endswith(endings) and not Path(file).name.startswith((".", "_")))


def _endings(kind: str) -> tuple[str, ...]:
    plain = SUFFIXES[kind]
    return plain if kind == "parquet" else plain + tuple(suffix + ".gz" for suffix in plain)


def _names(kind: str) -> str:
    return "ending in " + " or ".join(_endings(kind))


def _some(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return (", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) if names else "nothing"


def split_file(path: str) -> list[FilePart]:
    """Parts that can be read at the same time: ranges of a plain local file; else the file as it is."""
    if is_url(path) or path.endswith(".gz"):
        return [FilePart(path)]
    size = Path(path).stat().st_size
    return [FilePart(path, start, min(start + PART, size)) for start in range(0, size, PART)]


@contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a local or remote file, decompressed.

    Raises:
        InputError: it cannot be read, or is not the gzip file that its name says.
    """
    try:
        with fsspec.open(path, "rb") if is_url(path) else Path(path).open("rb") as raw:
            yield gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read_lines(part: FilePart, cut: bool) -> Iterator[Lines]:
    """The lines of a part in chunks of about CHUNK bytes; only \\n ends a line.

    Args:
        part: what to read.
        cut: end longer lines than CHUNK at their last space before it, so that a file without line
            ends needs no more memory than another.
    """
    with open_bytes(part.path) as file:
        if part.start:
            file.seek(part.start - 1)
            while (skipped := file.readline(CHUNK)) and not skipped.endswith(b"\n"):
                pass                                           # the rest of a line that the part before reads
        position = file.tell()
        line, held, size, rest = 1, list[bytes](), 0, b""
        while part.end is None or position < part.end or rest:
            piece = rest + file.readline(CHUNK - len(rest) if cut else -1)
            if not piece:
                break
            piece, rest = _cut(piece) if cut else (piece, b"")
            position += len(piece)
            held.append(piece)
            size += len(piece)
            if size >= CHUNK or rest:
                data = b"".join(held)
                yield Lines(part.path, part.start, line, data)
                line, held, size = line + data.count(b"\n"), [], 0
        if held:
            yield Lines(part.path, part.start, line, b"".join(held))


def _cut(piece: bytes) -> tuple[bytes, bytes]:
    """Split a piece of CHUNK bytes without a line end after its last space, or else before its last character."""
    if len(piece) < CHUNK or piece.endswith(b"\n"):
        return piece, b""
    at = piece.rfind(b" ", 0, -1) + 1
    if not at:
        at = len(piece) - 1
        while piece[at] & 0xC0 == 0x80:                        # inside a character
            at -= 1
    return piece[:at], piece[at:]


def is_empty(path: str) -> bool:
    """Whether a local file holds nothing, decompressed."""
    if Path(path).stat().st_size == 0:
        return True
    with open_bytes(path) as file:
        return not file.read(1)
