"""Scoring the encoder while it trains: one Spearman on held-out scored pairs, and transfer tasks if wanted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.world import World
from stages.encoder import Encoder, padded
from stages.evaluate.classifier import select_and_test, transfer_scores
from stages.evaluate.sts import (
    ScoredPairs,
    correlations,
    pair_files,
    pair_similarities,
    read_scored_file,
    validation_pairs,
    validation_set,
)
from stages.evaluate.transfer import TransferData, load_transfer

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
class SharedSentences:
    """Distinct tokenised sentences, longest first, that the ranks of a training run encode together."""

    tokens: list[list[int]]                                    # ids of each sentence
    pad: int

    @classmethod
    def of(
        cls, sentences: Iterable[str], tokenizer: PreTrainedTokenizerFast, max_length: int
    ) -> tuple["SharedSentences", dict[str, int]]:
        """The distinct ones among ``sentences``, and the place of each."""
        texts = sorted(set(sentences))
        if not texts:                                          # which tokenizers cannot do
            return cls([], tokenizer.pad_token_id), {}
        encoded = tokenizer(texts, truncation=True, max_length=max_length, add_special_tokens=True)["input_ids"]
        longest_first = sorted(range(len(texts)), key=lambda row: -len(encoded[row]))
        places = {texts[row]: place for place, row in enumerate(longest_first)}
        return cls([encoded[row] for row in longest_first], tokenizer.pad_token_id), places

    def encode(self, encoder: Encoder, device: torch.device, world: World) -> NDArray[np.float32]:
        """(n, D) embeddings on every rank; each encodes every size-th sentence.

        All ranks make the same number of forward passes, as ZeRO-3 needs.
        """
        share = -(-len(self.tokens) // world.size)                                 # rounded up
        rows = [min(place * world.size + world.rank, len(self.tokens) - 1) for place in range(share)]
        with torch.no_grad():
            embeddings = torch.cat([
                self._encode(encoder, rows[start : start + BATCH], device) for start in range(0, share, BATCH)
            ])
            gathered = world.gather(embeddings)                                    # (size * share, D), rank by rank
        by_place = gathered.reshape(world.size, share, -1).transpose(0, 1).flatten(0, 1)
        found: NDArray[np.float32] = by_place[: len(self.tokens)].cpu().numpy()
        return found

    def _encode(self, encoder: Encoder, rows: list[int], device: torch.device) -> Tensor:
        ids, mask = padded([torch.tensor(self.tokens[row]) for row in rows], self.pad)
        embeddings: Tensor = encoder(ids.to(device), mask.to(device)).embedding
        return embeddings


@dataclass(frozen=True)
class Validation:
    """Scored pairs among shared sentences."""

    sentences: SharedSentences
    first: np.ndarray                                          # (P,) place of each pair's first sentence
    second: np.ndarray                                         # (P,)
    gold: np.ndarray                                           # (P,)

    @classmethod
    def read(
        cls, file: ValidationFile | None, data: str | None, tokenizer: PreTrainedTokenizerFast, max_length: int
    ) -> "Validation":
        """Tokenise the pairs of :func:`read_validation`."""
        pairs = read_validation(file, data)
        sentences, places = SharedSentences.of(pairs.sentences, tokenizer, max_length)
        first, second = (np.array([places[text] for text in side]) for side in (pairs.first, pairs.second))
        return cls(sentences, first, second, np.asarray(pairs.gold))

    def spearman(self, encoder: Encoder, device: torch.device, world: World) -> float:
        """Spearman correlation (x 100) of the encoder's similarity and gold; every rank calls it and knows it."""
        vectors = self.sentences.encode(encoder, device, world)
        alike = pair_similarities(vectors[self.first], vectors[self.second], encoder.config.similarity)
        return correlations(alike, self.gold)["spearman"]


@dataclass(frozen=True)
class TransferMonitor:
    """Transfer tasks that are scored while an encoder trains, by the fast protocol and on their dev rows alone."""

    tasks: dict[str, TransferData]
    sentences: SharedSentences
    places: dict[str, int]

    @classmethod
    def read(
        cls, tasks: Sequence[str], data: str | None, tokenizer: PreTrainedTokenizerFast, max_length: int
    ) -> "TransferMonitor":
        """Tokenise the sentences of some of ``config.TRANSFER_TASKS``, which may be none."""
        loaded = {task: load_transfer(str(data), task, "fast") for task in tasks}
        texts = (text for task in loaded.values() for text in task.sentences)
        return cls(loaded, *SharedSentences.of(texts, tokenizer, max_length))

    def accuracies(self, encoder: Encoder, device: torch.device, world: World) -> dict[str, float]:
        """``TASK_fast_dev_accuracy`` of each task, in percent; every rank calls it, fits its share and knows all."""
        if not self.tasks:
            return {}
        vectors = self.sentences.encode(encoder, device, world)
        found = torch.zeros(len(self.tasks), dtype=torch.float64, device=device)
        for at, task in list(enumerate(self.tasks.values()))[world.rank :: world.size]:
            with TemporaryDirectory() as scratch:
                scores = transfer_scores(
                    task,
                    lambda texts: vectors[[self.places[text] for text in texts]],
                    "fast",
                    lambda items: map(select_and_test, items),
                    Path(scratch),
                )
            found[at] = float(scores["dev_accuracy"])
        together = (world.mean(found) * world.size).tolist()
        return {f"{name}_fast_dev_accuracy": value for name, value in zip(self.tasks, together, strict=True)}
