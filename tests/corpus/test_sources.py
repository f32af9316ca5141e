"""Every kind of source, good and bad."""

import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from cluster.errors import InputError
from stages.corpus import files, sources
from stages.corpus.config import CorpusConfig, Source
from stages.corpus.files import FilePart, Lines, read_lines
from stages.corpus.prepare import check_source
from tests.corpus.conftest import Prepared, sentences, write


def source(**fields: Any) -> Source:
    found: Source = TypeAdapter(Source).validate_python({k: str(v) if k == "path" else v for k, v in fields.items()})
    return found


def texts(config: Source) -> list[str]:
    """All texts of a source, read in this process."""
    parts = sources.split_source(config)
    return [
        text
        for part in parts
        for chunk in sources.read_part(config, part)
        for text in sources.documents(config, chunk).texts
    ]


def checked(**fields: Any) -> list[str]:
    return check_source(CorpusConfig(source=source(**fields)))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_text_is_lines_that_only_line_feeds_end(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.txt{ending}", "\ufeffone\r\ntwo \u2028 half\rthree\x0b\x85\n\nlast")
    assert texts(source(kind="text", path=path)) == ["one\r", "two \u2028 half\rthree\x0b\x85", "", "last"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_csv_knows_quotes_and_line_ends_within(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.csv{ending}", '\ufeffid,text\r\n1,"one, ""quoted""\nand on"\r\n\r\n2,two\rhalf\r\n3,\n')
    assert texts(source(kind="csv", path=path)) == ['one, "quoted"\nand on', "two half", ""]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_without_header_line_is_read_by_positions(kind: str, tmp_path: Path) -> None:
    separator = {"csv": ",", "tsv": "\t"}[kind]
    path = write(tmp_path / f"a.{kind}", "one A two\nthree B four\n".replace(" ", separator))
    assert texts(source(kind=kind, path=path, columns=[0, 2])) == ["one", "two", "three", "four"]
    with pytest.raises(InputError, match=r"no column 3; it has 0, 1, 2; set corpus\.source\.columns"):
        checked(kind=kind, path=path, columns=[0, 3])


@pytest.mark.shared
def test_the_similarity_sets_give_every_sentence_of_every_split_scored_or_not(shared: Path) -> None:
    chosen = source(kind="sts", path=shared / "data/senteval")
    found = texts(chosen)
    assert len(found) == 89_192                                # 2 x the lines of 30 files
    assert len(set(found)) == 47_328
    assert len(check_source(CorpusConfig(source=chosen))) == 2 * 24 + 6


def test_a_folder_without_some_similarity_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "STS").mkdir()
    with pytest.raises(InputError, match=r"STS12-en-test.*: no such file, and corpus\.source\.kind=sts reads all"):
        checked(kind="sts", path=tmp_path)


def test_tsv_knows_no_quotes_and_gives_several_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'first\tlabel\tsecond\n"one\t1\ttwo"\nit\'s\t0\t5" long\n')
    assert texts(source(kind="tsv", path=path, columns=["second", "first"])) == ['two"', '"one', '5" long', "it's"]


def test_json_lines_give_their_column_and_null_is_empty(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one\nand \u2028 on", "n": 1}), "", '{"body": null}', '{"body": "\\ud800"}']
    path = write(tmp_path / "a.jsonl", "\r\n".join(lines))
    assert texts(source(kind="jsonl", path=path, columns=["body"])) == ["one\nand \u2028 on", "", "\ud800"]


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2], "text": ["one", None]}), tmp_path / "a.parquet")
    assert texts(source(kind="parquet", path=tmp_path)) == ["one", ""]


def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path) -> None:
    for part in range(2):
        write(tmp_path / f"{part}.jsonl", "".join(json.dumps({"text": f"text {part}{at}"}) + "\n" for at in range(2)))
    config = source(kind="hub", path=str(tmp_path))            # the library takes a folder for a data set, too
    assert sorted(texts(config)) == ["text 00", "text 01", "text 10", "text 11"]
    with pytest.raises(InputError, match=r"no column 'body'; it has text; set corpus.source.columns"):
        texts(source(kind="hub", path=str(tmp_path), columns=["body"]))
    with pytest.raises(InputError, match=r"no data set that can be had here"):
        texts(source(kind="hub", path=str(tmp_path / "missing")))


def test_a_url_is_read_like_a_file(web: Callable[[Path], str], tmp_path: Path) -> None:
    write(tmp_path / "a.txt.gz", "one\ntwo\n")
    assert checked(kind="text", path=f"{web(tmp_path)}/a.txt.gz") == []
    assert texts(source(kind="text", path=f"{web(tmp_path)}/a.txt.gz")) == ["one", "two"]
    assert texts(source(kind="text", path=f"file://{tmp_path}")) == ["one", "two"]
    with pytest.raises(InputError, match=r"b.txt cannot be read: "):
        texts(source(kind="text", path=f"{web(tmp_path)}/b.txt"))
    with pytest.raises(InputError, match=r"leads to no files; a folder is searched for ending in .csv"):
        texts(source(kind="csv", path=f"file://{tmp_path}"))


@pytest.fixture
def web() -> Iterator[Callable[[Path], str]]:
    """Serves folders over HTTP."""
    servers = []

    def serve(folder: Path) -> str:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()


def test_a_glob_and_a_folder_are_searched(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt.gz", ".hidden.txt", "d.csv"):
        write(tmp_path / name, name)
    assert texts(source(kind="text", path=tmp_path)) == ["a.txt", "b.txt", "deep/c.txt.gz"]
    assert texts(source(kind="text", path=tmp_path / "[ab].t*")) == ["a.txt", "b.txt"]
    assert checked(kind="text", path=tmp_path) == [str(tmp_path / name) for name in ("a.txt", "b.txt", "deep/c.txt.gz")]


def test_parts_of_a_file_give_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["x" * (at * 7 % 23) for at in range(200)]
    path = write(tmp_path / "a.txt", "\n".join(lines) + "\n")
    for size in (1, 10, 100):
        monkeypatch.setattr(files, "PART", size)
        assert texts(source(kind="text", path=path)) == lines


def test_a_long_line_is_cut_between_words_in_the_same_places_in_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 40)
    long = "naïve words " * 30 + "é" * 100
    path = write(tmp_path / "a.txt", f"short\n{long}\nend\n")
    whole = texts(source(kind="text", path=path))
    assert "".join(whole) == f"short{long}end"
    assert max(len(text.encode()) for text in whole) <= 40
    monkeypatch.setattr(files, "PART", 64)
    assert texts(source(kind="text", path=path)) == whole
    jsonl = write(tmp_path / "a.jsonl", json.dumps({"text": long}))
    assert texts(source(kind="jsonl", path=jsonl)) == [long]


def test_a_line_is_located_from_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", b"fine\n" * 99 + b"not \xff fine\n" + b"fine\n" * 9)
    for part, chunk in ((7, 3), (1000, 1000), (100, 30)):
        monkeypatch.setattr(files, "PART", part)
        monkeypatch.setattr(files, "CHUNK", chunk + 20)
        with pytest.raises(InputError, match=r"a.txt, line 100: byte 0xFF is not UTF-8"):
            texts(source(kind="text", path=path))


def test_only_whole_lines_are_in_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 10)
    path = write(tmp_path / "a.txt.gz", "one\ntwo\nthree\nfour\n")
    assert list(read_lines(FilePart(str(path)), cut=True)) == [
        Lines(str(path), 0, 1, b"one\ntwo\nthree\n"),
        Lines(str(path), 0, 4, b"four\n"),
    ]


BAD_FILES = {
    "an empty file": ("text", "a.txt", b"", {}, "the file is empty"),
    "an empty archive": ("text", "a.txt.gz", b"", {}, "the file is empty"),
    "a CSV without the column": ("csv", "a.csv", b"id,body\n1,x\n", {}, "a.csv: no column 'text'; it has id, body;"),
    "a TSV without the column": ("tsv", "a.tsv", b"id\tbody\n", {"columns": ["b"]}, "no column 'b'; it has id, body;"),
    "a Parquet file that is none": ("parquet", "a.parquet", b"text", {}, "a.parquet is not a whole Parquet file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_the_check_before_the_run_finds(case: str, tmp_path: Path) -> None:
    kind, name, data, fields, message = BAD_FILES[case]
    write(tmp_path / name, data)
    with pytest.raises(InputError) as error:
        checked(kind=kind, path=tmp_path / name, **fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "corpora.txt", "x")
    with pytest.raises(InputError, match=r"corpus.txt: there is no such file; .* holds corpora.txt$"):
        checked(kind="text", path=tmp_path / "corpus.txt")


def test_a_folder_without_matching_files_says_what_would_match(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "x")
    with pytest.raises(InputError, match=r"without files ending in .jsonl or .* or .jsonl.gz .*; it holds a.json$"):
        checked(kind="jsonl", path=tmp_path)


def test_parquet_of_the_wrong_column_or_type_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet: no column 'text'; it has n; set corpus.source.columns"):
        checked(kind="parquet", path=tmp_path)
    with pytest.raises(InputError, match=r"a.parquet: column 'n' holds int64; it must hold strings"):
        checked(kind="parquet", path=tmp_path, columns=["n"])


BAD_LINES = {
    "no JSON": ("jsonl", "{}x", "a.jsonl, line 2: not JSON: Extra data"),
    "no object": ("jsonl", '["text"]', "a.jsonl, line 2: a JSON array; each line must be an object"),
    "no such column": ("jsonl", '{"body": "x"}', "a.jsonl, line 2: no column 'text'; it has body"),
    "no string": ("jsonl", '{"text": 3}', "a.jsonl, line 2: 'text' is a number; it must be a string"),
    "a field too many": ("csv", "x,y", "a.csv, line 2: 2 fields, but the first line has 1"),
    "an open quote": ("csv", '"x', "a.csv, line 2: unexpected end of data"),
    "bytes that are no UTF-8": ("tsv", b"\xe9", "a.tsv, line 2: byte 0xE9 is not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_reading_names_file_and_line_of(case: str, tmp_path: Path) -> None:
    kind, line, message = BAD_LINES[case]
    first = b'{"text": "fine"}\n' if kind == "jsonl" else b"text\n"
    path = write(tmp_path / f"a.{kind}", first + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(InputError) as error:
        texts(source(kind=kind, path=path))
    assert message in str(error.value)


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", "one\n" * 9999)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a.txt.gz is not a whole gzip file"):
        texts(source(kind="text", path=path))
    write(tmp_path / "b.txt", "plain").rename(tmp_path / "b.txt.gz")
    with pytest.raises(InputError, match=r"b.txt.gz is not a whole gzip file"):
        checked(kind="text", path=tmp_path / "b.txt.gz")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["text", "csv", "tsv", "jsonl", "parquet", "hub"])
def test_every_kind_of_source_becomes_the_same_corpus(
    kind: str, prepare: Callable[..., Prepared], tmp_path: Path
) -> None:
    lines = sentences(20)
    bodies = {
        "text": "\n".join(lines),
        "csv": "\n".join(["text", *lines]),
        "tsv": "\n".join(["text", *lines]),
        "jsonl": "\n".join(json.dumps({"text": line}) for line in lines),
    }
    folder = tmp_path / "source"
    folder.mkdir()
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), folder / "a.parquet")
    else:
        suffix = {"text": "txt", "hub": "jsonl"}.get(kind, kind)
        write(folder / f"a.{suffix}", bodies[suffix if kind == "hub" else kind])
    found = prepare({"kind": kind, "path": str(folder)})
    assert sorted(found.texts) == sorted(lines)
    assert found.texts[0] == "This is sentence number 8 of the corpus."    # the seed's choice, on every machine
