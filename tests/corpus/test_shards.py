"""Ranges of hashes cover each hash once."""

import numpy as np
import pytest

from stages.corpus.shards import HashRange


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2**20, 1), (10 * 2**20, 10), (2**26, 16), (2**40, 2**17)])
def test_ranges_are_of_1_to_8_megabytes(size: int, count: int) -> None:
    assert len(HashRange.cover(size)) == count


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_every_hash_is_in_one_range(count: int) -> None:
    edges = [at * 2**64 // count for at in range(count)]
    high = np.unique(np.array([*edges, *(edge + 1 for edge in edges), 0, 2**63, 2**64 - 1], np.uint64))
    slices = [HashRange(index, count).rows(high) for index in range(count)]
    assert [at for part in slices for at in range(part.start, part.stop)] == list(range(len(high)))
