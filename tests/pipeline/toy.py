"""Stages of text files, for tests of how stages are planned and executed."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from cluster.errors import InputError
from pipeline.dag import Stage
from stages.context import Context

PATIENCE = 120                                                 # seconds until a test that waits has failed


class Toy(BaseModel, frozen=True):
    """What a toy stage does, in this order."""

    text: str = ""                                             # added to what its needs have
    meets: str | None = None                                   # folder where it waits until `guests` stages are
    guests: int = 2
    hangs: bool = False
    refuses: bool = False
    fails_without: str | None = None                           # a file, without which it fails after half its work


@dataclass(frozen=True)
class Text:
    """``folder/text.txt``."""

    folder: Path
    length: int


def write(toy: Toy, *needs: Text, context: Context) -> Text:
    """Write the needs' texts and the stage's own."""
    (context.out / "pid").write_text(str(os.getpid()))
    whole = "".join((need.folder / "text.txt").read_text() for need in needs) + toy.text
    assert all((need.folder / "manifest.json").is_file() for need in needs)    # they are finished
    if toy.meets:
        _meet(Path(toy.meets), toy.text, toy.guests)
    while toy.hangs:
        time.sleep(0.1)
    if toy.refuses:
        raise InputError("toy.text=x is no text; write y")
    half = context.out / "half.txt"
    gone_on = half.is_file()
    half.write_text(whole)
    if toy.fails_without and not Path(toy.fails_without).exists():
        raise RuntimeError("out of luck\nand of lines")
    (context.out / "text.txt").write_text(whole + ("!" if gone_on else ""))
    return Text(context.out, len(whole))


def _meet(folder: Path, name: str, guests: int) -> None:
    (folder / name).touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < guests:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} waited alone")
        time.sleep(0.05)


def stage(name: str, *needs: str, **toy: object) -> Stage:
    """A stage that writes its name, unless told otherwise."""
    return Stage(name, write, Toy.model_validate({"text": name} | toy), needs=needs)
