"""The command: a config in, its stages executed on Ray, a table out."""

import argparse
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if sys.path and Path(sys.path[0] or ".").resolve() == ROOT / "pipeline":
    sys.path[0] = str(ROOT)                                    # run as a script: import packages from the checkout

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")       # processes are the parallelism here
os.environ.setdefault("HF_HUB_VERBOSITY", "error")             # what it warns of, an error of ours says
os.environ.setdefault("APINCSE_SHARED", str(ROOT.parent / "shared"))   # configs name research data through it

from cluster.errors import InputError  # noqa: E402
from pipeline import configs  # noqa: E402

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    command = argparse.ArgumentParser(
        prog="python pipeline/run.py",
        description="Train a sentence encoder, evaluate it before and after, and log everything to MLflow.",
        epilog=(
            f"Ready configs: {', '.join(configs.names())}. Finished stages are kept under ROOT/store and found again, "
            "so the same command goes on after an interruption. RAY_ADDRESS and MLFLOW_TRACKING_URI name a "
            "cluster and a tracking server; without them Ray runs on this machine and MLflow in ROOT/mlflow.db."
        ),
    )
    command.add_argument("--config", default="demo", metavar="NAME|FILE.yaml", help="experiment (default: demo)")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one field of the config, such as train.learning_rate=1e-4; may be repeated",
    )  # fmt: skip
    command.add_argument("--plan", action="store_true", help="show the stages and which the store has; run nothing")
    command.add_argument("--until", metavar="STAGE", help="stop after this stage")
    command.add_argument(
        "--fresh", action="append", default=[], metavar="STAGE", nargs="+",
        help="run this stage again, and what depends on it",
    )  # fmt: skip
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    stopped_by = signal.SIGINT

    def terminate(_signal: int, _frame: object) -> None:
        nonlocal stopped_by
        stopped_by = signal.SIGTERM
        raise KeyboardInterrupt                                # Ray turns any other exception into an exit of its own

    signal.signal(signal.SIGTERM, terminate)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        return _run(options)
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: {error}\nto go on: {_again(options)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        how = "interrupted" if stopped_by == signal.SIGINT else "terminated"
        print(f"{how}; to go on: {_again(options)}", file=sys.stderr)
        return 128 + stopped_by


def _run(options: argparse.Namespace) -> int:
    from pipeline.config import load_config  # both import PyTorch, which --help can do without
    from pipeline.experiment import Experiment

    fresh = [name for group in options.fresh for name in group]
    try:
        config = load_config(options.config, options.overrides)
        experiment = Experiment(config, until=options.until, fresh=fresh)
    except (RuntimeError, ValueError) as error:                # such as a path from a home that nobody has
        raise InputError(str(error) or type(error).__name__) from error
    if options.plan:
        experiment.print_plan()
        return 0
    return experiment.run(again=_again(options))


def _again(options: argparse.Namespace) -> str:
    """The command that goes on after an interruption; with --fresh it would start all over."""
    words = [sys.orig_argv[0], sys.argv[0], "--config", options.config]
    for override in options.overrides:
        words += ["--set", override]
    return shlex.join([*words, *(["--until", options.until] if options.until else [])])


if __name__ == "__main__":
    sys.exit(main())
