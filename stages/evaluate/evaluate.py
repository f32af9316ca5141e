"""The evaluate stage: one encoder, one or more poolings, every task of the config."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel

from cluster.errors import InputError
from stages.artifacts import Scores, TrainedEncoder
from stages.context import Context
from stages.encoder import max_positions
from stages.evaluate.config import GRADED_SAMPLE, EvaluateConfig
from stages.evaluate.encode import Encoded, encode
from stages.evaluate.geometry import geometry
from stages.evaluate.sts import ScoredPairs, correlations, load_tasks, pair_cosines


class EvaluateJob(BaseModel, extra="forbid", frozen=True):
    """What to score: an encoder as it was given, or the one that training hands over."""

    evaluate: EvaluateConfig
    encoder: str | None                                        # hub name or folder; null: the trained encoder
    poolings: tuple[str, ...]                                  # each gets its own scores


def evaluate(job: EvaluateJob, *inputs: TrainedEncoder, context: Context) -> Scores:
    """Score an encoder; writes ``scores.json`` and ``pairs-POOLING.parquet`` (task, subset, gold, cosine).

    Args:
        job: what to score.
        inputs: the trained encoder, where ``job.encoder`` is None.
        context: where to write and compute.

    Raises:
        InputError: the data are broken or incomplete, the encoder is unusable, or its embeddings are.
    """
    tasks, warnings = load_tasks(job.evaluate)
    encoder = job.encoder or str(inputs[0].folder / "encoder")
    progress = context.progress
    encoded = encode(
        encoder,
        (sentence for pairs in tasks.values() for sentence in pairs.sentences),
        job.poolings,
        job.evaluate.batch_size,
        _max_length(job.evaluate, encoder),
        context.cluster,
        report=lambda done, total: progress.update(done, total, "sentences"),
    )
    scores = {
        pooling: _score(tasks, encoded, pooling, context.out)
        | {"n_sentences": len(encoded.rows), "n_truncated": int(encoded.truncated.sum()), "warnings": warnings}
        for pooling in job.poolings
    }
    (context.out / "scores.json").write_text(json.dumps(scores, indent=2, allow_nan=False) + "\n")
    return Scores(context.out)


def sts_scores(pairs: ScoredPairs, cosines: NDArray[np.float64]) -> dict[str, object]:
    """One task's correlations in percent, in all three ways of joining its subsets.

    ``spearman`` and ``pearson`` are over all pairs together (what SimCSE and its successors report), ``_mean`` is
    the mean over the subsets, ``_wmean`` the mean weighted by their pairs (what older papers report).

    Raises:
        InputError: a correlation is undefined; names the subset.
    """
    subsets: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(pairs.subsets):
        inside = pairs.of_subset(name)
        try:
            subsets[name] = {"n": int(inside.sum()), **correlations(cosines[inside], pairs.gold[inside])}
        except InputError as error:
            raise InputError(f"subset {name}: {error}") from None
    sizes = [subset["n"] for subset in subsets.values()]
    scores: dict[str, object] = {"n": len(cosines), **correlations(cosines, pairs.gold)}
    for measure in ("spearman", "pearson"):
        values = [subset[measure] for subset in subsets.values()]
        scores[f"{measure}_mean"] = float(np.mean(values))
        scores[f"{measure}_wmean"] = float(np.average(values, weights=sizes))
    return scores | {"subsets": subsets}


def _score(tasks: dict[str, ScoredPairs], encoded: Encoded, pooling: str, out: Path) -> dict[str, object]:
    """All scores of one pooling; its cosines go into a file."""
    cosines = {
        task: pair_cosines(encoded.of(pooling, pairs.first), encoded.of(pooling, pairs.second))
        for task, pairs in tasks.items()
    }
    _write_pairs(out / f"pairs-{pooling}.parquet", tasks, cosines)
    sts: dict[str, dict[str, object]] = {}
    for task, pairs in tasks.items():
        try:
            sts[task] = sts_scores(pairs, cosines[task])
        except InputError as error:
            raise InputError(f"{task}, {pooling} pooling: {error}") from None
    average = float(np.mean([scores["spearman"] for scores in sts.values()])) if sts else None
    curves = [geometry(tasks[task], encoded, pooling) for task in ("STS-B", GRADED_SAMPLE) if task in tasks]
    return {"sts": sts | {"avg_spearman": average}, "transfer": {}, "geometry": curves[0] if curves else {}}


def _write_pairs(path: Path, tasks: dict[str, ScoredPairs], cosines: dict[str, NDArray[np.float64]]) -> None:
    table = {
        "task": [task for task, pairs in tasks.items() for _ in pairs.first],
        "subset": [name for pairs in tasks.values() for name in pairs.subsets],
        "gold": np.concatenate([pairs.gold for pairs in tasks.values()]) if tasks else [],
        "cosine": np.concatenate([cosines[task] for task in tasks]) if tasks else [],
    }
    pq.write_table(pa.table(table), path)


def _max_length(config: EvaluateConfig, encoder: str) -> int:
    """Tokens a sentence may have: as configured, else as many as the encoder has positions."""
    positions = max_positions(encoder)
    if config.max_length is not None and config.max_length > positions:
        raise InputError(
            f"evaluate.max_length={config.max_length} is above the {positions} positions of {encoder}; "
            "lower it, or leave it null for all of them"
        )
    return config.max_length or positions
