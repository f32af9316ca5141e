import numpy as np
import pytest

from cluster.errors import InputError
from stages.evaluate.whitening import Whitening, WhiteningConfig


def vectors(n: int, dimensions: int = 5) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.normal(size=(n, dimensions)) @ random.normal(size=(dimensions, dimensions)) + 3).astype(np.float32)


def test_whitened_embeddings_have_mean_zero_and_the_identity_as_covariance() -> None:
    whitened = Whitening.fit(vectors(200), None)(vectors(200)).astype(np.float64)
    np.testing.assert_allclose(whitened.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(whitened.T @ whitened / 200, np.eye(5), atol=1e-3)


def test_it_is_the_papers_svd_of_the_covariance() -> None:
    fitted_on, others = vectors(50), vectors(7)
    mean = fitted_on.astype(np.float64).mean(axis=0)
    covariance = sum(np.outer(row - mean, row - mean) for row in fitted_on.astype(np.float64)) / 50
    u, variances, _ = np.linalg.svd(covariance)
    wanted = (others - mean) @ (u @ np.diag(1 / np.sqrt(variances)))[:, :3]
    found = Whitening.fit(fitted_on, 3)(others)
    np.testing.assert_allclose(np.abs(found), np.abs(wanted), rtol=1e-3)       # directions have no sign
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, rtol=2e-3, atol=1e-3)


def test_fewer_sentences_than_dimensions_are_refused_with_what_would_do() -> None:
    with pytest.raises(InputError, match=r"4 sentences of 5 numbers vary in 3 directions only; set .*at most 3"):
        Whitening.fit(vectors(4), None)
    assert Whitening.fit(vectors(4), 3)(vectors(4)).shape == (4, 3)


def test_a_number_of_corpus_sentences_needs_the_corpus() -> None:
    with pytest.raises(ValueError, match="fit=evaluation"):
        WhiteningConfig(sentences=5)
    assert WhiteningConfig(fit="corpus", sentences=5).sentences == 5
