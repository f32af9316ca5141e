import math
from collections.abc import Sequence

import numpy as np
import pytest

from stages.evaluate.geometry import alignment, anisotropy, geometry, uniformity, variance_share
from stages.evaluate.sts import ScoredPairs


def unit(rows: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, 5))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_alignment_is_the_papers_mean_squared_distance() -> None:
    first, second = unit(6, 0), unit(6, 1)
    distances = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in zip(first, second, strict=True)]
    assert alignment(first, second) == pytest.approx(sum(distances) / 6)
    assert alignment(first, first) == 0


def test_uniformity_is_the_papers_log_of_mean_potentials_over_pairs() -> None:
    vectors = unit(7, 2)
    potentials = [
        math.exp(-2 * np.linalg.norm(vectors[i] - vectors[j]) ** 2) for i in range(7) for j in range(7) if i < j
    ]
    assert uniformity(vectors) == pytest.approx(math.log(sum(potentials) / len(potentials)))


def test_anisotropy_is_the_mean_cosine_of_different_sentences() -> None:
    vectors = unit(7, 3)
    cosines = [float(vectors[i] @ vectors[j]) for i in range(7) for j in range(7) if i != j]
    assert anisotropy(vectors) == pytest.approx(sum(cosines) / len(cosines))
    assert anisotropy(np.ones((3, 1))) == pytest.approx(1)


def test_the_share_of_variance_is_that_of_the_largest_principal_components() -> None:
    vectors = unit(40, 4) * np.array([9, 1, 1, 1, 1])
    singular = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False) ** 2
    assert variance_share(vectors, 1) == pytest.approx(singular[0] / singular.sum())
    assert variance_share(vectors, 3) == pytest.approx(singular[:3].sum() / singular.sum())
    assert variance_share(vectors, 10) == pytest.approx(1)


def test_positives_are_pairs_scored_above_four_and_sentences_count_once() -> None:
    vectors = {"a": [2.0, 0], "b": [0, 3.0], "c": [1.0, 1]}
    curves = {"a": [0.0, 1], "b": [0.5, 1], "c": [1.0, 1]}

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.array([vectors[text] for text in texts], np.float32)

    def layers(texts: Sequence[str]) -> np.ndarray:
        return np.array([curves[text] for text in texts], np.float32)

    pairs = ScoredPairs(("a", "a", "b"), ("b", "c", "c"), np.array([4.0, 4.5, 1]), ("test",) * 3)
    found = geometry(pairs, embed, layers)
    assert found["alignment"] == pytest.approx(2 - 2 * math.cos(math.pi / 4))
    assert found["anisotropy"] == pytest.approx((0 + 2 * math.cos(math.pi / 4)) / 3)
    assert found["layer_similarity"] == pytest.approx([0.5, 1])
    none_alike = ScoredPairs(("a", "a"), ("b", "c"), np.array([1.0, 2]), ("test",) * 2)
    assert geometry(none_alike, embed, layers)["alignment"] is None
