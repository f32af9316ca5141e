"""Which labelled rows to train on."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, PositiveInt, model_validator

Columns = tuple[str | int, ...]
"""Names; or positions from 0, which say that a csv or tsv file has no header line."""


class _Source(BaseModel, extra="forbid", frozen=True):
    path: str                                                  # file, glob or folder; .gz too; hub: owner/name
    columns: Columns | None = None                             # null: the usual names of this kind of rows


class CsvRows(_Source):
    """Comma-separated values with CSV quoting."""

    kind: Literal["csv"]


class TsvRows(_Source):
    """Tab-separated values without quoting, whatever the file's name ends in."""

    kind: Literal["tsv"]


class JsonLinesRows(_Source):
    """One JSON object a line."""

    kind: Literal["jsonl"]


class ParquetRows(_Source):
    """Parquet files."""

    kind: Literal["parquet"]


class HubRows(_Source):
    """A data set of the Hugging Face hub."""

    kind: Literal["hub"]
    subset: str | None = None
    split: str = "train"
    revision: str | None = None


RowSource = Annotated[CsvRows | TsvRows | JsonLinesRows | ParquetRows | HubRows, Field(discriminator="kind")]


class _Labelled(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    usual: ClassVar[Columns]                                   # columns, unless the source names others
    texts: ClassVar[int]                                       # how many of them are sentences; the others are labels

    source: RowSource
    exclude_evaluation: bool = True                            # drop pairs that the run is scored or validated on
    sample: PositiveInt | None = None                          # keep so many rows, drawn by the seed; null: all

    @property
    def columns(self) -> Columns:
        """The columns to read, sentences first."""
        return self.usual if self.source.columns is None else self.source.columns

    @model_validator(mode="after")
    def _has_all_columns(self) -> Self:
        fewest, most = len(self.usual), self._most_columns()
        if not fewest <= len(self.columns) <= most:
            raise ValueError(
                f"source.columns has {len(self.columns)} columns; these rows need {fewest}"
                f"{'' if most == fewest else ' or more'}, such as [{', '.join(map(str, self.usual))}]"
            )
        return self

    def _most_columns(self) -> int:
        return len(self.usual)


class ScoredPairsConfig(_Labelled):
    """Two sentences and how alike they are, as one or more people or models judged it."""

    usual = ("sentence1", "sentence2", "score")
    texts = 2

    kind: Literal["scored-pairs"]
    label_range: tuple[float, float] | None = None             # lowest and highest label there may be; null: there is

    def _most_columns(self) -> int:
        return 1000                                            # every column after the sentences is one judge's

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.label_range is not None and self.label_range[0] >= self.label_range[1]:
            raise ValueError(f"label_range={list(self.label_range)}: the lowest label must come first")
        return self


class BinaryPairsConfig(_Labelled):
    """Two sentences, and 1 for alike or 0 for not."""

    usual = ("sentence1", "sentence2", "label")
    texts = 2

    kind: Literal["binary-pairs"]


class TripletsConfig(_Labelled):
    """A sentence, one that is alike, and one that is not."""

    usual = ("anchor", "positive", "negative")
    texts = 3

    kind: Literal["triplets"]


class NLIConfig(_Labelled):
    """A premise, a hypothesis, and whether that is an entailment, neutral or a contradiction.

    They become triplets: each premise with something it entails and something that contradicts it.
    """

    usual = ("premise", "hypothesis", "label")
    texts = 2

    kind: Literal["nli"]


LabelledConfig = ScoredPairsConfig | BinaryPairsConfig | TripletsConfig | NLIConfig
