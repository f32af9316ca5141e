"""Sentence pairs of any file or hub data set: scored by people, or marked as alike (1) and not alike (0)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError, first_line
from stages.evaluate.config import SimilaritySet
from stages.evaluate.files import Row, number, read_columns, require_columns, sentence, typed_row
from stages.evaluate.sts import ScoredPairs, correlations


@dataclass(frozen=True)
class SimilarityData:
    """One set's pairs; where it is binary, gold is 1 of sentences that are alike and 0 of others."""

    test: ScoredPairs
    validation: ScoredPairs | None                             # chooses the thresholds of a binary set
    binary: bool

    @property
    def sentences(self) -> tuple[str, ...]:
        """Both sentences of all pairs, validation included, with repetitions."""
        return self.test.sentences + (self.validation.sentences if self.validation else ())


def load_similarity(chosen: SimilaritySet) -> SimilarityData:
    """Read a set, and see whether it is binary: every label 0 or 1, in any spelling of these numbers.

    Raises:
        InputError: no such file, data set or column; an empty sentence, a malformed line, a label that is no number;
            labels that are all equal; validation pairs that are not binary, or that no threshold needs.
    """
    test = _load(chosen, chosen.path if chosen.kind == "file" else chosen.split)
    binary = _is_binary(test)
    if chosen.validation is None:
        return SimilarityData(test, None, binary)
    validation = _load(chosen, chosen.validation)
    if not binary:
        raise InputError(
            f"evaluate.similarity {chosen.name}: its test labels are scores, such as {_no_binary_label(test):g}, and "
            f"scores need no threshold; leave validation={chosen.validation} out"
        )
    if not _is_binary(validation):
        raise InputError(
            f"evaluate.similarity {chosen.name}: its test labels are 0 and 1, but validation={chosen.validation} has "
            f"{_no_binary_label(validation):g}; name pairs with labels 0 and 1, or leave validation out"
        )
    _require_other_pairs(chosen, test, validation)
    return SimilarityData(test, validation, binary)


def _require_other_pairs(chosen: SimilaritySet, test: ScoredPairs, validation: ScoredPairs) -> None:
    """Refuse validation pairs that are the test pairs under another name; a few that are in both are usual."""
    tested, validated = (set(zip(pairs.first, pairs.second, strict=True)) for pairs in (test, validation))
    same = len(tested & validated)
    if same > len(tested) / 2:
        raise InputError(
            f"evaluate.similarity {chosen.name}: {same} of {len(tested)} test pairs are in validation="
            f"{chosen.validation}, and a threshold chosen on test pairs would flatter; name other pairs"
        )


def similarity_files(chosen: SimilaritySet) -> list[str]:
    """The local files, or the local folder, that decide the scores; none of a data set on the hub."""
    if chosen.kind == "hub":
        return [chosen.path] if Path(chosen.path).is_dir() else []
    return [chosen.path] if chosen.validation is None else [chosen.path, chosen.validation]


def similarity_scores(
    data: SimilarityData, test: NDArray[np.float64], validation: NDArray[np.float64] | None
) -> dict[str, object]:
    """How well cosines agree with the labels.

    Without validation pairs a binary set gets no accuracy and no F1: they need a threshold, and one chosen on the
    test pairs themselves would flatter.

    Args:
        data: n test pairs, and maybe validation pairs.
        test: (n,) cosines of the test pairs.
        validation: cosines of the validation pairs, where there are any.

    Returns:
        ``n``; ``spearman`` and ``pearson``, x 100; of a binary set ``average_precision`` (the area under the curve of
        precision over recall, which needs no threshold) in percent; with validation pairs ``n_validation``,
        ``accuracy`` and ``f1`` of the test pairs in percent, and ``accuracy_threshold`` and ``f1_threshold``, the
        cosines from which on a pair is taken for alike, each the best of its measure on the validation pairs.

    Raises:
        InputError: all cosines are one value, so that no correlation is defined.
    """
    from sklearn.metrics import accuracy_score, average_precision_score, f1_score  # a second that planning does without

    scores: dict[str, object] = {"n": len(test), **correlations(test, data.test.gold)}
    if not data.binary:
        return scores
    alike = data.test.gold == 1
    scores["average_precision"] = 100 * float(average_precision_score(alike, test))
    if data.validation is None or validation is None:
        return scores
    by_accuracy, by_f1 = best_thresholds(validation, data.validation.gold == 1)
    return scores | {
        "n_validation": len(validation),
        "accuracy": 100 * float(accuracy_score(alike, test >= by_accuracy)),
        "accuracy_threshold": by_accuracy,
        "f1": 100 * float(f1_score(alike, test >= by_f1, zero_division=0)),
        "f1_threshold": by_f1,
    }


def best_thresholds(cosines: NDArray[np.float64], alike: NDArray[np.bool_]) -> tuple[float, float]:
    """The cosines from which on to take a pair for alike, for the highest accuracy and for the highest F1.

    A threshold lies halfway between two neighbouring cosines, so that equal cosines are never parted; or just above
    the highest (no pair is alike), or at the lowest (all are). Of equally good ones it is the highest.

    Args:
        cosines: (n,) of n > 0 pairs.
        alike: (n,) the truth; at least one pair is alike.
    """
    negated, group = np.unique(-cosines, return_inverse=True)
    values = -negated                                          # (m,) distinct, the highest first
    middles = (values[:-1] + values[1:]) / 2
    middles = np.where(middles > values[1:], middles, values[:-1])     # two adjacent floats have no middle
    thresholds = np.concatenate([[np.nextafter(values[0], np.inf)], middles, values[-1:]])
    called = np.concatenate([[0], np.bincount(group)]).cumsum()        # (m + 1,) pairs taken for alike
    right = np.concatenate([[0], np.bincount(group[alike], minlength=len(values))]).cumsum()  # those that are alike
    correct = right + (len(alike) - alike.sum()) - (called - right)
    f1 = 2 * right / (called + alike.sum())
    return float(thresholds[correct.argmax()]), float(thresholds[f1.argmax()])


def _is_binary(pairs: ScoredPairs) -> bool:
    return bool(np.isin(pairs.gold, (0, 1)).all())


def _no_binary_label(pairs: ScoredPairs) -> float:
    return float(pairs.gold[~np.isin(pairs.gold, (0, 1))][0])


def _load(chosen: SimilaritySet, part: str) -> ScoredPairs:
    """The pairs of one file, or of one split of a hub data set."""
    if chosen.kind == "file":
        place = Path(part).expanduser()
        return _pairs(read_columns(place, chosen.columns), place, chosen.name)
    place = Path(f"{chosen.path} ({part})")
    return _pairs(_hub_rows(_open_hub(chosen, part), chosen.columns, place), place, chosen.name)


def _pairs(rows: Iterable[Row], place: Path, name: str) -> ScoredPairs:
    first, second, gold = list[str](), list[str](), list[float]()
    for at, (one, other, label) in rows:
        first.append(sentence(one, place, at))
        second.append(sentence(other, place, at))
        gold.append(number(label, place, at))
    if len(set(gold)) < 2:
        found = f"all {len(gold)} labels are {gold[0]:g}" if gold else "it has no pairs"
        raise InputError(f"{place}: {found}; a set needs two different labels, so check evaluate.similarity {name}")
    return ScoredPairs(tuple(first), tuple(second), np.array(gold, dtype=np.float64), (name,) * len(gold))


def _open_hub(chosen: SimilaritySet, split: str) -> Any:
    from datasets import load_dataset  # slow to import, and files do without
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        return load_dataset(chosen.path, chosen.subset, split=split, revision=chosen.revision)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        generating = isinstance(error, DatasetGenerationError)     # says no more than that; its cause says what
        reason = first_line(error.__cause__ or error) if generating else first_line(error)
        raise InputError(
            f"evaluate.similarity {chosen.name}: {chosen.path} with split {split} cannot be had here: {reason}"
        ) from error


def _hub_rows(data: Any, columns: Sequence[str | int], place: Path) -> list[Row]:
    require_columns(place, columns, data.column_names)
    table = zip(*(data[column] for column in columns), strict=True)
    return [(at, typed_row(row, columns, place, at)) for at, row in enumerate(table, start=1)]
