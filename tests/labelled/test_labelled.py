"""From files of labelled rows to tokenised ones: what is read, averaged, dropped, refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from cluster.errors import InputError
from stages.batches import TokenisedSentences
from stages.context import Context
from stages.encoder import load_tokenizer
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.sts import load_pairs
from stages.labelled.config import LabelledConfig
from stages.labelled.prepare import LabelledJob, check_labelled, prepare_labelled
from stages.labelled.read import Rows, read_rows

TOKENIZER = "all-MiniLM-L6-v2"
PAIRS = "a b\tc d\t5\ne f\tg h\t0\ni j\tk l\t2.5\n"


def config(folder: Path, kind: str, text: str, columns: Any = (0, 1, 2), source: str = "tsv", **options: Any) -> Any:
    path = folder / "rows.data"
    path.write_text(text)
    values = {"kind": kind, "source": {"kind": source, "path": str(path), "columns": columns}, **options}
    return TypeAdapter(LabelledConfig).validate_python(values)


def read(*arguments: Any, **options: Any) -> Rows:
    return read_rows(config(*arguments, **options))


def prepare(folder: Path, chosen: Any, seed: int = 1) -> tuple[TokenisedSentences, list[list[str]], dict[str, Any]]:
    out = folder / f"out-{len(list(folder.glob('out-*')))}"
    out.mkdir()
    job = LabelledJob(
        corpus=chosen, tokenizer=TOKENIZER, max_length=16, seed=seed, evaluate=EvaluateConfig(), validation=None
    )
    rows = prepare_labelled(job, Context(out))
    texts = pq.read_table(out / "part-00000.parquet")["text"].to_pylist()
    assert rows.rows == len(texts)
    return TokenisedSentences.read(out), texts, json.loads((out / "statistics.json").read_text())


def test_scores_go_from_their_range_to_0_and_1(tmp_path: Path) -> None:
    rows = read(tmp_path, "scored-pairs", PAIRS, label_range=(-5, 5))
    assert rows.texts == [("a b", "c d"), ("e f", "g h"), ("i j", "k l")]
    assert rows.labels is not None
    assert rows.labels.tolist() == [1.0, 0.5, 0.75]
    rows = read(tmp_path, "scored-pairs", PAIRS)               # without a range: the one that is there
    assert rows.labels is not None
    assert rows.labels.tolist() == [1.0, 0.0, 0.5]
    assert rows.seen["labels"]["range"] == [0, 5]


def test_several_judges_are_averaged_and_their_agreement_is_reported(tmp_path: Path) -> None:
    text = "a\tb\t0\t1\t0\nc\td\t2\t2\t4\ne\tf\t4\t5\t2\n"
    rows = read(tmp_path, "scored-pairs", text, columns=(0, 1, 2, 3, 4), label_range=(0, 5))
    assert rows.labels is not None
    assert rows.labels.tolist() == pytest.approx([1 / 15, 8 / 15, 11 / 15])
    assert rows.seen["labels"]["judges"] == 3
    assert rows.seen["labels"]["agreement"] == pytest.approx(100 * (1 + 0.5 + 0.5) / 3)


@pytest.mark.parametrize("source", ["csv", "jsonl", "parquet"])
def test_the_kind_of_file_is_what_the_config_says(source: str, tmp_path: Path) -> None:
    import pyarrow as pa

    names = ["sentence1", "sentence2", "label"]
    table = [("a, b", "c", 1), ("d", "e", 0)]
    text = {
        "csv": '"sentence1","sentence2","label"\n"a, b",c,1\nd,e,0\n',
        "jsonl": "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in table),
        "parquet": "",
    }[source]
    chosen = config(tmp_path, "binary-pairs", text, columns=None, source=source)
    if source == "parquet":
        columns = [list(column) for column in zip(*table, strict=True)]
        pq.write_table(pa.table(dict(zip(names, columns, strict=True))), chosen.source.path)
    rows = read_rows(chosen)
    assert rows.texts == [("a, b", "c"), ("d", "e")]
    assert rows.labels is not None
    assert rows.labels.tolist() == [1, 0]


def test_inferences_become_triplets_of_a_premise_an_entailment_and_a_contradiction(tmp_path: Path) -> None:
    text = (
        "p\tyes 1\tentailment\np\tyes 2\tENTAILMENT\np\tyes 3\t0\np\tno 1\tcontradiction\np\tno 2\t2\np\tso\tneutral\n"
        "q\tyes\t0\nq\tso\t-\nr\tno\t2\n"
    )
    rows = read(tmp_path, "nli", text)
    assert rows.texts == [("p", "yes 1", "no 1"), ("p", "yes 2", "no 2"), ("p", "yes 3", "no 1")]
    assert rows.labels is None
    assert rows.seen["inferences"] == {"contradiction": 3, "entailment": 4, "neutral": 1, "unlabelled": 1}
    assert (rows.seen["premises"], rows.seen["premises_with_both"]) == (3, 1)


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("scored-pairs", "a\tb\t1\nc\td\t6\n", {"label_range": (0, 5)},
     r"line 2: the label 6 is outside corpus\.label_range=\[0, 5\]; mend it"),
    ("scored-pairs", "a\tb\tx\n", {}, "line 1: the score 'x' is no number"),
    ("scored-pairs", "a\tb\t1\nc\td\t1\n", {}, "corpus: all 2 labels are 1, so there is nothing to learn"),
    ("binary-pairs", "a\tb\t1\nc\td\t2\n", {}, "line 2: the label 2 is neither 0 nor 1; .*scored-pairs"),
    ("binary-pairs", "a\tb\t1\nc\td\t1\n", {}, "corpus: all 2 labels are 1"),
    ("triplets", "a\tb\tc\nd\t \te\n", {}, "line 2: an empty sentence"),
    ("triplets", '{"a": "b", "p": "c", "n": null}\n', {"source": "jsonl", "columns": ("a", "p", "n")},
     "line 1: an empty sentence"),
    ("nli", "a\tb\tmaybe\n", {}, "line 1: the label 'maybe' is no inference"),
    ("nli", "a\tb\t0\nc\td\t2\n", {}, "no premise of 2 has both"),
    ("triplets", "a\tb\n", {}, "no column 2"),
    ("triplets", "", {}, "rows|column"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "options", "message"), WRONG)
def test_what_is_wrong_is_said_before_anything_runs(
    kind: str, text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as error:
        check_labelled(config(tmp_path, kind, text, **options))
    assert "\n" not in str(error.value)


def test_columns_must_be_as_many_as_the_rows_need(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"has 2 columns; these rows need 3, such as \[anchor, positive, neg"):
        config(tmp_path, "triplets", "", columns=(0, 1))
    with pytest.raises(ValidationError, match="need 3 or more, such as"):
        config(tmp_path, "scored-pairs", "", columns=(0, 1))


def test_exact_duplicates_are_dropped_and_other_labels_of_a_pair_counted(tmp_path: Path) -> None:
    text = "a b\tc d\t5\na  b\tc d\t5\nc d\ta b\t5\na b\tc d\t4\ne\tf\t0\n"
    _, texts, statistics = prepare(tmp_path, config(tmp_path, "scored-pairs", text))
    assert len(texts) == 3
    assert (statistics["rows"], statistics["duplicates"], statistics["conflicting"], statistics["kept"]) == (5, 2, 1, 3)


def test_pairs_that_are_scored_are_dropped_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    scored = load_pairs(None, "graded-sample")
    first, second = scored.first[0], scored.second[0]
    text = f"{second.upper()} !\t{first}\t1\n{first}\tanother sentence\t0\nthis\tthat\t1\n"
    _, texts, statistics = prepare(tmp_path, config(tmp_path, "binary-pairs", text))
    assert sorted(texts) == sorted([[first, "another sentence"], ["this", "that"]])
    assert statistics["pairs_in_evaluation_data"] == 1
    assert statistics["rows_with_a_sentence_in_evaluation_data"] == 2
    _, texts, statistics = prepare(tmp_path, config(tmp_path, "binary-pairs", text, exclude_evaluation=False))
    assert (len(texts), statistics["pairs_in_evaluation_data"], statistics["kept"]) == (3, 1, 3)


def test_rows_are_tokenised_in_a_seeded_order_and_sampled_from_its_start(tmp_path: Path) -> None:
    text = "".join(f"one {at}\ttwo {at}\tthree {at}\n" for at in range(50))
    chosen = config(tmp_path, "triplets", text)
    rows, texts, _ = prepare(tmp_path, chosen)
    assert texts == prepare(tmp_path, chosen)[1] != prepare(tmp_path, chosen, seed=2)[1]
    few = config(tmp_path, "triplets", text, sample=7)
    assert prepare(tmp_path, few)[1] == texts[:7]
    tokenizer = load_tokenizer(TOKENIZER)
    batch = rows.batch(np.array([4, 9]), pad=0)
    wanted = [texts[row][member] for member in range(3) for row in (4, 9)]         # all first members first
    for ids, mask, sentence in zip(batch.input_ids, batch.attention_mask, wanted, strict=True):
        assert ids[mask.bool()].tolist() == tokenizer(sentence)["input_ids"]
    assert (len(rows), rows.members, batch.labels) == (50, 3, None)


def test_a_batch_of_pairs_has_their_labels_and_knows_equal_sentences(tmp_path: Path) -> None:
    rows, texts, _ = prepare(tmp_path, config(tmp_path, "scored-pairs", "a\tb\t5\na\tc\t0\nd\tb\t1\n"))
    batch = rows.batch(np.arange(3), pad=0)
    by_pair = {("a", "b"): 1.0, ("a", "c"): 0.0, ("d", "b"): 0.2}
    assert batch.labels is not None
    assert batch.labels.tolist() == pytest.approx([by_pair[tuple(pair)] for pair in texts])
    assert batch.text_ids is not None
    flat = [pair[member] for member in range(2) for pair in texts]
    same = batch.text_ids[:, None] == batch.text_ids[None, :]
    assert same.tolist() == [[one == other for other in flat] for one in flat]


@pytest.mark.shared
def test_the_train_split_of_sts_b_is_read_and_rid_of_its_own_test_pairs(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "senteval"
    chosen = TypeAdapter(LabelledConfig).validate_python({
        "kind": "scored-pairs",
        "label_range": (0, 5),
        "source": {
            "kind": "tsv", "columns": (5, 6, 4), "path": str(data / "downstream/STS/STSBenchmark/sts-train.csv"),
        },
    })  # fmt: skip
    job = LabelledJob(
        corpus=chosen, tokenizer=TOKENIZER, max_length=32, seed=0, validation=None,
        evaluate=EvaluateConfig(data=str(data), sts=("STS-B",)),
    )  # fmt: skip
    rows = prepare_labelled(job, Context(tmp_path))
    statistics = json.loads((tmp_path / "statistics.json").read_text())
    assert (statistics["rows"], statistics["duplicates"], statistics["pairs_in_evaluation_data"]) == (5749, 45, 20)
    assert rows.rows == statistics["kept"] == 5684
