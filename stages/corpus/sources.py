"""From a source to documents: what tasks read, in chunks, and the texts in each chunk."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import InputError
from stages.corpus.config import (
    CsvSource,
    HubSource,
    JsonLinesSource,
    ParquetSource,
    PythonDocsSource,
    Source,
    StsSource,
    TextSource,
    TsvSource,
)
from stages.corpus.files import CHUNK, FilePart, Lines, find_files, is_empty, is_url, open_bytes, read_lines, split_file
from stages.corpus.prose import CodeFiles, documentation_files, prose_in
from stages.evaluate.sts import all_text_files, all_texts

csv.field_size_limit(sys.maxsize // 2**32)                     # 2 GiB; the default of 128 KiB refuses long documents


@dataclass(frozen=True)
class HubPart:
    """One of the pieces that a streamed data set is split into."""

    index: int
    count: int


@dataclass(frozen=True)
class SimilaritySets:
    """A folder in SentEval layout, whose sets are small enough to be read in one."""

    folder: str


@dataclass(frozen=True)
class Documents:
    """Texts, one or more sentences each, and counts of what was seen on the way to them."""

    texts: list[str]
    counts: Counter[str] = field(default_factory=Counter)


Part = FilePart | HubPart | CodeFiles | SimilaritySets
Chunk = Lines | Documents | CodeFiles


def check_source(source: Source) -> list[str]:
    """See cheaply that there is something to read, and return the local files that will be.

    Raises:
        InputError: no file, empty files, or no such column.
    """
    if isinstance(source, StsSource):
        return all_text_files(source.path)
    if isinstance(source, (PythonDocsSource, HubSource)) or is_url(source.path):
        return []
    files = find_files(source.kind, source.path)
    if all(is_empty(file) for file in files):
        what = "the file is" if len(files) == 1 else "all files are"
        raise InputError(f"corpus.source.path={source.path}: {what} empty")
    for file in files:
        if isinstance(source, (CsvSource, TsvSource)):
            next(_read_table(source, FilePart(file)), None)
        elif isinstance(source, ParquetSource):
            next(_read_parquet(source, FilePart(file)), None)
    return files


def split_source(source: Source) -> list[Part]:
    """What can be read at the same time.

    Raises:
        InputError: there is nothing.
    """
    if isinstance(source, PythonDocsSource):
        return list(documentation_files())
    if isinstance(source, HubSource):
        count = _open_hub(source).num_shards
        return [HubPart(index, count) for index in range(count)]
    if isinstance(source, StsSource):
        return [SimilaritySets(source.path)]
    files = find_files(source.kind, source.path)
    if isinstance(source, (TextSource, JsonLinesSource)):
        return [part for file in files for part in split_file(file)]
    return [FilePart(file) for file in files]


def read_part(source: Source, part: Part) -> Iterator[Chunk]:
    """Read a part in chunks of about CHUNK bytes, leaving the work that can be split to ``documents``."""
    match source, part:
        case TextSource(), FilePart():
            yield from read_lines(part, cut=True)
        case JsonLinesSource(), FilePart():
            yield from read_lines(part, cut=False)
        case CsvSource() | TsvSource(), FilePart():
            yield from _read_table(source, part)
        case ParquetSource(), FilePart():
            yield from _read_parquet(source, part)
        case HubSource(), HubPart():
            yield from _read_hub(source, part)
        case StsSource(), SimilaritySets():
            yield from _in_chunks(all_texts(part.folder))
        case PythonDocsSource(), CodeFiles():
            yield part


def documents(source: Source, chunk: Chunk) -> Documents:
    """The texts in a chunk.

    Raises:
        InputError: bytes that are not UTF-8, or a line that is no JSON object with the columns.
    """
    match source, chunk:
        case TextSource(), Lines():
            lines, counts = _decode(source, chunk)
            return Documents(lines, counts)
        case JsonLinesSource(), Lines():
            lines, counts = _decode(source, chunk)
            return Documents(list(_json_texts(source, chunk, lines)), counts)
        case _, CodeFiles():
            return Documents(*prose_in(chunk))
        case _, Documents():
            return chunk
    raise TypeError(f"{type(source).__name__} does not give {type(chunk).__name__}")


def _decode(
    source: TextSource | JsonLinesSource | CsvSource | TsvSource, chunk: Lines
) -> tuple[list[str], Counter[str]]:
    """The lines without line ends and byte order mark, and how many characters stand in for invalid bytes."""
    data = chunk.data
    if chunk.start == 0 and chunk.line == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    replaced = 0
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if source.on_invalid_utf8 == "error":
            where = chunk.locate(data.count(b"\n", 0, error.start))
            raise InputError(
                f"{where}: byte 0x{data[error.start]:02X} is not UTF-8; convert the file, or set "
                f"corpus.source.on_invalid_utf8=replace"
            ) from None
        text = data.decode(errors="replace")
        replaced = text.count("\ufffd") - data.count("\ufffd".encode())
    return text.removesuffix("\n").split("\n"), Counter(replaced_characters=replaced)


def _json_texts(source: JsonLinesSource, chunk: Lines, lines: list[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{chunk.locate(index)}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{chunk.locate(index)}: a JSON {_JSON[type(row)]}; each line must be an object")
        for column in source.columns:
            if column not in row:
                raise InputError(f"{chunk.locate(index)}: {_lacks(column, row)}")
            if not isinstance(row[column], str | None):
                kind = _JSON[type(row[column])]
                raise InputError(f"{chunk.locate(index)}: {column!r} is a {kind}; it must be a string")
            yield row[column] or ""


_JSON = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", dict: "object"}
_JSON[type(None)] = "null"


def _read_table(source: CsvSource | TsvSource, part: FilePart) -> Iterator[Documents]:
    """CSV or TSV: one reader a file, because only the start of a file knows which line ends are quoted."""
    counts = Counter[str]()
    lines = _table_lines(source, part, counts)
    quoted = isinstance(source, CsvSource)
    rows = csv.reader(lines, strict=True) if quoted else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        first = next(rows, None)
        if first is None:
            return
        named = any(isinstance(column, str) for column in source.columns)
        present = first if named else range(len(first))
        for column in source.columns:
            if column not in present:
                raise InputError(f"{part.path}: {_lacks(column, map(str, present))}")
        wanted = [first.index(column) if isinstance(column, str) else column for column in source.columns]
        yield from _in_chunks(_fields(part, rows if named else chain([first], rows), rows, wanted, len(first)), counts)
    except csv.Error as error:
        raise InputError(f"{part.path}, line {rows.line_num}: {error}") from None


def _table_lines(source: CsvSource | TsvSource, part: FilePart, counts: Counter[str]) -> Iterator[str]:
    for chunk in read_lines(part, cut=False):
        decoded, seen = _decode(source, chunk)
        counts += seen
        for line in decoded:
            yield line.removesuffix("\r").replace("\r", " ") + "\n"    # a lone \r would end a row for the csv module


def _fields(
    part: FilePart, rows: Iterable[list[str]], reader: Any, wanted: list[int], expected: int
) -> Iterator[str]:
    """The wanted fields of each row, all of which must have as many fields as the first line."""
    for row in rows:
        if len(row) != expected:
            if not row:                                        # an empty line
                continue
            raise InputError(
                f"{part.path}, line {reader.line_num}: {len(row)} fields, but the first line has {expected}"
            )
        yield from (row[at] for at in wanted)


def _read_parquet(source: ParquetSource, part: FilePart) -> Iterator[Documents]:
    with open_bytes(part.path) as file:
        try:
            parquet = pq.ParquetFile(file)
            schema = parquet.schema_arrow
            for column in source.columns:
                if column not in schema.names:
                    raise InputError(f"{part.path}: {_lacks(column, schema.names)}")
                kind = schema.field(column).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                    raise InputError(f"{part.path}: column {column!r} holds {kind}; it must hold strings")
            batches = parquet.iter_batches(1024, columns=list(source.columns))
            yield from _in_chunks(text or "" for batch in batches for row in _rows(batch) for text in row)
        except pa.ArrowInvalid as error:
            raise InputError(f"{part.path} is not a whole Parquet file: {error}") from None


def _rows(batch: pa.RecordBatch) -> Iterable[tuple[str | None, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _open_hub(source: HubSource) -> Any:
    from datasets import load_dataset  # slow to import, and the other sources do without

    try:
        return load_dataset(source.path, source.subset, split=source.split, revision=source.revision, streaming=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"corpus.source.path={source.path} is no data set that can be had here: {reason}") from error


def _read_hub(source: HubSource, part: HubPart) -> Iterator[Documents]:
    yield from _in_chunks(_hub_texts(source, part))


def _hub_texts(source: HubSource, part: HubPart) -> Iterator[str]:
    for row in _open_hub(source).shard(part.count, part.index):
        for column in source.columns:
            if column not in row:
                raise InputError(f"{source.path}: {_lacks(column, row)}")
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise InputError(f"{source.path}: column {column!r} holds {kind}; it must hold strings")
            yield row[column] or ""


def _lacks(column: str | int, present: Iterable[str]) -> str:
    return f"no column {column!r}; it has {', '.join(present)}; set corpus.source.columns"


def _in_chunks(texts: Iterable[str], counts: Counter[str] | None = None) -> Iterator[Documents]:
    """Gather texts to chunks of about CHUNK bytes; the counts made while they came go with them."""
    held, size = list[str](), 0
    for text in texts:
        held.append(text)
        size += len(text) + 1
        if size >= CHUNK:
            yield Documents(held, _taken(counts))
            held, size = [], 0
    yield Documents(held, _taken(counts))


def _taken(counts: Counter[str] | None) -> Counter[str]:
    taken = Counter(counts or {})
    if counts is not None:
        counts.clear()
    return taken
