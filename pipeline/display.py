"""What the terminal shows while stages run: bars in a terminal, plain lines elsewhere."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pipeline.dag import Outcome, Watcher, read_progress

EVERY = 10.0                                                   # seconds between plain lines of one stage


class Display(Watcher):
    """Shows every running stage's progress on stderr."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self._running: dict[str, tuple[Path, float]] = {}      # stage -> its folder, and when it started
        self._spoke: dict[str, float] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line above the bars."""
        self.console.print(text, soft_wrap=True)

    def running(self, stage: str, partial: Path) -> None:
        """Start a bar."""
        self._running[stage] = (partial, time.monotonic())
        self._spoke[stage] = time.monotonic()
        if self.console.is_terminal:
            self._bars[stage] = self._progress.add_task(stage, total=None, done="", note="starting")
        else:
            self.say(f"{stage}: started")

    def waiting(self, stage: str, holder: str) -> None:
        """Say who is computing the same thing."""
        self.say(f"{stage}: waiting for {holder}, which is computing the same; its result will be used")

    def stopping(self, stage: str) -> None:
        """Say why the command does not end at once."""
        self.say(f"{stage}: saving after this step")

    def poll(self) -> None:
        """Bring bars up to date."""
        for stage, (partial, started) in self._running.items():
            progress = read_progress(partial)
            if progress is None:
                continue
            of = f" of {progress['total']:,.0f}" if progress["total"] else ""
            done = f"{progress['done']:,.0f}{of} {progress['unit']}" if progress["done"] or of else ""
            if stage in self._bars:
                self._progress.update(
                    self._bars[stage],
                    completed=progress["done"],
                    total=progress["total"],
                    done=done,
                    note=progress["note"],
                )
            elif time.monotonic() - self._spoke[stage] > EVERY:
                self._spoke[stage] = time.monotonic()
                elapsed = f"{time.monotonic() - started:.0f} s"
                self.say(f"{stage}: {', '.join(filter(None, (done, elapsed, progress['note'])))}")

    def finished(self, outcome: Outcome) -> None:
        """Replace the bar by a line."""
        self._running.pop(outcome.name, None)
        if outcome.name in self._bars:
            self._progress.remove_task(self._bars.pop(outcome.name))
        took = "from the store" if outcome.status == "cached" else f"done in {outcome.seconds:.0f} s"
        self.say(f"{outcome.name}: {took}")
