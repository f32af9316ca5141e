"""Tokenised sentences as training batches, in an order that the seed alone decides."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cluster.world import World
from stages.methods.base import Batch


@dataclass(frozen=True)
class TokenisedSentences:
    """All token ids of a corpus in one array: 10^6 sentences of 30 tokens are 120 MB."""

    tokens: np.ndarray                                         # (sum of lengths,) int32
    offsets: np.ndarray                                        # (n + 1,) int64; where each sentence starts, and the end

    @classmethod
    def read(cls, folder: Path) -> "TokenisedSentences":
        """Read ``part-*.parquet`` in the order of their names."""
        parts = [pq.read_table(file, columns=["input_ids"]) for file in sorted(folder.glob("part-*.parquet"))]
        ids = pa.concat_tables(parts)["input_ids"].combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return cls(ids.values.to_numpy(zero_copy_only=False).astype(np.int32), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def batch(self, rows: np.ndarray, pad: int) -> Batch:
        """The sentences ``rows``, padded with the token ``pad`` to the longest of them."""
        sentences = [torch.from_numpy(self.tokens[self.offsets[row] : self.offsets[row + 1]]).long() for row in rows]
        input_ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        mask = torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]
        return Batch(input_ids, mask.long())


def global_rows(sentences: int, batch_size: int, step: int, seed: int) -> np.ndarray:
    """Which sentences make up the global batch of a step.

    Each epoch is a permutation of its own; what is left over when it does not divide by the batch size is dropped.

    Args:
        sentences: in the corpus.
        batch_size: of all workers together; at most ``sentences``.
        step: counted from 0 through all epochs.
        seed: of the run.

    Returns:
        (batch_size,) int64.
    """
    epoch, place = divmod(step, sentences // batch_size)
    rows: np.ndarray = _epoch_order(sentences, seed, epoch)[place * batch_size :][:batch_size]
    return rows


@lru_cache(maxsize=1)
def _epoch_order(sentences: int, seed: int, epoch: int) -> np.ndarray:
    order: np.ndarray = np.random.default_rng([seed, epoch]).permutation(sentences)
    return order


def own_share(rows: np.ndarray, world: World) -> np.ndarray:
    """This worker's contiguous part of a global batch, which must divide evenly."""
    share: np.ndarray = rows.reshape(world.size, -1)[world.rank]
    return share


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(moved(batch.input_ids), moved(batch.attention_mask))
