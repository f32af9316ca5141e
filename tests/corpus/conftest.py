"""A corpus made on the spot: a job over it, and what came out of it."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.context import Context
from stages.corpus.config import CorpusConfig
from stages.corpus.prepare import CorpusJob, prepare_corpus

TOKENIZER = "all-MiniLM-L6-v2"


@dataclass
class Prepared:
    """The corpus stage's output, read back."""

    folder: Path
    table: pa.Table
    statistics: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        return self.table["text"].to_pylist()


@pytest.fixture
def prepare(ray_cluster: None, tmp_path: Path) -> Callable[..., Prepared]:
    """Prepare the corpus of a source in a fresh folder; other keywords than these are the corpus's config."""

    def run(source: dict[str, Any], max_length: int = 16, seed: int = 1, **options: Any) -> Prepared:
        out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        out.mkdir()
        config = CorpusConfig.model_validate({"source": source, "exclude_evaluation": False} | options)
        job = CorpusJob(corpus=config, tokenizer=TOKENIZER, max_length=max_length, seed=seed, exclude=None)
        corpus = prepare_corpus(job, Context(out))
        table = pa.concat_tables(pq.read_table(file) for file in sorted(out.glob("part-*.parquet")))
        assert corpus.folder == out
        assert corpus.sentences == len(table)
        assert not (out / "scratch").exists()
        return Prepared(out, table, json.loads((out / "statistics.json").read_text()))

    return run


def sentences(count: int, start: int = 0) -> list[str]:
    """Distinct short sentences."""
    return [f"This is sentence number {at} of the corpus." for at in range(start, start + count)]


def write(path: Path, text: str | bytes) -> Path:
    """Write a file, compressed if its name says so."""
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
