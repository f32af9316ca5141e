"""Which sentences to train on."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator


class _Files(BaseModel, extra="forbid", frozen=True):
    path: str                                                  # file, glob, folder or URL; .gz too
    on_invalid_utf8: Literal["error", "replace"] = "error"


class TextSource(_Files):
    """Lines of text, a sentence or a paragraph each."""

    kind: Literal["text"]


Columns = tuple[str, ...] | tuple[NonNegativeInt, ...]
"""Names in the header line; or positions from 0 in files that have no header line."""


class CsvSource(_Files):
    """Comma-separated values with CSV quoting."""

    kind: Literal["csv"]
    columns: Columns = ("text",)


class TsvSource(_Files):
    """Tab-separated values without quoting."""

    kind: Literal["tsv"]
    columns: Columns = ("text",)


class JsonLinesSource(_Files):
    """One JSON object a line."""

    kind: Literal["jsonl"]
    columns: tuple[str, ...] = ("text",)


class ParquetSource(BaseModel, extra="forbid", frozen=True):
    """Parquet files."""

    kind: Literal["parquet"]
    path: str
    columns: tuple[str, ...] = ("text",)


class HubSource(BaseModel, extra="forbid", frozen=True):
    """A data set of the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    path: str                                                  # owner/name
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: tuple[str, ...] = ("text",)


class StsSource(BaseModel, extra="forbid", frozen=True):
    """The sentences of the similarity sets themselves, all splits, pairs without a score included.

    Who trains on them has seen the evaluation's sentences, if not its scores: ``exclude_evaluation`` must be false,
    and every table of such a run says so.
    """

    kind: Literal["sts"]
    path: str                                                  # folder in SentEval layout


class PythonDocsSource(BaseModel, extra="forbid", frozen=True):
    """The English prose in the documentation of Python and of the installed libraries."""

    kind: Literal["python-docs"]


Source = Annotated[
    TextSource | CsvSource | TsvSource | JsonLinesSource | ParquetSource | HubSource | StsSource | PythonDocsSource,
    Field(discriminator="kind"),
]


class CorpusConfig(BaseModel, extra="forbid", frozen=True):
    """Where the sentences come from and which are kept."""

    kind: Literal["sentences"] = "sentences"                   # labelled rows have configs of their own
    source: Source = PythonDocsSource(kind="python-docs")
    segment: bool = True                                       # split paragraphs; false: a line is a sentence
    language: str = "en"                                       # of the segmentation rules
    min_words: NonNegativeInt = 4
    max_words: PositiveInt = 64
    exclude_evaluation: bool = True                            # drop sentences that occur in the evaluation data
    sample: PositiveInt | None = None                          # keep so many, drawn by the seed; null: all

    @model_validator(mode="after")
    def _some_length_is_allowed(self) -> Self:
        if self.min_words > self.max_words:
            raise ValueError(f"min_words={self.min_words} is more than max_words={self.max_words}")
        return self
