"""Our scores and seconds beside those of SentEval itself, on the same data, encoder and machine.

python benchmarks/senteval.py --senteval SIMCSE/SentEval --data DATA [--tasks MRPC MR SUBJ]    the classifiers
python benchmarks/senteval.py --senteval SIMCSE/SentEval --data DATA --sts                     the seven STS sets

SIMCSE is a checkout of SimCSE, whose fork of SentEval is run as it is, but that ``.cuda()`` and its devices are made to
mean the CPU; settings are those of SimCSE's ``--mode test``. Both sides of the classifiers get the same embeddings.
"""

import argparse
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster.config import ClusterConfig
from cluster.launch import map_tasks, start_ray, stop_ray
from stages.encoder import max_positions, resolve
from stages.evaluate.classifier import ClassifierTask, Outcome, select_and_test, transfer_scores
from stages.evaluate.config import STS_TASKS, TRANSFER_TASKS, EvaluateConfig
from stages.evaluate.encode import encode
from stages.evaluate.evaluate import sts_scores
from stages.evaluate.softmax import objective, regression_path, with_constant
from stages.evaluate.sts import load_tasks, pair_cosines, senteval_folder
from stages.evaluate.transfer import load_transfer

ENCODER = "all-MiniLM-L6-v2"
SETTINGS = {                                                   # of SimCSE's evaluation.py --mode test
    "usepytorch": True,
    "kfold": 10,
    "classifier": {"nhid": 0, "optim": "adam", "batch_size": 64, "tenacity": 5, "epoch_size": 4},
}
FOLDERS = {"SST2": "SST/binary", "STS-B": "STS/STSBenchmark", "SICK-R": "SICK"}
CLASSES = {"SST2": "SSTEval", "STS-B": "STSBenchmarkEval", "SICK-R": "SICKRelatednessEval"}
WAYS = {"": "all", "_mean": "mean", "_wmean": "wmean"}         # of joining subsets: ours, SentEval's


Embed = Callable[[Sequence[str]], NDArray[np.float32]]         # n sentences -> (n, D)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--senteval", required=True, help="folder SentEval of a checkout of SimCSE")
    parser.add_argument("--data", required=True, help="folder in SentEval layout")
    parser.add_argument("--tasks", nargs="+", choices=TRANSFER_TASKS, default=["MRPC", "MR", "SUBJ"])
    parser.add_argument("--sts", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.senteval)
    toolkit = Toolkit(arguments.data)
    if arguments.sts:
        _compare_sts(toolkit, arguments.data)
    else:
        _compare_classifiers(toolkit, arguments.data, arguments.tasks)


class Toolkit:
    """SentEval, made to run on a CPU and under today's Python, from outside."""

    def __init__(self, data: str) -> None:
        inspect.getargspec = inspect.getfullargspec            # type: ignore[attr-defined]
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_: self
        from senteval import binary, mrpc, sst, sts, trec, utils
        from senteval.tools import classifier, validation

        classifier.torch = _OnCpu()
        self._modules, self._parameters = (binary, mrpc, sst, sts, trec), utils.dotdict
        self._folder = senteval_folder(data)
        self.seconds = 0.0                                     # of the classifiers
        self.finals: list[tuple[Any, NDArray[np.float64], NDArray[np.int64]]] = []      # classifier, features, labels
        for kind in (validation.InnerKFoldClassifier, validation.KFoldClassifier, validation.SplitClassifier):
            kind.run = self._timed(kind.run)
        classifier.MLP.prepare_split = self._noted(classifier.MLP.prepare_split)

    def run(self, task: str, embed: Embed, batch_size: int) -> dict[str, Any]:
        """SentEval's figures of a task's test set; sets ``seconds`` and ``finals``."""
        self.seconds, self.finals = 0.0, []
        kind = CLASSES.get(task, f"{task}Eval")
        evaluation = next(getattr(module, kind) for module in self._modules if hasattr(module, kind))
        folder = FOLDERS.get(task, f"STS/{task}-en-test" if task in STS_TASKS else task)
        made = evaluation(str(self._folder / folder))
        parameters = self._parameters(SETTINGS | {"batch_size": batch_size})
        if hasattr(made, "datasets"):
            made.datasets = [name for name in made.datasets if name not in ("train", "dev")]
        made.do_prepare(parameters, lambda *_: None)
        figures: dict[str, Any] = made.run(parameters, lambda _, batch: embed([" ".join(words) for words in batch]))
        return figures

    def _timed(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(classifier: Any) -> Any:
            start = time.perf_counter()
            result = run(classifier)
            self.seconds += time.perf_counter() - start
            return result

        return timed

    def _noted(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Remember those classifiers that test: they put some of their training rows aside by themselves."""

        def noted(classifier: Any, *arguments: Any) -> Any:
            parts = split(classifier, *arguments)
            if arguments[3] is not None:
                self.finals.append((classifier, parts[0].double().numpy(), parts[1].numpy()))
            return parts

        return noted


class _OnCpu:
    """The module torch, whose every device is the CPU."""

    def device(self, _name: str) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _compare_classifiers(toolkit: Toolkit, data: str, tasks: Sequence[str]) -> None:
    start_ray()
    print("| task | dev | test | F1 | seconds | our dev | test | F1 | seconds | ratio | objective | ours |")
    print("|---" * 12 + "|", flush=True)
    for name in tasks:
        task = load_transfer(data, name)
        encoded = encode(                                      # on Ray, as in a run, so that its workers have started
            ENCODER, task.sentences, ("mean",), 64, max_positions(ENCODER), ClusterConfig(), lambda done, total: None
        )
        vectors: Embed = partial(encoded.of, "mean")
        torch.set_num_threads(1)                               # at steps as small as SentEval's, more slow it down
        theirs = toolkit.run(name, vectors, batch_size=128)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            ours = transfer_scores(task, vectors, "full", _on_ray, Path(folder))
        seconds = time.perf_counter() - start
        print("|", " | ".join([
            name, *(f"{theirs[key]:.2f}" if key in theirs else "" for key in ("devacc", "acc", "f1")),
            f"{toolkit.seconds:.1f}",
            *(f"{ours[key]:.2f}" if key in ours else "" for key in ("dev_accuracy", "test_accuracy", "f1")),
            f"{seconds:.1f}", f"{toolkit.seconds / seconds:.0f}", *(f"{value:.5f}" for value in _objectives(toolkit)),
        ]), "|", flush=True)
    stop_ray()


def _on_ray(items: Sequence[ClassifierTask]) -> Iterator[Outcome]:
    return map_tasks(select_and_test, items, ClusterConfig())


def _objectives(toolkit: Toolkit) -> tuple[float, float]:
    """The regularised objective of SentEval's testing classifiers and of ours, same rows and reg; means over them."""
    values = []
    for classifier, features, labels in toolkit.finals:
        (layer,) = classifier.model
        theirs = torch.column_stack([layer.weight, layer.bias]).detach().double().numpy()
        rows, reg, classes = with_constant(features), classifier.l2reg, len(theirs)
        ((ours,),) = regression_path(rows, labels, np.full((len(rows), 1), 1 / len(rows)), classes, [reg])
        values.append([objective(rows, labels, fitted, reg) for fitted in (theirs, ours)])
    first, second = np.mean(values, axis=0)
    return float(first), float(second)


def _compare_sts(toolkit: Toolkit, data: str) -> None:
    """SentEval encodes both sides of each pair as they come; we go through Ray, each distinct sentence once."""
    embed_plainly = _plain_encoder()
    start = time.perf_counter()
    theirs = {task: toolkit.run(task, embed_plainly, batch_size=64) for task in STS_TASKS}
    their_seconds = time.perf_counter() - start
    start_ray()
    start = time.perf_counter()
    tasks, _ = load_tasks(EvaluateConfig(data=data))
    encoded = encode(
        ENCODER, [text for pairs in tasks.values() for text in pairs.sentences], ("mean",), 64, max_positions(ENCODER),
        ClusterConfig(), lambda done, total: None,
    )
    vectors: Embed = partial(encoded.of, "mean")
    ours: dict[str, dict[str, Any]] = {
        task: sts_scores(pairs, pair_cosines(vectors(pairs.first), vectors(pairs.second)))
        for task, pairs in tasks.items()
    }
    seconds = time.perf_counter() - start
    stop_ray()
    differences = {
        f"{task} {measure}{suffix}": abs(100 * float(theirs[task]["all"][measure][way]) - ours[task][measure + suffix])
        for task in tasks for measure in ("spearman", "pearson") for suffix, way in WAYS.items()
    }
    differences |= {
        f"{task} {subset} {measure}": abs(100 * float(theirs[task][subset][measure][0]) - score[measure])
        for task in tasks for subset, score in ours[task]["subsets"].items() for measure in ("spearman", "pearson")
    }
    print(f"SentEval {their_seconds:.1f} s, ours {seconds:.1f} s, ratio {their_seconds / seconds:.2f}")
    largest = sorted(differences.items(), key=lambda each: -each[1])[:5]
    print(f"largest differences of {len(differences)} figures, in points:")
    print(*(f"{name}: {difference:.4f}" for name, difference in largest), sep="\n")


def _plain_encoder() -> Embed:
    """Tokenise, encode and mean-pool a batch, padded to its longest, as a user of SentEval would."""
    model = AutoModel.from_pretrained(resolve(ENCODER)).eval()
    tokenizer = AutoTokenizer.from_pretrained(resolve(ENCODER))

    def embed_plainly(sentences: Sequence[str]) -> NDArray[np.float32]:
        batch = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        means: NDArray[np.float32] = ((states * mask).sum(1) / mask.sum(1)).numpy()
        return means

    return embed_plainly


if __name__ == "__main__":
    main()
