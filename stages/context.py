"""What a stage is given beside its config and inputs: where to write, where to compute, whom to tell."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import ClusterConfig

STOP = "stop"
"""A file in a stage's folder that asks it to save what it has and end, if it can."""


@dataclass
class Progress:
    """How far a stage is, in a small file that the driver turns into a progress bar.

    A file, because a stage may run on another machine than the terminal; the store is what both can see.
    """

    path: Path
    interval: float = 0.3                                      # seconds between writes
    _written: float = field(default=0.0, repr=False)

    def update(self, done: float, total: float | None, unit: str, note: str = "") -> None:
        """Say that ``done`` of ``total`` units (None: unknown) are done; ``note`` is shown beside the bar."""
        now = time.monotonic()
        if now - self._written < self.interval and done != total:
            return
        self._written = now
        aside = self.path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps({"done": done, "total": total, "unit": unit, "note": note}))
        aside.replace(self.path)


@dataclass(frozen=True)
class Context:
    """The surroundings of one execution of a stage; nothing in it changes the result."""

    out: Path                                                  # the only folder that the stage may write to
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: tuple[str, str] | None = None                    # MLflow tracking URI and run id, for live metrics
    embeddings: Path | None = None                             # folder where evaluations keep embeddings for each other

    @property
    def asked_to_stop(self) -> bool:
        """Whether the stage should save what it has and end."""
        return (self.out / STOP).exists()

    @property
    def progress(self) -> Progress:
        """A progress reporter into ``out``; keep one for a whole loop."""
        return Progress(self.out / "progress.json")
