from pathlib import Path

import numpy as np
import pytest

from cluster.errors import InputError
from stages.evaluate.config import TRANSFER_TASKS
from stages.evaluate.sts import senteval_folder
from stages.evaluate.transfer import FILES, TREC_CLASSES, load_transfer, transfer_files
from tests.evaluate.conftest import write

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """All seven tasks, twelve rows a class, and nothing else."""
    for task in ("MR", "CR", "SUBJ", "MPQA"):
        for kind, name in zip(("good", "bad"), FILES[task]["train"], strict=True):
            write(tmp_path / name, "".join(f"{kind} film {'very ' * (at % 3)}{at}\n" for at in range(12)))
    for (name,) in FILES["SST2"].values():
        write(tmp_path / name, "".join(f"a film {at}\t{at % 2}\n" for at in range(24)))
    for (name,) in FILES["TREC"].values():
        write(tmp_path / name, "".join(f"{TREC_CLASSES[at % 6]}:fine What is {at} ?\n" for at in range(72)))
    for (name,) in FILES["MRPC"].values():
        rows = (f"{at % 2}\t{at}\t{at}\tHe said {at} .\tShe said that {at} .\r\n" for at in range(24))
        write(tmp_path / name, "\ufeff" + HEADER + "".join(rows))
    return tmp_path


def edit(file: Path, line: int, text: str | bytes) -> None:
    lines = file.read_bytes().split(b"\n")
    lines[line - 1] = text if isinstance(text, bytes) else text.encode()
    file.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("task", TRANSFER_TASKS)
def test_every_task_is_read_and_its_size_compared_with_the_published_one(data: Path, task: str) -> None:
    loaded = load_transfer(str(data), task)
    assert list(loaded.splits) == list(FILES[task])
    assert transfer_files(str(data), task) == [data / name for names in FILES[task].values() for name in names]
    per_row = 2 if task == "MRPC" else 1
    assert len(loaded.sentences) == per_row * sum(len(split.labels) for split in loaded.splits.values())
    assert len(loaded.warnings) == len(loaded.counts)
    assert sum(found for _, found, _ in loaded.counts) * per_row == len(loaded.sentences)


def test_a_warning_names_file_and_both_counts(data: Path) -> None:
    assert load_transfer(str(data), "SUBJ").warnings == [
        f"{data}/SUBJ/subj.objective: 12 sentences, where SUBJ has 5000",
        f"{data}/SUBJ/subj.subjective: 12 sentences, where SUBJ has 5000",
    ]
    assert load_transfer(str(data), "CR").warnings == [f"{data}/CR: 24 sentences, where CR has 3775"]
    assert load_transfer(str(data), "MRPC").warnings[0].endswith("train.txt: 24 pairs, where MRPC has 4076")


def test_a_folder_with_transfer_sets_alone_is_found_and_also_from_above(data: Path, tmp_path: Path) -> None:
    assert senteval_folder(str(data)) == data
    for task in (task for task in TRANSFER_TASKS if task != "SST2"):
        (data / task).rename(data / f"no-{task}")
    assert senteval_folder(str(data)) == data
    (data / "downstream").mkdir()
    (data / "SST").rename(data / "downstream/SST")
    assert senteval_folder(str(data)) == data / "downstream"


def test_rows_are_sorted_by_words_then_class_then_place_as_in_senteval(data: Path) -> None:
    write(data / "MR/rt-polarity.pos", "a b c\nd\n" + "e f\n" * 10)
    write(data / "MR/rt-polarity.neg", "g\nh i j\nk  l\n" + "m n o p\n" * 9)
    train = load_transfer(str(data), "MR").splits["train"]
    assert train.first[:3] == ("g", "d", "k l")
    assert train.first[13:16] == ("h i j", "a b c", "m n o p")
    assert train.labels.tolist() == [0, 1, 0, *[1] * 10, 0, 1, *[0] * 9]


def test_pairs_are_sorted_by_the_words_of_both(data: Path) -> None:
    rows = ["1\t1\t1\ta b\tc d", "0\t1\t1\te f\tg", "1\t1\t1\th\ti j k", "0\t1\t1\tl m\tn o"]
    rows += ["0\t1\t1\tp q r\ts"] * 8 + ["1\t1\t1\tp q r\ts"] * 8
    write(data / "MRPC/msr_paraphrase_train.txt", HEADER + "\n".join(rows))
    train = load_transfer(str(data), "MRPC").splits["train"]
    assert list(zip(train.first, train.second, strict=True))[:4] == [
        ("h", "i j k"), ("e f", "g"), ("l m", "n o"), ("a b", "c d")
    ]
    assert train.labels.tolist()[:4] == [1, 0, 0, 1]


def test_words_are_counted_as_senteval_sees_them_in_latin_1(data: Path) -> None:
    text = "voilà deux"                                        # à ends in the byte that is a no-break space in Latin-1
    assert len(text.encode().decode("latin-1").split()) == 2
    write(data / "CR/custrev.pos", "à la\n" + "x y z\n" * 11)  # two words; as Latin-1 sees it, Ã and la
    write(data / "CR/custrev.neg", "Ã à à a\n" + "x y z w v\n" * 11)
    assert load_transfer(str(data), "CR").splits["train"].first[0] == "à la"


def test_a_file_that_is_no_utf_8_is_latin_1(data: Path) -> None:
    edit(data / "TREC/train_5500.label", 1, "ABBR:exp Où est le café ?".encode("latin-1"))
    edit(data / "MPQA/mpqa.pos", 1, "naïve".encode("latin-1"))
    assert "Où est le café ?" in load_transfer(str(data), "TREC").sentences
    assert "naïve" in load_transfer(str(data), "MPQA").sentences
    edit(data / "MPQA/mpqa.pos", 1, "naïve".encode())
    assert "naïve" in load_transfer(str(data), "MPQA").sentences


def test_crlf_and_a_byte_order_mark_do_not_reach_the_sentences(data: Path) -> None:
    for task in TRANSFER_TASKS:
        clean = load_transfer(str(data), task)
        for file in transfer_files(str(data), task):
            content = file.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
            file.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n"))
        assert load_transfer(str(data), task).sentences == clean.sentences


@pytest.mark.parametrize(
    ("task", "file", "line", "text", "message"),
    [
        ("MR", "MR/rt-polarity.neg", 5, " ", "an empty sentence"),
        ("SST2", "SST/binary/sentiment-dev", 2, "a film 1", "1 tab-separated fields, expected 2"),
        ("SST2", "SST/binary/sentiment-dev", 2, "a film\t1\t1", "3 tab-separated fields, expected 2"),
        ("SST2", "SST/binary/sentiment-test", 24, "a film\t2", "the class '2' is unknown; it may be 0, 1"),
        ("SST2", "SST/binary/sentiment-train", 3, b"caf\xe9\t1", "not UTF-8"),
        ("TREC", "TREC/TREC_10.label", 3, "WHAT:x y ?", "the class 'WHAT' is unknown; it may be ABBR, DESC, ENTY, HUM"),
        ("TREC", "TREC/TREC_10.label", 3, "What is this ?", "is not of the form COARSE:fine question"),
        ("TREC", "TREC/train_5500.label", 3, "HUM:ind", "is not of the form COARSE:fine question"),
        ("MRPC", "MRPC/msr_paraphrase_test.txt", 4, "1\t1\t1\tHe said .", "4 fields where the first line has 5"),
        ("MRPC", "MRPC/msr_paraphrase_test.txt", 4, "yes\t1\t1\ta\tb", "the class 'yes' is unknown; it may be 0, 1"),
        ("MRPC", "MRPC/msr_paraphrase_test.txt", 4, "1\t1\t1\ta\t ", "an empty sentence"),
    ],
)
def test_a_bad_line_is_named(data: Path, task: str, file: str, line: int, text: str | bytes, message: str) -> None:
    edit(data / file, line, text)
    with pytest.raises(InputError) as error:
        load_transfer(str(data), task)
    assert str(error.value).startswith(f"{data / file}, line {line}: ")
    assert message in str(error.value)


def test_a_missing_file_says_how_to_do_without(data: Path) -> None:
    (data / "MPQA/mpqa.neg").unlink()
    with pytest.raises(InputError, match=r"mpqa\.neg: no such file; restore it, or leave MPQA out of evaluate\.trans"):
        load_transfer(str(data), "MPQA")


def test_classes_too_small_for_the_folds_are_refused(data: Path) -> None:
    write(data / "MR/rt-polarity.pos", "good film\n" * 11)     # 9 are left outside of an outer fold of 2
    with pytest.raises(InputError, match=r"class 1 has 11 rows, but MR with evaluate\.protocol=full needs at least 12"):
        load_transfer(str(data), "MR")
    assert len(load_transfer(str(data), "MR", "fast").splits["train"].labels) == 23
    write(data / "TREC/train_5500.label", "HUM:ind Who ?\n" * 50)
    with pytest.raises(InputError, match="class ABBR has 0 rows"):
        load_transfer(str(data), "TREC")
    write(data / "SST/binary/sentiment-train", "good\t1\n" * 50)
    with pytest.raises(InputError, match="class 0 has 0 rows"):
        load_transfer(str(data), "SST2")


def test_an_empty_split_is_refused(data: Path) -> None:
    write(data / "SST/binary/sentiment-test", "")
    with pytest.raises(InputError, match="sentiment-test: no sentence at all"):
        load_transfer(str(data), "SST2")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("task", "rows", "of_class_1"), [("MR", 10662, 5331), ("SUBJ", 10000, 5000), ("MRPC", 4076, 2753)]
)
def test_the_real_sets_are_complete(shared: Path, task: str, rows: int, of_class_1: int) -> None:
    loaded = load_transfer(str(shared / "data/senteval"), task)
    assert loaded.warnings == []
    labels = loaded.splits["train"].labels
    assert (len(labels), int(np.sum(labels))) == (rows, of_class_1)
