"""What to score an encoder on, and how."""

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, PositiveInt, model_validator

STS_TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
GRADED_SAMPLE = "graded-sample"                                # the pairs that come with this package

BaselinePooling = Literal["cls", "mean", "first-last-mean"]

_OTHER_NAMES = {"stsbenchmark": "STS-B", "sickrelatedness": "SICK-R", "sick": "SICK-R"}


def sts_task(name: str) -> str:
    """The task that ``name`` means: STS-B for STSb, sts_b and STSBenchmark, SICK-R for SICKRelatedness.

    Raises:
        ValueError: there is no such task; names the nearest.
    """
    known = _OTHER_NAMES | {_plain(task): task for task in STS_TASKS}
    if _plain(name) in known:
        return known[_plain(name)]
    near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    raise ValueError(f"there is no similarity task {name!r}; {hint}Known are {', '.join(STS_TASKS)}, or all, or none")


def _plain(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(" ", "")


def _one_or_many(value: object) -> object:
    """Let a single task stand without brackets, as on the command line."""
    return (value,) if isinstance(value, str) and value not in ("all", "none") else value


def _in_table_order(tasks: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Give equal choices one spelling, so that they have one key in the store."""
    if isinstance(tasks, str):
        return tasks
    chosen = {sts_task(name) for name in tasks}
    return tuple(task for task in STS_TASKS if task in chosen) or "none"


class EvaluateConfig(BaseModel, extra="forbid", frozen=True):
    """All that decides the scores, beside the encoder; where they are computed is ClusterConfig's matter."""

    data: str | None = None                                    # folder in SentEval layout; null: the graded sample
    sts: Annotated[
        tuple[str, ...] | Literal["all", "none"], BeforeValidator(_one_or_many), AfterValidator(_in_table_order)
    ] = "all"
    baseline_poolings: tuple[BaselinePooling, ...] = ("cls", "mean", "first-last-mean")
    batch_size: PositiveInt = 64                               # sentences per forward pass
    max_length: PositiveInt | None = None                      # tokens; null: as many as the encoder has positions
    allow_partial: bool = False                                # warn of sets of another size than published

    @model_validator(mode="after")
    def _named_tasks_have_data(self) -> "EvaluateConfig":
        if self.data is None and isinstance(self.sts, tuple):
            raise ValueError(
                f"evaluate.sts names {', '.join(self.sts)} but evaluate.data is null; "
                "set evaluate.data to a folder in SentEval layout, or evaluate.sts to all for the graded sample"
            )
        return self

    @property
    def sts_tasks(self) -> tuple[str, ...]:
        """The similarity tasks to score, in the order of the papers' tables."""
        if self.sts == "none":
            return ()
        if self.data is None:
            return (GRADED_SAMPLE,)
        return STS_TASKS if isinstance(self.sts, str) else self.sts
