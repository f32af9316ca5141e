"""The graded sample is what GRADED_SAMPLE.md says it is."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy.stats import spearmanr

import stages.evaluate

FILE = Path(stages.evaluate.__file__).parent / "graded_sample.tsv"
HEADER = "split\tgenre\tphenomenon\tscore\tsentence1\tsentence2"
GENRES = {"news", "captions", "forum", "definitions", "questions"}
PHENOMENA = {
    "paraphrase",
    "low-overlap-paraphrase",
    "negation",
    "role-swap",
    "number-change",
    "detail-change",
    "specificity",
    "same-topic",
    "lexical-trap",
    "unrelated",
}


class Pair(NamedTuple):
    split: str
    genre: str
    phenomenon: str
    score: float
    sentence1: str
    sentence2: str


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    header, *lines = FILE.read_text(encoding="utf-8").splitlines()
    assert header == HEADER
    fields = [line.split("\t") for line in lines]
    assert {len(row) for row in fields} == {6}
    return [Pair(row[0], row[1], row[2], float(row[3]), row[4], row[5]) for row in fields]


def sentences(pairs: list[Pair]) -> list[str]:
    return [sentence for pair in pairs for sentence in (pair.sentence1, pair.sentence2)]


def overlap(pair: Pair) -> float:
    """Jaccard: the words both sentences have, over the words either has; in [0, 1]."""
    one, two = (set(re.findall(r"[\w']+", text.lower())) for text in (pair.sentence1, pair.sentence2))
    return len(one & two) / len(one | two)


def rank_correlation(values: list[float], pairs: list[Pair]) -> float:
    return float(spearmanr(values, [pair.score for pair in pairs]).statistic)


def test_there_are_160_dev_and_240_test_pairs(pairs: list[Pair]) -> None:
    assert Counter(pair.split for pair in pairs) == {"dev": 160, "test": 240}


def test_every_genre_has_eight_pairs_of_every_phenomenon_three_or_four_of_them_dev(pairs: list[Pair]) -> None:
    cells = Counter((pair.genre, pair.phenomenon) for pair in pairs)
    assert cells == {(genre, phenomenon): 8 for genre in GENRES for phenomenon in PHENOMENA}
    dev = Counter((pair.genre, pair.phenomenon) for pair in pairs if pair.split == "dev")
    assert set(dev) == set(cells)
    assert set(dev.values()) == {3, 4}


def test_each_split_takes_two_and_three_fifths_of_every_genre_and_phenomenon(pairs: list[Pair]) -> None:
    for split, fifths in (("dev", 2), ("test", 3)):
        own = [pair for pair in pairs if pair.split == split]
        assert Counter(pair.genre for pair in own) == dict.fromkeys(GENRES, 16 * fifths)
        assert Counter(pair.phenomenon for pair in own) == dict.fromkeys(PHENOMENA, 8 * fifths)


def test_scores_go_from_0_to_5_by_halves_and_each_is_given_at_least_twenty_times(pairs: list[Pair]) -> None:
    given = Counter(pair.score for pair in pairs)
    assert set(given) == set(np.arange(0, 5.5, 0.5))
    assert min(given.values()) >= 20


def test_scores_fit_the_phenomenon(pairs: list[Pair]) -> None:
    for pair in pairs:
        if pair.phenomenon in {"paraphrase", "low-overlap-paraphrase"}:
            assert pair.score >= 4, pair
        elif pair.phenomenon in {"same-topic", "lexical-trap", "unrelated"}:
            assert pair.score <= 1.5, pair
        else:
            assert 1.5 <= pair.score <= 4.5, pair


def test_no_sentence_occurs_twice_in_any_pair_or_split(pairs: list[Pair]) -> None:
    repeated = [text for text, n in Counter(map(str.lower, sentences(pairs))).items() if n > 1]
    assert repeated == []


def test_sentences_are_plain_text_of_5_to_30_words(pairs: list[Pair]) -> None:
    for text in sentences(pairs):
        assert text == " ".join(text.split()), f"odd whitespace: {text!r}"
        assert '"' not in text
        assert text[0].isupper(), text
        assert text[-1] in ".?", text
        assert 5 <= len(text.split()) <= 30, text


@pytest.mark.parametrize("split", ["dev", "test", "all"])
def test_word_overlap_alone_does_not_give_the_score(pairs: list[Pair], split: str) -> None:
    own = [pair for pair in pairs if split in (pair.split, "all")]
    correlation = rank_correlation([overlap(pair) for pair in own], own)
    print(f"\n{split}: Spearman of Jaccard word overlap and score {100 * correlation:.1f}")
    assert 0 < correlation < 0.6


def test_length_does_not_give_the_score(pairs: list[Pair]) -> None:
    total = [float(len(f"{pair.sentence1} {pair.sentence2}".split())) for pair in pairs]
    difference = [float(abs(len(pair.sentence1.split()) - len(pair.sentence2.split()))) for pair in pairs]
    assert abs(rank_correlation(total, pairs)) < 0.2
    assert abs(rank_correlation(difference, pairs)) < 0.2


def test_paraphrases_with_little_overlap_share_fewer_words_than_lexical_traps(pairs: list[Pair]) -> None:
    means = {
        kind: np.mean([overlap(pair) for pair in pairs if pair.phenomenon == kind])
        for kind in ("low-overlap-paraphrase", "lexical-trap", "paraphrase")
    }
    assert means["low-overlap-paraphrase"] < means["lexical-trap"] < means["paraphrase"]
