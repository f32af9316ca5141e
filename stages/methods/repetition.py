"""Token repetition: a copy of each sentence in which some tokens come twice, so that its length tells less."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from stages.encoder import padded
from stages.methods.base import Batch

# English words that carry grammar rather than meaning; in other languages every token may come twice.
STOP_WORDS = """
a an the this that these those some any each every either neither no all both few many much more most other such
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
herself it its itself they them their theirs themselves one who whom whose which what
am is are was were be been being have has had having do does did doing done will would shall should can could may
might must ought
about above across after against along among around as at before behind below beneath beside between beyond by
down during except for from in inside into like near of off on onto out outside over past since through throughout
to toward towards under until up upon with within without
and but or nor so yet if than then because while although though unless whereas whether when where why how
not only own same too very just also again further once here there now still even ever never
"""


@dataclass(frozen=True)
class LeftOut:
    """Token ids that are not repeated."""

    special: NDArray[np.int64]
    stop_words: NDArray[np.int64]


@lru_cache(maxsize=4)
def left_out(tokenizer: PreTrainedTokenizerFast) -> LeftOut:
    """The special tokens, and the stop words that are one token, small or capital, within a sentence or at its start.

    WordPiece gives the pieces that go on a word ids of their own, so "the" within "lathe" is none of these; BPE shares
    them with the first word of a sentence, so there it is.
    """
    words = [form for word in STOP_WORDS.split() for form in (word, word.capitalize())]
    written = [form for word in words for form in (word, f" {word}")]
    pieces = tokenizer(written, add_special_tokens=False)["input_ids"]
    stop_words = {ids[0] for ids in pieces if len(ids) == 1}
    special = set(tokenizer.all_special_ids)
    return LeftOut(np.array(sorted(special)), np.array(sorted(stop_words - special), dtype=np.int64))


def sentences(batch: Batch) -> Iterator[NDArray[np.int64]]:
    """Each row's tokens without padding, as an array of its own."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    for ids, length in zip(batch.input_ids.numpy(), lengths, strict=True):
        yield ids[:length].copy()


def draw_places(
    random: np.random.Generator, tokens: NDArray[np.int64], left: LeftOut, rate: float, room: int, stop_words: bool
) -> NDArray[np.int64]:
    """Which tokens of a sentence come twice: 0 to max(2, int(rate * n)) of them, each number as likely.

    Args:
        random: of this sentence.
        tokens: (S,) with special tokens; n counts the others.
        left: what is not repeated.
        rate: of n.
        room: tokens that the encoder has positions for beyond S; there are no more repetitions than that, since
            cutting the end would lose what the sentence says there.
        stop_words: whether they may be repeated.

    Returns:
        (R,) ascending and distinct.

    Source: ESimCSE, equations 2 and 3, arXiv:2109.04380; WSSCSE repeats by the same rule.
    """
    word = ~np.isin(tokens, left.special)
    may = word if stop_words else word & ~np.isin(tokens, left.stop_words)
    wanted = int(random.integers(0, max(2, int(rate * int(word.sum()))), endpoint=True))
    places = np.flatnonzero(may)
    chosen: NDArray[np.int64] = np.sort(random.choice(places, min(wanted, len(places), max(0, room)), replace=False))
    return chosen


def repeat(tokens: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(S,) tokens, (R,) places -> (S + R,) tokens with each of the places' twice, and (R,) where the copies lie."""
    times = np.ones(len(tokens), dtype=np.int64)
    times[places] = 2
    return np.repeat(tokens, times), places + 1 + np.arange(len(places))


def with_second(
    batch: Batch, second: Sequence[NDArray[np.int64]], pad: int, hidden: Sequence[NDArray[np.int64]] | None = None
) -> Batch:
    """A batch of n sentences and, after them, n others, padded together; rows of two members.

    Args:
        batch: n rows.
        second: the n others.
        pad: the padding token.
        hidden: what was masked in the others, as long as they; None: nothing.
    """
    first = list(sentences(batch))
    ids, mask = padded([torch.from_numpy(row) for row in (*first, *second)], pad)
    masked = None
    if hidden is not None:
        nothing = [np.full(len(row), -100) for row in first]
        masked, _ = padded([torch.from_numpy(row) for row in (*nothing, *hidden)], -100)
    return Batch(ids, mask, hidden=masked, done=batch.done)
