"""The order of the training sentences, and how it splits over workers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.batches import TokenisedSentences, global_rows, own_share, row_seeds
from tests import tiny


@dataclass
class Rank:
    """As much of a world as a share depends on."""

    rank: int
    size: int


@pytest.fixture
def sentences(tmp_path: Path) -> TokenisedSentences:
    return TokenisedSentences.read(tiny.corpus(tmp_path / "corpus", 25).folder)


def test_sentences_come_back_as_written_in_the_order_of_the_files(sentences: TokenisedSentences) -> None:
    wanted = tiny.token_lists(25, seed=0)
    assert len(sentences) == 25
    for row, tokens in enumerate(wanted):
        batch = sentences.batch(np.array([row]), pad=0)
        assert batch.input_ids.tolist() == [tokens]
        assert batch.attention_mask.tolist() == [[1] * len(tokens)]


def test_a_batch_is_padded_to_its_longest_sentence_and_masked(sentences: TokenisedSentences) -> None:
    rows, wanted = np.array([7, 3, 20, 11]), tiny.token_lists(25, seed=0)
    batch = sentences.batch(rows, pad=9)
    longest = max(len(wanted[row]) for row in rows)
    for ids, mask, row in zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), rows, strict=True):
        missing = longest - len(wanted[row])
        assert ids == wanted[row] + [9] * missing
        assert mask == [1] * len(wanted[row]) + [0] * missing
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64


def test_an_epoch_shows_no_sentence_twice_and_leaves_out_less_than_a_batch() -> None:
    for epoch in range(3):
        shown = np.concatenate([global_rows(103, 10, 10 * epoch + step, seed=0) for step in range(10)])
        assert len(shown) == len(set(shown.tolist())) == 100
        assert set(shown.tolist()) <= set(range(103))


def test_epochs_differ_in_order_and_in_what_they_leave_out() -> None:
    orders = [np.concatenate([global_rows(103, 10, 10 * epoch + step, 0) for step in range(10)]) for epoch in (0, 1)]
    assert orders[0].tolist() != orders[1].tolist()
    assert set(orders[0].tolist()) != set(orders[1].tolist())


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    forwards = [global_rows(50, 8, step, seed=3).tolist() for step in range(14)]
    torch.manual_seed(99)
    np.random.seed(99)
    backwards = [global_rows(50, 8, step, seed=3).tolist() for step in reversed(range(14))]
    assert forwards == backwards[::-1]
    assert forwards != [global_rows(50, 8, step, seed=4).tolist() for step in range(14)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_all_workers_are_the_global_batch_in_order(size: int) -> None:
    rows = global_rows(50, 8, step=2, seed=0)
    shares = [own_share(rows, Rank(rank, size)) for rank in range(size)]  # type: ignore[arg-type]
    assert {len(share) for share in shares} == {8 // size}
    assert np.concatenate(shares).tolist() == rows.tolist()


def test_each_row_of_each_step_has_a_seed_of_its_own_that_the_run_and_the_step_decide() -> None:
    seeds = np.concatenate([row_seeds(8, step, seed) for step in range(20) for seed in range(3)])
    assert len(set(seeds.tolist())) == 8 * 20 * 3
    np.testing.assert_array_equal(row_seeds(8, 5, 1), row_seeds(8, 5, 1))
