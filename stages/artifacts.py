"""What stages hand to each other: small frozen records whose files lie in the stage's folder of the store."""

from dataclasses import dataclass
from pathlib import Path

import xxhash

CHUNK = 1 << 20                                                # bytes


@dataclass(frozen=True)
class Corpus:
    """Distinct training sentences, tokenised, in a seeded random order.

    ``folder/part-*.parquet``, read in the order of their names, have the columns ``text`` (string),
    ``input_ids`` (list of int32, special tokens included), ``length`` (int32, tokens) and
    ``truncated`` (bool). ``folder/statistics.json`` says what each step saw and dropped.
    """

    folder: Path
    sentences: int


@dataclass(frozen=True)
class LabelledRows:
    """Distinct rows of two or three sentences, tokenised, in a seeded random order.

    ``folder/part-*.parquet``, read in the order of their names, have the columns ``text`` (list of string),
    ``input_ids`` (list of lists of int32, special tokens included), ``text_ids`` (list of int32, equal for equal
    sentences) and ``label`` (float32 in [0, 1]; null in triplets). ``folder/statistics.json`` is as a corpus's.
    """

    folder: Path
    rows: int


@dataclass(frozen=True)
class TrainedEncoder:
    """``folder/encoder``: the best checkpoint; ``folder/metrics.jsonl``: one object a logged step."""

    folder: Path
    best_step: int
    best_score: float | None


@dataclass(frozen=True)
class Scores:
    """``folder/scores.json``: {pooling: S}, S as in the README; ``folder/pairs-POOLING.parquet``: cosines."""

    folder: Path


def file_digest(file: Path) -> str:
    """128-bit xxHash of a file's bytes."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
