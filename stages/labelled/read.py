"""From files to rows of sentences and labels, with what is wrong said by file and line."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError, first_line
from stages.corpus.clean import normalise
from stages.corpus.files import find_files, is_url
from stages.evaluate.files import number, read_columns, sentence, typed_row
from stages.labelled.config import (
    BinaryPairsConfig,
    Columns,
    HubRows,
    LabelledConfig,
    NLIConfig,
    RowSource,
    ScoredPairsConfig,
)

_Row = tuple[Path, int, list[str]]                             # file, line from 1, fields

INFERENCES = {
    "entailment": "entailment", "0": "entailment",
    "neutral": "neutral", "1": "neutral",
    "contradiction": "contradiction", "2": "contradiction",
    "-": "unlabelled", "-1": "unlabelled", "": "unlabelled",   # where SNLI's annotators did not agree
}  # fmt: skip
"""How files of natural-language inference spell their labels."""


@dataclass(frozen=True)
class Rows:
    """n rows of two or three sentences, in the order of their files."""

    texts: list[tuple[str, ...]]
    labels: NDArray[np.float64] | None                         # (n,) in [0, 1]; none of triplets
    seen: dict[str, Any]                                       # for the statistics

    def take(self, which: Sequence[int] | NDArray[np.int64]) -> "Rows":
        """The rows at these places."""
        labels = None if self.labels is None else self.labels[np.asarray(which, dtype=np.int64)]
        return Rows([self.texts[at] for at in which], labels, self.seen)


def check_files(source: RowSource) -> list[str]:
    """The local files of a source; none for the hub.

    Raises:
        InputError: there are none, or the path is a URL.
    """
    if isinstance(source, HubRows):
        return []
    if is_url(source.path):
        raise InputError(f"corpus.source.path={source.path}: labelled rows are read from files or the hub; fetch it")
    return find_files(source.kind, source.path)


def read_rows(config: LabelledConfig) -> Rows:
    """Read and check all rows; labels end in [0, 1].

    Raises:
        InputError: no rows, a missing column, an empty sentence, a label that is none; names file and line.
    """
    table = list(_table(config.source, config.columns))
    if not table:
        raise InputError(f"corpus.source.path={config.source.path}: there are no rows")
    texts = [
        tuple(sentence(normalise(text), file, at) for text in values[: config.texts]) for file, at, values in table
    ]
    match config:
        case ScoredPairsConfig():
            labels, seen = _scores(config, table)
            return Rows(texts, labels, seen)
        case BinaryPairsConfig():
            labels = np.array([_binary(values[2], file, at) for file, at, values in table])
            _require_two_labels(labels)
            return Rows(texts, labels, {"labels": {"1": int(labels.sum()), "0": int((1 - labels).sum())}})
        case NLIConfig():
            return _triplets(texts, [_inference(values[2], file, at) for file, at, values in table])
        case _:
            return Rows(texts, None, {})


def _table(source: RowSource, columns: Columns) -> Iterator[_Row]:
    if isinstance(source, HubRows):
        yield from _hub_table(source, columns)
        return
    for file in check_files(source):
        for at, values in read_columns(Path(file), columns, source.kind):
            yield Path(file), at, values


def _hub_table(source: HubRows, columns: Columns) -> Iterator[_Row]:
    from datasets import load_dataset  # seconds that files do without

    try:
        rows = load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except Exception as error:                                 # the library has no common one
        raise InputError(f"corpus.source.path={source.path} cannot be had from the hub: {first_line(error)}") from error
    missing = [str(column) for column in columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"{source.path}: no column {', '.join(missing)}; it has {', '.join(rows.column_names)}; "
            "set corpus.source.columns"
        )
    for at, row in enumerate(rows, start=1):
        yield Path(source.path), at, typed_row([row[column] for column in columns], columns, Path(source.path), at)


def _scores(config: ScoredPairsConfig, table: list[_Row]) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """(n,) means over the judges, from the range of labels to [0, 1], and what the labels were like."""
    judged = np.array([[number(label, file, at) for label in values[2:]] for file, at, values in table])
    low, high = config.label_range or (float(judged.min()), float(judged.max()))
    outside = np.flatnonzero(((judged < low) | (judged > high)).any(axis=1))
    if len(outside):
        file, at, values = table[outside[0]]
        raise InputError(
            f"{file}, line {at}: the label {', '.join(values[2:])} is outside corpus.label_range=[{low:g}, {high:g}]; "
            "mend it, or set the range that labels may have"
        )
    means = judged.mean(axis=1)
    _require_two_labels(means)
    seen: dict[str, Any] = {
        "range": [low, high], "lowest": float(means.min()), "highest": float(means.max()), "mean": float(means.mean()),
    }  # fmt: skip
    if judged.shape[1] > 1:
        seen |= {"judges": judged.shape[1], "agreement": agreement(judged)}
    return (means - low) / (high - low), {"labels": seen}


def agreement(judged: NDArray[np.float64]) -> float | None:
    """The mean of Spearman's correlation (x 100) over all pairs of judges; None if one has a single label for all.

    Args:
        judged: (n, J) labels, J >= 2.
    """
    from scipy.stats import spearmanr  # a second that planning does without

    if (np.ptp(judged, axis=0) == 0).any():
        return None
    pairs = combinations(judged.T, 2)
    return 100 * float(np.mean([spearmanr(first, second).statistic for first, second in pairs]))


def _require_two_labels(labels: NDArray[np.float64]) -> None:
    if np.ptp(labels) == 0:
        raise InputError(
            f"corpus: all {len(labels)} labels are {labels[0]:g}, so there is nothing to learn from them; "
            "name the column of the labels in corpus.source.columns"
        )


def _binary(label: str, file: Path, at: int) -> float:
    value = number(label, file, at)
    if value not in (0, 1):
        raise InputError(
            f"{file}, line {at}: the label {label} is neither 0 nor 1; mend it, or set corpus.kind=scored-pairs"
        )
    return value


def _inference(label: str, file: Path, at: int) -> str:
    known = INFERENCES.get(label.strip().casefold())
    if known is None:
        raise InputError(
            f"{file}, line {at}: the label {label!r} is no inference; it may be entailment, neutral or contradiction, "
            "or 0, 1 or 2 for these"
        )
    return known


def _triplets(texts: list[tuple[str, ...]], labels: list[str]) -> Rows:
    """Every entailment of a premise with one of its contradictions, taken in turn.

    Source: supervised SimCSE, section 4, arXiv:2104.08821.
    """
    by_premise: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (premise, hypothesis), label in zip(texts, labels, strict=True):
        by_premise[premise][label].append(hypothesis)
    triplets: list[tuple[str, ...]] = []
    premises = 0
    for premise, hypotheses in by_premise.items():
        entailed, contradicted = hypotheses["entailment"], hypotheses["contradiction"]
        if entailed and contradicted:
            premises += 1
            triplets += [
                (premise, positive, contradicted[turn % len(contradicted)]) for turn, positive in enumerate(entailed)
            ]
    counts = Counter(labels)
    if not triplets:
        raise InputError(
            f"corpus: no premise of {len(by_premise)} has both an entailment and a contradiction, so there is no "
            f"triplet; there are {counts['entailment']} entailments and {counts['contradiction']} contradictions"
        )
    seen = {"inferences": dict(sorted(counts.items())), "premises": len(by_premise), "premises_with_both": premises}
    return Rows(triplets, None, seen)
