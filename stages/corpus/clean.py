"""From documents to the sentences worth training on, sorted by a seeded hash, in a scratch file a chunk."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import sentencex
import xxhash
from numpy.typing import NDArray

from stages.corpus.config import CorpusConfig
from stages.corpus.sources import Chunk, documents

EXAMPLES = 3                                                   # sentences that the statistics quote, a reason

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_IDEOGRAMS = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_NO_LETTERS = re.compile(r"[\W_]+")


@dataclass
class Cleaned:
    """What became of a chunk."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    size: int = 0                                              # bytes of the sentences that passed, repeated ones too
    file: str | None = None                                    # of those sentences, once each
    overlap: set[int] = field(default_factory=set)             # ``sentence_hash`` of those in the evaluation data

    def add(self, other: "Cleaned") -> None:
        """Take another chunk's counts, overlap and examples in."""
        self.counts += other.counts
        self.size += other.size
        self.overlap |= other.overlap
        for reason, found in other.examples.items():
            self.examples[reason] = sorted({*self.examples.get(reason, []), *found})[:EXAMPLES]


@dataclass(frozen=True)
class Cleaner:
    """Turns a chunk into sentences, in a Ray task."""

    config: CorpusConfig
    seed: int
    evaluation: NDArray[np.uint64]                             # ``comparison_hashes`` of its sentences, sorted
    scratch: Path

    def __call__(self, chunk: Chunk) -> Cleaned:
        """Read, normalise, segment and filter a chunk; write what passes into a new scratch file."""
        found = documents(self.config.source, chunk)
        cleaned = Cleaned(Counter(found.counts))
        sentences = list(self._sentences(found.texts, cleaned.counts))
        cleaned.counts["sentences"] = len(sentences)
        passed = self._filter(sentences, cleaned)
        cleaned.size = sum(len(sentence.encode()) for sentence in passed)
        if passed:
            cleaned.file = str(self.scratch / f"{uuid4().hex}.arrow")
            write_sorted(passed, self.seed, cleaned.file)
        return cleaned

    def _sentences(self, texts: list[str], counts: Counter[str]) -> Iterator[str]:
        counts["documents"] = len(texts)
        for text in texts:
            clean = normalise(text)
            if not clean:
                counts["empty"] += 1
            elif self.config.segment:
                yield from filter(None, map(str.strip, sentencex.segment(self.config.language, clean)))
            else:
                yield clean

    def _filter(self, sentences: list[str], cleaned: Cleaned) -> list[str]:
        quoted: dict[str, list[str]] = {"too_short": [], "too_long": [], "in_evaluation_data": []}
        passed = []
        for sentence in sentences:
            words = count_words(sentence)
            if words < self.config.min_words:
                quoted["too_short"].append(sentence)
            elif words > self.config.max_words:
                quoted["too_long"].append(sentence)
            else:
                passed.append(sentence)
        if len(self.evaluation):
            known = _contains(self.evaluation, comparison_hashes(passed))
            overlap = [passed[at] for at in np.flatnonzero(known)]
            cleaned.overlap = {sentence_hash(text, self.seed) for text in overlap}
            quoted["in_evaluation_data"] = overlap
            if self.config.exclude_evaluation:
                cleaned.counts["in_evaluation_data"] = len(overlap)
                passed = [passed[at] for at in np.flatnonzero(~known)]
        for length in ("too_short", "too_long"):
            cleaned.counts[length] = len(quoted[length])
        for reason, texts in quoted.items():
            drawn = {(xxhash.xxh3_64_intdigest(text.encode(), self.seed & _WORD), text[:200]) for text in texts}
            cleaned.examples[reason] = sorted(drawn)[:EXAMPLES]
        return passed


_WORD = 2**64 - 1


def normalise(text: str) -> str:
    """Unicode NFC, invisible characters dropped, control characters and odd spaces as one plain space each run."""
    if not (text.isascii() and text.isprintable()):
        text = _CONTROLS.sub(" ", _INVISIBLE.sub("", unicodedata.normalize("NFC", text)))
        text = _SURROGATES.sub("\ufffd", text)                 # halves of characters, which JSON can spell
    return " ".join(text.split())


def count_words(sentence: str) -> int:
    """Words between spaces; an ideogram or kana counts as a word, as such scripts do not use spaces."""
    return len((sentence if sentence.isascii() else _IDEOGRAMS.sub(" x ", sentence)).split())


def comparison_hashes(sentences: Iterable[str]) -> NDArray[np.uint64]:
    """Equal for sentences that differ only in case, compatibility forms, spaces, punctuation and symbols.

    So a sentence is found in the evaluation data whichever way either was tokenised.
    """
    plain = (_NO_LETTERS.sub("", unicodedata.normalize("NFKC", sentence).casefold()) for sentence in sentences)
    return np.fromiter((xxhash.xxh3_64_intdigest(sentence.encode()) for sentence in plain), np.uint64)


def sentence_hash(sentence: str, seed: int) -> int:
    """128 bits, in whose order ``write_sorted`` and the shards have the sentences."""
    return xxhash.xxh3_128_intdigest(sentence.encode(), seed & _WORD)


def _contains(among: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    at = np.searchsorted(among, values).clip(max=len(among) - 1)
    found: NDArray[np.bool_] = among[at] == values
    return found


def write_sorted(sentences: list[str], seed: int, path: str) -> None:
    """Write the distinct sentences, sorted by hash, as one Arrow record batch.

    The columns are the two halves of a 128-bit hash, ``high`` and ``low``, and ``text``. Equal hashes are
    taken for equal sentences: among 10^10 distinct ones, that fails with a probability of 10^-19.
    """
    digests = b"".join(xxhash.xxh3_128_digest(sentence.encode(), seed & _WORD) for sentence in sentences)
    high, low = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2).T
    order = np.lexsort((low, high))
    order = order[first_of_equals(high[order], low[order])]
    text = pa.array(sentences, pa.string()).take(pa.array(order))
    batch = pa.record_batch({"high": high[order], "low": low[order], "text": text})
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def first_of_equals(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of the sorted hashes differ from the one before."""
    first = np.ones(len(high), bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return first
