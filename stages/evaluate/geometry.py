"""How embeddings lie on the unit sphere."""

import numpy as np
from numpy.typing import NDArray

from stages.evaluate.encode import Encoded
from stages.evaluate.sts import ScoredPairs

POSITIVE_ABOVE = 4.0                                           # of 5: pairs scored higher mean the same


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


def geometry(pairs: ScoredPairs, encoded: Encoded, pooling: str) -> dict[str, object]:
    """Alignment of the pairs scored above 4; uniformity, anisotropy and the layer curve of all their sentences.

    Alignment is None where no pair is scored above 4. ``layer_similarity`` has T+1 entries: the mean cosine of each
    layer's [CLS] vector (index 0: the embeddings) with the last layer's, as in APINCSE's figure 3.
    """
    alike = pairs.gold > POSITIVE_ABOVE
    distinct = list(dict.fromkeys(pairs.sentences))
    vectors = _unit(encoded.of(pooling, distinct))
    first, second = _unit(encoded.of(pooling, pairs.first)), _unit(encoded.of(pooling, pairs.second))
    return {
        "alignment": alignment(first[alike], second[alike]) if alike.any() else None,
        "uniformity": uniformity(vectors),
        "anisotropy": anisotropy(vectors),
        "layer_similarity": encoded.layer_similarity[encoded.at(distinct)].mean(axis=0, dtype=np.float64).tolist(),
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
