"""Tokenised sentences as training batches, in an order that the seed alone decides."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cluster.world import World
from stages.encoder import padded
from stages.methods.base import Batch


@dataclass(frozen=True)
class TokenisedSentences:
    """All token ids of n rows in one array: 10^6 sentences of 30 tokens are 120 MB.

    A row is a sentence, or the k sentences of a pair or triplet.
    """

    tokens: np.ndarray                                         # (sum of lengths,) int32
    offsets: np.ndarray                                        # (k * n + 1,) int64; where sentences start, and the end
    members: int = 1                                           # k, sentences a row
    labels: np.ndarray | None = None                           # (n,) float32, of pairs
    text_ids: np.ndarray | None = None                         # (n, k) int64, of pairs and triplets

    @classmethod
    def read(cls, folder: Path) -> "TokenisedSentences":
        """Read ``part-*.parquet`` in the order of their names: those of a corpus, or of labelled rows."""
        files = sorted(folder.glob("part-*.parquet"))
        labelled = "text_ids" in pq.read_schema(files[0]).names
        columns = ["input_ids", "text_ids", "label"] if labelled else ["input_ids"]
        table = pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).combine_chunks()
        ids = table["input_ids"].combine_chunks()
        if not labelled:
            return cls(*_tokens_and_offsets(ids))
        text_ids = table["text_ids"].combine_chunks().flatten().to_numpy().astype(np.int64).reshape(len(table), -1)
        labels = None if table["label"].null_count else table["label"].to_numpy()
        return cls(*_tokens_and_offsets(ids.flatten()), text_ids.shape[1], labels, text_ids)

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.members

    def batch(self, rows: np.ndarray, pad: int) -> Batch:
        """The sentences of ``rows``, padded with the token ``pad`` to the longest of them."""
        places = (rows * self.members + np.arange(self.members)[:, None]).ravel()
        sentences = [torch.from_numpy(self.tokens[self.offsets[at] : self.offsets[at + 1]]).long() for at in places]
        input_ids, mask = padded(sentences, pad)
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows])
        text_ids = None if self.text_ids is None else torch.from_numpy(self.text_ids[rows].T.ravel())
        return Batch(input_ids, mask, labels, text_ids)


def _tokens_and_offsets(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return lists.values.to_numpy(zero_copy_only=False).astype(np.int32), lists.offsets.to_numpy().astype(np.int64)


def global_rows(rows_in_all: int, batch_size: int, step: int, seed: int) -> np.ndarray:
    """Which rows make up the global batch of a step.

    Each epoch is a permutation of its own; what is left over when it does not divide by the batch size is dropped.

    Args:
        rows_in_all: in the corpus; a row is a sentence, a pair or a triplet.
        batch_size: of all workers together; at most ``rows_in_all``.
        step: counted from 0 through all epochs.
        seed: of the run.

    Returns:
        (batch_size,) int64.
    """
    epoch, place = divmod(step, rows_in_all // batch_size)
    rows: np.ndarray = _epoch_order(rows_in_all, seed, epoch)[place * batch_size :][:batch_size]
    return rows


@lru_cache(maxsize=1)
def _epoch_order(rows_in_all: int, seed: int, epoch: int) -> np.ndarray:
    order: np.ndarray = np.random.default_rng([seed, epoch]).permutation(rows_in_all)
    return order


def own_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This worker's contiguous part of a global batch, which must divide evenly."""
    share: np.ndarray = rows.reshape(world.size, -1)[world.rank]
    return share


def row_seeds(batch_size: int, step: int, seed: int) -> np.ndarray:
    """(batch_size,) uint64: a seed for each row of a global batch, of what a method draws for that row."""
    return np.random.SeedSequence([seed, step]).generate_state(batch_size, np.uint64)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True) for name, value in values.items() if isinstance(value, Tensor)
    }
    return replace(batch, **moved)
