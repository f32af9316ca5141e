"""How embeddings lie on the unit sphere."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stages.evaluate.sts import ScoredPairs

POSITIVE_ABOVE = 4.0                                           # of 5: pairs scored higher mean the same
COMPONENTS = (1, 3, 10)


def alignment(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Mean squared distance of pairs that mean the same; 0 at best.

    Args:
        first: (P, D) unit vectors.
        second: (P, D) unit vectors, row i meaning the same as row i of ``first``.

    Source: Wang & Isola, alpha = 2, arXiv:2005.10242.
    """
    return float(np.square(first - second).sum(axis=1).mean())


def uniformity(vectors: NDArray[np.float64]) -> float:
    """Log of the mean Gaussian potential over all pairs of (n, D) unit vectors; the lower, the more evenly spread.

    Source: Wang & Isola, t = 2, arXiv:2005.10242.
    """
    return float(np.log(np.exp(-4 * (1 - _cosines_between(vectors))).mean()))      # |u-v|^2 = 2 - 2 cos


def anisotropy(vectors: NDArray[np.float64]) -> float:
    """Mean cosine over all pairs of (n, D) unit vectors: 0 when no direction is preferred, 1 in a single one.

    Source: Ethayarajh, arXiv:1909.00512, who samples the pairs.
    """
    return float(_cosines_between(vectors).mean())


def variance_share(vectors: NDArray[np.float64], components: int) -> float:
    """Share of the variance of (n, D) unit vectors, in [0, 1], that lies in their first principal components.

    Near ``components / D`` where no direction is preferred; some few directions have most of it in raw encoders.

    Source: Mu & Viswanath, arXiv:1702.01417, on word vectors.
    """
    variances = np.linalg.eigvalsh(np.atleast_2d(np.cov(vectors, rowvar=False)))[::-1]     # largest first
    total = float(variances.sum())
    return float(variances[:components].sum()) / total if total > 0 else 1.0


def geometry(
    pairs: ScoredPairs,
    embed: Callable[[Sequence[str]], NDArray[np.float32]],
    layer_similarity: Callable[[Sequence[str]], NDArray[np.float32]],
) -> dict[str, object]:
    """Alignment of the pairs scored above 4; uniformity, anisotropy and the layer curve of all their sentences.

    Args:
        pairs: scored from 0 to 5.
        embed: n sentences -> (n, D) embeddings.
        layer_similarity: n sentences -> (n, T+1) cosines of each layer's [CLS] vector with the last layer's.

    Returns:
        ``alignment`` (None where no pair is scored above 4), ``uniformity``, ``anisotropy``, ``variance_share`` of the
        first 1, 3 and 10 principal components, and ``layer_similarity``: T+1 mean cosines (index 0: the embeddings),
        as in APINCSE's figure 3.
    """
    alike = pairs.gold > POSITIVE_ABOVE
    distinct = list(dict.fromkeys(pairs.sentences))
    vectors = _unit(embed(distinct))
    first, second = _unit(embed(pairs.first)), _unit(embed(pairs.second))
    return {
        "alignment": alignment(first[alike], second[alike]) if alike.any() else None,
        "uniformity": uniformity(vectors),
        "anisotropy": anisotropy(vectors),
        "variance_share": {str(count): variance_share(vectors, count) for count in COMPONENTS},
        "layer_similarity": layer_similarity(distinct).mean(axis=0, dtype=np.float64).tolist(),
    }


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows of length 1; a zero row stays zero."""
    exact = vectors.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    unit: NDArray[np.float64] = exact / np.where(norms > 0, norms, 1)
    return unit


def _cosines_between(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The n(n-1)/2 cosines of different rows."""
    cosines: NDArray[np.float64] = (vectors @ vectors.T)[np.triu_indices(len(vectors), k=1)]
    return cosines
