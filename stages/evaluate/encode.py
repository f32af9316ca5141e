"""Sentences to vectors: each distinct sentence once, all poolings from one forward pass, on however many workers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.launch import map_tasks, uses_gpu
from stages.encoder import Encoder, load_tokenizer, padded
from stages.evaluate import cache
from stages.evaluate.encoded import Encoded

BATCHES_PER_TASK = {"cpu": 4, "cuda": 64}                      # enough to outweigh a task's start, few enough to
                                                               # spread; a task on a GPU starts a process of its own
TASKS_PER_FILE = 16                                            # whose embeddings are kept at once


@dataclass(frozen=True)
class EncodeTask:
    """What a worker needs to encode some sentences."""

    encoder: str
    content: str | None                                        # key of the encoder's content, if it was computed
    sentences: tuple[str, ...]
    poolings: tuple[str, ...]
    batch_size: int
    max_length: int
    device: str                                                # of torch


def encode(
    encoder: str,
    sentences: Iterable[str],
    poolings: tuple[str, ...],
    batch_size: int,
    max_length: int,
    cluster: ClusterConfig,
    report: Callable[[int, int], None],
    kept: Path | None = None,
) -> Encoded:
    """Encode the distinct ones among ``sentences`` with a saved encoder.

    Which sentences share a batch is decided here, by their length and spelling alone, so the result does not
    depend on the number of workers or on the order of ``sentences``.

    Args:
        encoder: hub name or folder that ``Encoder.load`` takes.
        sentences: in any order, with repetitions.
        poolings: as ``Encoder.pool`` names them.
        batch_size: sentences per forward pass.
        max_length: tokens, special ones included; longer sentences are cut and counted.
        cluster: where to compute.
        report: called with the sentences done and the distinct sentences there are.
        kept: folder of embeddings of earlier evaluations, which are taken from there, and of later ones; None: all
            are computed. A vector that was computed in a batch of other sentences differs by rounding (1e-6).

    Raises:
        InputError: an embedding has a number that is NaN or infinite; names pooling and sentence.
    """
    distinct = sorted(set(sentences), key=lambda text: (-len(text), text))
    device = "cuda" if uses_gpu(cluster) else "cpu"
    key = cache.encoder_key(encoder, max_length, device) if kept is not None else None
    folder = kept / key if kept is not None and key is not None else None
    known = cache.read(folder, distinct, poolings) if folder is not None else Encoded.nothing(poolings)
    missing = [text for text in distinct if text not in known.rows]
    size = BATCHES_PER_TASK[device] * batch_size
    tasks = [
        EncodeTask(encoder, key, tuple(missing[start : start + size]), poolings, batch_size, max_length, device)
        for start in range(0, len(missing), size)
    ]
    parts = [known]
    running = _run(tasks, cluster, lambda done: report(len(known.rows) + done, len(distinct)))
    while some := list(islice(running, TASKS_PER_FILE)):
        parts.append(Encoded.joined(some, poolings))
        if folder is not None:
            cache.write(folder, parts[-1])
    return Encoded.joined(parts, poolings)


def _run(tasks: Sequence[EncodeTask], cluster: ClusterConfig, report: Callable[[int], None]) -> Iterator[Encoded]:
    done = 0
    report(done)
    for task, part in zip(tasks, map_tasks(encode_task, tasks, cluster), strict=True):
        _check_finite(task, part)
        yield part
        done += len(task.sentences)
        report(done)


def encode_task(task: EncodeTask) -> Encoded:
    """Encode a task's sentences, which are distinct, in this process."""
    encoder, tokenizer = _load(task.encoder, task.content, task.device)
    return embed(encoder, tokenizer, task.sentences, task.poolings, task.batch_size, task.max_length)


def embed(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[str],
    poolings: Sequence[str],
    batch_size: int,
    max_length: int,
) -> Encoded:
    """Encode distinct sentences with an encoder in memory, without dropout, batched by their length in tokens.

    The encoder is left in the mode, training or not, in which it was.
    """
    tokens, truncated = _tokenise(tokenizer, sentences, max_length)
    by_length = sorted(range(len(tokens)), key=lambda row: -len(tokens[row]))      # stable: ties keep their order
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    device = next(encoder.parameters()).device
    was_training = encoder.training
    encoder.eval()
    vectors: dict[str, list[Tensor]] = {pooling: [] for pooling in poolings}
    similarities = []
    with torch.no_grad():
        for rows in batches:
            input_ids, mask = padded([torch.tensor(tokens[row]) for row in rows], int(tokenizer.pad_token_id))
            layers = encoder.layers(input_ids.to(device), mask.to(device))
            for pooling in poolings:
                vectors[pooling].append(encoder.pool(layers, pooling).float().cpu())
            cls = layers.cls.float()                                               # (T+1, B, d)
            similarities.append(F.cosine_similarity(cls, cls[-1:], dim=-1).T.cpu())
    encoder.train(was_training)
    back = np.argsort(by_length)
    return Encoded(
        rows={text: row for row, text in enumerate(sentences)},
        vectors={pooling: torch.cat(parts).numpy()[back] for pooling, parts in vectors.items()},
        layer_similarity=torch.cat(similarities).numpy()[back],
        truncated=truncated,
    )


def _tokenise(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str], max_length: int
) -> tuple[list[list[int]], NDArray[np.bool_]]:
    """Ids with special tokens, at most ``max_length`` of them, and (n,) whose were more."""
    tokens: list[list[int]] = tokenizer(list(sentences), truncation=False, verbose=False)["input_ids"]
    truncated = np.array([len(ids) > max_length for ids in tokens], dtype=bool)
    for row in np.flatnonzero(truncated).tolist():
        tokens[row] = tokenizer(sentences[row], truncation=True, max_length=max_length)["input_ids"]
    return tokens, truncated


def _check_finite(task: EncodeTask, part: Encoded) -> None:
    for pooling, vectors in part.vectors.items():
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if broken.size:
            raise InputError(
                f"the {pooling} embedding of {task.encoder} has NaN or infinite numbers for {broken.size} of "
                f"{len(vectors)} sentences, the first being {task.sentences[broken[0]]!r}; "
                "the encoder's weights are broken or overflow"
            )


@lru_cache(maxsize=1)
def _load(encoder: str, _content: str | None, device: str) -> tuple[Encoder, PreTrainedTokenizerFast]:
    """An encoder and its tokenizer, kept for a worker's next tasks with the same content under this name."""
    return Encoder.load(encoder).to(device), load_tokenizer(encoder)
