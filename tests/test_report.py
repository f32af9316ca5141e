"""The score table says what it must, and the pictures are drawn from what the stages write."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from stages.report import (
    best_baseline,
    cosine_against_gold,
    layer_similarity,
    loss_curve,
    markdown,
    notes,
    rich_table,
    score_tables,
)

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
    assert transfer.header[1:] == ("MR", "avg")
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


@pytest.mark.parametrize("steps", [0, 1, 8, 300])
def test_a_loss_curve_is_drawn_however_few_the_steps(tmp_path: Path, steps: int) -> None:
    lines = [
        {"step": step, "loss": 3 / step, "loss_instance": 1 / step, "loss_negative": 2 / step, "learning_rate": 3e-5}
        for step in range(1, steps + 1)
    ]
    lines += [{"step": step, "validation_spearman": 50 + step / 50} for step in range(25, steps + 1, 25)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert is_png(tmp_path / "loss.png")


@pytest.mark.parametrize("sizes", [{"graded-sample": 340}, {"STS12": 1200, "STS-B": 90}])
def test_cosines_are_drawn_for_every_task_and_encoder(tmp_path: Path, sizes: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    for name in ("mean", "after"):
        names = [task for task, size in sizes.items() for _ in range(size)]
        gold = random.integers(0, 11, len(names)) / 2
        table = {"task": names, "subset": names, "gold": gold, "cosine": gold / 5 + random.normal(0, 0.2, len(gold))}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    pairs = {"before, mean": tmp_path / "mean.parquet", "after": tmp_path / "after.parquet"}
    cosine_against_gold(pairs, tmp_path / "cosine.png")
    assert is_png(tmp_path / "cosine.png")


def test_the_layer_curve_is_drawn_with_and_without_a_baseline(tmp_path: Path) -> None:
    for name, scores in {"both": SCORES, "alone": {"after": SCORES["after"]}}.items():
        layer_similarity(scores, tmp_path / f"{name}.png")
        assert is_png(tmp_path / f"{name}.png")


def test_without_similarity_tasks_the_pictures_say_so(tmp_path: Path) -> None:
    none = pa.table({"task": pa.array([], pa.string()), "gold": pa.array([], pa.float64()), "cosine": []})
    pq.write_table(none, tmp_path / "pairs.parquet")
    cosine_against_gold({"after": tmp_path / "pairs.parquet"}, tmp_path / "cosine.png")
    layer_similarity({"after": {"sts": {"avg_spearman": None}, "geometry": {}}}, tmp_path / "layers.png")
    assert is_png(tmp_path / "cosine.png")
    assert is_png(tmp_path / "layers.png")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000
