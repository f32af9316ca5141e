"""The corpus stage: distinct sentences from any source, tokenised, in a seeded random order.

Two passes over the data keep memory bounded and the result independent of how the work was split. The
first cleans chunks of the source and sorts each by a seeded hash of its sentences; the second merges one
range of hashes after another. Equal sentences meet there, the order of the hashes is the random order,
and the first n are the sample.
"""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel, PositiveInt

from cluster.data import each, stream
from cluster.errors import InputError
from stages.artifacts import Corpus
from stages.context import Context, Progress
from stages.corpus import sources
from stages.corpus.clean import Cleaned, Cleaner, comparison_hashes, sentence_hash
from stages.corpus.config import CorpusConfig, PythonDocsSource
from stages.corpus.prose import documented_versions, versions_digest
from stages.corpus.shards import DistinctCounter, HashRange, Shard, ShardWriter
from stages.encoder import load_tokenizer
from stages.evaluate.data import evaluation_sentences

logger = logging.getLogger(__name__)


class CorpusJob(BaseModel, extra="forbid", frozen=True):
    """All that decides the corpus."""

    corpus: CorpusConfig
    tokenizer: str                                             # of the encoder with this name or folder
    max_length: PositiveInt                                    # tokens that a sentence keeps, special ones included
    seed: int                                                  # of the order and the sample
    exclude: str | None                                        # evaluation data, SentEval layout; None: the sample;
                                                               # whether it is dropped says ``exclude_evaluation``


def check_source(config: CorpusConfig) -> list[str]:
    """See cheaply, before anything runs, that the source can be read.

    Returns:
        The local files that make up the corpus; none for a URL, a hub data set or python-docs.

    Raises:
        InputError: a file, its content or a column is missing.
    """
    return sources.check_source(config.source)


def prepare_corpus(job: CorpusJob, context: Context) -> Corpus:
    """Read, clean, deduplicate, sample, shuffle and tokenise a corpus, on all CPUs that Ray has free.

    Equal jobs over equal files give equal shards, whatever the number of workers and of files.

    Raises:
        InputError: the source cannot be read, or no sentence is left.
    """
    tokenizer = _tokenizer_json(job)
    scratch = context.out / "scratch"
    _remove_leftovers(context.out, scratch)
    scratch.mkdir(parents=True)
    progress = context.progress
    try:
        cleaned, files = _clean(job, scratch, progress)
        shards, distinct = _plan(files, cleaned.size, job.corpus.sample)
        writer = ShardWriter(files, tokenizer, job.max_length, context.out)
        statistics = _statistics(job.corpus, cleaned, distinct) | _write(shards, writer, progress)
        last_shard = context.out / f"part-{shards[-1].number:05}.parquet"
        statistics["evaluation_overlap"] = _overlap(job, cleaned.overlap, last_shard)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)             # after an error, tasks may still be writing there
    (context.out / "statistics.json").write_text(json.dumps(statistics, indent=2, ensure_ascii=False) + "\n")
    return Corpus(context.out, sum(shard.sentences for shard in shards))


def _tokenizer_json(job: CorpusJob) -> str:
    tokenizer = load_tokenizer(job.tokenizer)
    special = tokenizer.num_special_tokens_to_add()
    if job.max_length <= special:
        raise InputError(
            f"encoder.max_length={job.max_length} leaves no room for words beside {special} special tokens; raise it"
        )
    return str(tokenizer.backend_tokenizer.to_str())


def _remove_leftovers(out: Path, scratch: Path) -> None:
    """A run that was killed here may have left more shards than this one will write."""
    shutil.rmtree(scratch, ignore_errors=True)
    for shard in out.glob("part-*"):
        shard.unlink()


def _clean(job: CorpusJob, scratch: Path, progress: Progress) -> tuple[Cleaned, list[str]]:
    """First pass: the sum of all counts, and the scratch files."""
    source = job.corpus.source
    evaluation = np.unique(comparison_hashes(evaluation_sentences(job.exclude)))
    cleaner = Cleaner(job.corpus, job.seed, evaluation, scratch)
    total, files = Cleaned(), list[str]()
    progress.update(0, None, "sentences", "reading and cleaning")
    for cleaned in stream(sources.split_source(source), lambda part: sources.read_part(source, part), cleaner):
        total.add(cleaned)
        if cleaned.file:
            files.append(cleaned.file)
        progress.update(total.counts["sentences"], None, "sentences", "reading and cleaning")
    if not files:
        raise InputError(_nothing_left(job.corpus, total))
    return total, files


def _nothing_left(config: CorpusConfig, cleaned: Cleaned) -> str:
    count = cleaned.counts
    return (
        f"corpus: no sentence is left of {count['documents']} documents with {count['sentences']} sentences: "
        f"{count['too_short']} have fewer than corpus.min_words={config.min_words} words, "
        f"{count['too_long']} more than corpus.max_words={config.max_words}, "
        f"{count['in_evaluation_data']} occur in the evaluation data (corpus.exclude_evaluation)"
    )


def _plan(files: list[str], size: int, sample: int | None) -> tuple[list[Shard], int]:
    """The shards to write, those of the sample alone, and the number of distinct sentences."""
    ranges = HashRange.cover(size)
    found = dict(each(ranges, DistinctCounter(files)))
    distinct = sum(found.values())
    left = distinct if sample is None else min(sample, distinct)
    shards = list[Shard]()
    for part in ranges:
        if taken := min(found[part.index], left):
            shards.append(Shard(part, taken, len(shards)))
            left -= taken
    return shards, distinct


def _write(shards: list[Shard], writer: ShardWriter, progress: Progress) -> dict[str, object]:
    """Second pass: the shards, and the statistics of what is in them."""
    total = sum(shard.sentences for shard in shards)
    done = tokens = truncated = 0
    for written in each(shards, writer):
        done += written.sentences
        tokens += written.tokens
        truncated += written.truncated
        progress.update(done, total, "sentences", "tokenising")
    return {"kept": total, "tokens": tokens, "truncated": truncated, "mean_length": tokens / total}


def _overlap(job: CorpusJob, found: set[int], last_shard: Path) -> dict[str, int]:
    """How many distinct sentences of the corpus occur in the evaluation data, and were dropped for it or kept.

    The corpus is sorted by the sentences' hashes, so those that a sample left out are beyond its last sentence.
    """
    if job.corpus.exclude_evaluation:
        return {"distinct": len(found), "dropped": len(found), "kept": 0}
    last = pq.read_table(last_shard, columns=["text"])["text"][-1].as_py()
    kept = sum(each <= sentence_hash(last, job.seed) for each in found)
    if kept:
        logger.warning(
            "%d sentences of the corpus occur in the evaluation data and are kept, so scores may flatter; "
            "corpus.exclude_evaluation=true drops them",
            kept,
        )
    return {"distinct": len(found), "dropped": 0, "kept": kept}


def _statistics(config: CorpusConfig, cleaned: Cleaned, distinct: int) -> dict[str, object]:
    """What each step before the shards saw and dropped; ``sentences`` less all drops are those kept."""
    count = cleaned.counts
    statistics: dict[str, object] = {"source": config.source.model_dump(mode="json")}
    if isinstance(config.source, PythonDocsSource):
        statistics |= {"files": count["files"], "not_prose": count["not_prose"]}
        statistics |= {"versions": documented_versions(), "versions_digest": versions_digest()}
    passed = count["sentences"] - count["too_short"] - count["too_long"] - count["in_evaluation_data"]
    kept = distinct if config.sample is None else min(config.sample, distinct)
    seen = ("documents", "empty", "replaced_characters", "sentences", "too_short", "too_long", "in_evaluation_data")
    statistics |= {name: count[name] for name in seen}
    statistics |= {"duplicates": passed - distinct, "sampled_away": distinct - kept}
    examples = {reason: [text for _, text in found] for reason, found in cleaned.examples.items() if found}
    return statistics | {"examples": examples}
