"""The pictures are drawn from what the stages write, whatever of it there is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import pictures
from stages.evaluate.config import STS_TASKS
from stages.pictures import (
    cosine_against_gold,
    cosine_by_gold_band,
    gold_bands,
    layer_similarity,
    loss_curve,
    sts_bars,
)
from stages.published import PUBLISHED, backbone_of, published_for

CURVE = {"layer_similarity": [0.1, 0.5, 0.7, 1.0]}


def score(*spearmans: float | None, tasks: tuple[str, ...] = STS_TASKS, **more: Any) -> dict[str, Any]:
    sts: dict[str, Any] = {task: {"spearman": value} for task, value in zip(tasks, spearmans, strict=True)}
    return {"sts": sts | {"avg_spearman": spearmans[0]}, "geometry": CURVE} | more


SCORES = {"before": {"cls": score(*[-20.0] * 7), "mean": score(*[50.0] * 7)}, "after": score(*[61.25] * 6, 4.0)}


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


@pytest.mark.parametrize(
    "sizes",
    [
        {"graded-sample": 340},
        {"STS12": 1200, "MRPC": 90},
        {f"set-{place}": 30 for place in range(9)},
    ],
    ids=["one", "scores and labels", "more than a row"],
)
@pytest.mark.parametrize("draw", [cosine_against_gold, cosine_by_gold_band])
def test_cosines_are_drawn_for_every_task_and_encoder(tmp_path: Path, draw: Any, sizes: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    for name in ("mean", "after"):
        names = np.repeat(list(sizes), list(sizes.values()))
        gold = np.where(names == "MRPC", random.integers(0, 2, len(names)), random.integers(0, 11, len(names)) / 2)
        table = {"task": names, "subset": names, "gold": gold, "cosine": gold / 5 + random.normal(0, 0.2, len(gold))}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    draw({"before, mean": tmp_path / "mean.parquet", "after": tmp_path / "after.parquet"}, tmp_path / "cosine.png")
    assert is_png(tmp_path / "cosine.png")


def test_bands_of_a_five_point_scale_are_points_and_a_score_on_the_border_counts_upwards() -> None:
    gold = np.array([1.0, 1.99, 2.0, 4.0, 5.0])
    bands = {name: inside.tolist() for name, inside in gold_bands(gold)}
    assert list(bands) == ["0–1", "1–2", "2–3", "3–4", "4–5"]
    assert [sum(inside) for inside in bands.values()] == [0, 2, 1, 0, 2]


def test_bands_of_another_scale_are_its_fifths_and_labels_are_classes() -> None:
    fifths = ["0–0.2", "0.2–0.4", "0.4–0.6", "0.6–0.8", "0.8–1"]
    assert [name for name, _ in gold_bands(np.array([0, 0.5, 1.0]))] == fifths
    assert [name for name, _ in gold_bands(np.array([0.0, 100.0]))][-1] == "80–100"
    assert [(name, inside.sum()) for name, inside in gold_bands(np.array([0, 1, 1]))] == [("0", 1), ("1", 2)]
    for gold in (np.linspace(-3, 7, 101), np.linspace(0, 5, 26)):                   # each score is in one band
        assert np.sum([inside for _, inside in gold_bands(gold)], axis=0).tolist() == [1] * len(gold)


@pytest.mark.parametrize("values", [np.full(50, 0.5), np.linspace(-0.4, 0.8, 40), np.array([0.1])])
def test_the_area_under_a_density_is_one(values: Any) -> None:
    at, density = pictures._density(values)
    assert np.trapezoid(density, at) == pytest.approx(1, abs=0.01)
    assert at[np.argmax(np.cumsum(density) >= density.sum() / 2)] == pytest.approx(np.median(values), abs=0.02)


@pytest.mark.parametrize(
    ("scores", "compared"),
    [
        (SCORES, True),
        ({"after": score(*[60.0] * 7)}, True),
        ({"after": score(50.0, 60.0, tasks=STS_TASKS[:2])}, False),
        ({"after": score(50.0, tasks=("graded-sample",))}, False),
        ({"after": score(*[60.0] * 7, warnings=["STS.input.OnWN.txt: 3 pairs, where STS13 OnWN has 561"])}, False),
        ({"after": score(*[60.0] * 7, warnings=["train.tsv: 3 rows, where SST2 has 67349"])}, True),
        (
            {"before": {"cls": score(None, None, tasks=STS_TASKS[:2])}, "after": score(None, 3.0, tasks=STS_TASKS[:2])},
            False,
        ),
    ],
)
def test_published_figures_stand_beside_all_seven_complete_sets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: dict[str, Any], compared: bool
) -> None:
    drawn = []
    really = pictures._draw_published
    monkeypatch.setattr(pictures, "_draw_published", lambda *given: drawn.append(really(*given)))
    sts_bars(scores, "bert-base-uncased", tmp_path / "bars.png")
    assert is_png(tmp_path / "bars.png")
    assert bool(drawn) is compared


def test_published_averages_are_those_of_the_sets() -> None:
    for row in PUBLISHED:
        if row.scores is not None:
            assert len(row.scores) == len(STS_TASKS)
            rounding = 0.031 if row.model == "SBERT-NLI" else 0.0051               # the paper prints 74.89 for 74.86
            assert np.mean(row.scores) == pytest.approx(row.average, abs=rounding), row


@pytest.mark.parametrize(
    ("encoder", "backbone"),
    [
        ("google-bert/bert-base-uncased", "BERT-base"),
        ("bert-large-cased", "BERT-large"),
        ("FacebookAI/roberta-base", "RoBERTa-base"),
        ("/models/roberta-large/", "RoBERTa-large"),
        ("princeton-nlp/unsup-simcse-bert-base-uncased", "BERT-base"),
        ("distilroberta-base", None),
        ("xlm-roberta-base", None),
        ("albert-base-v2", None),
        ("microsoft/deberta-base", None),
        ("all-MiniLM-L6-v2", None),
        ("/bert-base/encoder", None),
    ],
)
def test_papers_with_the_same_backbone_are_compared_with_else_those_with_bert_base(
    encoder: str, backbone: str | None
) -> None:
    assert backbone_of(encoder) == backbone
    assert {row.backbone for row in published_for(encoder)} == {backbone or "BERT-base"}


def test_the_layer_curve_is_drawn_with_and_without_a_baseline(tmp_path: Path) -> None:
    for name, scores in {"both": SCORES, "alone": {"after": SCORES["after"]}}.items():
        layer_similarity(scores, tmp_path / f"{name}.png")
        assert is_png(tmp_path / f"{name}.png")


def test_without_similarity_tasks_the_pictures_say_so(tmp_path: Path) -> None:
    none = pa.table({"task": pa.array([], pa.string()), "gold": pa.array([], pa.float64()), "cosine": []})
    pq.write_table(none, tmp_path / "pairs.parquet")
    cosine_against_gold({"after": tmp_path / "pairs.parquet"}, tmp_path / "cosine.png")
    cosine_by_gold_band({"after": tmp_path / "pairs.parquet"}, tmp_path / "bands.png")
    nothing = {"after": {"sts": {"avg_spearman": None}, "geometry": {}}}
    layer_similarity(nothing, tmp_path / "layers.png")
    sts_bars(nothing, "bert-base-uncased", tmp_path / "bars.png")
    assert all(is_png(tmp_path / f"{name}.png") for name in ("cosine", "bands", "layers", "bars"))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 4000
