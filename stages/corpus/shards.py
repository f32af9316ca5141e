"""From scratch files sorted by hash to tokenised shards: each range of hashes by itself."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.corpus.clean import first_of_equals

TOKENISE = 1024                                                # sentences at a time

SCHEMA = pa.schema(
    [("text", pa.string()), ("input_ids", pa.list_(pa.int32())), ("length", pa.int32()), ("truncated", pa.bool_())]
)


@dataclass(frozen=True)
class HashRange:
    """One of ``count`` equal ranges of the hashes: low memory whatever the size of all."""

    index: int
    count: int

    @staticmethod
    def cover(size: int) -> "list[HashRange]":
        """Ranges for so many bytes of text: of 1 to 8 MB, 16 for inputs between, that several may be worked on."""
        each = min(max(-(-size // 16), 2**20), 2**23)
        count = -(-size // each)
        return [HashRange(index, count) for index in range(count)]

    def rows(self, high: NDArray[np.uint64]) -> slice:
        """Those of the sorted hashes that lie in the range."""
        edges = [-(-(at << 64) // self.count) for at in (self.index, self.index + 1)]
        first, last = (len(high) if edge >> 64 else int(np.searchsorted(high, np.uint64(edge))) for edge in edges)
        return slice(first, last)


@dataclass(frozen=True)
class DistinctCounter:
    """Counts the distinct sentences of a range, in a Ray task."""

    files: Sequence[str]

    def __call__(self, part: HashRange) -> tuple[int, int]:
        """The range's index and its number of distinct sentences."""
        return part.index, int(_first_of_equals(_read(self.files, part, "high", "low")).sum())


@dataclass(frozen=True)
class Shard:
    """The first so many distinct sentences of a range, as the n-th file."""

    part: HashRange
    sentences: int
    number: int


@dataclass(frozen=True)
class Written:
    """What a shard holds."""

    sentences: int
    tokens: int
    truncated: int


@dataclass(frozen=True)
class ShardWriter:
    """Tokenises and writes a shard, in a Ray task."""

    files: Sequence[str]
    tokenizer: str                                             # as JSON: workers need no model hub and no transformers
    max_length: int
    out: Path

    def __call__(self, shard: Shard) -> Written:
        """Write ``part-NUMBER.parquet``, in the order of the hashes; a repeated call writes the same file."""
        merged = _read(self.files, shard.part, "high", "low", "text")
        table = self._tokenise(merged["text"].filter(pa.array(_first_of_equals(merged)))[: shard.sentences])
        path = self.out / f"part-{shard.number:05}.parquet"
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        pq.write_table(table, aside, compression="zstd")
        aside.replace(path)
        tokens, truncated = int(np.sum(table["length"].to_numpy())), int(np.sum(table["truncated"].to_numpy()))
        return Written(len(table), tokens, truncated)

    def _tokenise(self, sentences: pa.ChunkedArray) -> pa.Table:
        tokenizer = _tokenizer(self.tokenizer, self.max_length)
        tables = []
        for start in range(0, len(sentences), TOKENISE):
            batch = sentences[start : start + TOKENISE]
            encodings = tokenizer.encode_batch_fast(batch.to_pylist())
            ids = [encoding.ids for encoding in encodings]
            lengths = np.fromiter(map(len, ids), np.int32, len(ids))
            offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            flat = np.fromiter(chain.from_iterable(ids), np.int32, offsets[-1])
            truncated = [bool(encoding.overflowing) for encoding in encodings]
            listed = pa.ListArray.from_arrays(offsets, flat)
            columns = [batch.combine_chunks(), listed, pa.array(lengths), pa.array(truncated)]
            tables.append(pa.Table.from_arrays(columns, schema=SCHEMA))
        return pa.concat_tables(tables).combine_chunks()


@lru_cache(maxsize=1)
def _tokenizer(json: str, max_length: int) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"             # a task has one CPU
    tokenizer = Tokenizer.from_str(json)
    tokenizer.enable_truncation(max_length)
    tokenizer.no_padding()
    return tokenizer


def _read(files: Sequence[str], part: HashRange, *columns: str) -> pa.Table:
    """A range of hashes out of all files, sorted."""
    pieces = []
    for path in files:
        with pa.memory_map(path) as source:                    # only the pages of the range are read
            batch = pa.ipc.open_file(source).get_batch(0)
            pieces.append(batch[part.rows(batch["high"].to_numpy())].select(columns))
    table = pa.Table.from_batches(pieces)
    order = np.lexsort((table["low"].to_numpy(), table["high"].to_numpy()))
    return table.take(pa.array(order)).combine_chunks()


def _first_of_equals(table: pa.Table) -> NDArray[np.bool_]:
    return first_of_equals(table["high"].to_numpy(), table["low"].to_numpy())
