"""Scoring the encoder while it trains: one Spearman on held-out scored pairs."""

from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from cluster.world import World
from stages.encoder import Encoder
from stages.evaluate.sts import (
    ScoredPairs,
    correlations,
    pair_files,
    read_scored_file,
    validation_pairs,
    validation_set,
)

BATCH = 64                                                     # sentences per forward pass


class ValidationFile(BaseModel, extra="forbid", frozen=True):
    """Any csv, tsv, jsonl or parquet file with two text columns and a score."""

    path: str
    columns: tuple[str | int, str | int, str | int] = ("sentence1", "sentence2", "score")


def read_validation(file: ValidationFile | None, data: str | None) -> ScoredPairs:
    """The pairs of the named file, or else STS-B dev of ``data``, or else the graded sample's dev split."""
    return validation_pairs(data) if file is None else read_scored_file(file.path, file.columns)


def validation_files(file: ValidationFile | None, data: str | None) -> list[str]:
    """The files that :func:`read_validation` reads.

    Raises:
        InputError: one is missing or broken.
    """
    read_validation(file, data)
    return [file.path] if file is not None else [str(path) for path in pair_files(data, *validation_set(data))]


@dataclass(frozen=True)
class Validation:
    """Distinct tokenised sentences, longest first, and the pairs among them."""

    sentences: list[list[int]]                                 # token ids
    first: np.ndarray                                          # (P,) index of each pair's first sentence
    second: np.ndarray                                         # (P,)
    gold: np.ndarray                                           # (P,)
    pad: int

    @classmethod
    def read(
        cls, file: ValidationFile | None, data: str | None, tokenizer: PreTrainedTokenizerFast, max_length: int
    ) -> "Validation":
        """Tokenise the pairs of :func:`read_validation`."""
        pairs = read_validation(file, data)
        texts = sorted({*pairs.first, *pairs.second})
        encoded = tokenizer(texts, truncation=True, max_length=max_length, add_special_tokens=True)["input_ids"]
        longest_first = sorted(range(len(texts)), key=lambda row: -len(encoded[row]))
        places = {texts[row]: place for place, row in enumerate(longest_first)}
        return cls(
            sentences=[encoded[row] for row in longest_first],
            first=np.array([places[text] for text in pairs.first]),
            second=np.array([places[text] for text in pairs.second]),
            gold=np.asarray(pairs.gold),
            pad=tokenizer.pad_token_id,
        )

    def spearman(self, encoder: Encoder, device: torch.device, world: World) -> float:
        """Spearman correlation (x 100) of cosine and gold; each rank encodes every size-th sentence.

        All ranks make the same number of forward passes, as ZeRO-3 needs.
        """
        share = -(-len(self.sentences) // world.size)                              # rounded up
        rows = [min(place * world.size + world.rank, len(self.sentences) - 1) for place in range(share)]
        with torch.no_grad():
            embeddings = torch.cat([
                self._encode(encoder, rows[start : start + BATCH], device) for start in range(0, share, BATCH)
            ])
            gathered = world.gather(embeddings)                                    # (size * share, D), rank by rank
        by_place = gathered.reshape(world.size, share, -1).transpose(0, 1).flatten(0, 1).cpu().numpy()
        cosines = (by_place[self.first] * by_place[self.second]).sum(axis=1)
        return correlations(cosines, self.gold)["spearman"]

    def _encode(self, encoder: Encoder, rows: list[int], device: torch.device) -> Tensor:
        tokens = [torch.tensor(self.sentences[row]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(sentence) for sentence in tokens])
        mask = (torch.arange(ids.shape[1])[None, :] < lengths[:, None]).long()
        return F.normalize(encoder(ids.to(device), mask.to(device)).embedding, dim=-1)
