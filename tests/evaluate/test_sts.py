import gzip
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.errors import InputError
from stages.evaluate.config import STS_TASKS, EvaluateConfig
from stages.evaluate.data import check_evaluation
from stages.evaluate.sts import (
    SAMPLE_FILE,
    SPLITS,
    SUBSETS,
    correlations,
    load_pairs,
    load_tasks,
    pair_cosines,
    read_scored_file,
    sts_sentences,
    validation_pairs,
)

COLUMNS = ("sentence1", "sentence2", "score")


def partial(data: Path, **options: object) -> EvaluateConfig:
    return EvaluateConfig.model_validate({"data": str(data), "allow_partial": True} | options)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode())


def test_pairs_come_in_the_order_of_subsets_and_lines(senteval: Path) -> None:
    pairs = load_pairs(str(senteval), "STS12")
    assert list(dict.fromkeys(pairs.subsets)) == list(SUBSETS["STS12"])
    assert pairs.gold.tolist() == [0.5, 5, 2.25, 3, 4.75, 1] * 5
    first_line = (senteval / "STS/STS12-en-test/STS.input.MSRpar.txt").read_text().split("\n")[0]
    assert f"{pairs.first[0]}\t{pairs.second[0]}" == first_line


def test_the_folder_above_downstream_is_accepted(senteval: Path, tmp_path: Path) -> None:
    (tmp_path / "above").mkdir()
    senteval.rename(tmp_path / "above" / "downstream")
    assert len(load_pairs(str(tmp_path / "above"), "STS-B").gold) == 6


def test_an_empty_gold_line_drops_the_pair(senteval: Path) -> None:
    edit(senteval / "STS/STS15-en-test/STS.gs.belief.txt", "2.25\n", "\n")
    pairs = load_pairs(str(senteval), "STS15")
    assert len(pairs.gold) == 5 * 6 - 1
    assert pairs.gold[pairs.of_subset("belief")].tolist() == [0.5, 5, 3, 4.75, 1]


def test_quotes_are_no_csv_quoting_and_spaces_are_single(senteval: Path) -> None:
    path = senteval / "STS/STSBenchmark/sts-test.csv"
    lines = path.read_text().split("\n")
    lines[0] = 'g\tf\t2020\t1\t2.0\t"Unbalanced, he said.\tA  "quoted"   word '
    path.write_text("\n".join(lines))
    pairs = load_pairs(str(senteval), "STS-B")
    assert (pairs.first[0], pairs.second[0]) == ('"Unbalanced, he said.', 'A "quoted" word')


def test_crlf_line_ends_do_not_reach_the_sentences_or_scores(senteval: Path) -> None:
    for kind in ("input", "gs"):
        path = senteval / f"STS/STS13-en-test/STS.{kind}.FNWN.txt"
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    pairs = load_pairs(str(senteval), "STS13")
    assert len(pairs.gold) == 18
    assert not any("\r" in text for text in pairs.sentences)


def test_a_control_character_that_python_calls_a_line_end_ends_no_line(senteval: Path) -> None:
    path = senteval / "STS/STS13-en-test/STS.input.FNWN.txt"
    path.write_text("\n".join(f"a dog{chr(0x85)} runs\tthe cat {at}" for at in range(6)) + "\n")
    assert load_pairs(str(senteval), "STS13").first[0] == "a dog runs"


def test_sts_b_dev_is_what_training_validates_on(senteval: Path) -> None:
    edit(senteval / SPLITS["STS-B"]["dev"][0], "\t0.5\t", "\t0.125\t")
    assert validation_pairs(str(senteval)).gold[0] == 0.125


def test_without_data_training_validates_on_the_samples_dev_split() -> None:
    dev, test = validation_pairs(None), load_pairs(None, "graded-sample")
    assert len(dev.gold) > 100
    assert not set(dev.sentences) & set(test.sentences)


def test_dev_of_a_set_that_has_none_is_refused(senteval: Path) -> None:
    with pytest.raises(InputError, match="STS12 has no dev split"):
        load_pairs(str(senteval), "STS12", "dev")


def test_all_sentences_are_those_of_every_split_and_absent_sets_are_skipped(senteval: Path) -> None:
    (senteval / SPLITS["STS-B"]["train"][0]).unlink()
    found = sts_sentences(str(senteval))
    assert len(found) == len(set(found))
    for task, split in [("STS-B", "dev"), ("STS-B", "test"), ("SICK-R", "train"), ("SICK-R", "dev"), ("STS16", "test")]:
        assert set(load_pairs(str(senteval), task, split).sentences) <= set(found)


def test_all_sentences_of_the_graded_sample_are_both_splits() -> None:
    found = set(sts_sentences(None))
    assert set(validation_pairs(None).sentences) | set(load_pairs(None, "graded-sample").sentences) == found


def test_the_check_returns_every_file_that_is_scored(senteval: Path) -> None:
    (called,) = reads = check_evaluation(partial(senteval))
    assert called == str(senteval)
    files = reads[called]
    assert len(files) == len(set(files)) == 2 * sum(map(len, SUBSETS.values())) + 2
    assert not [file for file in files if "dev" in file or "train" in file]
    assert check_evaluation(EvaluateConfig()) == {"graded-sample": [str(SAMPLE_FILE)]}


def test_only_the_wanted_tasks_are_read(senteval: Path) -> None:
    (senteval / SPLITS["SICK-R"]["test"][0]).unlink()
    assert list(load_tasks(partial(senteval, sts=["STS16", "STS-B"]))[0]) == ["STS16", "STS-B"]


def test_a_folder_of_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds neither STS/ nor SICK/"):
        check_evaluation(partial(tmp_path))


def test_a_missing_file_is_named(senteval: Path) -> None:
    (senteval / "STS/STS14-en-test/STS.gs.images.txt").unlink()
    with pytest.raises(InputError, match=r"STS\.gs\.images\.txt: no such file.*leave STS14 out of evaluate\.sts"):
        check_evaluation(partial(senteval))


def test_a_gold_file_one_line_short_is_refused_with_both_counts(senteval: Path) -> None:
    edit(senteval / "STS/STS12-en-test/STS.gs.MSRvid.txt", "2.25\n", "")
    with pytest.raises(InputError, match=r"input\.MSRvid\.txt has 6 pairs but .*gs\.MSRvid\.txt has 5 scores"):
        check_evaluation(partial(senteval))


@pytest.mark.parametrize("score", ["high", "nan", "inf", "3,5"])
def test_a_gold_that_is_no_number_is_refused_with_its_line(senteval: Path, score: str) -> None:
    edit(senteval / "STS/STS16-en-test/STS.gs.headlines.txt", "2.25\n", f"{score}\n")
    with pytest.raises(InputError, match=rf"STS\.gs\.headlines\.txt, line 3: the score '{score}' is no number"):
        check_evaluation(partial(senteval))


def test_a_gold_outside_the_scale_is_refused_with_its_line(senteval: Path) -> None:
    edit(senteval / "STS/STS13-en-test/STS.gs.FNWN.txt", "2.25", "22.5")
    with pytest.raises(InputError, match=r"STS\.gs\.FNWN\.txt, line 3: the score 22\.5 is outside 0 to 5"):
        load_pairs(str(senteval), "STS13")


def test_a_sick_score_that_is_no_number_is_refused_with_its_line(senteval: Path) -> None:
    edit(senteval / "SICK/SICK_test_annotated.txt", "\t2.25\t", "\tx\t")
    with pytest.raises(InputError, match=r"SICK_test_annotated\.txt, line 4: the score 'x' is no number"):
        check_evaluation(partial(senteval))


@pytest.mark.parametrize(
    ("file", "line", "count"),
    [
        ("STS/STS12-en-test/STS.input.MSRpar.txt", 1, 3),
        ("STS/STSBenchmark/sts-test.csv", 1, 8),
        ("SICK/SICK_test_annotated.txt", 2, 6),
    ],
)
def test_a_stray_tab_is_refused_with_its_line(senteval: Path, file: str, line: int, count: int) -> None:
    lines = (senteval / file).read_bytes().decode().split("\n")
    lines[line - 1] = "a\t" + lines[line - 1]
    (senteval / file).write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"{Path(file).name}, line {line}: {count} (tab-separated )?fields"):
        check_evaluation(partial(senteval))


def test_an_empty_sentence_is_refused_with_its_line(senteval: Path) -> None:
    path = senteval / "STS/STS12-en-test/STS.input.MSRpar.txt"
    path.write_text("\n".join(["a dog\tthe cat", "a dog\t ", *["a\tb"] * 4]) + "\n")
    with pytest.raises(InputError, match=r"STS\.input\.MSRpar\.txt, line 2: an empty sentence"):
        check_evaluation(partial(senteval))


def test_bytes_that_are_not_utf8_are_refused_with_their_line(senteval: Path) -> None:
    path = senteval / "STS/STS13-en-test/STS.input.OnWN.txt"
    path.write_bytes(b"a\tb\n" + "caf\xe9\ttea\n".encode("latin-1") + b"a\tb\n" * 4)
    with pytest.raises(InputError, match=r"STS\.input\.OnWN\.txt, line 2: not UTF-8"):
        check_evaluation(partial(senteval))


def test_scores_that_are_all_equal_are_refused_before_anything_is_encoded(senteval: Path) -> None:
    (senteval / "STS/STS13-en-test/STS.gs.OnWN.txt").write_text("3\n" * 6)
    with pytest.raises(InputError, match=r"STS\.gs\.OnWN\.txt: 6 scored pairs without two different scores"):
        check_evaluation(partial(senteval))


def test_an_empty_file_is_refused(senteval: Path) -> None:
    (senteval / "STS/STSBenchmark/sts-test.csv").write_text("")
    with pytest.raises(InputError, match=r"sts-test\.csv: 0 scored pairs"):
        check_evaluation(partial(senteval))


def test_a_set_of_another_size_than_published_is_refused_with_both_counts(senteval: Path) -> None:
    with pytest.raises(InputError, match=r"gs\.MSRpar\.txt: 6 scored pairs, where STS12 MSRpar has 750.*allow_partial"):
        check_evaluation(EvaluateConfig(data=str(senteval)))


def test_allowed_partial_sets_become_warnings(senteval: Path) -> None:
    tasks, warnings = load_tasks(partial(senteval))
    assert list(tasks) == list(STS_TASKS)
    assert len(warnings) == sum(map(len, SUBSETS.values())) + 2
    assert warnings[-1].endswith("SICK_test_annotated.txt: 6 scored pairs, where SICK-R test has 4927")


def test_a_scored_file_reads_the_same_in_every_format(tmp_path: Path) -> None:
    rows = [('He said "no", twice', "tea", 1.5), ("b", "c d", 4.0)]
    (tmp_path / "p.csv").write_text(
        'score,id,sentence1,sentence2\n1.5,1,"He said ""no"", twice",tea\n4.0,2,b,c d\n'
    )
    (tmp_path / "p.tsv").write_text('sentence1\tsentence2\tscore\nHe said "no", twice\ttea\t1.5\nb\tc d\t4.0\n')
    (tmp_path / "bare.tsv").write_text('He said "no", twice\ttea\t1.5\nb\tc d\t4.0\n')
    records = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress((tmp_path / "p.jsonl").read_bytes()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    for name in ("p.csv", "p.tsv", "p.jsonl", "p.jsonl.gz", "p.parquet"):
        pairs = read_scored_file(str(tmp_path / name), COLUMNS)
        assert list(zip(pairs.first, pairs.second, pairs.gold.tolist(), strict=True)) == rows
    assert read_scored_file(str(tmp_path / "bare.tsv"), (0, 1, 2)).first == (rows[0][0], "b")


@pytest.mark.parametrize("name", ["p.csv", "p.tsv", "p.jsonl", "p.parquet"])
def test_a_scored_file_without_the_named_column_names_what_it_has(tmp_path: Path, name: str) -> None:
    (tmp_path / "p.csv").write_text("left,right,score\na,b,1\n")
    (tmp_path / "p.tsv").write_text("left\tright\tscore\na\tb\t1\n")
    (tmp_path / "p.jsonl").write_text('{"left": "a", "right": "b", "score": 1}\n')
    pq.write_table(pa.table({"left": ["a"], "right": ["b"], "score": [1.0]}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"no column sentence1, sentence2; it has left, right, score"):
        read_scored_file(str(tmp_path / name), COLUMNS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "sentence1,sentence2,score\na,b\n", "line 2: 2 fields where the first line has 3"),
        ("p.jsonl", '{"sentence1": "a"\n', "line 1: no JSON"),
        ("p.jsonl", "[1]\n", "line 1: no JSON object but list"),
        ("p.jsonl", '{"sentence1": "a", "sentence2": "b", "score": null}\n', "line 1: the score '' is no number"),
        ("p.xls", "", "cannot tell the format"),
        ("p.tsv", "sentence1\tsentence2\tscore\n", "0 scored pairs"),
    ],
)
def test_a_malformed_scored_file_is_refused_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_scored_file(str(tmp_path / name), COLUMNS)


def test_a_missing_scored_file_and_a_column_beyond_the_last_are_refused(tmp_path: Path) -> None:
    for name in ("p.csv", "p.parquet"):
        with pytest.raises(InputError, match="no such file"):
            read_scored_file(str(tmp_path / name), COLUMNS)
    (tmp_path / "p.tsv").write_text("a\tb\n")
    with pytest.raises(InputError, match="there is no column 2, counted from 0; it has 2 columns"):
        read_scored_file(str(tmp_path / "p.tsv"), (0, 1, 2))


def test_correlations_are_percent_and_spearman_is_pearson_of_ranks_with_ties() -> None:
    cosines, gold = np.array([0.1, 0.9, 0.9, 0.4, 0.2]), np.array([1.0, 4, 5, 2, 2])
    cosine_ranks, gold_ranks = np.array([1, 4.5, 4.5, 3, 2]), np.array([1, 4, 5, 2.5, 2.5])

    def pearson(x: np.ndarray, y: np.ndarray) -> float:
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        under = math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
        return 100 * over / under

    found = correlations(cosines, gold)
    assert found["pearson"] == pytest.approx(pearson(cosines, gold))
    assert found["spearman"] == pytest.approx(pearson(cosine_ranks, gold_ranks))


def test_equal_cosines_are_said_not_scored() -> None:
    gold = np.array([1.0, 2, 3])
    with pytest.raises(InputError, match=r"all 3 cosines are 1\.000000, so a correlation is undefined"):
        correlations(np.array([1.0, 1 - 1e-7, 1 + 1e-7]), gold)


def test_a_zero_vector_has_cosine_zero() -> None:
    first, second = np.array([[0.0, 0], [3, 4]], np.float32), np.array([[1.0, 0], [4, 3]], np.float32)
    assert pair_cosines(first, second) == pytest.approx([0, 24 / 25])
