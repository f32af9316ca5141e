"""What an evaluation reads, as a whole: everything checked first, complete, and known to the store by its content."""

from pathlib import Path

import pytest

from cluster.errors import InputError
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.data import check_evaluation, evaluation_sentences, load_evaluation


def config(data: Path, **options: object) -> EvaluateConfig:
    return EvaluateConfig.model_validate({"data": str(data), "protocol": "fast", "allow_partial": True} | options)


def test_a_transfer_set_of_another_size_than_published_is_refused_with_both_counts(transfer: Path) -> None:
    with pytest.raises(InputError, match=r"subj\.objective: 12 sentences, where SUBJ has 5000; restore the file, or"):
        load_evaluation(config(transfer, sts="none", transfer="SUBJ", allow_partial=False))
    data = load_evaluation(config(transfer, sts="none", transfer="SUBJ"))
    assert len(data.warnings) == 2


def test_every_file_that_decides_a_score_is_known_to_the_store(transfer: Path, tmp_path: Path) -> None:
    for name, first in (("test.tsv", "a"), ("valid.tsv", "e")):
        (tmp_path / name).write_text(f"{first}\tb\t1\n{first}\td\t0\n")
    test, validation = str(tmp_path / "test.tsv"), str(tmp_path / "valid.tsv")
    similarity = [{"name": "mine", "path": test, "columns": [0, 1, 2], "validation": validation}]
    reads = check_evaluation(config(transfer, sts=["STS-B"], transfer=["MRPC"], similarity=similarity))
    assert reads == {
        str(transfer): [
            str(transfer / "STS/STSBenchmark/sts-test.csv"),
            str(transfer / "MRPC/msr_paraphrase_train.txt"),
            str(transfer / "MRPC/msr_paraphrase_test.txt"),
        ],
        test: [test],
        validation: [validation],
    }


def test_a_missing_transfer_set_is_named(senteval: Path) -> None:
    with pytest.raises(InputError, match=r"TREC/train_5500\.label: no such file"):
        check_evaluation(config(senteval, transfer="TREC"))


def test_a_corpus_is_rid_of_transfer_sentences_too_and_a_broken_set_nobody_scores_is_no_obstacle(
    transfer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = (transfer / "SUBJ/subj.objective").read_text().splitlines()[0]
    assert first in evaluation_sentences(str(transfer))
    (transfer / "SUBJ/subj.objective").write_text("\n")
    assert first not in evaluation_sentences(str(transfer))
    assert "its sentences are not looked for in the corpus" in caplog.text
