"""What to score an encoder on, and how."""

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PositiveInt, field_validator, model_validator

from stages.encoder import Pooling
from stages.evaluate.whitening import WhiteningConfig

STS_TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TRANSFER_TASKS = ("MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC")
GRADED_SAMPLE = "graded-sample"                                # the pairs that come with this package

_OTHER_NAMES = {"stsbenchmark": "STS-B", "sickrelatedness": "SICK-R", "sick": "SICK-R"}


def task_named(name: str, tasks: tuple[str, ...], kind: str) -> str:
    """The task that ``name`` means: STS-B for STSb, sts_b and STSBenchmark, SICK-R for SICKRelatedness.

    Args:
        name: as the user wrote it.
        tasks: those that there are.
        kind: what they are, for the message.

    Raises:
        ValueError: there is no such task; names the nearest.
    """
    known = {plain: task for plain, task in _OTHER_NAMES.items() if task in tasks}
    known |= {_plain(task): task for task in tasks}
    if _plain(name) in known:
        return known[_plain(name)]
    near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    raise ValueError(f"there is no {kind} task {name!r}; {hint}Known are {', '.join(tasks)}, or all, or none")


def _plain(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(" ", "")


def _one_or_many(value: object) -> object:
    """Let a single task stand without brackets, as on the command line."""
    return (value,) if isinstance(value, str) and value not in ("all", "none") else value


def _in_table_order(tasks: tuple[str, ...], kind: str) -> AfterValidator:
    """Give equal choices one spelling, so that they have one key in the store."""

    def order(chosen: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if isinstance(chosen, str):
            return chosen
        meant = {task_named(name, tasks, kind) for name in chosen}
        return tuple(task for task in tasks if task in meant) or "none"

    return AfterValidator(order)


Tasks = tuple[str, ...] | Literal["all", "none"]
StsTasks = Annotated[Tasks, BeforeValidator(_one_or_many), _in_table_order(STS_TASKS, "similarity")]
TransferTasks = Annotated[Tasks, BeforeValidator(_one_or_many), _in_table_order(TRANSFER_TASKS, "transfer")]


def tasks_of(chosen: Tasks, all_tasks: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks that a choice means."""
    if chosen == "none":
        return ()
    return all_tasks if isinstance(chosen, str) else chosen


class SimilaritySet(BaseModel, extra="forbid", frozen=True):
    """Any file or hub data set of sentence pairs with a score, or with 1 for alike and 0 for not."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    path: str                                                  # csv, tsv, txt, jsonl or parquet file; hub: owner/name
    kind: Literal["file", "hub"] = "file"
    columns: tuple[str | int, str | int, str | int] = ("sentence1", "sentence2", "label")
                                                               # positions from 0 of a csv or tsv without header line
    validation: str | None = None                              # file, or split of the hub's set, that chooses the
                                                               # threshold of binary labels
    subset: str | None = None                                  # these three of hub sets alone
    split: str = "test"
    revision: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> "SimilaritySet":
        fields = type(self).model_fields
        of_hub = [name for name in ("subset", "split", "revision") if getattr(self, name) != fields[name].default]
        if self.kind == "file" and of_hub:
            raise ValueError(f"{self.name}: a file has no {', '.join(of_hub)}; leave it out, or set kind to hub")
        if self.validation == (self.path if self.kind == "file" else self.split):
            raise ValueError(
                f"{self.name}: validation={self.validation} are the test pairs themselves, and a threshold chosen on "
                "them would flatter; name others, or leave validation out"
            )
        urls = [path for path in (self.path, self.validation) if path is not None and "://" in path]
        if urls:
            raise ValueError(f"{self.name}: {urls[0]} is a URL; fetch the file first, or set kind to hub")
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"{self.name}: columns names one twice; name those of both sentences and of the label")
        return self


class EvaluateConfig(BaseModel, extra="forbid", frozen=True):
    """All that decides the scores, beside the encoder; where they are computed is ClusterConfig's matter."""

    data: str | None = None                                    # folder in SentEval layout; null: the graded sample
    sts: StsTasks = "all"
    transfer: TransferTasks = "none"
    protocol: Literal["full", "fast"] = "full"                 # of transfer: 10 folds as in SentEval, or 5
    similarity: tuple[SimilaritySet, ...] = ()                 # other sets of scored or binary pairs
    baseline_poolings: tuple[Pooling, ...] = ("cls", "mean", "first-last-mean")
    whitening: WhiteningConfig | None = None                   # of every embedding scored; null: none
    batch_size: PositiveInt = 64                               # sentences per forward pass
    max_length: Annotated[int, Field(ge=3)] | None = None      # tokens; null: as many as the encoder has positions
    allow_partial: bool = False                                # warn of sets of another size than published
    keep_embeddings: bool = True                               # in the store, for evaluations of the same encoder

    @field_validator("baseline_poolings")
    @classmethod
    def _baselines_need_no_training(cls, poolings: tuple[str, ...]) -> tuple[str, ...]:
        if "layer-attention" in poolings:
            raise ValueError("layer-attention needs training, and these are poolings before it; leave it out")
        return tuple(dict.fromkeys(poolings))

    @model_validator(mode="after")
    def _something_is_scored(self) -> "EvaluateConfig":
        if not (self.sts_tasks or self.transfer_tasks or self.similarity):
            raise ValueError(
                "evaluate.sts and evaluate.transfer are none and evaluate.similarity is empty, so there is nothing to "
                "score; set evaluate.sts to all, or name what to score"
            )
        return self

    @model_validator(mode="after")
    def _named_tasks_have_data(self) -> "EvaluateConfig":
        if self.data is None and isinstance(self.sts, tuple):
            raise ValueError(
                f"evaluate.sts names {', '.join(self.sts)} but evaluate.data is null; "
                "set evaluate.data to a folder in SentEval layout, or evaluate.sts to all for the graded sample"
            )
        if self.data is None and self.transfer != "none":
            raise ValueError(
                f"evaluate.transfer={', '.join(self.transfer_tasks)} but evaluate.data is null; "
                "set evaluate.data to a folder in SentEval layout, or evaluate.transfer to none"
            )
        names = [each.name for each in self.similarity]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"evaluate.similarity has two sets named {twice}; give each a name of its own")
        known = next((name for name in names if name in (*STS_TASKS, *TRANSFER_TASKS, GRADED_SAMPLE)), None)
        if known is not None:
            raise ValueError(f"evaluate.similarity has a set named {known}, as a known task is; give it another name")
        return self

    @property
    def sts_tasks(self) -> tuple[str, ...]:
        """The similarity tasks to score, in the order of the papers' tables."""
        if self.data is None:
            return () if self.sts == "none" else (GRADED_SAMPLE,)
        return tasks_of(self.sts, STS_TASKS)

    @property
    def transfer_tasks(self) -> tuple[str, ...]:
        """The transfer tasks to score, in the order of the papers' tables."""
        return tasks_of(self.transfer, TRANSFER_TASKS)
