"""The pictures of a run: losses, cosines against gold scores, scores beside published ones, layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stages.evaluate.config import STS_TASKS
from stages.published import backbone_of, published_for
from stages.report import best_baseline, is_incomplete
from stages.tracking import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
"""Okabe and Ito's colours, told apart with any colour vision."""

BANDS = 5                                                      # of the gold scale
IN_A_ROW = 7                                                   # panels: the sets of the papers' tables
WRAPPED = 4                                                    # panels a row, where there are more


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


@dataclass(frozen=True)
class _Panel:
    """The pairs of one set under one encoder."""

    task: str
    encoder: str
    gold: NDArray[np.float64]                                  # (P,)
    cosine: NDArray[np.float64]                                # (P,)

    @property
    def binary(self) -> bool:
        return bool(np.isin(self.gold, (0, 1)).all())


def cosine_against_gold(pairs: Mapping[str, Path], path: Path) -> None:
    """Draw every pair's cosine against its gold score: a column a task, a row an encoder.

    Args:
        pairs: label of an encoder -> its ``pairs-POOLING.parquet`` (columns task, gold, cosine), such as
            ``{"before, mean": ..., "after": ...}``; encoders stand side by side where there is one task.
        path: the PNG to write.

    The line joins the mean cosines of tenths of the gold scale; the title's Spearman is over all pairs.
    """
    from scipy.stats import spearmanr

    def draw(axis: "Axes", panel: _Panel) -> str:
        _draw_pairs(axis, panel)
        axis.set_xlabel("gold label" if panel.binary else "gold score")
        return f"{100 * float(spearmanr(panel.cosine, panel.gold).statistic):.1f}"

    _draw_panels(pairs, path, "cosine against gold, Spearman × 100", draw, "cosine", cosine_axis="y")


def _draw_pairs(axis: "Axes", panel: _Panel) -> None:
    """Density where there are many pairs, points where there are few; the mean over tenths of the gold scale."""
    gold, cosine = panel.gold, panel.cosine
    if panel.binary:
        sides = np.array([-0.3, 0.3, 0.7, 1.3])                # a column for either label, and nothing between them
        axis.hist2d(gold, cosine, bins=(sides, np.linspace(-1, 1, 61)), cmin=1, cmap="Blues", norm="log")
        axis.set_xticks([0, 1])
        axis.set_xlim(-0.5, 1.5)
    elif len(gold) > 1000:
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


def cosine_by_gold_band(pairs: Mapping[str, Path], path: Path) -> None:
    """Draw how the cosines of each band of the gold scale are spread: a column a task, a row an encoder.

    Args:
        pairs: as for ``cosine_against_gold``.
        path: the PNG to write.

    A curve is the density of one band's cosines, whatever the number of its pairs; its dot is the median. Bands are
    0-1 to 4-5 of a five-point scale (a score on the border counts to the higher band), fifths of any other scale,
    or the two classes. The further apart the curves, the better an encoder tells degrees of likeness.

    Source: the density plots in the appendix of SimCSE, arXiv:2104.08821.
    """
    _draw_panels(
        pairs, path, "spread of the cosines in each band of the gold score; dot: median", _draw_bands,
        "gold score", cosine_axis="x",
    )  # fmt: skip


def gold_bands(gold: NDArray[np.float64]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Name and members (P,) of each band of P gold scores, lowest first, as ``cosine_by_gold_band`` says."""
    if np.isin(gold, (0, 1)).all():
        return [("0", gold == 0), ("1", gold == 1)]
    five_points = gold.min() >= 0 and 4 < gold.max() <= 5
    edges = np.linspace(0, 5, BANDS + 1) if five_points else np.linspace(gold.min(), gold.max(), BANDS + 1)
    place = np.clip(np.searchsorted(edges, gold, side="right") - 1, 0, BANDS - 1)
    return [(f"{low:.3g}–{high:.3g}", place == band) for band, (low, high) in enumerate(pairwise(edges))]


def _draw_bands(axis: "Axes", panel: _Panel) -> str:
    """One curve above the other, the highest band on top, darker the more alike."""
    from matplotlib import colormaps

    bands = gold_bands(panel.gold)
    curves = [_density(panel.cosine[inside]) for _, inside in bands]
    height = 0.92 / max(density.max() for _, density in curves)
    for place, ((_, inside), (at, density)) in enumerate(zip(bands, curves, strict=True)):
        if inside.any():
            colour = colormaps["YlGnBu"](0.3 + 0.65 * place / (len(bands) - 1))
            axis.fill_between(at, place, place + height * density, color=colour, linewidth=0)
            median = float(np.median(panel.cosine[inside]))
            axis.plot(median, place + 0.12, "o", color="white", markersize=3.5, markeredgecolor="black")
    axis.set_yticks(range(len(bands)), [name for name, _ in bands])
    axis.set_ylim(-0.1, len(bands))
    axis.set_xlabel("cosine")
    return ""


def _density(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(256,) places and the density of cosines there: a histogram under a normal kernel, zero without values.

    The kernel is as wide as Silverman's rule has it, but no narrower than a line can be seen.
    """
    edges = np.linspace(-1.1, 1.1, 257)
    at = (edges[1:] + edges[:-1]) / 2
    if not values.size:
        return at, np.zeros_like(at)
    counts, _ = np.histogram(values, edges)
    width = max(0.9 * float(values.std()) * len(values) ** -0.2, 0.012)
    kernel = np.exp(-0.5 * ((at[:, None] - at[None, :]) / width) ** 2)
    return at, kernel @ counts / (len(values) * width * np.sqrt(2 * np.pi))


def _draw_panels(
    pairs: Mapping[str, Path],
    path: Path,
    title: str,
    draw: Callable[["Axes", _Panel], str],
    y_label: str,
    cosine_axis: str,
) -> None:
    """A panel for each set (column) and encoder (row); encoders side by side where there is one set.

    Args:
        pairs: as for ``cosine_against_gold``.
        path: the PNG to write.
        title: over all panels.
        draw: draws one panel and returns what its title says after the name.
        y_label: what the panels' y axis is.
        cosine_axis: x or y, which has the same limits in all panels.
    """
    panels = list(_read_panels(pairs))
    if not panels:
        _say("no similarity task was scored", path)
        return
    tasks = list(dict.fromkeys(panel.task for panel in panels))
    alone = len(tasks) == 1
    columns = len(pairs) if alone else len(tasks) if len(tasks) <= IN_A_ROW else WRAPPED
    rows = 1 if alone else -(-len(tasks) // columns) * len(pairs)
    size = 3.6 if alone else 2.4                               # inches
    figure, axes = _figure(rows, columns, (size * columns + 0.9, size * rows + 0.6))
    limits = _limits(panels)
    empty = set(axes.flat)
    for panel in panels:
        encoder = list(pairs).index(panel.encoder)
        block, column = (0, encoder) if alone else divmod(tasks.index(panel.task), columns)
        row = 0 if alone else block * len(pairs) + encoder
        axis, leftmost = axes[row, column], axes[row, 0]
        empty.discard(axis)
        said = draw(axis, panel)
        axis.set_title(": ".join(filter(None, (panel.encoder if alone else panel.task, said))), fontsize=10)
        axis.set(**{f"{cosine_axis}lim": limits})
        if axis is leftmost:
            axis.set_ylabel(y_label if alone else f"{panel.encoder}\n{y_label}")
        elif _tick_names(axis) == _tick_names(leftmost):
            axis.tick_params(labelleft=False)
        if not alone and encoder < len(pairs) - 1:             # the panel below is of the same set
            axis.set_xlabel("")
            axis.tick_params(labelbottom=False)
    for axis in empty:
        axis.set_visible(False)
    heading = f"{tasks[0]}: {title}" if alone else title[0].upper() + title[1:]
    figure.suptitle(fill(heading, int(10 * figure.get_figwidth())), fontsize=11)     # so many characters an inch
    _save(figure, path)


def _tick_names(axis: "Axes") -> list[str]:
    """What stands at the ticks of the y axis where the ticks are named, else nothing."""
    return [label.get_text() for label in axis.get_yticklabels()]


def _read_panels(pairs: Mapping[str, Path]) -> Iterator[_Panel]:
    import pyarrow.parquet as pq

    for encoder, file in pairs.items():
        table = pq.read_table(file)
        names = np.array(table["task"].to_pylist())
        gold, cosine = table["gold"].to_numpy(), table["cosine"].to_numpy()
        for task in dict.fromkeys(names.tolist()):
            yield _Panel(task, encoder, gold[names == task], cosine[names == task])


def _limits(panels: Sequence[_Panel]) -> tuple[float, float]:
    """The range of the cosines of all panels, without the few outliers that would squeeze the rest."""
    low = min(float(np.quantile(panel.cosine, 0.001)) for panel in panels)
    return max(low - 0.05, -1.02), 1.02


def sts_bars(scores: Mapping[str, Any], encoder: str, path: Path) -> None:
    """Draw the similarity scores, best baseline beside trained encoder, with what papers report as lines.

    Args:
        scores: as for ``stages.report.score_tables``.
        encoder: hub name or folder of the encoder that training started from; it chooses the papers' rows.
        path: the PNG to write.

    Published figures are drawn only where they compare: over all seven sets, each complete.
    """
    after = {task: score for task, score in scores["after"].get("sts", {}).items() if isinstance(score, Mapping)}
    if not after:
        _say("no similarity task was scored", path)
        return
    best = best_baseline(scores, "sts")
    bars = {"after training" if scores.get("before") else "encoder": (scores["after"]["sts"], "#8FBFE0")}
    if best is not None:
        bars = {f"before training, {best}": (scores["before"][best]["sts"], "#C8C8C8"), **bars}
    whole, incomplete = tuple(after) == STS_TASKS, is_incomplete(scores, after)
    averages = [] if len(after) == 1 else ["average" if whole else f"average of {len(after)}"]
    groups = [*after, *averages]
    figure, axes = _figure(1, 1, (1.6 + 1.15 * max(len(groups), 3), 5.2 if whole else 4))
    axis = axes[0, 0]
    width = 0.8 / len(bars)
    for place, (label, (part, colour)) in enumerate(bars.items()):
        values = [part[task]["spearman"] for task in after] + [part["avg_spearman"] for _ in averages]
        at = np.arange(len(groups)) - 0.4 + width * (place + 0.5)
        axis.bar(at, [value or 0 for value in values], width * 0.96, color=colour, label=label)
        for x, value in zip(at, values, strict=True):
            _write_value(axis, float(x), value)
    if whole and not incomplete:
        _draw_published(axis, encoder)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.7, len(groups) - 0.3)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("Spearman × 100" + (" (incomplete data)" if incomplete else ""))
    if len(bars) > 1:
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    _save(figure, path)


def _write_value(axis: "Axes", x: float, value: float | None) -> None:
    """A bar's value at its foot, where no line of a paper lies; above a bar too low to hold it."""
    inside = value is not None and value > 10
    axis.text(
        x, 1.2 if inside else max(value or 0, 0) + 1, "–" if value is None else f"{value:.1f}", ha="center",
        va="bottom", fontsize=8,
    )  # fmt: skip


def _draw_published(axis: "Axes", encoder: str) -> None:
    """Lines across the groups, each paper's in its colour, broken where labelled pairs were trained on."""
    from matplotlib.lines import Line2D

    rows = published_for(encoder)
    handles = []
    for row, colour in zip(rows, _cycle(len(rows)), strict=True):
        style: dict[str, Any] = {"color": colour, "linewidth": 1.6, "linestyle": (0, (2, 1)) if row.labelled else "-"}
        for place, value in enumerate((*(row.scores or [None] * len(STS_TASKS)), row.average)):
            if value is not None:
                axis.plot([place - 0.46, place + 0.46], [value, value], solid_capstyle="butt", **style)
        handles.append(Line2D([], [], label=f"{row.model} {row.average:.2f}", **style))
    title = f"published averages,\n{rows[0].backbone}"
    if backbone_of(encoder) is None:
        title += f" ({Path(encoder).name}\nis another backbone)"
    if any(row.labelled for row in rows):
        title += ";\nbroken: from labelled pairs"
    axis.figure.legend(
        handles=handles, title=title, frameon=False, loc="outside right upper", alignment="left", fontsize=9,
        title_fontsize=9,
    )  # fmt: skip


def layer_similarity(scores: Mapping[str, Any], path: Path) -> None:
    """Draw the mean cosine of each layer's [CLS] vector with the last layer's, before and after training.

    Args:
        scores: as for ``stages.report.score_tables``; the curves are in ``geometry.layer_similarity``.
        path: the PNG to write.

    Source: APINCSE, figure 3.
    """
    after = scores["after"].get("geometry", {}).get("layer_similarity")
    if not after:
        _say("layers are compared on the sentences of a similarity task, and none was scored", path)
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
    """n colours: black for the first, which is the total of the losses, then distinct ones."""
    colours = ["#000000", BLUE, ORANGE, GREEN, PURPLE, "#56B4E9", "#E69F00", GREY]
    return [colours[place % len(colours)] for place in range(n)]


def _figure(
    rows: int, columns: int, size: tuple[float, float], heights: Sequence[float] | None = None
) -> tuple["Figure", Any]:
    """A figure without a window (safe in any thread) and its (rows, columns) array of axes.

    With ``heights`` of the rows, the panels of a column have one x axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=heights is not None, squeeze=False, height_ratios=heights)
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
