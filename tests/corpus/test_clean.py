"""What a sentence is made of, and which are dropped."""

import numpy as np
import pytest

from stages.corpus.clean import comparison_hashes, count_words, normalise


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (" plain \t text\r", "plain text"),
        ("cafe\u0301", "caf\u00e9"),
        ("soft\u00adhyphen zero\u200bwidth \ufeffmark", "softhyphen zerowidth mark"),
        ("no\u00a0break\u2003em\u3000ideographic\u2028line", "no break em ideographic line"),
        ("bell\x07 nul\x00 next\x85line", "bell nul next line"),
        ("half \ud83d", "half \ufffd"),
        ("\u0645\u06cc\u200c\u062e\u0648", "\u0645\u06cc\u200c\u062e\u0648"),  # Persian needs the non-joiner
        (" \u200b\n", ""),
    ],
)
def test_text_is_normalised(text: str, clean: str) -> None:
    assert normalise(text) == clean


def test_an_ideogram_is_a_word() -> None:
    assert count_words("It's a well-known fact.") == 4
    assert count_words("今天天气很好") == 6
    assert count_words("我用 Python 写") == 4


def test_an_evaluation_sentence_is_known_in_any_case_and_tokenisation() -> None:
    same = comparison_hashes(["Don't stop (now)!", "do n't stop -LRB- now".replace("-LRB-", "("), "DON’T  STOP now…"])
    assert len(np.unique(same)) == 1
    assert len(np.unique(comparison_hashes(["A man plays.", "A man played.", "2 men play.", "3 men play."]))) == 4
