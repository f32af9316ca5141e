"""Sentences and their vectors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Encoded:
    """What one encoder makes of n sentences."""

    rows: dict[str, int]                                       # sentence -> its row below
    vectors: dict[str, NDArray[np.float32]]                    # pooling -> (n, D), not normalised
    layer_similarity: NDArray[np.float32]                      # (n, T+1) cosine of each layer's [CLS] with the last's
    truncated: NDArray[np.bool_]                               # (n,) longer than the encoder was given it

    def of(self, pooling: str, sentences: Iterable[str]) -> NDArray[np.float32]:
        """(n, D) the vectors of n sentences, not normalised."""
        return self.vectors[pooling][self.at(sentences)]

    def at(self, sentences: Iterable[str]) -> list[int]:
        """The rows of ``sentences``."""
        return [self.rows[sentence] for sentence in sentences]

    @classmethod
    def nothing(cls, poolings: Iterable[str]) -> Self:
        """No sentence at all."""
        empty = np.zeros((0, 0), np.float32)
        return cls({}, dict.fromkeys(poolings, empty), empty, np.zeros(0, bool))

    @classmethod
    def joined(cls, parts: Sequence["Encoded"], poolings: Iterable[str]) -> Self:
        """Parts with different sentences, one after the other."""
        full = [part for part in parts if part.rows]
        if not full:
            return cls.nothing(poolings)
        return cls(
            rows={text: row for row, text in enumerate(text for part in full for text in part.rows)},
            vectors={pooling: np.concatenate([part.vectors[pooling] for part in full]) for pooling in poolings},
            layer_similarity=np.concatenate([part.layer_similarity for part in full]),
            truncated=np.concatenate([part.truncated for part in full]),
        )
