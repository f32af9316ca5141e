"""The corpus stage as a whole, on a real Ray."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from cluster.errors import InputError
from stages.context import Context
from stages.corpus import files
from stages.corpus.config import CorpusConfig
from stages.corpus.prepare import CorpusJob, prepare_corpus
from stages.encoder import load_tokenizer
from stages.evaluate.data import evaluation_sentences
from tests.corpus.conftest import TOKENIZER, Prepared, sentences, write

pytestmark = pytest.mark.cluster
Prepare = Callable[..., Prepared]


def test_each_count_of_the_statistics_is_right(prepare: Prepare, tmp_path: Path) -> None:
    known = next(text for text in evaluation_sentences(None) if 5 <= len(text.split()) <= 12 and text.isascii())
    lines = [
        "A first sentence stands here. A second sentence stands beside it.",
        "A first  sentence\u00a0stands here.",                 # a duplicate once its spaces are normalised
        "Too short.",
        "word " * 30 + "end.",
        "",
        known.upper().replace(" ", "  "),
        "The very last of all these sentences is the longest one of them that is kept here.",
    ]
    path = write(tmp_path / "corpus.txt", "\n".join(lines) + "\n")
    found = prepare({"kind": "text", "path": str(path)}, max_words=20, max_length=12, exclude_evaluation=True)
    assert found.statistics["documents"] == 7
    assert found.statistics["empty"] == 1
    assert found.statistics["sentences"] == 7
    assert found.statistics["too_short"] == 1
    assert found.statistics["too_long"] == 1
    assert found.statistics["in_evaluation_data"] == 1
    assert found.statistics["evaluation_overlap"] == {"distinct": 1, "dropped": 1, "kept": 0}
    assert found.statistics["duplicates"] == 1
    assert found.statistics["sampled_away"] == 0
    assert found.statistics["kept"] == len(found.table) == 3
    assert found.statistics["truncated"] == 1
    assert found.statistics["tokens"] == sum(found.table["length"].to_pylist())
    assert found.statistics["mean_length"] == found.statistics["tokens"] / 3
    assert found.statistics["examples"]["too_short"] == ["Too short."]


def test_the_ids_are_the_tokenizers(prepare: Prepare, tmp_path: Path) -> None:
    lines = [*sentences(50), "Naïve façades “quoted” — and an unusually long end."]
    path = write(tmp_path / "corpus.txt", "\n".join(lines))
    found = prepare({"kind": "text", "path": str(path)}, max_length=12)
    tokenizer = load_tokenizer(TOKENIZER)
    whole = [len(ids) for ids in tokenizer(found.texts)["input_ids"]]
    assert found.table["input_ids"].to_pylist() == tokenizer(found.texts, truncation=True, max_length=12)["input_ids"]
    assert found.table["length"].to_pylist() == [min(length, 12) for length in whole]
    assert found.table["truncated"].to_pylist() == [length > 12 for length in whole]
    assert [str(field.type) for field in found.table.schema] == ["string", "list<element: int32>", "int32", "bool"]


def test_the_order_depends_on_the_seed_alone(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = sentences(3000)
    one = prepare({"kind": "text", "path": str(write(tmp_path / "one.txt", "\n".join(lines)))})
    folder = tmp_path / "many"
    folder.mkdir()
    for part in range(3):
        name = f"{part}.txt.gz" if part == 1 else f"{part}.txt"
        write(folder / name, "\r\n".join(reversed(lines[part * 1000 : part * 1000 + 1200])))   # overlapping, reversed
    many = prepare({"kind": "text", "path": str(folder)})
    monkeypatch.setattr(files, "PART", 50_000)                  # one file in many parts
    split = prepare({"kind": "text", "path": str(tmp_path / "one.txt")})
    other = prepare({"kind": "text", "path": str(tmp_path / "one.txt")}, seed=2)
    assert one.texts == many.texts == split.texts
    assert sorted(one.texts) == sorted(lines)
    assert one.texts != sorted(one.texts)
    assert other.texts != one.texts
    assert sorted(other.texts) == sorted(lines)
    assert many.statistics["duplicates"] == 400


def test_one_free_cpu_gives_what_two_give(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.txt.gz", "\n".join(sentences(2000)))
    with_two = prepare({"kind": "text", "path": str(path)})

    @ray.remote(num_cpus=1)
    def stage(out: Path) -> None:                              # holds one of the two CPUs while it waits
        config = CorpusConfig.model_validate(
            {"source": {"kind": "text", "path": str(path)}, "exclude_evaluation": False}
        )
        prepare_corpus(CorpusJob(corpus=config, tokenizer=TOKENIZER, max_length=16, seed=1, exclude=None), Context(out))

    (tmp_path / "one").mkdir()
    ray.get(stage.remote(tmp_path / "one"), timeout=120)
    assert _digests(tmp_path / "one") == _digests(with_two.folder)


def test_a_rerun_gives_the_same_files_and_replaces_what_a_killed_one_left(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.txt", "\n".join(sentences(500)))
    first = prepare({"kind": "text", "path": str(path)})
    out = tmp_path / "killed"
    (out / "scratch").mkdir(parents=True)
    write(out / "scratch" / "old.arrow", "left")
    write(out / "part-00007.parquet", "left")
    job = CorpusJob(
        corpus=CorpusConfig(source={"kind": "text", "path": str(path)}, exclude_evaluation=False),
        tokenizer=TOKENIZER, max_length=16, seed=1, exclude=None,
    )
    prepare_corpus(job, Context(out))
    assert _digests(out) == _digests(first.folder)


def test_a_sample_is_the_beginning_of_the_whole_order(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.txt", "\n".join(sentences(40_000)))    # 1.6 MB: several ranges
    whole = prepare({"kind": "text", "path": str(path)})
    sample = prepare({"kind": "text", "path": str(path)}, sample=30_000)
    assert len(list(whole.folder.glob("part-*"))) > 1
    assert sample.texts == whole.texts[:30_000]
    assert sample.statistics["sampled_away"] == 10_000
    assert prepare({"kind": "text", "path": str(path)}, sample=99_999).texts == whole.texts


def test_without_segmentation_a_line_is_a_sentence(prepare: Prepare, tmp_path: Path) -> None:
    line = "One sentence is here. Another sentence is there."
    path = write(tmp_path / "corpus.txt", line)
    assert prepare({"kind": "text", "path": str(path)}, segment=False).texts == [line]
    assert len(prepare({"kind": "text", "path": str(path)}).texts) == 2


@pytest.fixture
def overlapping(tmp_path: Path) -> dict[str, str]:
    """A source of 400 plain sentences and of ten from the evaluation data: in two spellings, one of them repeated."""
    known = [text for text in evaluation_sentences(None) if text.isascii() and text != text.upper()][:10]
    lines = [*known, *known, *sentences(200), *map(str.upper, known), *sentences(200, start=200)]
    return {"kind": "text", "path": str(write(tmp_path / "overlapping.txt", "\n".join(lines)))}


def test_sentences_of_the_evaluation_data_are_counted_once_each_where_they_are_dropped(
    prepare: Prepare, overlapping: dict[str, str]
) -> None:
    found = prepare(overlapping, segment=False, min_words=1, exclude_evaluation=True)
    assert found.statistics["evaluation_overlap"] == {"distinct": 20, "dropped": 20, "kept": 0}
    assert found.statistics["in_evaluation_data"] == 30
    assert sorted(found.texts) == sorted(sentences(400))


def test_sentences_of_the_evaluation_data_are_counted_and_warned_of_where_they_are_kept(
    prepare: Prepare, overlapping: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = prepare(overlapping, segment=False, min_words=1, exclude_evaluation=False)
    assert found.statistics["evaluation_overlap"] == {"distinct": 20, "dropped": 0, "kept": 20}
    assert found.statistics["in_evaluation_data"] == 0         # dropped ones
    assert found.statistics["duplicates"] == 10
    assert found.statistics["kept"] == 420
    assert len(found.statistics["examples"]["in_evaluation_data"]) == 3
    assert "20 sentences of the corpus occur in the evaluation data and are kept" in caplog.text


def test_of_a_sample_only_its_own_sentences_count_as_kept(prepare: Prepare, overlapping: dict[str, str]) -> None:
    found = prepare(overlapping, segment=False, min_words=1, exclude_evaluation=False, sample=100)
    kept = len(set(found.texts) - set(sentences(400)))
    assert 0 < kept < 20
    assert found.statistics["evaluation_overlap"] == {"distinct": 20, "dropped": 0, "kept": kept}


def test_a_corpus_apart_from_the_evaluation_data_gives_no_warning(
    prepare: Prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "corpus.txt", "\n".join(sentences(20)))
    found = prepare({"kind": "text", "path": str(path)}, exclude_evaluation=False)
    assert found.statistics["evaluation_overlap"] == {"distinct": 0, "dropped": 0, "kept": 0}
    assert "evaluation data" not in caplog.text


def test_progress_ends_at_the_number_of_sentences(prepare: Prepare, tmp_path: Path) -> None:
    found = prepare({"kind": "text", "path": str(write(tmp_path / "corpus.txt", "\n".join(sentences(30))))})
    progress = json.loads((found.folder / "progress.json").read_text())
    assert (progress["done"], progress["total"], progress["unit"]) == (30, 30, "sentences")


def test_a_corpus_that_is_empty_after_filtering_says_what_dropped_it(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.txt", "Too short.\nShort too.\n" + "word " * 99)
    message = r"^corpus: no sentence is left of 3 documents with 3 sentences: 2 have fewer .* 1 more than"
    with pytest.raises(InputError, match=message) as error:
        prepare({"kind": "text", "path": str(path)})
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_utf8_are_an_error_with_file_and_line(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", "A plain first line is fine.\nThe caf\xe9 is not.\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin.txt, line 2: byte 0xE9 is not UTF-8; .*on_invalid_utf8=replace$"):
        prepare({"kind": "text", "path": str(path)})
    found = prepare({"kind": "text", "path": str(path), "on_invalid_utf8": "replace"})
    assert "The caf\ufffd is not." in found.texts
    assert found.statistics["replaced_characters"] == 1


def test_a_max_length_of_special_tokens_alone_is_an_error(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"encoder.max_length=2 leaves no room"):
        prepare({"kind": "text", "path": str(write(tmp_path / "corpus.txt", "x"))}, max_length=2)


@pytest.mark.slow
def test_the_documentation_of_python_gives_twenty_thousand_sentences(prepare: Prepare) -> None:
    found = prepare({"kind": "python-docs"})
    assert len(set(found.texts)) == len(found.texts) >= 20_000
    assert found.statistics["versions"]["numpy"]
    assert not [text for text in found.texts if ">>>" in text or "``" in text or not text[0].isupper()]


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("part-*"))}
