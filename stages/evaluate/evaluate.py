"""The evaluate stage: one encoder, one or more poolings, every task of the config."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel

from cluster.errors import InputError
from cluster.launch import map_tasks
from stages.artifacts import Corpus, LabelledRows, Scores, TrainedEncoder
from stages.context import Context
from stages.corpus.clean import comparison_hashes
from stages.encoder import max_positions, resolve, saved_config
from stages.evaluate.classifier import select_and_test, transfer_scores
from stages.evaluate.config import GRADED_SAMPLE, EvaluateConfig
from stages.evaluate.data import EvaluationData, load_evaluation
from stages.evaluate.encode import encode
from stages.evaluate.encoded import Encoded
from stages.evaluate.geometry import geometry
from stages.evaluate.similarity import similarity_scores
from stages.evaluate.sts import ScoredPairs, correlations, pair_similarities
from stages.evaluate.whitening import SENTENCES, Whitening, WhiteningConfig

Embed = Callable[[Sequence[str]], NDArray[np.float32]]         # n sentences -> (n, D)


class EvaluateJob(BaseModel, extra="forbid", frozen=True):
    """What to score: an encoder as it was given, or the one that training hands over."""

    evaluate: EvaluateConfig
    encoder: str | None                                        # hub name or folder; null: the trained encoder
    poolings: tuple[str, ...]                                  # each gets its own scores


def evaluate(job: EvaluateJob, *inputs: TrainedEncoder | Corpus | LabelledRows, context: Context) -> Scores:
    """Score an encoder; writes ``scores.json`` and ``pairs-POOLING.parquet`` (task, subset, gold, cosine).

    Args:
        job: what to score.
        inputs: the trained encoder, where ``job.encoder`` is None; the corpus, where whitening is fitted on it. A
            corpus is also searched for the evaluation's sentences.
        context: where to write and compute.

    Raises:
        InputError: the data are broken or incomplete, the encoder is unusable, or its embeddings are.
    """
    data = load_evaluation(job.evaluate)
    encoder = job.encoder or next(str(each.folder / "encoder") for each in inputs if isinstance(each, TrainedEncoder))
    corpus = next((each for each in inputs if not isinstance(each, TrainedEncoder)), None)
    fitted_on = _to_fit(job.evaluate.whitening, corpus)
    progress = context.progress
    encoded = encode(
        encoder,
        [*fitted_on, *(sentence for _, sentences in data.sentences() for sentence in sentences)],
        job.poolings,
        job.evaluate.batch_size,
        _max_length(job.evaluate, encoder),
        context.cluster,
        report=lambda done, total: progress.update(done, total, "sentences"),
        kept=context.embeddings if job.evaluate.keep_embeddings else None,
    )
    overlap = _overlap(data, corpus) if corpus is not None else None
    saved = saved_config(resolve(encoder))
    about: dict[str, Any] = {
        "n_sentences": len(encoded.rows),
        "n_truncated": int(encoded.truncated.sum()),
        "corpus_overlap": overlap,
        "warnings": data.warnings,
        "notes": [*_whitening_notes(job.evaluate.whitening, len(fitted_on)), *_overlap_notes(overlap or {})],
    }
    scores = {}
    for pooling in job.poolings:
        # As with its head, what an encoder was trained with is for its own pooling alone.
        similarity = saved.similarity if saved is not None and pooling == saved.pooling else "cosine"
        space = _Space(encoded, pooling, job.evaluate.whitening, fitted_on, similarity)
        scores[pooling] = _score(job, data, space, context) | about
        if similarity != "cosine":
            note = "Pairs were compared by exp(-mean |u - v|), as in training, and not by cosine."
            scores[pooling]["notes"] = [*about["notes"], note]
    shutil.rmtree(context.out / "features", ignore_errors=True)
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


class _Space:
    """One pooling's embeddings, whitened if so configured."""

    def __init__(
        self,
        encoded: Encoded,
        pooling: str,
        whitening: WhiteningConfig | None,
        fitted_on: Sequence[str],
        similarity: Literal["cosine", "manhattan"],
    ) -> None:
        self.encoded, self.pooling, self.similarity = encoded, pooling, similarity
        self._plain: Embed = partial(encoded.of, pooling)
        self._whitening = whitening
        self._of_corpus: Whitening | None = None
        if whitening is not None and fitted_on:
            self._of_corpus = Whitening.fit(self._plain(fitted_on), whitening.dimensions)

    def of_task(self, sentences: Sequence[str]) -> Embed:
        """The embeddings that one task is scored with, whose sentences these are."""
        if self._whitening is None:
            return self._plain
        fitted = self._of_corpus or Whitening.fit(self._plain(sentences), self._whitening.dimensions)
        return lambda texts: fitted(self._plain(texts))

    def layer_similarity(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(n, T+1) cosines of each layer's [CLS] vector with the last one's."""
        return self.encoded.layer_similarity[self.encoded.at(sentences)]


def _score(job: EvaluateJob, data: EvaluationData, space: _Space, context: Context) -> dict[str, object]:
    """All scores of one pooling; its cosines go into a file."""
    embed = {name: space.of_task(sentences) for name, sentences in data.sentences()}

    def compare(pairs: ScoredPairs, name: str) -> NDArray[np.float64]:
        return pair_similarities(embed[name](pairs.first), embed[name](pairs.second), space.similarity)

    cosines = {name: compare(pairs, name) for name, pairs in data.pairs.items()}
    _write_pairs(context.out / f"pairs-{space.pooling}.parquet", data.pairs, cosines)
    sts: dict[str, dict[str, object]] = {}
    similarity: dict[str, dict[str, object]] = {}
    for name, pairs in data.pairs.items():
        try:
            if name in data.sts:
                sts[name] = sts_scores(pairs, cosines[name])
            else:
                other = data.similarity[name]
                validation = None if other.validation is None else compare(other.validation, name)
                similarity[name] = similarity_scores(other, cosines[name], validation)
        except InputError as error:
            raise InputError(f"{name}, {space.pooling} pooling: {error}") from None
    transfer = _transfer(job.evaluate, data, embed, context, context.out / "features" / space.pooling)
    measured = next((task for task in ("STS-B", GRADED_SAMPLE, *data.sts) if task in data.sts), None)
    shape = geometry(data.sts[measured], embed[measured], space.layer_similarity) if measured else {}
    return {
        "sts": sts | {"avg_spearman": _mean(sts, "spearman")},
        "similarity": similarity,
        "transfer": transfer | {"avg_accuracy": _mean(transfer, "test_accuracy")},
        "geometry": shape | ({"over": measured} if measured else {}),
    }


def _transfer(
    config: EvaluateConfig, data: EvaluationData, embed: dict[str, Embed], context: Context, scratch: Path
) -> dict[str, dict[str, object]]:
    progress = context.progress
    on_cpus = context.cluster.model_copy(update={"device": "cpu"})
    scores: dict[str, dict[str, object]] = {}
    for name, task in data.transfer.items():
        scores[name] = {**transfer_scores(
            task,
            embed[name],
            config.protocol,
            lambda items: map_tasks(select_and_test, items, on_cpus),
            scratch / name,                                    # never reused: another node may see an older file
            report=lambda done, total, name=name: progress.update(done, total, "folds", name),  # type: ignore[misc]
        )}
    return scores


def _mean(scores: dict[str, dict[str, object]], measure: str) -> float | None:
    return float(np.mean([score[measure] for score in scores.values()])) if scores else None


def _write_pairs(path: Path, tasks: dict[str, ScoredPairs], cosines: dict[str, NDArray[np.float64]]) -> None:
    table = {
        "task": [task for task, pairs in tasks.items() for _ in pairs.first],
        "subset": [name for pairs in tasks.values() for name in pairs.subsets],
        "gold": np.concatenate([pairs.gold for pairs in tasks.values()]) if tasks else [],
        "cosine": np.concatenate([cosines[task] for task in tasks]) if tasks else [],
    }
    pq.write_table(pa.table(table), path)


def _to_fit(whitening: WhiteningConfig | None, corpus: Corpus | LabelledRows | None) -> list[str]:
    """The corpus sentences that whitening is fitted on: the first ones, for the corpus is in a random order."""
    if whitening is None or whitening.fit != "corpus":
        return []
    assert corpus is not None
    wanted = whitening.sentences or SENTENCES
    sentences: list[str] = []
    for texts in _texts(corpus):
        sentences += texts
        if len(sentences) >= wanted:
            break
    return sentences[:wanted]


def _texts(corpus: Corpus | LabelledRows) -> Iterator[list[str]]:
    """The sentences of each of the corpus's files, in the corpus's order."""
    for file in sorted(corpus.folder.glob("part-*.parquet")):
        texts = pq.read_table(file, columns=["text"])["text"]
        yield (pc.list_flatten(texts) if isinstance(corpus, LabelledRows) else texts).to_pylist()


def _overlap(data: EvaluationData, corpus: Corpus | LabelledRows) -> dict[str, int]:
    """How many distinct sentences of each task are in the corpus, case, spaces and punctuation aside."""
    trained_on = np.unique(np.concatenate([comparison_hashes(texts) for texts in _texts(corpus)]))
    return {
        name: int(np.isin(np.unique(comparison_hashes(sentences)), trained_on).sum())
        for name, sentences in data.sentences()
    }


def _overlap_notes(overlap: dict[str, int]) -> list[str]:
    return [f"{count:,} sentences of {task} are in the corpus, too." for task, count in overlap.items() if count]


def _whitening_notes(whitening: WhiteningConfig | None, fitted_on: int) -> list[str]:
    if whitening is None:
        return []
    kept = f"{whitening.dimensions} dimensions" if whitening.dimensions else "all dimensions"
    on = f"{fitted_on:,} sentences of the corpus" if fitted_on else "each task's own test sentences with repetitions"
    return [f"Embeddings were whitened ({kept}), fitted on {on}."]


def _max_length(config: EvaluateConfig, encoder: str) -> int:
    """Tokens a sentence may have: as configured, else as many as the encoder has positions."""
    positions = max_positions(encoder)
    if config.max_length is not None and config.max_length > positions:
        raise InputError(
            f"evaluate.max_length={config.max_length} is above the {positions} positions of {encoder}; "
            "lower it, or leave it null for all of them"
        )
    return config.max_length or positions
