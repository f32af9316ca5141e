import pytest
from pydantic import ValidationError

from stages.evaluate.config import GRADED_SAMPLE, STS_TASKS, EvaluateConfig


def test_without_data_the_graded_sample_is_scored() -> None:
    assert EvaluateConfig().sts_tasks == (GRADED_SAMPLE,)


def test_all_are_the_seven_tasks_of_the_papers_tables() -> None:
    assert EvaluateConfig(data="somewhere").sts_tasks == STS_TASKS


def test_none_scores_no_similarity_task() -> None:
    assert EvaluateConfig(data="there", sts="none", transfer="MR").sts_tasks == ()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("STSBenchmark", "STS-B"),
        ("stsb", "STS-B"),
        ("STS-B", "STS-B"),
        ("SICKRelatedness", "SICK-R"),
        ("SICK-R", "SICK-R"),
        ("sts12", "STS12"),
    ],
)
def test_the_names_in_common_use_are_understood(given: str, meant: str) -> None:
    assert EvaluateConfig(data="somewhere", sts=(given,)).sts_tasks == (meant,)


def test_one_task_may_stand_without_brackets() -> None:
    assert EvaluateConfig.model_validate({"data": "somewhere", "sts": "STS-B"}).sts_tasks == ("STS-B",)


def test_equal_choices_of_tasks_are_equal_configs() -> None:
    one = EvaluateConfig(data="somewhere", sts=("SICK-R", "STS12", "STS12"))
    other = EvaluateConfig(data="somewhere", sts=("STS12", "SICKRelatedness"))
    assert one == other


def test_an_unknown_task_names_the_nearest_and_all() -> None:
    with pytest.raises(ValidationError, match=r"no similarity task 'STS17'; did you mean STS1\d\? Known are STS12, "):
        EvaluateConfig(data="somewhere", sts=("STS17",))


def test_named_tasks_without_data_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"names STS12 but evaluate\.data is null"):
        EvaluateConfig(sts=("STS12",))


def test_an_unknown_baseline_pooling_is_refused() -> None:
    with pytest.raises(ValidationError, match="first-last-mean"):
        EvaluateConfig.model_validate({"baseline_poolings": ["max"]})
