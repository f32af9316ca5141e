"""The score tables say what they must."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stages.report import best_baseline, geometry_table, markdown, notes, rich_table, score_tables, warnings

STS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")


def score(*spearmans: float, tasks: tuple[str, ...] = STS, **more: Any) -> dict[str, Any]:
    sts: dict[str, Any] = {
        task: {"n": 9, "spearman": value, "pearson": 1.0} for task, value in zip(tasks, spearmans, strict=True)
    }
    sts["avg_spearman"] = float(np.mean(spearmans))
    return {"sts": sts, "transfer": {}, "geometry": {"layer_similarity": [0.1, 0.5, 0.7, 1.0]}} | more


SCORES = {
    "before": {"cls": score(*[20.0] * 7), "mean": score(*[50.0] * 7), "first-last-mean": score(*[49.0] * 6, 59.0)},
    "after": score(*[61.25] * 6, 40.0),
}


def test_after_is_compared_with_the_best_baseline_and_not_with_the_first() -> None:
    (table,) = score_tables(SCORES)
    assert best_baseline(SCORES) == "first-last-mean"
    assert table.header == ("", *STS, "avg")
    assert [row[0] for row in table.rows] == [
        "before, cls", "before, mean", "before, first-last-mean*", "after", "difference to *",
    ]  # fmt: skip
    assert table.best == 2
    assert table.rows[-1][1:] == (*["+12.25"] * 6, "-19.00", "+7.79")


def test_without_training_the_encoder_stands_alone() -> None:
    (table,) = score_tables({"after": score(*[50.0] * 7)})
    assert table.rows == (("encoder", *["50.00"] * 8),)
    assert "best baseline" not in markdown({"after": score(*[50.0] * 7)})


def test_transfer_accuracies_get_a_table_of_their_own() -> None:
    after = score(*[50.0] * 7) | {"transfer": {"MR": {"n_test": 5, "test_accuracy": 81.5}, "avg_accuracy": 81.5}}
    similarity, transfer = score_tables({"after": after})
    assert similarity.header[1:] == (*STS, "avg")
    assert transfer.header[1:] == ("MR", "avg of 1")
    assert transfer.rows == (("encoder", "81.50", "81.50"),)


def test_an_undefined_average_is_a_dash_and_never_the_best() -> None:
    empty = {"sts": {"STS12": {"n": 3, "spearman": None}, "avg_spearman": None}}
    full = score(50.0, tasks=("STS12",))
    (table,) = score_tables({"before": {"cls": empty, "mean": full}, "after": empty})
    assert table.best == 1
    assert table.rows[0] == ("before, cls", "–", "–")
    assert table.rows[-1] == ("difference to *", "–", "–")


def test_the_table_of_the_seven_sets_fits_a_terminal_of_80_columns() -> None:
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(rich_table(score_tables(SCORES)[0]))
    text = terminal.getvalue()
    assert "…" not in text
    assert "before, first-last-mean*" in text
    assert max(map(len, text.splitlines())) <= 80


def test_markdown_has_a_cell_for_each_column_of_each_row() -> None:
    lines = [line for line in markdown(SCORES).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5
    assert {line.count("|") for line in lines} == {len(STS) + 3}


def test_what_limits_the_scores_is_said_beside_them() -> None:
    after = score(
        50.0, tasks=("graded-sample",), n_sentences=4000, n_truncated=12, warnings=["STS12 has 7 pairs, not 3108"]
    )
    said = notes({"after": after})
    assert ["no benchmark" in said[0], "STS12 has 7 pairs" in said[1], "12 of 4,000" in said[2]] == [True] * 3
    assert all(note in markdown({"after": after}) for note in said)
    assert notes({"after": score(*[50.0] * 7, n_sentences=9, n_truncated=0, warnings=[])}) == []


LCQMC = {"n": 9, "spearman": 60.0, "average_precision": 80.0, "n_validation": 5, "accuracy": 75.5, "f1": 70.0}
BQ = {"n": 9, "spearman": 50.0, "average_precision": 66.25}
GRADED = {"n": 9, "spearman": 71.0, "pearson": 70.0}


def similarity(**sets: dict[str, Any]) -> dict[str, Any]:
    return {"sts": {"avg_spearman": None}, "similarity": sets, "transfer": {"avg_accuracy": None}, "geometry": {}}


def test_every_column_of_other_sets_says_its_measure_where_they_differ() -> None:
    scores = {"after": similarity(LCQMC=LCQMC, BQ=BQ, mine=GRADED)}
    (table,) = score_tables(scores)
    assert table.header == ("", "LCQMC\naccuracy", "BQ\navg. prec.", "mine\nSpearman")
    assert table.rows == (("encoder", "75.50", "66.25", "71.00"),)
    assert "| LCQMC accuracy | BQ avg. prec. | mine Spearman |" in markdown(scores)
    terminal = io.StringIO()
    Console(width=80, file=terminal).print(rich_table(table))
    assert "accuracy avg. prec. Spearman" in " ".join(terminal.getvalue().split())


def test_other_sets_of_one_measure_have_it_in_the_title_and_an_average() -> None:
    scores = {"before": {"cls": similarity(a=BQ, b=BQ), "mean": similarity(a=BQ, b=BQ | {"average_precision": 70.0})}}
    (table,) = score_tables(scores | {"after": similarity(a=BQ, b=BQ)})
    assert table.title == "Other sets of pairs: average precision, percent"
    assert table.header == ("", "a", "b", "avg of 2")
    assert table.rows[1] == ("before, mean*", "66.25", "70.00", "68.12")
    assert best_baseline(scores | {"after": similarity(a=BQ, b=BQ)}) == "mean"
    assert score_tables({"after": similarity(a=GRADED)})[0].header == ("", "a")


def test_the_average_of_some_of_the_seven_sets_is_not_called_the_average() -> None:
    def header(*tasks: str) -> tuple[str, ...]:
        return score_tables({"after": score(*[50.0] * len(tasks), tasks=tasks)})[0].header

    assert header(*STS)[-1] == "avg"
    assert header(*STS[:3])[-1] == "avg of 3"
    assert header("graded-sample")[-1] == "avg"


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("10-fold", "Test accuracy, percent (10-fold cross-validation)"),
        ("5-fold (fast)", "Test accuracy, percent (fast protocol: 5 folds)"),
        (None, "Test accuracy, percent"),
    ],
)
def test_the_transfer_title_says_the_protocol(protocol: str | None, said: str) -> None:
    transfer = {task: {"test_accuracy": 80.0, "protocol": protocol} for task in ("MR", "SUBJ")}
    (table,) = score_tables({"after": {"transfer": transfer | {"avg_accuracy": 80.0}}})
    assert table.title == said


def test_incomplete_data_are_said_in_the_title_of_their_table_alone_wherever_they_were_met() -> None:
    short = "/data/MRPC/msr_paraphrase_test.txt: 7 rows, where MRPC has 1725"
    transfer = {"transfer": {"MRPC": {"test_accuracy": 70.0}, "avg_accuracy": 70.0}}
    scores = {"before": {"cls": score(*[50.0] * 7, warnings=[short])}, "after": score(*[50.0] * 7) | transfer}
    sts, mrpc = score_tables(scores)
    assert "incomplete" not in sts.title
    assert mrpc.title.endswith("(incomplete data, see the warning)")
    assert mrpc.title in markdown(scores)
    assert warnings(scores) == [short]
    assert f"Warning: {short}" in notes(scores)
    (mr,) = score_tables({"after": {"transfer": {"MR": {"test_accuracy": 70.0}}, "warnings": [short]}})
    assert "incomplete" not in mr.title


def test_what_the_evaluation_noted_is_passed_on_once() -> None:
    noted = score(*[50.0] * 7, notes=["3 sentences of STS12 are in the corpus, too."])
    assert notes({"before": {"cls": noted, "mean": noted}, "after": noted}) == noted["notes"]


def test_the_geometry_of_the_best_baseline_and_the_trained_encoder_is_in_the_markdown() -> None:
    raw = {"alignment": 0.25, "uniformity": -1.5, "anisotropy": 0.6, "variance_share": {"1": 0.3, "3": 0.5, "10": 0.75}}
    trained = {"alignment": None, "uniformity": -2.5, "anisotropy": 0.125, "over": "STS-B"}
    before = {"cls": score(*[10.0] * 7), "mean": score(*[50.0] * 7) | {"geometry": raw}}
    scores = {"before": before, "after": score(*[60.0] * 7) | {"geometry": trained}}
    table = geometry_table(scores)
    assert table is not None
    assert table.rows == (
        ("before, mean", "0.250", "-1.500", "0.600", "30.0", "50.0", "75.0"),
        ("after", "–", "-2.500", "0.125", "–", "–", "–"),
    )
    assert "(STS-B)" in table.title
    assert table.title in markdown(scores)
    assert geometry_table({"after": similarity(mine=GRADED)}) is None


def test_a_table_says_where_sentences_of_its_tasks_were_trained_on() -> None:
    trained_on = {"after": score(*[50.0] * 7, corpus_overlap={"STS12": 12, "MR": 0})}
    assert score_tables(trained_on)[0].title.endswith("(trained on sentences of it, see the notes)")
    (untouched,) = score_tables({"after": score(*[50.0] * 7, corpus_overlap={"STS12": 0, "MR": 3})})
    assert "trained on" not in untouched.title
