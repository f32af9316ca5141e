"""The score that chooses the best weights, against pairs encoded one by one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from cluster.errors import InputError
from cluster.world import Solo, World
from stages.encoder import Encoder, load_tokenizer
from stages.evaluate.classifier import select_and_test, transfer_scores
from stages.evaluate.sts import SAMPLE_FILE, read_scored_file
from stages.evaluate.transfer import load_transfer
from stages.evaluate.validation import TransferMonitor, Validation, ValidationFile, validation_files
from tests import tiny
from tests.processes import in_processes


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def pairs(tmp_path: Path) -> ValidationFile:
    return ValidationFile(path=tiny.scored_pairs(tmp_path / "pairs.jsonl", count=41))


def one_by_one(bert: str, pairs: ValidationFile, max_length: int) -> float:
    encoder, tokenizer = Encoder.load(bert), load_tokenizer(bert)
    read = read_scored_file(pairs.path, pairs.columns)

    def embed(text: str) -> np.ndarray:
        tokens = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            return encoder(tokens["input_ids"], tokens["attention_mask"]).embedding[0].double().numpy()

    both = [(embed(first), embed(second)) for first, second in zip(read.first, read.second, strict=True)]
    cosines = [u @ v / np.linalg.norm(u) / np.linalg.norm(v) for u, v in both]
    return 100 * float(spearmanr(cosines, read.gold).statistic)


def score(world: World, bert: str, pairs: ValidationFile, max_length: int = 16) -> float:
    validation = Validation.read(pairs, None, load_tokenizer(bert), max_length)
    return validation.spearman(Encoder.load(bert), torch.device("cpu"), world)


@pytest.mark.parametrize("max_length", [16, 8])
def test_it_is_the_rank_correlation_of_cosines_and_scores(bert: str, pairs: ValidationFile, max_length: int) -> None:
    assert score(Solo(), bert, pairs, max_length) == pytest.approx(one_by_one(bert, pairs, max_length), abs=0.02)


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_sentences_and_all_know_the_score(size: int, bert: str, pairs: ValidationFile) -> None:
    alone = score(Solo(), bert, pairs)
    scores = in_processes(size, score, bert, pairs)
    assert len(set(scores)) == 1
    assert scores[0] == pytest.approx(alone, abs=0.02)


def test_each_distinct_sentence_is_encoded_once_longest_first(bert: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,score\nword1,word2 word3,1\nword2 word3,word1,2\n")
    file = ValidationFile(path=str(tmp_path / "pairs.csv"))
    validation = Validation.read(file, None, load_tokenizer(bert), 16)
    assert validation.sentences.tokens == [[2, 7, 8, 3], [2, 6, 3]]
    assert validation.first.tolist() == [1, 0]
    assert validation.second.tolist() == [0, 1]
    assert validation.gold.tolist() == [1, 2]


def test_without_file_or_data_the_graded_samples_dev_split_validates(bert: str) -> None:
    assert validation_files(None, None) == [str(SAMPLE_FILE)]
    validation = Validation.read(None, None, load_tokenizer(bert), 16)
    assert 100 < len(validation.gold) < 400


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.csv"):
        validation_files(ValidationFile(path=str(tmp_path / "gone.csv")), None)


@pytest.fixture
def transfer(tmp_path: Path) -> str:
    """MR and SUBJ in SentEval layout, 20 sentences a class, whose classes have words of their own."""
    random = np.random.default_rng(3)
    files = ("MR/rt-polarity.pos", "MR/rt-polarity.neg", "SUBJ/subj.objective", "SUBJ/subj.subjective")
    for at, name in enumerate(files):
        words = tiny.WORDS[10 * at : 10 * at + 16]             # some of which two classes share
        lines = [" ".join(random.choice(words, size=random.integers(2, 9))) + "\n" for _ in range(20)]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(lines))
    return str(tmp_path)


def accuracies(world: World, bert: str, transfer: str) -> dict[str, float]:
    monitor = TransferMonitor.read(("MR", "SUBJ"), transfer, load_tokenizer(bert), 16)
    return monitor.accuracies(Encoder.load(bert), torch.device("cpu"), world)


@pytest.mark.cluster
def test_transfer_tasks_are_watched_by_the_dev_accuracy_of_the_fast_protocol(
    bert: str, transfer: str, tmp_path: Path
) -> None:
    found = accuracies(Solo(), bert, transfer)
    assert set(found) == {"MR_fast_dev_accuracy", "SUBJ_fast_dev_accuracy"}
    task, encoder, tokenizer = load_transfer(transfer, "MR", "fast"), Encoder.load(bert), load_tokenizer(bert)

    def vectors(texts: Sequence[str]) -> np.ndarray:
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            return encoder(tokens["input_ids"], tokens["attention_mask"]).embedding.numpy()

    wanted = transfer_scores(task, vectors, "fast", lambda items: map(select_and_test, items), tmp_path / "scratch")
    assert found["MR_fast_dev_accuracy"] == pytest.approx(wanted["dev_accuracy"], abs=0.5)
    one, other = in_processes(2, accuracies, bert, transfer)
    assert one == other == pytest.approx(found, abs=0.5)
    assert TransferMonitor.read((), None, tokenizer, 16).accuracies(encoder, torch.device("cpu"), Solo()) == {}
