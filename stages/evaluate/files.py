"""Reading evaluation files so that whatever is wrong with one is said with its name and line."""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from types import NoneType

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import InputError, first_line

Row = tuple[int, list[str]]                                    # line number from 1, fields


def read_lines(path: Path, encodings: Sequence[str] = ("utf-8",)) -> list[str]:
    r"""The lines of a file (or .gz) without their ends; only ``\n`` and ``\r\n`` end a line.

    ``str.splitlines`` would also split at the control characters that web text carries.

    Args:
        path: a byte order mark is passed over.
        encodings: the first that fits the whole file is taken.

    Raises:
        InputError: there is no such file, it is damaged, or a line is not in the last of the encodings.
    """
    _require_file(path)
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    lines = content.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n") if content else []
    *preferred, encoding = encodings
    encoding = next((each for each in preferred if _fits(content, each)), encoding)
    decoded = []
    for number, line in enumerate(lines, start=1):
        try:
            decoded.append(line.decode(encoding).removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {number}: not {encoding.upper()} ({error.reason}); convert the file"
            ) from None
    return decoded


def _fits(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{path} is a folder; name a file in it" if path.is_dir() else f"{path}: no such file")


def sentence(text: str, path: Path, line: int) -> str:
    """``text`` with single spaces, as SentEval joins its tokens; InputError if nothing is left."""
    words = " ".join(text.split())
    if not words:
        raise InputError(f"{path}, line {line}: an empty sentence; fill it in or drop the pair")
    return words


def number(text: str, path: Path, line: int) -> float:
    """``text`` as a finite number; InputError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{path}, line {line}: the score {text!r} is no number; mend it or drop the pair")
    return value


def fields(line: str, path: Path, at: int, expected: tuple[int, ...]) -> list[str]:
    """The tab-separated fields of ``line``, no quoting; InputError unless their number is one of ``expected``."""
    parts = line.split("\t")
    if len(parts) not in expected:
        raise InputError(
            f"{path}, line {at}: {len(parts)} tab-separated fields, expected {' or '.join(map(str, expected))} "
            "(a missing field, or a stray tab inside a sentence)"
        )
    return parts


def read_columns(path: Path, columns: tuple[str | int, ...], kind: str | None = None) -> list[Row]:
    """Rows of a csv, tsv, jsonl or parquet file as (line number, the values of ``columns`` as text).

    Args:
        path: the suffix decides the format; ``.csv`` has CSV quoting, ``.tsv`` and ``.txt`` have tabs and no
            quoting; all but parquet may be followed by ``.gz``.
        columns: names, looked up in the header line (csv, tsv), the objects (jsonl) or the schema (parquet);
            or positions from 0, which say that a csv or tsv file has no header line.
        kind: csv, tsv, jsonl or parquet, where the suffix does not say it.

    Returns:
        Truth values of jsonl and parquet come as 1 and 0.

    Raises:
        InputError: no such file, unknown format, a column that is not there, a malformed line.
    """
    suffix = f".{kind}" if kind else Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if suffix == ".parquet":
        return _parquet_rows(path, columns)
    if suffix == ".jsonl":
        return _json_rows(path, columns)
    if suffix == ".csv":
        return _picked(path, _csv_rows(path), columns)
    if suffix in (".tsv", ".txt"):
        rows = [(at, line.split("\t")) for at, line in enumerate(read_lines(path), start=1)]
        return _picked(path, rows, columns)
    raise InputError(f"{path}: cannot tell the format; name the file .csv, .tsv, .txt, .jsonl or .parquet")


def typed_row(values: Iterable[object], columns: Sequence[str | int], path: Path, line: int) -> list[str]:
    """Values of typed columns as they would stand in a csv file: truth values as 1 and 0, null as nothing.

    Raises:
        InputError: one is neither text nor a number.
    """
    row = []
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, (str, int, float, Decimal, NoneType)):
            names = {"list": "a list", "dict": "an object", "bytes": "bytes"}
            kind = names.get(type(value).__name__, f"a {type(value).__name__}")
            raise InputError(f"{path}, line {line}: column {column} holds {kind}; name one with a text or a number")
        plain = int(value) if isinstance(value, bool) else value
        row.append("" if plain is None else str(plain))
    return row


def require_columns(path: Path, columns: Sequence[str | int], present: Sequence[str]) -> None:
    """InputError unless each of ``columns`` is among those that the file has, and once."""
    twice = next((column for column in columns if present.count(str(column)) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: there are {present.count(str(twice))} columns {twice}; give them names of their own")
    missing = [str(column) for column in columns if column not in present]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; it has {', '.join(present) or 'none'}")


def _csv_rows(path: Path) -> list[Row]:
    reader = csv.reader(io.StringIO("\n".join(read_lines(path)), newline=""), strict=True)
    try:
        return [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: no CSV ({error}); mend its quotes or line ends") from None


def _picked(path: Path, rows: list[Row], columns: tuple[str | int, ...]) -> list[Row]:
    """The wanted fields of all rows; without any name among ``columns`` there is no header line to skip."""
    header = rows[0][1] if rows else []
    names = [column for column in columns if isinstance(column, str)]
    require_columns(path, names, header)
    places = [header.index(column) if isinstance(column, str) else column for column in columns]
    outside = [place for place in places if not 0 <= place < len(header)]
    if outside:
        raise InputError(f"{path}: there is no column {outside[0]}, counted from 0; it has {len(header)} columns")
    for at, row in rows:
        if len(row) != len(header):
            raise InputError(f"{path}, line {at}: {len(row)} fields where the first line has {len(header)}")
    return [(at, [row[place] for place in places]) for at, row in (rows[1:] if names else rows)]


def _json_rows(path: Path, columns: tuple[str | int, ...]) -> list[Row]:
    rows = []
    for at, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line, object_pairs_hook=_without_doubles)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {at}: no JSON ({error.msg})") from None
        except KeyError as error:
            raise InputError(f"{path}, line {at}: the key {error} is there twice; drop one") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {at}: no JSON object but {type(record).__name__}")
        require_columns(Path(f"{path}, line {at}"), columns, list(record))
        rows.append((at, typed_row([record[column] for column in columns], columns, path, at)))
    return rows


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object's members; a KeyError with the name that two of them have."""
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            raise KeyError(name)
        members[name] = value
    return members


def _parquet_rows(path: Path, columns: tuple[str | int, ...]) -> list[Row]:
    _require_file(path)
    try:
        require_columns(path, columns, pq.read_schema(path).names)
        table = pq.read_table(path, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {first_line(error)}") from None
    rows = zip(*(table[column].to_pylist() for column in columns), strict=True)
    return [(at, typed_row(row, columns, path, at)) for at, row in enumerate(rows, start=1)]
