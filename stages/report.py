"""What a run says to people: the score tables, for a terminal and as Markdown, and what to know beside them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

KINDS = ("sts", "similarity", "transfer")                      # the parts of a score with tasks of their own
AVERAGES = {"sts": "avg_spearman", "transfer": "avg_accuracy"}
WHOLE = 7                                                      # sets in the papers' averages, of either kind
MEASURES = {                                                   # of the similarity kind: in a title, over a column
    "spearman": ("Spearman correlation × 100", "Spearman"),
    "accuracy": ("accuracy, percent", "accuracy"),
    "average_precision": ("average precision, percent", "avg. prec."),
}
GEOMETRY = ("alignment", "uniformity", "anisotropy")
VARIANCE = ("1", "3", "10")                                    # so many principal components
BEST = "* the best baseline: the encoder before training, under the pooling with the highest average"


@dataclass(frozen=True)
class ScoreTable:
    """A table of formatted cells; ``rows`` start with their label, ``best`` is the row of the best baseline.

    A name in ``header`` may have two lines.
    """

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
    return [_score_table(scores, kind) for kind in KINDS if _tasks(scores["after"], kind)]


def _score_table(scores: Mapping[str, Any], kind: str) -> ScoreTable:
    measures = _measures(scores["after"], kind)
    shown = slice(None if _average_name(kind, measures) else -1)     # all columns, or all but the average
    before = {pooling: _values(score, kind, measures)[shown] for pooling, score in scores.get("before", {}).items()}
    after = _values(scores["after"], kind, measures)[shown]
    best = best_baseline(scores, kind)
    rows = [
        (f"before, {pooling}" + ("*" if pooling == best else ""), *map(_cell, values))
        for pooling, values in before.items()
    ]
    rows.append(("after" if before else "encoder", *map(_cell, after)))
    if best is not None:
        rows.append(("difference to *", *map(_difference, after, before[best])))
    place = list(before).index(best) if best is not None else None
    return ScoreTable(_title(scores, kind, measures), _header(kind, measures), tuple(rows), place)


def _title(scores: Mapping[str, Any], kind: str, measures: Mapping[str, str]) -> str:
    if kind == "sts":
        title = "Spearman correlation × 100, all pairs of a task together"
    elif kind == "transfer":
        title = "Test accuracy, percent" + _protocol(scores["after"])
    else:
        names = [name for measure, (name, _) in MEASURES.items() if measure in measures.values()]
        title = f"Other sets of pairs: {' or '.join(names)}"
    title += " (incomplete data, see the warning)" if is_incomplete(scores, measures) else ""
    return title + (" (trained on sentences of it, see the notes)" if seen(scores).keys() & measures.keys() else "")


def _protocol(score: Mapping[str, Any]) -> str:
    """How transfer tasks were scored, in brackets; what the stage wrote, if it is neither of the known two."""
    written = {task.get("protocol") for task in _part(score, "transfer").values() if isinstance(task, Mapping)}
    names = sorted(str(name) for name in written if name)
    if any("fast" in name for name in names):
        return " (fast protocol: 5 folds)"
    if any(name.startswith("10-fold") for name in names):
        return " (10-fold cross-validation)"
    return f" ({', '.join(names)})" if names else ""


def _header(kind: str, measures: Mapping[str, str]) -> tuple[str, ...]:
    """The tasks, each over its measure where these differ, and what the average is over."""
    names = tuple(measures)
    if len(set(measures.values())) > 1:
        names = tuple(f"{task}\n{MEASURES[measure][1]}" for task, measure in measures.items())
    average = _average_name(kind, measures)
    return ("", *names, average) if average else ("", *names)


def _average_name(kind: str, measures: Mapping[str, str]) -> str | None:
    """``avg`` for what papers average or a set that stands alone; None where there is nothing to average."""
    if kind == "similarity":
        alike = len(measures) > 1 and len(set(measures.values())) == 1
        return f"avg of {len(measures)}" if alike else None
    return "avg" if len(measures) == WHOLE or "graded-sample" in measures else f"avg of {len(measures)}"


def best_baseline(scores: Mapping[str, Any], kind: str | None = None) -> str | None:
    """The pooling that scores best on average before training; None without a baseline.

    Args:
        scores: as for ``score_tables``.
        kind: ``sts``, ``similarity`` or ``transfer``; None: the first of them that was scored.
    """
    kind = kind or next((kind for kind in KINDS if _tasks(scores["after"], kind)), KINDS[0])
    measures = _measures(scores["after"], kind)
    averages = {pooling: _values(score, kind, measures)[-1] for pooling, score in scores.get("before", {}).items()}
    scored = {pooling: value for pooling, value in averages.items() if value is not None}
    return max(scored, key=scored.__getitem__, default=None)


def geometry_table(scores: Mapping[str, Any]) -> ScoreTable | None:
    """How the embeddings lie on the unit sphere, before (best baseline) and after training; None if not measured."""
    best = best_baseline(scores)
    chosen = {f"before, {best}": scores["before"][best]} if best is not None else {}
    chosen["after" if scores.get("before") else "encoder"] = scores["after"]
    measured = {label: score.get("geometry") or {} for label, score in chosen.items()}
    if not any(name in geometry for geometry in measured.values() for name in GEOMETRY):
        return None
    over = scores["after"].get("geometry", {}).get("over")
    title = (
        "Geometry of the embeddings" + (f" ({over})" if over else "") + ": alignment and uniformity (lower is better), "
        "anisotropy (mean cosine), percent of the variance in the first principal components"
    )
    header = ("", *GEOMETRY, *(f"variance in {n}" for n in VARIANCE))
    rows = []
    for label, geometry in measured.items():
        shares = geometry.get("variance_share") or {}
        cells = [_cell(geometry.get(name), 3) for name in GEOMETRY]
        cells += [_cell(None if shares.get(n) is None else 100 * shares[n], 1) for n in VARIANCE]
        rows.append((label, *cells))
    return ScoreTable(title, header, tuple(rows), None)


def warnings(scores: Mapping[str, Any]) -> list[str]:
    """What was wrong with the data of any of the scores, each said once."""
    return list(dict.fromkeys(text for score in _all_scores(scores) for text in score.get("warnings", [])))


def seen(scores: Mapping[str, Any]) -> dict[str, int]:
    """The tasks whose sentences the corpus has, and how many of them."""
    return {task: count for task, count in (scores["after"].get("corpus_overlap") or {}).items() if count}


def is_incomplete(scores: Mapping[str, Any], tasks: Iterable[str]) -> bool:
    """Whether one of the warnings names one of the tasks, as a word: MRPC does not name MR, nor STS12-en STS12."""
    words = [re.compile(rf"(?<![\w-]){re.escape(task)}(?![\w-])") for task in tasks]
    return any(word.search(warning) for warning in warnings(scores) for word in words)


def notes(scores: Mapping[str, Any]) -> list[str]:
    """What a reader must know to judge the scores: which data they are on, and what was cut off."""
    after = scores["after"]
    lines = []
    if "graded-sample" in _tasks(after, "sts"):
        lines.append(
            "graded-sample is a small set written for this project. It is no benchmark: its figures compare encoders "
            "with each other, not with published results."
        )
    lines += [f"Warning: {warning}" for warning in warnings(scores)]
    if after.get("n_truncated"):
        lines.append(
            f"{after['n_truncated']:,} of {after['n_sentences']:,} sentences were longer than the encoder takes "
            "and were cut off."
        )
    if _tasks(after, "transfer"):
        lines.append(
            "Transfer: SentEval's folds and penalties; its regressions are solved exactly, where SentEval stops Adam "
            "early, so accuracies of small sets may differ from SentEval's by a point or two."
        )
    lines += dict.fromkeys(text for score in _all_scores(scores) for text in score.get("notes", []))
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
    for table in filter(None, (*score_tables(scores), geometry_table(scores))):
        rule = ("---", *["---:"] * (len(table.header) - 1))
        header = [name.replace("\n", " ") for name in table.header]
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *table.rows)]
        blocks += [table.title, "\n".join(lines), *([BEST] if table.best is not None else [])]
    blocks.append("\n".join(f"- {note}" for note in notes(scores)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _all_scores(scores: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield scores["after"]
    yield from scores.get("before", {}).values()


def _part(score: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    part: Mapping[str, Any] = score.get(kind) or {}
    return part


def _tasks(score: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    return tuple(name for name, value in _part(score, kind).items() if isinstance(value, Mapping))


def _measures(score: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Task -> the measure that its column shows."""
    if kind != "similarity":
        return dict.fromkeys(_tasks(score, kind), "spearman" if kind == "sts" else "test_accuracy")
    part = _part(score, kind)
    return {
        task: next((name for name in ("accuracy", "average_precision") if name in part[task]), "spearman")
        for task in _tasks(score, kind)
    }


def _values(score: Mapping[str, Any], kind: str, measures: Mapping[str, str]) -> list[float | None]:
    """The score of each task, and their average; None for those that are undefined."""
    part = _part(score, kind)
    values = [part.get(task, {}).get(measure) for task, measure in measures.items()]
    if kind in AVERAGES:
        return [*values, part.get(AVERAGES[kind])]
    complete = values and None not in values
    return [*values, sum(values) / len(values) if complete else None]


def _cell(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _difference(new: float | None, old: float | None) -> str:
    return "–" if new is None or old is None else f"{new - old:+.2f}"
