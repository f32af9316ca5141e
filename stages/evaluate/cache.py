"""Embeddings kept between evaluations: an encoder that was scored on some tasks need not encode them again for others.

A folder for each encoder, named by the content of its files, holds Parquet files of sentences and their vectors. So a
changed encoder finds nothing, and the same encoder finds its vectors under whatever name and in whatever experiment.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stages.artifacts import file_digest
from stages.encoder import check_encoder, resolve
from stages.evaluate.encoded import Encoded

logger = logging.getLogger(__name__)

FORMAT = 1                                                     # raise it when encoding gives other vectors
SENTENCE, LAYERS, TRUNCATED = "sentence", "layer_similarity", "truncated"


def encoder_key(encoder: str, max_length: int, device: str) -> str | None:
    """16 hex digits of all that decides an encoder's vectors; None for one of the hub without a known commit.

    Args:
        encoder: hub name or folder.
        max_length: tokens at which sentences are cut.
        device: of torch.
    """
    source = Path(resolve(encoder))
    if source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.is_file())
        content: Any = {str(file.relative_to(source)): file_digest(file) for file in files}
    else:
        content = getattr(check_encoder(encoder), "_commit_hash", None)
        if content is None:
            return None
    libraries = {library: version(library) for library in ("torch", "transformers")}
    whole = json.dumps([FORMAT, content, max_length, device, libraries], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def read(folder: Path, sentences: Sequence[str], poolings: Sequence[str]) -> Encoded:
    """What ``folder`` knows of distinct ``sentences``: those that have all of the poolings."""
    wanted = set(sentences)
    vectors: dict[str, dict[str, NDArray[np.float32]]] = {pooling: {} for pooling in poolings}
    layers: dict[str, NDArray[np.float32]] = {}
    truncated: dict[str, bool] = {}
    for file in sorted(folder.glob("*.parquet")):
        table = _table(file, poolings)
        if table is None:
            continue
        texts = table[SENTENCE].to_pylist()
        rows = [row for row, text in enumerate(texts) if text in wanted]
        curves, cut = _matrix(table, LAYERS), table[TRUNCATED].to_pylist()
        for row in rows:
            layers[texts[row]], truncated[texts[row]] = curves[row], cut[row]
        for pooling in vectors.keys() & set(table.column_names):
            of_pooling = _matrix(table, pooling)
            vectors[pooling].update((texts[row], of_pooling[row]) for row in rows)
    known = [text for text in sentences if all(text in of_pooling for of_pooling in vectors.values())]
    if not known:
        return Encoded.nothing(poolings)
    return Encoded(
        rows={text: row for row, text in enumerate(known)},
        vectors={pooling: np.stack([of_pooling[text] for text in known]) for pooling, of_pooling in vectors.items()},
        layer_similarity=np.stack([layers[text] for text in known]),
        truncated=np.array([truncated[text] for text in known]),
    )


def write(folder: Path, encoded: Encoded) -> None:
    """Add vectors to ``folder``, aside and renamed."""
    if not encoded.rows:
        return
    columns = {
        SENTENCE: pa.array(list(encoded.rows), pa.string()),
        TRUNCATED: pa.array(encoded.truncated),
        LAYERS: _lists(encoded.layer_similarity),
        **{pooling: _lists(vectors) for pooling, vectors in encoded.vectors.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256("\0".join([*encoded.vectors, *encoded.rows]).encode()).hexdigest()[:16]
    aside = folder / f".{name}-{uuid4().hex}.partial"          # another run may write the same at the same time
    pq.write_table(pa.table(columns), aside, write_page_checksum=True)
    aside.replace(folder / f"{name}.parquet")


def _table(file: Path, poolings: Sequence[str]) -> pa.Table | None:
    """The columns in question, or None where there are none or the file is damaged."""
    try:
        present = [pooling for pooling in poolings if pooling in pq.read_schema(file).names]
        if not present:
            return None
        return pq.read_table(file, columns=[SENTENCE, TRUNCATED, LAYERS, *present], page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        logger.warning("%s is damaged and was passed over (%s); its sentences are encoded again", file, error)
        return None


def _lists(matrix: NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(matrix).ravel()), matrix.shape[1])


def _matrix(table: pa.Table, column: str) -> NDArray[np.float32]:
    lists = table[column].combine_chunks()
    matrix: NDArray[np.float32] = lists.flatten().to_numpy().reshape(len(lists), -1)
    return matrix
