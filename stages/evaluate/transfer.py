"""Transfer tasks: sentences with a class each, which a classifier on frozen embeddings has to tell apart.

MR, CR, SUBJ, MPQA, SST2, TREC and MRPC are read from a folder in SentEval layout. They come in the order in which
SentEval (Conneau and Kiela 2018, in the fork that SimCSE reports with) gives them to its classifiers, so that the folds
drawn from them are the same.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError
from stages.evaluate.files import fields, read_columns, read_lines, sentence
from stages.evaluate.sts import senteval_folder

FOLDS = {"full": 10, "fast": 5}                                # of cross-validation, by evaluate.protocol

TREC_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
CLASSES = {"TREC": TREC_CLASSES}                               # of the others: 0 and 1

FILES: dict[str, dict[str, tuple[str, ...]]] = {               # task -> split -> files; of two, class 1 comes first
    "MR": {"train": ("MR/rt-polarity.pos", "MR/rt-polarity.neg")},
    "CR": {"train": ("CR/custrev.pos", "CR/custrev.neg")},
    "SUBJ": {"train": ("SUBJ/subj.objective", "SUBJ/subj.subjective")},
    "MPQA": {"train": ("MPQA/mpqa.pos", "MPQA/mpqa.neg")},
    "SST2": {split: (f"SST/binary/sentiment-{split}",) for split in ("train", "dev", "test")},
    "TREC": {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)},
    "MRPC": {"train": ("MRPC/msr_paraphrase_train.txt",), "test": ("MRPC/msr_paraphrase_test.txt",)},
}

PUBLISHED = {                                                  # rows of a file, or of a folder's files together
    "MR": {"MR/rt-polarity.pos": 5331, "MR/rt-polarity.neg": 5331},
    "CR": {"CR": 3775},
    "SUBJ": {"SUBJ/subj.objective": 5000, "SUBJ/subj.subjective": 5000},
    "MPQA": {"MPQA": 10606},
    "SST2": {"SST/binary/sentiment-train": 67349, "SST/binary/sentiment-dev": 872, "SST/binary/sentiment-test": 1821},
    "TREC": {"TREC/train_5500.label": 5452, "TREC/TREC_10.label": 500},
    "MRPC": {"MRPC/msr_paraphrase_train.txt": 4076, "MRPC/msr_paraphrase_test.txt": 1725},
}

Selection = Literal["inner folds", "folds", "dev"]
"""What the strength of regularisation is chosen by: cross-validation inside each training fold of an outer one (these
tasks have no test set), cross-validation on the training set, or the dev set."""

_SELECTION: dict[str, Selection] = {"SST2": "dev", "TREC": "folds", "MRPC": "folds"}


@dataclass(frozen=True)
class Labelled:
    """n sentences, or pairs of them, with a class each."""

    first: tuple[str, ...]
    second: tuple[str, ...]                                    # empty but for MRPC
    labels: NDArray[np.int64]                                  # (n,) from 0


@dataclass(frozen=True)
class TransferData:
    """A task's splits, in the order of SentEval."""

    task: str
    selection: Selection
    splits: dict[str, Labelled]                                # train; test but for inner folds; dev of SST2
    counts: tuple[tuple[Path, int, int], ...]                  # file or folder, rows found, rows as published

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences of all splits, with repetitions."""
        return tuple(text for split in self.splits.values() for text in split.first + split.second)

    @property
    def warnings(self) -> list[str]:
        """Which files have another number of rows than published."""
        rows = "pairs" if self.task == "MRPC" else "sentences"
        return [
            f"{path}: {found} {rows}, where {self.task} has {expected}"
            for path, found, expected in self.counts
            if found != expected
        ]


@dataclass(frozen=True)
class _Row:
    texts: tuple[str, ...]
    label: int
    words: tuple[int, ...]                                     # of each text, as SentEval counts them


def load_transfer(data: str, task: str, protocol: Literal["full", "fast"] = "full") -> TransferData:
    """All splits of a transfer task.

    Args:
        data: folder in SentEval layout, or the folder above its ``downstream``.
        task: one of ``config.TRANSFER_TASKS``.
        protocol: says how many folds there must be sentences for.

    Raises:
        InputError: a file is missing or malformed, or a class has too few sentences for the folds.
    """
    folder = senteval_folder(data)
    rows: dict[str, list[_Row]] = {}
    for names in FILES[task].values():
        for at, name in enumerate(names):
            rows[name] = _read(folder / name, task, label=1 - at)
    splits = {split: _split([row for name in names for row in rows[name]]) for split, names in FILES[task].items()}
    loaded = TransferData(
        task,
        _SELECTION.get(task, "inner folds"),
        splits,
        tuple(
            (folder / path, sum(len(rows[name]) for name in rows if name == path or name.startswith(f"{path}/")), size)
            for path, size in PUBLISHED[task].items()
        ),
    )
    _check_classes(loaded, folder, protocol)
    return loaded


def transfer_files(data: str, task: str) -> list[Path]:
    """The files that ``load_transfer`` reads."""
    folder = senteval_folder(data)
    return [folder / name for names in FILES[task].values() for name in names]


def _check_classes(data: TransferData, folder: Path, protocol: Literal["full", "fast"]) -> None:
    """See that every fold gets a sentence of each class.

    Raises:
        InputError: it does not; or a split is empty.
    """
    folds = FOLDS[protocol]
    # Of n sentences, an outer fold takes at most ceil(n / folds), and each of as many inner folds needs one more.
    least = {"dev": 1, "folds": folds, "inner folds": folds + 2}[data.selection]
    names = CLASSES.get(data.task, ("0", "1"))
    for label, name in enumerate(names):
        found = int((data.splits["train"].labels == label).sum())
        if found < least:
            files = " and ".join(str(folder / each) for each in FILES[data.task]["train"])
            faster = ", or set evaluate.protocol=fast" if data.selection != "dev" and protocol == "full" else ""
            raise InputError(
                f"{files}: class {name} has {found} rows, but {data.task} with evaluate.protocol={protocol} needs "
                f"at least {least} of each class; restore the data{faster}"
            )
    for split, labelled in data.splits.items():
        if not len(labelled.labels):
            raise InputError(f"{folder / FILES[data.task][split][0]}: no sentence at all; restore the file")


def _split(rows: list[_Row]) -> Labelled:
    """The rows in SentEval's order: by words and class, and else as they are in the files."""
    rows = sorted(rows, key=lambda row: (*row.words, row.label))
    return Labelled(
        first=tuple(row.texts[0] for row in rows),
        second=tuple(row.texts[1] for row in rows if len(row.texts) > 1),
        labels=np.array([row.label for row in rows], dtype=np.int64),
    )


def _read(file: Path, task: str, label: int) -> list[_Row]:
    if not file.is_file():
        raise InputError(f"{file}: no such file; restore it, or leave {task} out of evaluate.transfer")
    match task:
        case "MRPC":
            return _read_mrpc(file)
        case "SST2":
            return _read_sst(file)
        case "TREC":
            return _read_latin(file, _trec_question)
        case _:
            return _read_latin(file, lambda line, file, at: (line, label))


def _read_latin(file: Path, parse: Callable[[str, Path, int], tuple[str, int]]) -> list[_Row]:
    """A file that SentEval reads as Latin-1, whatever it is.

    The sentences are decoded as what they are, but sorted by the words that SentEval sees: Latin-1 takes some bytes of
    UTF-8 for spaces.
    """
    rows = []
    seen = read_lines(file, ("latin-1",))
    for at, line in enumerate(read_lines(file, ("utf-8", "latin-1")), start=1):
        text, label = parse(line, file, at)
        as_seen, _ = parse(seen[at - 1], file, at)
        rows.append(_Row((sentence(text, file, at),), label, (len(as_seen.split()),)))
    return rows


def _trec_question(line: str, file: Path, at: int) -> tuple[str, int]:
    """The question and class in ``COARSE:fine question``."""
    parts = re.fullmatch(r"([^:\s]+):\S+ (.*)", line.strip())
    if parts is None:
        raise InputError(f"{file}, line {at}: {line[:60]!r} is not of the form COARSE:fine question; mend the line")
    return parts[2], _label(parts[1], TREC_CLASSES, file, at)


def _read_sst(file: Path) -> list[_Row]:
    """SST2: sentence, class."""
    rows = []
    for at, line in enumerate(read_lines(file), start=1):
        text, label = fields(line.strip(), file, at, expected=(2,))
        words = sentence(text, file, at)
        rows.append(_Row((words,), _label(label, ("0", "1"), file, at), (len(words.split()),)))
    return rows


def _read_mrpc(file: Path) -> list[_Row]:
    """MRPC: a header line names the columns."""
    rows = []
    for at, (first, second, label) in read_columns(file, ("#1 String", "#2 String", "Quality")):
        texts = (sentence(first, file, at), sentence(second, file, at))
        words = (len(texts[0].split()), len(texts[1].split()))
        rows.append(_Row(texts, _label(label, ("0", "1"), file, at), words))
    return rows


def _label(text: str, classes: tuple[str, ...], file: Path, at: int) -> int:
    if text.strip() not in classes:
        raise InputError(f"{file}, line {at}: the class {text!r} is unknown; it may be {', '.join(classes)}")
    return classes.index(text.strip())
