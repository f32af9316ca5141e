"""Token repetition: what comes twice, how often, and that each sentence's seed alone decides it."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import BertTokenizer

from stages.methods.base import Batch
from stages.methods.repetition import LeftOut, draw_places, left_out, repeat, with_second
from tests import oracles, tiny

NOTHING = np.array([], dtype=np.int64)
SPECIAL = LeftOut(np.arange(5), NOTHING)


def sentence(words: int) -> np.ndarray:
    """[CLS], distinct words, [SEP]."""
    return np.array([2, *range(5, 5 + words), 3])


def drawn(words: int, rate: float = 0.32, room: int = 100, left: LeftOut = SPECIAL, **options: bool) -> list[list[int]]:
    """The places of 600 draws."""
    options = {"stop_words": True, **options}
    return [
        draw_places(np.random.default_rng(seed), sentence(words), left, rate, room, **options).tolist()
        for seed in range(600)
    ]


def test_a_repeated_sentence_is_the_sentence_with_tokens_twice_and_copies_after_them() -> None:
    for places in ([], [1], [1, 2, 5], [3, 6]):
        tokens, copies = repeat(sentence(6), np.array(places, dtype=np.int64))
        assert tokens.tolist() == oracles.repeated(sentence(6).tolist(), places)
        assert np.delete(tokens, copies).tolist() == sentence(6).tolist()
        assert [tokens[at] == tokens[at - 1] for at in copies] == [True] * len(places)


@pytest.mark.parametrize(("words", "most"), [(1, 1), (2, 2), (5, 2), (10, 3), (30, 9)])
def test_up_to_the_papers_number_of_tokens_is_repeated_each_number_as_often(words: int, most: int) -> None:
    counts = Counter(len(places) for places in drawn(words))
    assert set(counts) == set(range(most + 1))
    if words > 1:                                              # a single word cannot come twice twice
        assert all(abs(count - 600 / (most + 1)) < 60 for count in counts.values())


def test_places_are_distinct_and_no_special_token_is_repeated() -> None:
    seen = Counter()
    for places in drawn(10):
        assert places == sorted(set(places))
        seen.update(places)
    assert set(seen) == set(range(1, 11))
    assert max(seen.values()) < 1.6 * min(seen.values())


def test_stop_words_are_repeated_only_where_a_method_has_it_so() -> None:
    left = LeftOut(np.arange(5), np.array([6, 8]))
    assert {place for places in drawn(4, left=left, stop_words=False) for place in places} == {1, 3}
    assert {place for places in drawn(4, left=left) for place in places} == {1, 2, 3, 4}
    everything = LeftOut(np.arange(5), np.arange(5, 64))
    assert drawn(4, left=everything, stop_words=False) == [[]] * 600


def test_there_are_no_more_repetitions_than_positions() -> None:
    assert max(len(places) for places in drawn(30, room=4)) == 4
    assert drawn(30, room=0) == drawn(30, room=-3) == [[]] * 600
    assert drawn(0) == [[]] * 600


def test_stop_words_are_those_of_the_tokenizer() -> None:
    vocabulary = [*tiny.SPECIAL, "the", "whale", "##the", "because", "of", "un"]
    tokenizer = BertTokenizer(vocab={word: at for at, word in enumerate(vocabulary)})
    left = left_out(tokenizer)
    assert [vocabulary[at] for at in left.stop_words] == ["the", "because", "of"]
    assert left.special.tolist() == [0, 1, 2, 3, 4]


def test_seconds_follow_the_sentences_and_all_are_padded_alike() -> None:
    batch = Batch(torch.tensor([[2, 5, 3, 0], [2, 6, 7, 3]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), done=0.5)
    both = with_second(batch, [np.array([2, 5, 4, 3]), np.array([2, 6, 6, 7, 3])], 0, [np.full(4, -100), np.arange(5)])
    assert both.input_ids.tolist() == [[2, 5, 3, 0, 0], [2, 6, 7, 3, 0], [2, 5, 4, 3, 0], [2, 6, 6, 7, 3]]
    assert both.attention_mask.sum(dim=1).tolist() == [3, 4, 4, 5]
    assert both.hidden is not None
    assert both.hidden.tolist() == [[-100] * 5] * 3 + [[0, 1, 2, 3, 4]]
    assert both.done == 0.5
