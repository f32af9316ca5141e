"""All that an evaluation reads, checked as it is read."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import InputError
from stages.evaluate.config import GRADED_SAMPLE, TRANSFER_TASKS, EvaluateConfig
from stages.evaluate.similarity import SimilarityData, load_similarity, similarity_files
from stages.evaluate.sts import ScoredPairs, load_tasks, pair_files, sts_sentences
from stages.evaluate.transfer import TransferData, load_transfer, transfer_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationData:
    """Every task of a config by name, and what is incomplete about them."""

    sts: dict[str, ScoredPairs]
    similarity: dict[str, SimilarityData]
    transfer: dict[str, TransferData]
    warnings: list[str]

    @property
    def pairs(self) -> dict[str, ScoredPairs]:
        """The test pairs of the STS tasks and of the other similarity sets."""
        return self.sts | {name: each.test for name, each in self.similarity.items()}

    def sentences(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each task's name and all its sentences, with repetitions."""
        for tasks in (self.sts, self.similarity, self.transfer):
            for name, task in tasks.items():
                yield name, task.sentences


def load_evaluation(config: EvaluateConfig) -> EvaluationData:
    """Read every task of the config.

    Raises:
        InputError: a file is missing or malformed, or a set has another size than published and
            ``config.allow_partial`` is not set.
    """
    sts, warnings = load_tasks(config)
    transfer = {task: load_transfer(str(config.data), task, config.protocol) for task in config.transfer_tasks}
    warnings = warnings + [warning for task in transfer.values() for warning in task.warnings]
    if warnings and not config.allow_partial:
        raise InputError(f"{warnings[0]}; restore the file, or set evaluate.allow_partial=true to score it as it is")
    return EvaluationData(sts, {each.name: load_similarity(each) for each in config.similarity}, transfer, warnings)


def check_evaluation(config: EvaluateConfig) -> dict[str, list[str]]:
    """Read all that the stage will read, before anything is started.

    Returns:
        What the config calls some data -> the local files that decide the scores, for a digest of their content.

    Raises:
        InputError: as ``load_evaluation``.
    """
    load_evaluation(config)
    in_folder: list[Path] = [file for task in config.sts_tasks for file in pair_files(config.data, task)]
    in_folder += [file for task in config.transfer_tasks for file in transfer_files(str(config.data), task)]
    named = {path: [path] for each in config.similarity for path in similarity_files(each)}
    return {config.data or GRADED_SAMPLE: [str(file) for file in in_folder], **named}


def evaluation_sentences(data: str | None) -> list[str]:
    """The distinct sentences of every split, dev and train included, of every set that lies in a SentEval folder.

    So that a training corpus can be rid of them. Sets that are absent are no error here; nor are transfer sets that
    cannot be read, for they may be none of those that are scored.
    """
    sentences = sts_sentences(data)
    for task in TRANSFER_TASKS if data is not None else ():
        if all(file.is_file() for file in transfer_files(str(data), task)):
            try:
                sentences += load_transfer(str(data), task).sentences
            except InputError as error:
                logger.warning("%s; its sentences are not looked for in the corpus", error)
    return list(dict.fromkeys(sentences))
