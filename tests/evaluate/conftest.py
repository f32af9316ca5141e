"""A small random BERT and a small folder in SentEval layout, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from stages.evaluate.sts import SPLITS, SUBSETS

WORDS = ["a", "the", "man", "woman", "dog", "cat", "plays", "guitar", "eats", "red", "green", "runs", "not", "two"]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a BERT with random weights: 3 layers of 16 numbers, 24 positions, a word a token."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=24,
            initializer_range=0.3,
        )
    ).save_pretrained(folder)
    BertTokenizer(vocab={word: at for at, word in enumerate(vocabulary)}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def sentences() -> Callable[[int], list[str]]:
    """Makes n sentences of 1 to 12 words, some of them equal."""

    def make(n: int) -> list[str]:
        random = np.random.default_rng(n)
        return [" ".join(random.choice(WORDS, size=random.integers(1, 13))) for _ in range(n)]

    return make


@pytest.fixture
def senteval(tmp_path: Path, sentences: Callable[[int], list[str]]) -> Path:
    """A folder with every STS and SICK file, six pairs in each."""
    folder = tmp_path / "senteval"
    made = iter(sentences(1000))
    golds = ["0.5", "5", "2.25", "3", "4.750", "1"]
    for task, subsets in SUBSETS.items():
        for subset in subsets:
            lines = [f"{next(made)}\t{next(made)}\n" for _ in golds]
            write(folder / f"STS/{task}-en-test/STS.input.{subset}.txt", "".join(lines))
            write(folder / f"STS/{task}-en-test/STS.gs.{subset}.txt", "".join(f"{gold}\n" for gold in golds))
    for file, _ in SPLITS["STS-B"].values():
        rows = [f"main\tmade\t2020\t{at}\t{gold}\t{next(made)}\t{next(made)}\n" for at, gold in enumerate(golds)]
        write(folder / file, "".join(rows))
    for file, _ in SPLITS["SICK-R"].values():
        rows = [f"{at}\t{next(made)}\t{next(made)}\t{gold}\tNEUTRAL\r\n" for at, gold in enumerate(golds)]
        header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\r\n"
        write(folder / file, header + "".join(rows))
    return folder


@pytest.fixture
def transfer(senteval: Path, sentences: Callable[[int], list[str]]) -> Path:
    """The same folder with SUBJ and MRPC of 24 rows each, whose classes have words of their own."""
    made = iter(sentences(500))
    for name, word in {"objective": "red", "subjective": "green"}.items():
        lines = [f"{word} {word} {word} {next(made).split()[0]}\n" for _ in range(12)]
        write(senteval / f"SUBJ/subj.{name}", "".join(lines))
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    for split in ("train", "test"):
        rows = []
        for at in range(24):
            first = next(made)
            rows.append(f"{at % 2}\t{at}\t{at}\t{first}\t{first if at % 2 else next(made)}\n")
        write(senteval / f"MRPC/msr_paraphrase_{split}.txt", header + "".join(rows))
    return senteval


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
