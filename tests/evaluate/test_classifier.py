"""The classifiers against SentEval's definitions: its folds, its objective, its way to choose the penalty."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.launch import map_tasks
from stages.evaluate.classifier import REGS, ClassifierTask, f1_score, fold_rows, select_and_test, transfer_scores
from stages.evaluate.softmax import objective, predictions, regression_path, with_constant
from stages.evaluate.transfer import Labelled, TransferData

VECTORS = np.random.default_rng(3).normal(size=(400, 6)).astype(np.float32)


def vectors(sentences: tuple[str, ...]) -> np.ndarray:
    """A sentence is the number of its vector."""
    return VECTORS[[int(text) for text in sentences]]


def labelled(start: int, stop: int, classes: int = 2, second: bool = False) -> Labelled:
    """Sentences whose class follows from their vector, but for some noise."""
    rows = np.arange(start, stop)
    noise = np.random.default_rng(start).normal(size=(len(rows), classes))
    labels = (VECTORS[rows, :classes] * 2 + noise).argmax(axis=1)
    texts = tuple(map(str, rows))
    return Labelled(texts, texts[::-1] if second else (), labels.astype(np.int64))


def scores(task: TransferData, scratch: Path, protocol: str = "fast", embed=vectors) -> dict:
    return transfer_scores(task, embed, protocol, lambda items: map(select_and_test, items), scratch)


def inner(rows: int = 120) -> TransferData:
    return TransferData("MR", "inner folds", {"train": labelled(0, rows)}, ())


def problem(classes: int, count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    return with_constant(VECTORS[:count]), labelled(0, count, classes).labels


def fit(features: np.ndarray, labels: np.ndarray, classes: int, reg: float) -> np.ndarray:
    weights = np.full((len(labels), 1), 1 / len(labels))
    return next(regression_path(features, labels, weights, classes, [reg]))[0]


def plain_objective(parameters: np.ndarray, features: np.ndarray, labels: np.ndarray, reg: float) -> float:
    """Mean cross-entropy + reg/2 (|W|^2 + |b|^2), row by row."""
    total = 0.0
    for row, label in zip(features, labels, strict=True):
        logits = [float(np.dot(weights, row)) for weights in parameters]
        total += float(np.log(sum(np.exp(logit) for logit in logits))) - logits[label]
    return total / len(labels) + reg / 2 * sum(float(number) ** 2 for number in parameters.ravel())


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("reg", REGS)
def test_the_solution_is_the_minimum_of_sentevals_objective(classes: int, reg: float) -> None:
    features, labels = problem(classes)
    found = fit(features, labels, classes, reg)
    assert objective(features, labels, found, reg) == pytest.approx(plain_objective(found, features, labels, reg))

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.tensor(flat.reshape(classes, -1), requires_grad=True)
        logits = torch.tensor(features) @ weights.T
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)) + reg / 2 * (weights**2).sum()
        loss.backward()
        return loss.item(), weights.grad.numpy().ravel()

    precise = {"ftol": 0, "gtol": 1e-9, "maxiter": 5000}
    oracle = minimize(value, np.zeros(found.size), jac=True, method="L-BFGS-B", options=precise)
    assert objective(features, labels, found, reg) <= oracle.fun + 1e-9
    np.testing.assert_allclose(found.ravel(), oracle.x, atol=1e-3)


def test_the_factor_between_reg_and_the_c_of_scikit_learn_is_as_documented() -> None:
    for classes, factor in ((2, 2), (6, 1)):
        features, labels = problem(classes)
        found = fit(features, labels, classes, 1e-2)
        c = factor / (len(labels) * 1e-2)
        theirs = LogisticRegression(C=c, fit_intercept=False, solver="newton-cholesky", tol=1e-10).fit(features, labels)
        ours = found[1:] - found[:1] if classes == 2 else found
        np.testing.assert_allclose(ours, theirs.coef_, atol=1e-3)


def test_it_is_never_worse_than_adam_with_early_stopping() -> None:
    features, labels = problem(2, 100)
    data, truth = torch.tensor(VECTORS[:100]), torch.tensor(labels)
    for reg in REGS:
        torch.manual_seed(1111)
        layer = torch.nn.Linear(6, 2)
        adam = torch.optim.Adam(layer.parameters(), weight_decay=reg)
        for _ in range(40):
            for rows in torch.randperm(100).split(64):
                adam.zero_grad()
                torch.nn.functional.cross_entropy(layer(data[rows]), truth[rows]).backward()
                adam.step()
        adams = np.column_stack([layer.weight.detach().numpy(), layer.bias.detach().numpy()]).astype(np.float64)
        best = objective(features, labels, fit(features, labels, 2, reg), reg)
        assert best <= objective(features, labels, adams, reg)


def test_regressions_fitted_together_are_those_fitted_one_by_one() -> None:
    features, labels = problem(3)
    weights = np.ones((len(labels), 4))
    for fold in range(3):
        weights[fold::3, fold] = 0
    weights /= weights.sum(axis=0)
    paths = zip(REGS, regression_path(features, labels, weights, 3, REGS), strict=True)
    for reg, together in paths:
        for fold in range(4):
            rows = np.flatnonzero(weights[:, fold])
            alone = fit(features[rows], labels[rows], 3, reg)
            np.testing.assert_allclose(together[fold], alone, atol=2e-3)
            values = [objective(features[rows], labels[rows], each, reg) for each in (together[fold], alone)]
            assert values[0] == pytest.approx(values[1], abs=1e-9)


def test_folds_are_those_of_senteval() -> None:
    labels = labelled(0, 97).labels
    theirs = StratifiedKFold(n_splits=10, shuffle=True, random_state=1111).split(VECTORS[:97], labels)
    for (rows, test_rows), (their_rows, their_test_rows) in zip(fold_rows(labels, 10), theirs, strict=True):
        assert rows.tolist() == their_rows.tolist()
        assert test_rows.tolist() == their_test_rows.tolist()


def test_the_penalty_is_chosen_inside_each_training_fold(tmp_path: Path) -> None:
    found = scores(inner(), tmp_path)
    features, labels = with_constant(VECTORS[:120]), labelled(0, 120).labels
    dev, test = [], []
    for rows, test_rows in fold_rows(labels, 5):
        means = []
        for reg in REGS:
            right = []
            for inside, outside in fold_rows(labels[rows], 5):
                fitted = fit(features[rows[inside]], labels[rows[inside]], 2, reg)
                right.append((predictions(features[rows[outside]], fitted) == labels[rows[outside]]).mean())
            means.append(100 * np.mean(right))
        chosen = int(np.argmax(np.round(means, 2)))            # the first, hence weakest, of equal ones
        fitted = fit(features[rows], labels[rows], 2, REGS[chosen])
        dev.append(means[chosen])
        test.append(100 * (predictions(features[test_rows], fitted) == labels[test_rows]).mean())
    assert found == {
        "n_train": 120, "n_test": 120, "dev_accuracy": pytest.approx(np.mean(dev)),
        "test_accuracy": pytest.approx(np.mean(test)), "protocol": "5-fold (fast)",
    }
    assert found["test_accuracy"] > 75


def test_with_a_dev_set_the_penalty_is_chosen_by_it(tmp_path: Path) -> None:
    splits = {"train": labelled(0, 60), "dev": labelled(60, 120), "test": labelled(120, 180)}
    found = scores(TransferData("SST2", "dev", splits, ()), tmp_path)
    features = {name: with_constant(vectors(split.first)) for name, split in splits.items()}
    accuracies = []
    for reg in REGS:
        fitted = fit(features["train"], splits["train"].labels, 2, reg)
        accuracies.append(
            [100 * (predictions(features[name], fitted) == splits[name].labels).mean() for name in ("dev", "test")]
        )
    chosen = int(np.argmax([dev for dev, _ in accuracies]))
    assert [found["dev_accuracy"], found["test_accuracy"]] == pytest.approx(accuracies[chosen])
    assert found["protocol"] == "dev"


def test_six_classes_are_told_apart_and_tested_on_the_test_set(tmp_path: Path) -> None:
    splits = {"train": labelled(0, 300, classes=6), "test": labelled(300, 400, classes=6)}
    found = scores(TransferData("TREC", "folds", splits, ()), tmp_path, "full")
    assert (found["n_train"], found["n_test"], found["protocol"]) == (300, 100, "10-fold")
    train, test = (with_constant(vectors(split.first)) for split in splits.values())
    fitted = [fit(train, splits["train"].labels, 6, reg) for reg in REGS]
    right = [100 * (predictions(test, each) == splits["test"].labels).mean() for each in fitted]
    assert min(abs(found["test_accuracy"] - each) for each in right) < 1e-9
    assert found["test_accuracy"] > 60


def test_pairs_are_told_by_difference_and_product_and_have_an_f1(tmp_path: Path) -> None:
    splits = {"train": labelled(0, 120, second=True), "test": labelled(120, 200, second=True)}
    found = scores(TransferData("MRPC", "folds", splits, ()), tmp_path)
    u, v = vectors(splits["test"].first), vectors(splits["test"].second)
    assert np.load(tmp_path / "test-features.npy").tolist() == np.c_[np.abs(u - v), u * v].tolist()
    outcome = select_and_test(ClassifierTask(str(tmp_path), 2, 5, None))
    assert found["f1"] == f1_score(outcome.predictions, splits["test"].labels)
    assert found["test_accuracy"] == outcome.accuracy


def test_f1_is_that_of_class_1() -> None:
    predicted, labels = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    assert f1_score(predicted, labels) == pytest.approx(100 * 2 / 3)       # precision and recall are 2/3
    assert f1_score(np.zeros(3, int), np.zeros(3, int)) == 0


def test_embeddings_without_information_give_the_larger_class(tmp_path: Path) -> None:
    task = inner(100)
    larger = max(np.bincount(task.splits["train"].labels))
    found = scores(task, tmp_path, embed=lambda texts: np.ones((len(texts), 4), np.float32))
    assert found["test_accuracy"] == pytest.approx(larger, abs=0.5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, broken: float) -> None:
    def embed(sentences: tuple[str, ...]) -> np.ndarray:
        made = vectors(sentences)
        made[2, 1] = broken
        return made

    with pytest.raises(InputError, match="MR: 1 of 120 embeddings have NaN or infinite numbers"):
        scores(inner(), tmp_path, embed=embed)


def test_a_regression_that_does_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.evaluate.softmax.NEWTON_STEPS", 1)
    with pytest.raises(InputError, match=r"the classifier does not converge with regularisation 0\.001 on embeddings"):
        fit(*problem(2), 2, 1e-3)


@pytest.mark.cluster
def test_scores_and_progress_are_the_same_inline_and_on_workers(
    tmp_path: Path, ray_cluster: None
) -> None:
    seen: list[tuple[int, int]] = []
    on_workers = transfer_scores(
        inner(),
        vectors,
        "fast",
        lambda items: map_tasks(select_and_test, items, ClusterConfig()),
        tmp_path,
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 5) for done in range(6)]
    assert scores(inner(), tmp_path) == on_workers
