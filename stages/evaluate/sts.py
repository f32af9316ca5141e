"""Semantic textual similarity: sentence pairs that people scored, and how well cosines follow their scores.

STS12-16, STS-B and SICK-R are read from a folder in SentEval layout and scored as SentEval does (in the fork that
SimCSE and its successors report with), so that figures can be set beside published ones.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cluster.errors import InputError
from stages.evaluate.config import GRADED_SAMPLE, TRANSFER_TASKS, EvaluateConfig
from stages.evaluate.files import fields, number, read_columns, read_lines, sentence

SAMPLE_FILE = Path(__file__).with_name("graded_sample.tsv")

SUBSETS = {                                                    # pairs with a score, as published
    "STS12": {"MSRpar": 750, "MSRvid": 750, "SMTeuroparl": 459, "surprise.OnWN": 750, "surprise.SMTnews": 399},
    "STS13": {"FNWN": 189, "headlines": 750, "OnWN": 561},     # without SMT, whose licence keeps it out of SentEval
    "STS14": {
        "deft-forum": 450, "deft-news": 300, "headlines": 750, "images": 750, "OnWN": 750, "tweet-news": 750,
    },
    "STS15": {"answers-forums": 375, "answers-students": 750, "belief": 375, "headlines": 750, "images": 750},
    "STS16": {
        "answer-answer": 254, "headlines": 249, "plagiarism": 230, "postediting": 244, "question-question": 209,
    },
}

SPLITS = {                                                     # file and pairs of each split, as published
    "STS-B": {
        "train": ("STS/STSBenchmark/sts-train.csv", 5749),
        "dev": ("STS/STSBenchmark/sts-dev.csv", 1500),
        "test": ("STS/STSBenchmark/sts-test.csv", 1379),
    },
    "SICK-R": {
        "train": ("SICK/SICK_train.txt", 4500),
        "dev": ("SICK/SICK_trial.txt", 500),
        "test": ("SICK/SICK_test_annotated.txt", 4927),
    },
}

SMALLEST_SPREAD = 1e-6                                         # of cosines; less is float32 noise around one value


@dataclass(frozen=True)
class ScoredPairs:
    """n sentence pairs with a human score each, in the order of their files."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    gold: NDArray[np.float64]                                  # (n,)
    subsets: tuple[str, ...]                                   # the part of the task that each pair belongs to

    @property
    def sentences(self) -> tuple[str, ...]:
        """All 2n sentences, with repetitions."""
        return self.first + self.second

    def of_subset(self, name: str) -> NDArray[np.bool_]:
        """(n,) which pairs belong to one subset."""
        return np.array([subset == name for subset in self.subsets], dtype=bool)


@dataclass(frozen=True)
class _Part:
    """One subset of a task, or one split of a set without subsets."""

    name: str
    files: tuple[Path, ...]                                    # the file; of STS12-16, the sentences' and the scores'
    expected: int | None                                       # pairs with a score, as published


def load_pairs(data: str | None, task: str, split: str = "test") -> ScoredPairs:
    """The pairs of one split of a task; those whose gold line is empty are left out.

    Args:
        data: folder in SentEval layout, or the folder above its ``downstream``; None for the graded sample.
        task: one of ``config.STS_TASKS``, or ``config.GRADED_SAMPLE``.
        split: ``test``; ``dev`` of all but STS12-16; ``train`` of STS-B and SICK-R.

    Raises:
        InputError: a file is missing or malformed; names file and line.
    """
    return _joined(_read(part, task, split) for part in _parts(data, task, split))


def pair_files(data: str | None, task: str, split: str = "test") -> list[Path]:
    """The files that ``load_pairs`` reads."""
    return [file for part in _parts(data, task, split) for file in part.files]


def validation_pairs(data: str | None) -> ScoredPairs:
    """What training chooses its checkpoint by: STS-B dev, or the graded sample's dev split without data."""
    return load_pairs(data, *validation_set(data))


def validation_set(data: str | None) -> tuple[str, str]:
    """Task and split of ``validation_pairs``."""
    return (GRADED_SAMPLE if data is None else "STS-B", "dev")


def load_tasks(config: EvaluateConfig) -> tuple[dict[str, ScoredPairs], list[str]]:
    """The test pairs of every STS task of the config, and which have another number of pairs than published.

    Raises:
        InputError: a file is missing or malformed.
    """
    tasks = {task: load_pairs(config.data, task) for task in config.sts_tasks}
    warnings = []
    for task, pairs in tasks.items():
        found = Counter(pairs.subsets)
        for part in _parts(config.data, task, "test"):
            if part.expected is not None and found[part.name] != part.expected:
                warnings.append(
                    f"{part.files[-1]}: {found[part.name]} scored pairs, where {task} {part.name} has {part.expected}"
                )
    return tasks, warnings


def sts_sentences(data: str | None) -> list[str]:
    """The distinct sentences of every split, dev and train included, of every similarity set that is there."""
    if data is None:
        sources = [(GRADED_SAMPLE, "dev"), (GRADED_SAMPLE, "test")]
    else:
        sources = [(task, "test") for task in SUBSETS]
        sources += [(task, split) for task, splits in SPLITS.items() for split in splits]
    parts = [(part, task, split) for task, split in sources for part in _parts(data, task, split)]
    present = [_read(*part) for part in parts if all(file.is_file() for file in part[0].files)]
    return list(dict.fromkeys(sentence for pairs in present for sentence in pairs.sentences))


def all_texts(data: str) -> list[str]:
    """Every sentence of every split of the similarity sets, of pairs without a score too, with repetitions.

    Raises:
        InputError: a file is missing or malformed.
    """
    texts: list[str] = []
    for part in (part for task in SUBSETS for part in _parts(data, task, "test")):
        texts += [text for pair in _input_pairs(part) for text in pair]
    for task, splits in SPLITS.items():
        for split in splits:
            texts += load_pairs(data, task, split).sentences
    return texts


def all_text_files(data: str) -> list[str]:
    """The files that :func:`all_texts` reads.

    Raises:
        InputError: one is missing.
    """
    years = [_parts(data, task, "test") for task in SUBSETS]
    splits = [_parts(data, task, split) for task, splits in SPLITS.items() for split in splits]
    files = [file for parts in (*years, *splits) for part in parts for file in part.files]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file, and corpus.source.kind=sts reads all similarity sets; restore it")
    return [str(file) for file in files]


def read_scored_file(path: str, columns: tuple[str | int, str | int, str | int]) -> ScoredPairs:
    """The pairs of any csv, tsv, jsonl or parquet file with two text columns and a score.

    Args:
        path: its suffix decides the format (``files.read_columns``).
        columns: the sentences' and the score's; positions from 0 for a file without a header line.

    Raises:
        InputError: a missing file or column, an empty sentence, a score that is no number.
    """
    file = Path(path).expanduser()
    rows = read_columns(file, columns)
    return _pairs(
        [
            (sentence(first, file, at), sentence(second, file, at), number(score, file, at), file.stem)
            for at, (first, second, score) in rows
        ],
        file,
    )


def pair_cosines(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float64]:
    """(n,) cosines of the rows of two (n, D) arrays; 0 where a row is zero.

    The expression is SentEval's, pair by pair in the embeddings' own precision. Its rounding decides how pairs of
    identical sentences rank among each other: exact cosines would move STS12 by some thousandths of a point.
    """
    with np.errstate(invalid="ignore"):
        cosines = [np.dot(u, v) / (np.linalg.norm(u) * np.linalg.norm(v)) for u, v in zip(first, second, strict=True)]
    return np.nan_to_num(np.array(cosines, dtype=np.float64))


def pair_similarities(
    first: NDArray[np.float32], second: NDArray[np.float32], similarity: Literal["cosine", "manhattan"]
) -> NDArray[np.float64]:
    """(n,) how alike the rows of two (n, D) arrays are: cosines, or exp(-mean |u - v|), which siamese nets learn."""
    if similarity == "cosine":
        return pair_cosines(first, second)
    alike: NDArray[np.float64] = np.exp(-np.abs(first.astype(np.float64) - second).mean(axis=1))
    return alike


def correlations(cosines: NDArray[np.float64], gold: NDArray[np.float64]) -> dict[str, float]:
    """Spearman's and Pearson's correlation in percent, of (n,) cosines with (n,) human scores.

    Raises:
        InputError: they are undefined, because all cosines (or all scores) are one value.
    """
    from scipy.stats import pearsonr, spearmanr  # a second that planning and cached runs do without

    if np.ptp(cosines) < SMALLEST_SPREAD:
        raise InputError(
            f"all {len(cosines)} cosines are {cosines[0]:.6f}, so a correlation is undefined: "
            "the encoder gives every sentence the same direction; check its weights and pooling"
        )
    if np.ptp(gold) == 0:
        raise InputError(f"all {len(gold)} scores are {gold[0]:g}, so a correlation is undefined")
    return {
        "spearman": 100 * float(spearmanr(cosines, gold).statistic),
        "pearson": 100 * float(pearsonr(cosines, gold).statistic),
    }


def senteval_folder(data: str) -> Path:
    """The folder that holds STS/, SICK/ or a transfer set: ``data`` itself or its ``downstream``.

    Raises:
        InputError: neither holds any of them.
    """
    sets = ("STS", "SICK", *(task.replace("SST2", "SST") for task in TRANSFER_TASKS))
    for folder in (Path(data).expanduser(), Path(data).expanduser() / "downstream"):
        if any((folder / name).is_dir() for name in sets):
            return folder
    raise InputError(
        f"evaluate.data={data} is no folder in SentEval layout: it holds neither STS/ nor SICK/ nor a transfer set "
        "such as MR/, nor does its downstream/; name another folder, or null for the graded sample"
    )


def _parts(data: str | None, task: str, split: str) -> list[_Part]:
    if data is None:
        return [_Part(split, (SAMPLE_FILE,), None)]
    folder = senteval_folder(data)
    if task in SPLITS:
        name, expected = SPLITS[task][split]
        return [_Part(split, (folder / name,), expected)]
    if split != "test":
        raise InputError(f"{task} has no {split} split; use STS-B or SICK-R")
    of_year = folder / "STS" / f"{task}-en-test"
    return [
        _Part(name, (of_year / f"STS.input.{name}.txt", of_year / f"STS.gs.{name}.txt"), expected)
        for name, expected in SUBSETS[task].items()
    ]


def _read(part: _Part, task: str, split: str) -> ScoredPairs:
    missing = [file for file in part.files if not file.is_file()]
    if missing:
        raise InputError(f"{missing[0]}: no such file; restore it, or leave {task} out of evaluate.sts")
    readers = {"STS-B": _read_benchmark, "SICK-R": _read_sick, GRADED_SAMPLE: _read_sample}
    return readers.get(task, _read_subset)(part)


def _read_subset(part: _Part) -> ScoredPairs:
    """STS12-16: ``s1<TAB>s2`` lines in one file, gold lines in another; an empty gold drops the pair."""
    input_file, gold_file = part.files
    inputs, golds = _input_pairs(part), read_lines(gold_file)
    if len(inputs) != len(golds):
        raise InputError(
            f"{input_file} has {len(inputs)} pairs but {gold_file} has {len(golds)} scores; restore the files"
        )
    rows = []
    for at, ((first, second), gold) in enumerate(zip(inputs, golds, strict=True), start=1):
        if gold.strip():
            score = _gold(gold, gold_file, at)
            rows.append((sentence(first, input_file, at), sentence(second, input_file, at), score, part.name))
    return _pairs(rows, gold_file)


def _input_pairs(part: _Part) -> list[list[str]]:
    """The two sentences of each pair of a subset of STS12-16, scored or not."""
    file = part.files[0]
    return [fields(line, file, at, expected=(2,)) for at, line in enumerate(read_lines(file), start=1)]


def _read_benchmark(part: _Part) -> ScoredPairs:
    """STS-B: genre, source, year, index, score, s1, s2; the original release has two columns more."""
    (file,) = part.files
    rows = []
    for at, line in enumerate(read_lines(file), start=1):
        _, _, _, _, gold, first, second, *_ = fields(line, file, at, expected=(7, 9))
        rows.append(_row(first, second, gold, file, at, part.name))
    return _pairs(rows, file)


def _read_sick(part: _Part) -> ScoredPairs:
    """SICK: a header line names the columns."""
    (file,) = part.files
    columns = read_columns(file, ("sentence_A", "sentence_B", "relatedness_score"))
    return _pairs([_row(first, second, gold, file, at, part.name) for at, (first, second, gold) in columns], file)


def _read_sample(part: _Part) -> ScoredPairs:
    """The graded sample: one file for both splits; genres are its subsets."""
    (file,) = part.files
    columns = read_columns(file, ("split", "genre", "sentence1", "sentence2", "score"))
    return _pairs(
        [
            _row(first, second, gold, file, at, genre)
            for at, (split, genre, first, second, gold) in columns
            if split == part.name
        ],
        file,
    )


_Row = tuple[str, str, float, str]


def _row(first: str, second: str, gold: str, file: Path, at: int, subset: str) -> _Row:
    return sentence(first, file, at), sentence(second, file, at), _gold(gold, file, at), subset


def _gold(text: str, file: Path, at: int) -> float:
    """A score of the similarity sets, all of which go from 0, or 1, to 5.

    Raises:
        InputError: it is outside.
    """
    score = number(text, file, at)
    if not 0 <= score <= 5:
        raise InputError(f"{file}, line {at}: the score {text.strip()} is outside 0 to 5; restore the file")
    return score


def _pairs(rows: list[_Row], file: Path) -> ScoredPairs:
    if len({gold for _, _, gold, _ in rows}) < 2:
        raise InputError(
            f"{file}: {len(rows)} scored pairs without two different scores, so a correlation is undefined; "
            "restore the file"
        )
    first, second, gold, subsets = zip(*rows, strict=True)
    return ScoredPairs(first, second, np.array(gold, dtype=np.float64), subsets)


def _joined(parts: Iterable[ScoredPairs]) -> ScoredPairs:
    pairs = list(parts)
    return ScoredPairs(
        tuple(text for part in pairs for text in part.first),
        tuple(text for part in pairs for text in part.second),
        np.concatenate([part.gold for part in pairs]),
        tuple(name for part in pairs for name in part.subsets),
    )
