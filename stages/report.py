"""What a run says to people: the score table, for a terminal and as Markdown, and the pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stages.tracking import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
"""Okabe and Ito's colours, told apart with any colour vision."""

MEASURES = {"sts": ("avg_spearman", "spearman"), "transfer": ("avg_accuracy", "test_accuracy")}
TITLES = {"sts": "Spearman correlation × 100, all pairs of a task together", "transfer": "Test accuracy, percent"}
BEST = "* the best baseline: the encoder before training, under the pooling with the highest average"


@dataclass(frozen=True)
class ScoreTable:
    """A table of formatted cells; ``rows`` start with their label, ``best`` is the row of the best baseline."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None


def score_tables(scores: Mapping[str, Any]) -> list[ScoreTable]:
    """Compare the encoder before and after training, task by task: similarity first, then transfer.

    Args:
        scores: ``{"before": {POOLING: S}, "after": S}`` of ``summary.json``; ``before`` may be missing.

    Returns:
        A table for each kind of task that was scored. The baseline with the best average is marked, and the
        last row is the trained encoder's difference to it, so that training is not credited with bad pooling.
    """
    return [_score_table(scores, kind) for kind in MEASURES if _tasks(scores["after"], kind)]


def _score_table(scores: Mapping[str, Any], kind: str) -> ScoreTable:
    tasks = _tasks(scores["after"], kind)
    before = {pooling: _values(score, kind, tasks) for pooling, score in scores.get("before", {}).items()}
    after = _values(scores["after"], kind, tasks)
    best = best_baseline(scores, kind)
    rows = [
        (f"before, {pooling}" + ("*" if pooling == best else ""), *map(_cell, values))
        for pooling, values in before.items()
    ]
    rows.append(("after" if before else "encoder", *map(_cell, after)))
    if best is not None:
        rows.append(("difference to *", *map(_difference, after, before[best])))
    place = list(before).index(best) if best is not None else None
    return ScoreTable(TITLES[kind], ("", *tasks, "avg"), tuple(rows), place)


def best_baseline(scores: Mapping[str, Any], kind: str = "sts") -> str | None:
    """The pooling that scores best on average before training; None without a baseline."""
    average = MEASURES[kind][0]
    averages = {pooling: _part(score, kind).get(average) for pooling, score in scores.get("before", {}).items()}
    scored = {pooling: value for pooling, value in averages.items() if value is not None}
    return max(scored, key=scored.__getitem__, default=None)


def notes(scores: Mapping[str, Any]) -> list[str]:
    """What a reader must know to judge the scores: which data they are on, and what was cut off."""
    after = scores["after"]
    lines = []
    if "graded-sample" in _tasks(after, "sts"):
        lines.append(
            "graded-sample is a small set written for this project. It is no benchmark: its figures compare encoders "
            "with each other, not with published results."
        )
    lines += [f"Warning: {warning}" for warning in after.get("warnings", [])]
    if after.get("n_truncated"):
        lines.append(
            f"{after['n_truncated']:,} of {after['n_sentences']:,} sentences were longer than the encoder takes "
            "and were cut off."
        )
    return lines


def rich_table(table: ScoreTable) -> "Group":
    """For a terminal of 80 columns: the best baseline in bold, gains in green and losses in red."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    drawn = Table(box=box.SIMPLE, show_edge=False, padding=0)
    for column, name in enumerate(table.header):
        drawn.add_column(name, justify="left" if column == 0 else "right", no_wrap=True)
    for place, row in enumerate(table.rows):
        label, *cells = row
        if table.best is not None and place == len(table.rows) - 1:
            drawn.add_section()
            cells = [f"[{'red' if cell.startswith('-') else 'green'}]{cell}[/]" for cell in cells]
        drawn.add_row(label, *cells, style="bold" if place == table.best else "")
    return Group(table.title, drawn, *([BEST] if table.best is not None else []))    # a table's own would wrap early


def markdown(scores: Mapping[str, Any]) -> str:
    """All tables and notes as Markdown."""
    blocks = []
    for table in score_tables(scores):
        rule = ("---", *["---:"] * (len(table.header) - 1))
        lines = ["| " + " | ".join(cells) + " |" for cells in (table.header, rule, *table.rows)]
        blocks += [table.title, "\n".join(lines), *([BEST] if table.best is not None else [])]
    blocks.append("\n".join(f"- {note}" for note in notes(scores)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _part(score: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    part: Mapping[str, Any] = score.get(kind) or {}
    return part


def _tasks(score: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    return tuple(name for name, value in _part(score, kind).items() if isinstance(value, Mapping))


def _values(score: Mapping[str, Any], kind: str, tasks: Sequence[str]) -> list[float | None]:
    """The score of each task, and their average."""
    average, measure = MEASURES[kind]
    part = _part(score, kind)
    return [*(part.get(task, {}).get(measure) for task in tasks), part.get(average)]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _difference(new: float | None, old: float | None) -> str:
    return "–" if new is None or old is None else f"{new - old:+.2f}"


def loss_curve(metrics_file: Path, path: Path) -> None:
    """Draw the loss and its parts, the validation score with the best step marked, and the learning rate.

    Args:
        metrics_file: the training stage's ``metrics.jsonl``.
        path: the PNG to write.
    """
    records = read_metrics(metrics_file)
    panels = [("loss", 3.0), ("validation_spearman", 1.6), ("learning_rate", 0.9)]
    panels = [(name, height) for name, height in panels if _series(records, name)[0].size or name == "loss"]
    figure, axes = _figure(len(panels), 1, (8, 1.6 * sum(height for _, height in panels)), [h for _, h in panels])
    for (name, _), axis in zip(panels, axes[:, 0], strict=True):
        if name == "loss":
            _draw_losses(axis, records)
        elif name == "validation_spearman":
            _draw_validation(axis, records)
        else:
            axis.plot(*_series(records, name), color=GREY)
            axis.set_ylabel("learning\nrate")
            axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("optimizer step")
    figure.align_ylabels()
    _save(figure, path)


def _draw_losses(axis: "Axes", records: list[dict[str, Any]]) -> None:
    """The total and each ``loss_PART``; long noisy curves faint, under their running mean."""
    names = sorted({name for record in records for name in record if name.startswith("loss")})   # the total is first
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        steps, values = _series(records, name)
        label = "total" if name == "loss" else name.removeprefix("loss_").replace("_", " ")
        width = 2.2 if name == "loss" else 1.5
        window = len(values) // 40
        if window > 1:
            axis.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
            values = np.convolve(values, np.ones(window) / window, mode="valid")
            steps = steps[window // 2 :][: len(values)]        # each mean stands at its middle step
            label += f" (mean of {window})" if name == "loss" else ""
        marker = "o" if len(values) < 15 else ""
        axis.plot(steps, values, color=colour, linewidth=width, label=label, marker=marker, markersize=3)
    axis.set_ylabel("loss (nats)")
    if len(names) > 1:
        axis.legend(frameon=False, ncols=min(len(names), 4), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _draw_validation(axis: "Axes", records: list[dict[str, Any]]) -> None:
    steps, values = _series(records, "validation_spearman")
    axis.plot(steps, values, color=GREEN, marker="o", markersize=3.5)
    best = int(np.argmax(values))
    axis.plot(steps[best], values[best], marker="*", markersize=13, color=ORANGE, linestyle="")
    place = best / max(len(steps) - 1, 1)
    axis.annotate(
        f"best: {values[best]:.2f} at step {steps[best]:,.0f}",
        (steps[best], values[best]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
        color=ORANGE,
    )
    axis.set_ylabel("validation\nSpearman × 100")
    axis.margins(y=0.3)


def cosine_against_gold(pairs: Mapping[str, Path], path: Path) -> None:
    """Draw every pair's cosine against its gold score: a column a task, a row an encoder.

    Args:
        pairs: label of an encoder -> its ``pairs-POOLING.parquet`` (columns task, gold, cosine), such as
            ``{"before, mean": ..., "after": ...}``; encoders stand side by side where there is one task.
        path: the PNG to write.

    The line joins the mean cosines of tenths of the gold scale; the title's Spearman is over all pairs.
    """
    import pyarrow.parquet as pq
    from scipy.stats import spearmanr

    tables = {label: pq.read_table(file) for label, file in pairs.items()}
    tasks = list(dict.fromkeys(task for table in tables.values() for task in table["task"].to_pylist()))
    if not tasks:
        _say("no similarity task was scored", path)
        return
    side_by_side = len(tasks) == 1
    rows, columns = (1, len(tables)) if side_by_side else (len(tables), len(tasks))
    panel = 3.6 if side_by_side else 2.4                       # inches
    figure, axes = _figure(rows, columns, (panel * columns + 0.9, panel * rows + 0.6))
    panels = iter(axes.flat)
    for label, table in tables.items():
        names = np.array(table["task"].to_pylist())
        gold, cosine = table["gold"].to_numpy(), table["cosine"].to_numpy()
        for task in tasks:
            axis, inside = next(panels), names == task
            _draw_pairs(axis, gold[inside], cosine[inside])
            correlation = 100 * float(spearmanr(cosine[inside], gold[inside]).statistic)
            axis.set_title(f"{label if side_by_side else task}: {correlation:.1f}", fontsize=10)
            if task == tasks[0] and not side_by_side:
                axis.set_ylabel(f"{label}\ncosine")
    if side_by_side:
        axes[0, 0].set_ylabel("cosine")
    for axis in axes[-1]:
        axis.set_xlabel("gold score")
    figure.suptitle(f"{tasks[0] if side_by_side else 'Cosine against gold'}, Spearman × 100", fontsize=11)
    _save(figure, path)


def _draw_pairs(axis: "Axes", gold: NDArray[np.float64], cosine: NDArray[np.float64]) -> None:
    """Density where there are many pairs, points where there are few; the mean over tenths of the gold scale."""
    if len(gold) > 1000:
        axis.hexbin(gold, cosine, gridsize=(24, 14), bins="log", mincnt=1, cmap="Blues", linewidths=0.2)
    else:
        axis.scatter(gold, cosine, s=9, alpha=0.35, color=BLUE, linewidths=0)
    edges = np.linspace(gold.min(), gold.max(), 11)
    edges[-1] += 1e-9                                          # the highest score belongs to the last tenth
    tenths = [(gold >= low) & (gold < high) for low, high in pairwise(edges)]
    axis.plot(
        [gold[tenth].mean() for tenth in tenths if tenth.any()],
        [cosine[tenth].mean() for tenth in tenths if tenth.any()],
        color=ORANGE, linewidth=1.8,
    )  # fmt: skip


def layer_similarity(scores: Mapping[str, Any], path: Path) -> None:
    """Draw the mean cosine of each layer's [CLS] vector with the last layer's, before and after training.

    Args:
        scores: as for ``score_tables``; the curves are in ``geometry.layer_similarity``.
        path: the PNG to write.

    Source: APINCSE, figure 3.
    """
    after = scores["after"].get("geometry", {}).get("layer_similarity")
    if not after:
        _say("layers are compared on STS-B or the graded sample, which were not scored", path)
        return
    before = next(iter(scores.get("before", {}).values()), None)     # the layers are the same under every pooling
    curves = {"after training" if before else "encoder": (after, BLUE)}
    if before:
        curves = {"before training": (before["geometry"]["layer_similarity"], GREY), **curves}
    figure, axes = _figure(1, 1, (7, 4))
    axis = axes[0, 0]
    for label, (curve, colour) in curves.items():
        axis.plot(range(len(curve)), curve, color=colour, marker="o", markersize=4, label=label)
        hardest = int(np.argmax(curve[1:-1])) + 1 if len(curve) > 2 else 0
        axis.plot(hardest, curve[hardest], marker="o", markersize=10, markerfacecolor="none", color=colour)
    last = len(after) - 1
    axis.set_xticks(range(last + 1), ["emb.", *map(str, range(1, last)), f"{last}\n(last)"])
    axis.set_xlabel("layer (ringed: most like the last one, the hardest negative)")
    axis.set_ylabel("mean cosine of [CLS] with the last layer's")
    axis.legend(frameon=False)
    _save(figure, path)


def _series(records: list[dict[str, Any]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps and values of those records that have a number under this name."""
    points = [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _cycle(n: int) -> list[str]:
    """n colours: black for the total, then distinct ones."""
    colours = ["#000000", BLUE, ORANGE, GREEN, PURPLE, "#56B4E9", "#E69F00", GREY]
    return [colours[place % len(colours)] for place in range(n)]


def _figure(
    rows: int, columns: int, size: tuple[float, float], heights: Sequence[float] | None = None
) -> tuple["Figure", Any]:
    """A figure without a window (safe in any thread) and its (rows, columns) array of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=heights is None, squeeze=False, height_ratios=heights)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#E5E5E5", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _say(text: str, path: Path) -> None:
    """A picture of the reason why there is no picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1.5))
    figure.text(0.5, 0.5, text, ha="center", va="center", color=GREY)
    _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=150)
