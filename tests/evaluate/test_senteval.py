"""Our figures against those that SentEval, in the fork that SimCSE's evaluation.py calls, gives the same embeddings.

The expected figures are facts measured by running that toolkit on the research data, with a ``batcher`` that returns
the embeddings named here as float32.
"""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cluster.config import ClusterConfig
from stages.encoder import max_positions
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.encode import encode
from stages.evaluate.evaluate import sts_scores
from stages.evaluate.sts import ScoredPairs, correlations, load_pairs, load_tasks, pair_cosines, read_scored_file

pytestmark = pytest.mark.shared

OF_HASHED_WORDS = {                                            # spearman, pearson: of all pairs, mean, weighted mean
    "STS12": [33.7098, 45.8081, 45.5182, 29.8476, 43.8670, 43.9229],
    "STS13": [46.5556, 38.4285, 46.5228, 46.7214, 36.2764, 44.5550],
    "STS14": [46.7791, 54.9583, 55.7700, 46.4598, 54.3477, 55.0001],
    "STS15": [61.6013, 57.9405, 60.3893, 61.9020, 59.3437, 61.1256],
    "STS16": [51.2030, 53.3421, 54.4699, 51.2858, 53.2705, 54.3575],
    "STS-B": [43.3336, 43.3336, 43.3336, 42.6328, 42.6328, 42.6328],
    "SICK-R": [52.0113, 52.0113, 52.0113, 54.5169, 54.5169, 54.5169],
}

OF_SUBSETS = {                                                 # spearman
    ("STS12", "SMTeuroparl"): 57.0010,                         # where the rounding of equal pairs' cosines matters most
    ("STS13", "FNWN"): 18.6665,
    ("STS14", "deft-forum"): 39.3867,
    ("STS15", "belief"): 55.5069,
    ("STS16", "question-question"): 9.6381,
}


@cache
def word_vector(word: str) -> np.ndarray:
    """512 numbers, each 1 or -1, that only the word decides."""
    digest = hashlib.blake2b(word.encode(), digest_size=64).digest()
    return 2.0 * np.unpackbits(np.frombuffer(digest, np.uint8)) - 1


def hashed_words(sentences: tuple[str, ...]) -> np.ndarray:
    """(n, 512) sums of the words' vectors: whole numbers, so that every machine computes the same."""
    return np.stack([sum(map(word_vector, text.lower().split())) for text in sentences]).astype(np.float32)


def scores_of_hashed_words(pairs: ScoredPairs) -> dict:
    return sts_scores(pairs, pair_cosines(hashed_words(pairs.first), hashed_words(pairs.second)))


def test_all_figures_of_the_seven_sets_are_sentevals(shared: Path) -> None:
    tasks, warnings = load_tasks(EvaluateConfig(data=str(shared / "data/senteval")))
    assert warnings == []
    found = {task: scores_of_hashed_words(pairs) for task, pairs in tasks.items()}
    for task, expected in OF_HASHED_WORDS.items():
        names = [measure + way for measure in ("spearman", "pearson") for way in ("", "_mean", "_wmean")]
        assert [found[task][name] for name in names] == pytest.approx(expected, abs=1e-3)
    for (task, subset), spearman in OF_SUBSETS.items():
        assert found[task]["subsets"][subset]["spearman"] == pytest.approx(spearman, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "split", "spearman"),
    [("STS-B", "dev", 55.5427), ("STS-B", "train", 46.3728), ("SICK-R", "dev", 54.6392), ("SICK-R", "train", 52.9581)],
)
def test_the_other_splits_are_sentevals_too(shared: Path, task: str, split: str, spearman: float) -> None:
    pairs = load_pairs(str(shared / "data/senteval"), task, split)
    assert scores_of_hashed_words(pairs)["spearman"] == pytest.approx(spearman, abs=1e-3)


def test_a_real_encoder_scores_what_senteval_gives_it(shared: Path) -> None:
    pairs = load_pairs(str(shared / "data/senteval"), "STS-B")
    name, expected = "all-MiniLM-L6-v2", {"cls": 73.5042, "mean": 82.0325, "first-last-mean": 81.5495}
    encoded = encode(
        name, pairs.sentences, tuple(expected), 64, max_positions(name), ClusterConfig(), lambda done, total: None
    )
    assert not encoded.truncated.any()
    for pooling, spearman in expected.items():
        cosines = pair_cosines(encoded.of(pooling, pairs.first), encoded.of(pooling, pairs.second))
        assert correlations(cosines, pairs.gold)["spearman"] == pytest.approx(spearman, abs=1e-3)


@pytest.mark.parametrize(
    ("file", "pairs"), [("STS-B/test.tsv", 1361), ("LCQMC/valid.tsv", 8802), ("BQ/test.tsv", 10000)]
)
def test_scored_files_without_a_header_are_read_whole(shared: Path, file: str, pairs: int) -> None:
    assert len(read_scored_file(str(shared / "data/zh" / file), (0, 1, 2)).gold) == pairs
