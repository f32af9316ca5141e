import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from cluster.errors import InputError
from stages.evaluate.config import SimilaritySet
from stages.evaluate.similarity import (
    SimilarityData,
    best_thresholds,
    load_similarity,
    similarity_files,
    similarity_scores,
)
from stages.evaluate.sts import ScoredPairs

ROWS = [("one dog", "a  dog", 1), ("a \"cat, he said", "two men", 0), ("它是红的", "它不是红的", 1)]
NAMES = ("sentence1", "sentence2", "label")


def chosen(path: Path | str, **options: Any) -> SimilaritySet:
    return SimilaritySet.model_validate({"name": "other", "path": str(path)} | options)


def separated(path: Path, rows: list[tuple[Any, ...]], separator: str = "\t", end: str = "\n") -> Path:
    data = "".join(separator.join(map(str, row)) + end for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def json_lines(path: Path, labels: list[Any]) -> Path:
    records = [dict(zip(NAMES, (*row[:2], label), strict=True)) for row, label in zip(ROWS, labels, strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_parquet(path: Path, labels: list[Any]) -> Path:
    columns = dict(zip(NAMES, map(list, zip(*ROWS, strict=True)), strict=True))
    pq.write_table(pa.table(columns | {"label": labels}), path)
    return path


def hub_folder(path: Path, **rows: list[tuple[Any, ...]]) -> Path:
    path.mkdir()
    for split, of_split in rows.items():
        separated(path / f"{split}.csv", [NAMES, *of_split], separator=",")
    return path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


WRITERS: dict[str, Callable[[Path], Path]] = {
    "set.tsv": lambda path: separated(path, [NAMES, *ROWS]),
    "set.txt": lambda path: separated(path, [NAMES, *ROWS], end="\r\n"),
    "set.tsv.gz": lambda path: separated(path, [NAMES, *ROWS]),
    "set.csv": lambda path: separated(
        path, [NAMES, *(tuple('"' + str(field).replace('"', '""') + '"' for field in row) for row in ROWS)], ","
    ),
    "set.jsonl": lambda path: json_lines(path, [1, 0, 1]),
    "booleans.jsonl": lambda path: json_lines(path, [True, False, True]),
    "words.jsonl": lambda path: json_lines(path, ["1.0", "0.0", "1"]),
    "set.parquet": lambda path: as_parquet(path, [1, 0, 1]),
    "booleans.parquet": lambda path: as_parquet(path, [True, False, True]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_binary_pairs(name: str, tmp_path: Path) -> None:
    data = load_similarity(chosen(WRITERS[name](tmp_path / name)))
    assert data.test.first == ("one dog", 'a "cat, he said', "它是红的")
    assert data.test.second == ("a dog", "two men", "它不是红的")
    assert data.test.gold.tolist() == [1, 0, 1]
    assert set(data.test.subsets) == {"other"}
    assert data.binary
    assert data.validation is None


def test_a_hub_set_gives_the_pairs_of_its_splits(tmp_path: Path, hub_cache: None) -> None:
    rows = [("one dog", "a dog", 1), ("two men", "a cat", 0)]
    others = [("a man", "a human", 1), ("red", "green", 0)]
    folder = hub_folder(tmp_path / "hub", test=rows, validation=others)
    data = load_similarity(chosen(folder, kind="hub", validation="validation"))
    assert data.binary
    assert data.test.gold.tolist() == [1, 0]
    assert data.validation is not None
    assert data.validation.second == ("a human", "green")
    assert data.sentences == (*data.test.first, *data.test.second, *data.validation.first, *data.validation.second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "nope"}, r"^evaluate.similarity other: .* with split nope cannot be had here: Unknown split"),
        ({"subset": "nope"}, r"cannot be had here: BuilderConfig 'nope' not found"),
        ({"columns": ("sentence1", "text", "label")}, r"hub \(test\): no column text; it has sentence1, sentence2,"),
    ],
)
def test_what_a_hub_set_lacks_is_said_in_one_line(
    tmp_path: Path, hub_cache: None, options: dict[str, Any], message: str
) -> None:
    folder = hub_folder(tmp_path / "hub", test=[("one dog", "a dog", 1), ("two men", "a cat", 0)])
    with pytest.raises(InputError, match=message) as error:
        load_similarity(chosen(folder, kind="hub", **options))
    assert "\n" not in str(error.value)


def test_a_hub_set_that_is_broken_or_absent_is_said_in_one_line(tmp_path: Path, hub_cache: None) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "test.jsonl").write_text("{nope\n")
    with pytest.raises(InputError, match="cannot be had here: JSON parse error"):
        load_similarity(chosen(tmp_path / "broken", kind="hub"))
    with pytest.raises(InputError, match="cannot be had here: Couldn't find any data file"):
        load_similarity(chosen(tmp_path / "absent", kind="hub"))


def test_the_files_that_decide_the_scores_are_named(tmp_path: Path) -> None:
    assert similarity_files(chosen("test.tsv")) == ["test.tsv"]
    assert similarity_files(chosen("test.tsv", validation="dev.tsv")) == ["test.tsv", "dev.tsv"]
    assert similarity_files(chosen("owner/name", kind="hub", validation="dev")) == []
    assert similarity_files(chosen(tmp_path, kind="hub")) == [str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": "a"}, "a file has no subset; leave it out, or set kind to hub"),
        ({"split": "dev", "revision": "main"}, "a file has no split, revision;"),
        ({"validation": "set.tsv"}, "are the test pairs themselves"),
        ({"kind": "hub", "validation": "test"}, "are the test pairs themselves"),
        ({"columns": ("a", "a", "label")}, "columns names one twice"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chosen("set.tsv", **options)
    assert chosen("set.tsv") == SimilaritySet.model_validate(chosen("set.tsv").model_dump())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", " ", 1), ("b", "c", 0)], r"set.tsv, line 2: an empty sentence"),
        ([("a", "b", 1), ("b", "c\td", 0)], r"set.tsv, line 3: 4 fields where the first line has 3"),
        ([("a", "b", 1), ("b", "c")], r"set.tsv, line 3: 2 fields where the first line has 3"),
        ([("a", "b", "yes"), ("b", "c", "no")], r"set.tsv, line 2: the score 'yes' is no number"),
        ([("a", "b", "nan"), ("b", "c", 0)], r"set.tsv, line 2: the score 'nan' is no number"),
        ([("a", "b", 1), ("b", "c", 1.0)], r"set.tsv: all 2 labels are 1; .*evaluate.similarity other"),
        ([], r"set.tsv: it has no pairs"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, rows: list[tuple[Any, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_similarity(chosen(separated(tmp_path / "set.tsv", [NAMES, *rows])))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["set.tsv", "set.csv", "set.jsonl", "set.parquet"])
def test_a_column_that_is_missing_names_those_there(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name)
    with pytest.raises(InputError, match=r"no column text, gold; it has sentence1, sentence2, label"):
        load_similarity(chosen(path, columns=("text", "sentence2", "gold")))


@pytest.mark.parametrize(("columns", "place"), [((0, 1, 3), 3), ((0, -1, 2), -1)])
def test_a_position_outside_the_line_is_refused(tmp_path: Path, columns: tuple[int, ...], place: int) -> None:
    with pytest.raises(InputError, match=f"there is no column {place}, counted from 0; it has 3 columns"):
        load_similarity(chosen(separated(tmp_path / "set.tsv", ROWS), columns=columns))


def test_a_list_is_no_sentence(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"sentence1": "a", "sentence2": ["b"], "label": 1}\n')
    with pytest.raises(InputError, match=r"set.jsonl, line 1: column sentence2 holds a list"):
        load_similarity(chosen(path))


def test_broken_csv_and_parquet_files_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text('sentence1,sentence2,label\n"a,b,1\nc,d,0\n')
    with pytest.raises(InputError, match=r"set.csv, line 3: no CSV \(unexpected end of data\)"):
        load_similarity(chosen(tmp_path / "set.csv"))
    (tmp_path / "set.parquet").write_text("no parquet")
    with pytest.raises(InputError, match=r"set.parquet is not a whole Parquet file"):
        load_similarity(chosen(tmp_path / "set.parquet"))
    with pytest.raises(InputError, match=r"absent.csv: no such file"):
        load_similarity(chosen(tmp_path / "absent.csv"))


def test_validation_is_of_binary_sets_alone_and_binary_itself(tmp_path: Path) -> None:
    scored = separated(tmp_path / "scored.tsv", [("a", "b", 0), ("c", "d", 2.5), ("e", "f", 1)])
    binary = separated(tmp_path / "binary.tsv", [("a", "b", "0.0"), ("c", "d", "1.0")])
    assert not load_similarity(chosen(scored, columns=(0, 1, 2))).binary
    with pytest.raises(InputError, match=r"test labels are scores, such as 2.5, .* leave validation=.*binary.tsv out"):
        load_similarity(chosen(scored, columns=(0, 1, 2), validation=str(binary)))
    with pytest.raises(InputError, match=r"test labels are 0 and 1, but validation=.*scored.tsv has 2.5"):
        load_similarity(chosen(binary, columns=(0, 1, 2), validation=str(scored)))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "sizes", "binary"),
    [("LCQMC", (12500, 8802), True), ("BQ", (10000, 10000), True), ("STS-B", (1361, None), False)],
)
def test_chinese_sets_are_read_whole(shared: Path, name: str, sizes: tuple[int, int | None], binary: bool) -> None:
    folder = shared / "data" / "zh" / name
    validation = str(folder / "valid.tsv") if sizes[1] else None
    data = load_similarity(chosen(folder / "test.tsv", columns=(0, 1, 2), validation=validation))
    assert (len(data.test.gold), data.validation and len(data.validation.gold)) == sizes
    assert data.binary is binary


@pytest.mark.shared
def test_the_paraphrase_corpus_own_file_is_read(shared: Path) -> None:
    folder = shared / "data" / "senteval" / "downstream" / "MRPC"
    data = load_similarity(
        chosen(
            folder / "msr_paraphrase_test.txt",
            columns=("#1 String", "#2 String", "Quality"),
            validation=str(folder / "msr_paraphrase_train.txt"),
        )
    )
    assert data.validation is not None
    assert (len(data.test.gold), len(data.validation.gold)) == (1725, 4076)
    assert (data.test.gold.sum(), data.validation.gold.sum()) == (1147, 2753)      # as published
    assert data.binary


def pairs(gold: NDArray[np.float64]) -> ScoredPairs:
    return ScoredPairs(("a",) * len(gold), ("b",) * len(gold), gold, ("other",) * len(gold))


def drawn(seed: int, size: int, decimals: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines, some of them equal where decimals are few, and labels that follow them loosely; both labels occur."""
    generator = np.random.default_rng(seed)
    cosines = np.round(generator.uniform(-1, 1, size), decimals)
    alike = (cosines + generator.normal(0, 0.7, size) > 0.2).astype(np.float64)
    alike[:2] = 0, 1
    return cosines, alike


def accuracy(alike: NDArray[np.bool_], called: NDArray[np.bool_]) -> float:
    return sum(a == c for a, c in zip(alike, called, strict=True)) / len(alike)


def f1(alike: NDArray[np.bool_], called: NDArray[np.bool_]) -> float:
    hits = sum(a and c for a, c in zip(alike, called, strict=True))
    return 2 * hits / (sum(alike) + sum(called))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_threshold_is_better_on_validation(seed: int) -> None:
    cosines, gold = drawn(seed, size=2 + seed, decimals=seed % 4)
    for threshold, measure in zip(best_thresholds(cosines, gold == 1), (accuracy, f1), strict=True):
        every = [*cosines, 2.0]                                # a threshold can only part pairs at one of these
        best = max(measure(gold == 1, cosines >= each) for each in every)
        assert measure(gold == 1, cosines >= threshold) == best
        higher = [each for each in every if each > threshold]
        called = (cosines >= threshold).sum()
        assert all(measure(gold == 1, cosines >= each) < best for each in higher if (cosines >= each).sum() < called)


def test_a_threshold_lies_halfway_between_neighbours() -> None:
    alike = np.array([True, False, True, False])
    assert best_thresholds(np.array([0.75, 0.25, 0.5, 0.0]), alike) == (0.375, 0.375)
    adjacent = np.array([0.5, np.nextafter(0.5, 0)])
    assert best_thresholds(adjacent, np.array([True, False])) == (0.5, 0.5)


def test_where_none_or_all_are_best_taken_for_alike_the_threshold_says_so() -> None:
    by_accuracy, by_f1 = best_thresholds(np.array([0.1, 0.5, 0.9]), np.array([True, False, False]))
    assert 0.9 < by_accuracy < 0.9001                          # none: two of three are right
    assert by_f1 == 0.1                                        # all: F1 is 1/2


@pytest.mark.parametrize("seed", range(20))
def test_thresholds_and_scores_are_those_of_sentence_transformers(seed: int) -> None:
    from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator as Evaluator
    from sklearn.metrics import average_precision_score

    validation, labels = drawn(seed, size=200, decimals=2 + seed % 3)
    test, gold = drawn(100 + seed, size=150, decimals=2)
    scores = similarity_scores(SimilarityData(pairs(gold), pairs(labels), True), test, validation)
    _, by_accuracy = Evaluator.find_best_acc_and_threshold(validation, labels.astype(int), True)
    best_f1, _, _, by_f1 = Evaluator.find_best_f1_and_threshold(validation, labels.astype(int), True)
    assert scores["accuracy_threshold"] == pytest.approx(by_accuracy, abs=1e-12)
    assert f1(labels == 1, validation >= scores["f1_threshold"]) == pytest.approx(best_f1, abs=1e-12)
    assert scores["f1_threshold"] == pytest.approx(by_f1, abs=1e-12)
    assert scores["accuracy"] == pytest.approx(100 * accuracy(gold == 1, test >= by_accuracy))
    assert scores["f1"] == pytest.approx(100 * f1(gold == 1, test >= by_f1))
    assert scores["average_precision"] == pytest.approx(100 * average_precision_score(gold, test))
    assert (scores["n"], scores["n_validation"]) == (150, 200)


def test_average_precision_is_the_mean_precision_at_each_alike_pair() -> None:
    cosines, gold = drawn(7, size=60, decimals=9)              # no equal cosines
    precisions = [gold[cosines >= each].mean() for each in cosines[gold == 1]]
    scores = similarity_scores(SimilarityData(pairs(gold), None, True), cosines, None)
    assert scores["average_precision"] == pytest.approx(100 * np.mean(precisions))


def test_without_validation_there_is_no_accuracy_and_scored_sets_have_correlations_alone() -> None:
    cosines, gold = drawn(1, size=50, decimals=3)
    binary = similarity_scores(SimilarityData(pairs(gold), None, True), cosines, None)
    assert list(binary) == ["n", "spearman", "pearson", "average_precision"]
    scored = similarity_scores(SimilarityData(pairs(gold + cosines), None, False), cosines, None)
    assert list(scored) == ["n", "spearman", "pearson"]


def test_test_labels_do_not_move_the_threshold() -> None:
    validation, labels = drawn(1, size=80, decimals=3)
    test, gold = drawn(2, size=80, decimals=3)
    one = similarity_scores(SimilarityData(pairs(gold), pairs(labels), True), test, validation)
    other = similarity_scores(SimilarityData(pairs(1 - gold), pairs(labels), True), test, validation)
    assert one["accuracy_threshold"] == other["accuracy_threshold"]
    assert one["accuracy"] == pytest.approx(100 - other["accuracy"])   # type: ignore[operator]


def test_cosines_that_are_all_equal_are_an_input_error() -> None:
    _, gold = drawn(1, size=20, decimals=3)
    with pytest.raises(InputError, match="all 20 cosines are"):
        similarity_scores(SimilarityData(pairs(gold), None, True), np.full(20, 0.5), None)


@pytest.mark.parametrize("value", [None, b"bytes", [1]], ids=str)
def test_a_sentence_that_is_no_text_is_refused_and_not_scored_as_its_name(tmp_path: Path, value: object) -> None:
    columns = {"sentence1": [value, value], "sentence2": ["a", "b"], "label": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "pairs.parquet")
    with pytest.raises(InputError, match=r"pairs\.parquet, line 1: (an empty sentence|column sentence1 holds)"):
        load_similarity(SimilaritySet(name="own", path=str(tmp_path / "pairs.parquet")))


def test_a_column_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,label,label\na,b,0,1\nc,d,1,0\n")
    with pytest.raises(InputError, match=r"there are 2 columns label; give them names of their own"):
        load_similarity(SimilaritySet(name="own", path=str(tmp_path / "pairs.csv")))


def test_a_copy_of_the_test_pairs_does_not_choose_the_threshold(tmp_path: Path) -> None:
    for name in ("test.csv", "copy.csv"):
        (tmp_path / name).write_text("sentence1,sentence2,label\na,b,0\nc,d,1\n")
    chosen = SimilaritySet(name="own", path=str(tmp_path / "test.csv"), validation=str(tmp_path / "copy.csv"))
    with pytest.raises(InputError, match="2 of 2 test pairs are in validation="):
        load_similarity(chosen)


def test_a_gzip_file_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(b"sentence1,sentence2,label\na,b,0\nc,d,1\n" * 50)
    (tmp_path / "pairs.csv.gz").write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"pairs\.csv\.gz is not a whole gzip file"):
        load_similarity(SimilaritySet(name="own", path=str(tmp_path / "pairs.csv.gz")))


def test_a_key_of_jsonl_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 1, "label": 0}\n')
    with pytest.raises(InputError, match=r"pairs\.jsonl, line 1: the key 'label' is there twice"):
        load_similarity(SimilaritySet(name="own", path=str(tmp_path / "pairs.jsonl")))


def test_a_folder_is_no_file_and_damaged_parquet_is_named(tmp_path: Path) -> None:
    for name in ("pairs.tsv", "pairs.parquet"):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=rf"{name} is a folder; name a file in it"):
            load_similarity(SimilaritySet(name="own", path=str(tmp_path / name)))
    columns = {"sentence1": ["a b"] * 500, "sentence2": ["c d"] * 500, "label": [0, 1] * 250}
    pq.write_table(pa.table(columns), tmp_path / "damaged.parquet", use_dictionary=False)
    content = bytearray((tmp_path / "damaged.parquet").read_bytes())
    content[40:60] = bytes(20)
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"damaged\.parquet is not a whole Parquet file"):
        load_similarity(SimilaritySet(name="own", path=str(tmp_path / "damaged.parquet")))
