"""The corpus stage for labelled data: distinct rows of two or three sentences, tokenised, in a seeded order."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PositiveInt
from tokenizers import Tokenizer

from cluster.errors import InputError
from stages.artifacts import LabelledRows
from stages.context import Context
from stages.corpus.clean import comparison_hashes
from stages.encoder import load_tokenizer
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.data import load_evaluation
from stages.evaluate.validation import ValidationFile, read_validation
from stages.labelled.config import LabelledConfig
from stages.labelled.read import Rows, check_files, read_rows

PART = 100_000                                                 # rows a file

SCHEMA = pa.schema([
    ("text", pa.list_(pa.string())),
    ("input_ids", pa.list_(pa.list_(pa.int32()))),
    ("text_ids", pa.list_(pa.int32())),
    ("label", pa.float32()),
])


class LabelledJob(BaseModel, extra="forbid", frozen=True):
    """All that decides the rows."""

    corpus: LabelledConfig = Field(discriminator="kind")
    tokenizer: str                                             # of the encoder with this name or folder
    max_length: PositiveInt                                    # tokens that a sentence keeps, special ones included
    seed: int                                                  # of the order and the sample
    evaluate: EvaluateConfig                                   # whose test pairs are held against the rows
    validation: ValidationFile | None                          # and these; null: STS-B dev, or the graded sample's


def check_labelled(config: LabelledConfig) -> list[str]:
    """Read all rows before anything runs.

    Returns:
        The local files; none for a data set of the hub, which is not asked for yet.

    Raises:
        InputError: as :func:`stages.labelled.read.read_rows`.
    """
    if config.source.kind == "hub":
        return []
    read_rows(config)
    return check_files(config.source)


def prepare_labelled(job: LabelledJob, context: Context) -> LabelledRows:
    """Read, check, deduplicate, compare with the evaluation data, shuffle, sample and tokenise.

    Raises:
        InputError: the rows are malformed, or none is left.
    """
    progress = context.progress
    progress.update(0, None, "rows", "reading")
    rows = read_rows(job.corpus)
    statistics: dict[str, Any] = {
        "source": job.corpus.source.model_dump(mode="json"),
        "kind": job.corpus.kind,
        **rows.seen,
        "rows": len(rows.texts),
    }
    distinct, conflicting = _distinct(rows)
    statistics |= {"duplicates": len(rows.texts) - len(distinct.texts), "conflicting": conflicting}
    overlap = Overlap.of(distinct, _evaluation_pairs(job))
    statistics |= {
        "pairs_in_evaluation_data": int(overlap.pairs.sum()),
        "rows_with_a_sentence_in_evaluation_data": int(overlap.sentences.sum()),
        "evaluation_pairs_dropped": job.corpus.exclude_evaluation,
    }
    kept = distinct.take(np.flatnonzero(~overlap.pairs)) if job.corpus.exclude_evaluation else distinct
    if not kept.texts:
        raise InputError(
            f"corpus: all {len(distinct.texts)} rows are pairs that the run is scored or validated on; give other "
            "data, score other sets (evaluate.sts), or set corpus.exclude_evaluation=false"
        )
    order = np.random.default_rng(job.seed).permutation(len(kept.texts))[: job.corpus.sample]
    statistics |= {"sampled_away": len(kept.texts) - len(order)}
    chosen = kept.take(order)
    statistics |= _write(chosen, job, context.out)
    progress.update(len(order), len(order), "rows")
    (context.out / "statistics.json").write_text(json.dumps(statistics, indent=2, ensure_ascii=False) + "\n")
    return LabelledRows(context.out, len(order))


def _distinct(rows: Rows) -> tuple[Rows, int]:
    """The first of rows with the same sentences and label, and how many of them differ in the label alone.

    The two sentences of a pair may stand in either order.
    """
    first = dict[tuple[Any, ...], int]()
    for at, texts in enumerate(rows.texts):
        sentences = tuple(sorted(texts)) if rows.labels is not None else texts
        first.setdefault((sentences, None if rows.labels is None else float(rows.labels[at])), at)
    conflicting = len(first) - len({sentences for sentences, _ in first})
    return rows.take(list(first.values())), conflicting


def _evaluation_pairs(job: LabelledJob) -> list[tuple[str, str]]:
    """The test pairs of every set that the run scores, and those that choose its checkpoint."""
    data = load_evaluation(job.evaluate)
    sets: list[tuple[Sequence[str], Sequence[str]]] = [
        (pairs.first, pairs.second)
        for pairs in (*data.pairs.values(), read_validation(job.validation, job.evaluate.data))
    ]
    sets += [(each.validation.first, each.validation.second) for each in data.similarity.values() if each.validation]
    tests = [task.splits["test"] for task in data.transfer.values() if "test" in task.splits]
    sets += [(test.first, test.second) for test in tests if test.second]
    return [pair for first, second in sets for pair in zip(first, second, strict=True)]


@dataclass(frozen=True)
class Overlap:
    """Which of n rows the evaluation data knows, whichever way it spells them."""

    pairs: NDArray[np.bool_]                                   # (n,) two of its sentences are an evaluation pair
    sentences: NDArray[np.bool_]                               # (n,) one of its sentences occurs there

    @classmethod
    def of(cls, rows: Rows, known: list[tuple[str, str]]) -> "Overlap":
        """Compare every two sentences of a row as a pair, in either order."""
        hashes = _Hashes([*chain.from_iterable(rows.texts), *chain.from_iterable(known)])
        known_pairs = {frozenset(hashes(text) for text in pair) for pair in known}
        known_sentences = frozenset(chain.from_iterable(known_pairs))
        pairs, sentences = [], []
        for texts in rows.texts:
            found = [hashes(text) for text in texts]
            pairs.append(any(frozenset(pair) in known_pairs for pair in combinations(found, 2)))
            sentences.append(not known_sentences.isdisjoint(found))
        return cls(np.array(pairs, dtype=bool), np.array(sentences, dtype=bool))


class _Hashes:
    """``comparison_hashes`` of texts, each computed once."""

    def __init__(self, texts: list[str]) -> None:
        distinct = list(dict.fromkeys(texts))
        self._by_text: dict[str, int] = dict(zip(distinct, comparison_hashes(distinct).tolist(), strict=True))

    def __call__(self, text: str) -> int:
        return self._by_text[text]


def _write(rows: Rows, job: LabelledJob, out: Path) -> dict[str, Any]:
    """``part-*.parquet``, and the statistics of what is in them."""
    for leftover in out.glob("part-*"):
        leftover.unlink()                                      # of a run that was killed here
    tokenizer = Tokenizer.from_str(load_tokenizer(job.tokenizer).backend_tokenizer.to_str())
    tokenizer.enable_truncation(job.max_length)
    tokenizer.no_padding()
    distinct = list(dict.fromkeys(chain.from_iterable(rows.texts)))
    encodings = tokenizer.encode_batch(distinct)
    ids = [encoding.ids for encoding in encodings]
    places = {text: place for place, text in enumerate(distinct)}
    for number, start in enumerate(range(0, len(rows.texts), PART)):
        texts = rows.texts[start : start + PART]
        text_ids = [[places[text] for text in row] for row in texts]
        labels = [None] * len(texts) if rows.labels is None else rows.labels[start : start + PART].tolist()
        table = pa.table(
            [texts, [[ids[place] for place in row] for row in text_ids], text_ids, labels], schema=SCHEMA
        )
        pq.write_table(table, out / f"part-{number:05}.parquet", compression="zstd")
    lengths = [len(tokens) for tokens in ids]
    return {
        "kept": len(rows.texts),
        "sentences": len(distinct),
        "truncated": sum(bool(encoding.overflowing) for encoding in encodings),
        "mean_length": sum(lengths) / len(lengths),
    }
