"""Checkpoints of a training run: written aside, sealed with digests, then renamed; a damaged one is passed over."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from stages.artifacts import file_digest

log = logging.getLogger(__name__)

SEAL = "digests.json"
POSITION = "position.json"


@dataclass
class Position:
    """Where a training run is; with the weights and the method's state, all that resuming needs."""

    step: int = 0                                              # optimizer steps done, skipped ones included
    best_step: int = 0
    best_score: float | None = None
    without_improvement: int = 0                               # validations since the best
    nonfinite: int = 0                                         # steps skipped because their gradient was not finite
    nonfinite_in_a_row: int = 0
    workers: int = 1                                           # that wrote it


def folder_of(out: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return out / "checkpoints" / f"step-{step:08d}"


def begin(out: Path, step: int) -> Path:
    """An empty folder beside the checkpoint's own, to be written and then given to :func:`seal`."""
    aside = folder_of(out, step).with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def seal(aside: Path, position: Position) -> None:
    """Add the position and the digest of every file, and give the folder its name."""
    (aside / POSITION).write_text(json.dumps(asdict(position)))
    (aside / SEAL).write_text(json.dumps(_digests(aside)))
    aside.rename(aside.with_suffix(""))


def read_position(checkpoint: Path) -> Position:
    """What :func:`seal` added."""
    return Position(**json.loads((checkpoint / POSITION).read_text()))


def newest_first(out: Path) -> Iterator[Path]:
    """Checkpoints under their final name, damaged or not."""
    return (folder for folder in sorted((out / "checkpoints").glob("step-*"), reverse=True) if not folder.suffix)


def newest_intact(out: Path) -> Path | None:
    """The checkpoint to go on from; newer ones, all damaged, are named in a warning and removed."""
    for folder in newest_first(out):
        damage = damage_of(folder)
        if damage is None:
            return folder
        log.warning("the checkpoint %s is damaged (%s); its steps come again", folder, damage)
        shutil.rmtree(folder)
    return None


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file is as it was written."""
    try:
        sealed: dict[str, str] = json.loads((checkpoint / SEAL).read_text())
        for name, digest in _digests(checkpoint).items():
            if sealed.pop(name, None) != digest:
                return f"{name} was changed after it was written"
    except (OSError, ValueError) as error:
        return str(error)
    return f"{next(iter(sealed))} is missing" if sealed else None


def _digests(folder: Path) -> dict[str, str]:
    """Of each file but the seal."""
    return {file.name: file_digest(file) for file in sorted(folder.iterdir()) if file.name != SEAL}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory, as safetensors wants them."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
