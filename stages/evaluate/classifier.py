"""Scores of transfer tasks: softmax regressions on frozen embeddings, by SentEval's protocols.

The figures are those of SentEval's classifier without hidden layer (Conneau and Kiela 2018), with the settings that
SimCSE reports with: 10 folds, and the strength of the L2 penalty chosen among 1e-5 to 1e-2. There, Adam goes towards
the minimum and stops early, at the epoch that does best on the very rows that ``dev_accuracy`` is of; here the minimum
itself is found, which is sooner done, and no epoch is chosen. So dev accuracies are a little lower than SentEval's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError
from stages.evaluate.softmax import Array, predictions, regression_path, with_constant
from stages.evaluate.transfer import CLASSES, FOLDS, Labelled, TransferData

REGS = (1e-5, 1e-4, 1e-3, 1e-2)                                # mean cross-entropy + reg/2 |parameters|^2
SEED = 1111                                                    # of SentEval's folds


@dataclass(frozen=True)
class ClassifierTask:
    """What a worker needs to train on some rows, choose the penalty and test on other rows."""

    folder: str                                                # of SPLIT-features.npy and SPLIT-labels.npy
    classes: int
    folds: int                                                 # that choose the penalty; 0: the dev split does
    outer_fold: int | None                                     # the fold of train to test on; None: the test split


@dataclass(frozen=True)
class Outcome:
    """What a worker found."""

    reg: float                                                 # chosen
    dev_accuracy: float                                        # by which it was chosen, percent
    predictions: NDArray[np.int64]                             # of the rows to test on
    labels: NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """Of the test, in percent."""
        return 100 * float((self.predictions == self.labels).mean())


def transfer_scores(
    task: TransferData,
    vectors: Callable[[Sequence[str]], NDArray[np.float32]],
    protocol: Literal["full", "fast"],
    run: Callable[[Sequence[ClassifierTask]], Iterator[Outcome]],
    scratch: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float | int | str]:
    """Score one transfer task; the result does not depend on the number of workers.

    Args:
        task: its sentences and classes.
        vectors: n sentences -> (n, D) embeddings.
        protocol: 10 folds, inside and outside, or 5.
        run: ``select_and_test`` of each task, in their order, wherever that is to be computed.
        scratch: a folder for features, which all workers see; what is written there is of no use later.
        report: called with the classifiers' tasks done and all there are.

    Returns:
        ``test_accuracy`` and ``dev_accuracy`` (by which the penalty was chosen) in percent, both means over the outer
        folds where there is no test set; ``f1`` of MRPC in percent; ``n_train``, ``n_test``, ``protocol``.

    Raises:
        InputError: the embeddings have NaN or infinite numbers, or a classifier does not converge on them.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    for name, split in task.splits.items():
        np.save(scratch / f"{name}-features.npy", _features(task.task, split, vectors))
        np.save(scratch / f"{name}-labels.npy", split.labels)
    folds = 0 if task.selection == "dev" else FOLDS[protocol]
    outer = list(range(folds)) if task.selection == "inner folds" else [None]
    classes = len(CLASSES.get(task.task, ("0", "1")))
    items = [ClassifierTask(str(scratch.absolute()), classes, folds, fold) for fold in outer]
    outcomes = []
    report(0, len(items))
    for outcome in run(items):
        outcomes.append(outcome)
        report(len(outcomes), len(items))
    scores: dict[str, float | int | str] = {
        "n_train": len(task.splits["train"].labels),
        "n_test": sum(len(outcome.labels) for outcome in outcomes),
        "dev_accuracy": float(np.mean([outcome.dev_accuracy for outcome in outcomes])),
        "test_accuracy": float(np.mean([outcome.accuracy for outcome in outcomes])),
        "protocol": "dev" if not folds else f"{folds}-fold{' (fast)' if protocol == 'fast' else ''}",
    }
    return scores | ({"f1": f1_score(outcomes[0].predictions, outcomes[0].labels)} if task.task == "MRPC" else {})


def select_and_test(task: ClassifierTask) -> Outcome:
    """Choose the penalty by the dev split or by folds of the training rows, train on all these, and test.

    As in SentEval, a penalty's accuracy is the mean over the folds, rounded to hundredths of a percent; of equal ones
    the weakest penalty is taken.
    """
    features, labels = _read(task, "train")
    if task.outer_fold is None:
        tested, test_labels = _read(task, "test")
    else:
        rows, test_rows = list(fold_rows(labels, task.folds))[task.outer_fold]
        tested, test_labels = features[test_rows], labels[test_rows]
        features, labels = features[rows], labels[rows]
    inner = [] if not task.folds else list(fold_rows(labels, task.folds))
    judged = [(features[rows], labels[rows]) for _, rows in inner] or [_read(task, "dev")]
    weights = np.ones((len(labels), len(inner) + 1))           # the last regression is trained on all rows
    for fold, (_, rows) in enumerate(inner):
        weights[rows, fold] = 0
    weights /= weights.sum(axis=0)
    regs = sorted(REGS, reverse=True)
    candidates = []
    for reg, parameters in zip(regs, regression_path(features, labels, weights, task.classes, regs), strict=True):
        right = [
            float((predictions(rows, fitted) == truth).mean())
            for (rows, truth), fitted in zip(judged, parameters[: len(judged)], strict=True)
        ]
        accuracy = 100 * float(np.mean(right))
        candidates.append((round(accuracy, 2), -reg, accuracy, predictions(tested, parameters[-1])))
    _, negative, accuracy, predicted = max(candidates, key=lambda each: each[:2])
    return Outcome(-negative, accuracy, predicted, test_labels)


def fold_rows(labels: NDArray[np.int64], folds: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The rows outside and inside of each of SentEval's stratified folds."""
    from sklearn.model_selection import StratifiedKFold  # a second that planning and cached runs do without

    shuffled = StratifiedKFold(n_splits=folds, shuffle=True, random_state=SEED)
    yield from shuffled.split(np.zeros(len(labels)), labels)


def f1_score(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """F1 of class 1 in percent; 0 where it is neither found nor there."""
    from sklearn import metrics

    return 100 * float(metrics.f1_score(labels, predicted, zero_division=0))


def _features(
    task: str, split: Labelled, vectors: Callable[[Sequence[str]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """(n, D) embeddings; of pairs (n, 2D): |u - v| and u * v, as in SentEval."""
    features = vectors(split.first)
    if split.second:
        other = vectors(split.second)
        with np.errstate(over="ignore", invalid="ignore"):
            features = np.concatenate([np.abs(features - other), features * other], axis=1)
    broken = int((~np.isfinite(features).all(axis=1)).sum())
    if broken:
        raise InputError(
            f"{task}: {broken} of {len(features)} embeddings have NaN or infinite numbers, or overflow when they are "
            "multiplied; the encoder's weights are broken or overflow"
        )
    return features


def _read(task: ClassifierTask, split: str) -> tuple[Array, NDArray[np.int64]]:
    """(n, D+1) features with the constant column, and (n,) classes."""
    features = np.load(Path(task.folder) / f"{split}-features.npy", mmap_mode="r")
    return with_constant(features), np.load(Path(task.folder) / f"{split}-labels.npy")
