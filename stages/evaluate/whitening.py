"""BERT-whitening: embeddings rotated and scaled until their covariance is the identity, the largest directions kept.

Source: Su et al., arXiv:2103.15316.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, PositiveInt, model_validator

from cluster.errors import InputError

SENTENCES = 20_000                                             # of the corpus, unless the config says otherwise


class WhiteningConfig(BaseModel, extra="forbid", frozen=True):
    """What whitening is fitted on, and how many directions it keeps."""

    fit: Literal["corpus", "evaluation"] = "evaluation"        # sentences of the corpus, or of the very task scored
    sentences: PositiveInt | None = None                       # of the corpus; null: 20,000
    dimensions: PositiveInt | None = None                      # null: all

    @model_validator(mode="after")
    def _sentences_are_of_the_corpus(self) -> Self:
        if self.sentences is not None and self.fit != "corpus":
            raise ValueError(
                f"sentences={self.sentences} counts sentences of the corpus, but fit={self.fit}; "
                "set evaluate.whitening.fit to corpus, or leave sentences out"
            )
        return self


@dataclass(frozen=True)
class Whitening:
    """``(vectors - mean) @ matrix``."""

    mean: NDArray[np.float64]                                  # (D,)
    matrix: NDArray[np.float64]                                # (D, K)

    @classmethod
    def fit(cls, vectors: NDArray[np.float32], dimensions: int | None) -> Self:
        """Fit on (n, D) embeddings, keeping the ``dimensions`` directions of the largest variance.

        Raises:
            InputError: the embeddings vary in fewer directions than asked for.
        """
        exact = vectors.astype(np.float64)
        wanted = dimensions or exact.shape[1]
        mean = exact.mean(axis=0)
        variances, directions = np.linalg.eigh(np.cov(exact - mean, rowvar=False, bias=True))   # smallest first
        rank = int((variances > variances[-1] * exact.shape[1] * np.finfo(np.float32).eps).sum())
        if wanted > rank:
            raise InputError(
                f"whitening to {wanted} dimensions: {len(exact):,} sentences of {exact.shape[1]} numbers vary in "
                f"{rank} directions only; set evaluate.whitening.dimensions to at most {rank}, or fit on more sentences"
            )
        chosen = np.arange(exact.shape[1])[::-1][:wanted]
        return cls(mean, directions[:, chosen] / np.sqrt(variances[chosen]))

    def __call__(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, D) embeddings -> (n, K) whitened ones."""
        whitened: NDArray[np.float32] = ((vectors - self.mean) @ self.matrix).astype(np.float32)
        return whitened
