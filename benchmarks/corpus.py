"""How fast the corpus stage is, and how much memory it takes.

python benchmarks/corpus.py FILE [--tokenizer NAME]    sentences/s from text to Parquet
python benchmarks/corpus.py --memory                   peak memory at 0.3 and 3 million sentences
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stages.context import Context
from stages.corpus.config import CorpusConfig, TextSource
from stages.corpus.prepare import CorpusJob, prepare_corpus


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a text file, .gz too")
    parser.add_argument("--memory", action="store_true", help="on made-up files of 0.3 and 3 million sentences")
    parser.add_argument("--tokenizer", default="all-MiniLM-L6-v2")
    parser.add_argument("--max-length", type=int, default=32)
    arguments = parser.parse_args()
    if bool(arguments.file) == arguments.memory:
        parser.error("give a file or --memory")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.file:
            with _fresh_ray():
                _prepare(Path(arguments.file), Path(folder) / "warm", arguments)       # workers start and import
                seconds, cpu, statistics = _prepare(Path(arguments.file), Path(folder) / "out", arguments)
            print(f"{statistics['sentences']} sentences in {seconds:.1f} s: {statistics['sentences'] / seconds:,.0f}/s")
            print(f"{cpu:.1f} CPU-seconds: {statistics['sentences'] / cpu:,.0f} sentences a CPU-second")
        else:
            for count in (300_000, 3_000_000):
                path = _synthetic(Path(folder) / f"{count}.txt", count)
                with _fresh_ray(), _peak_memory() as peak:
                    _prepare(path, Path(folder) / f"out-{count}", arguments)
                size = path.stat().st_size
                print(f"{count} sentences ({size / 1e6:.0f} MB): peak {max(peak) / 1e6:.0f} MB", flush=True)


@contextmanager
def _fresh_ray() -> Iterator[None]:
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def _prepare(path: Path, out: Path, arguments: argparse.Namespace) -> tuple[float, float, dict[str, float]]:
    """Wall-clock seconds, CPU-seconds of this process and all of Ray, and the statistics."""
    config = CorpusConfig(source=TextSource(kind="text", path=str(path)))
    job = CorpusJob(
        corpus=config, tokenizer=arguments.tokenizer, max_length=arguments.max_length, seed=1, exclude=None
    )
    out.mkdir()
    start, cpu = time.perf_counter(), _cpu_seconds()
    prepare_corpus(job, Context(out))
    return time.perf_counter() - start, _cpu_seconds() - cpu, json.loads((out / "statistics.json").read_text())


def _processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def _cpu_seconds() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _processes() if process.is_running())


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Sample the memory of this process and Ray's, in bytes, each shared page counted once (PSS)."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(1):
            total = 0
            for process in _processes():
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            peak.append(total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _synthetic(path: Path, count: int) -> Path:
    """Distinct sentences of 6 to 11 made-up words, four to a line."""
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioulnrstdm", k=draw.randint(2, 9))) for _ in range(20_000)]
    with path.open("w") as file:
        for at in range(count):
            sentence = " ".join(draw.choices(words, k=draw.randint(5, 10)))
            file.write(f"{sentence.capitalize()} {at}." + ("\n" if at % 4 == 3 else " "))
    return path


if __name__ == "__main__":
    main()
