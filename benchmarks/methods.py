"""The methods side by side on real data, at an equal budget: trained by the pipeline, shown in a table.

    python benchmarks/methods.py unsupervised|sts-b|mrpc|lcqmc|bq|wsscse [--seeds 1 2 3] [--only NAME ...] [--steps N]
                                 [--set KEY=VALUE ...]

Finished trainings are found again in the store under ``--root``, finished scores in ``results.json`` there, so a run
that was interrupted goes on. The research data lie where APINCSE_SHARED says.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARED = Path(os.environ.get("APINCSE_SHARED", ROOT.parent / "shared")).absolute()
os.environ["APINCSE_SHARED"] = str(SHARED)                     # ready configs name data through it
STEPS = {"unsupervised": 300, "wsscse": 300, "sts-b": 270, "mrpc": 190, "lcqmc": 275, "bq": 310}
MINILM = {"encoder.name": "all-MiniLM-L6-v2", "train.learning_rate": 2e-5}
REPORTED = {"unsupervised": "seven STS sets", "wsscse": "seven STS sets", "sts-b": "STS-B test"}


@dataclass(frozen=True)
class Variant:
    """One line of a table."""

    label: str
    config: str
    settings: dict[str, Any]


def unsupervised() -> list[Variant]:
    """Every method that learns from sentences, as its ready config for the raw encoder has it."""
    from pipeline import configs
    from pipeline.config import load_config
    from stages.methods.registry import LABELLED

    found = []
    for name in configs.names():
        config = load_config(name) if name.startswith("raw-") else None
        if config is not None and config.train is not None and config.train.method.name not in LABELLED:
            found.append(Variant("apincse" if name == "raw-mini" else name.removeprefix("raw-"), name, {}))
    return sorted(found, key=lambda variant: variant.label == "rankcse")       # which needs simcse's encoder


def wsscse() -> list[Variant]:
    """WSSCSE's ablation and sweeps."""
    method = "train.method."
    return [
        Variant("no augmentation", "raw-wsscse", {method + "weak_weight": 0, method + "masked": 0}),
        Variant("repetition alone", "raw-wsscse", {method + "masked": 0}),
        Variant("repetition + MLM", "raw-wsscse", {}),
        Variant("repetition + MLM, own generator", "raw-wsscse", {method + "generator": "own"}),
        *(Variant(f"lambda {weight}", "raw-wsscse", {method + "weak_weight": weight}) for weight in (0.01, 0.5, 1)),
        *(Variant(f"r {rate}", "raw-wsscse", {method + "repetition": rate}) for rate in (0.12, 0.48)),
    ]


def labelled(data: dict[str, Any], encoders: dict[str, dict[str, Any]], binary: bool) -> list[Variant]:
    """The methods that learn from pairs, with [CLS] and with the mean."""
    methods = ["cosent", "angle", "sbert", "siamese"]
    return [
        Variant(f"{method}, {pooling}, {encoder}", f"raw-{method}", {
            "encoder.pooling": pooling, **settings, **data,
            **({"train.method.classes": 2} if method == "sbert" and binary else {}),
        })
        for encoder, settings in encoders.items()
        for method in methods
        for pooling in ("cls", "mean")
    ]  # fmt: skip


def pairs(name: str, train: Path, columns: list[int | str], validation: Path, test: Path) -> dict[str, Any]:
    """Settings of a run that trains, validates and is tested on files of binary pairs."""
    return {
        "corpus.kind": "binary-pairs",
        "corpus.source": {"kind": "tsv", "path": str(train), "columns": columns},
        "train.validation": {"path": str(validation), "columns": columns},
        "evaluate.sts": "none",
        "evaluate.similarity": [
            {"name": name, "path": str(test), "validation": str(validation), "columns": columns}
        ],
    }  # fmt: skip


def variants(group: str, root: Path) -> list[Variant]:
    """The lines of a group's table."""
    raw, minilm = {"raw": {}}, {"MiniLM": MINILM}
    match group:
        case "unsupervised":
            return unsupervised()
        case "wsscse":
            return wsscse()
        case "sts-b":
            return labelled({}, raw | minilm, binary=False)
        case "mrpc":
            folder = SHARED / "data/senteval/downstream/MRPC"
            train, validation, test = split_mrpc(folder, root)
            return labelled(pairs("MRPC", train, [0, 1, 2], validation, test), raw | minilm, binary=True)
        case _:
            folder = SHARED / "data/zh" / group.upper()
            train, validation = split(folder / "valid.tsv", root / group)
            characters = {"characters": {"encoder.name": str(character_encoder(folder / "valid.tsv", root / group))}}
            return labelled(
                pairs(group.upper(), train, [0, 1, 2], validation, folder / "test.tsv"), characters, binary=True
            )


def split(file: Path, folder: Path) -> tuple[Path, Path]:
    """A tenth of a file's rows, every tenth one, for validation, and the others to train on."""
    lines = file.read_text().splitlines(keepends=True)
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = folder / "train.tsv", folder / "validation.tsv"
    validation.write_text("".join(lines[::10]))
    train.write_text("".join(line for at, line in enumerate(lines) if at % 10))
    return train, validation


def split_mrpc(source: Path, root: Path) -> tuple[Path, Path, Path]:
    """MRPC as first, second, label, without the quirks of its files."""
    folder = root / "mrpc"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        rows = [line.split("\t") for line in (source / f"msr_paraphrase_{name}.txt").read_text().splitlines()[1:]]
        text = "".join(f"{first}\t{second}\t{label}\n" for label, _, _, first, second in rows)
        (folder / f"all-{name}.tsv").write_text(text)
    return *split(folder / "all-train.tsv", folder), folder / "all-test.tsv"


def character_encoder(file: Path, folder: Path) -> Path:
    """A random BERT of four layers whose tokens are the characters of a file."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    made = folder / "encoder"
    if not (made / "config.json").is_file():
        characters = sorted({character for character in file.read_text().lower() if not character.isspace()})
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{each}" for each in characters)]
        torch.manual_seed(0)
        BertModel(BertConfig(
            vocab_size=len(tokens), hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=128,
        )).save_pretrained(made)  # fmt: skip
        BertTokenizer(vocab={token: at for at, token in enumerate(tokens)}).save_pretrained(made)
    return made


def named(group: str, label: str, seed: int, steps: int) -> str:
    """The folder of a run."""
    return f"{group}-{'-'.join(label.replace(',', '').split())}-{steps}-{seed}"


def overrides(variant: Variant, seed: int, steps: int, group: str, root: Path) -> list[str]:
    """What the command sets for one run; RankCSE's teacher is what SimCSE trained with the same seed, a line above."""
    settings = {"name": named(group, variant.label, seed, steps), "root": root, "seed": seed, "train.steps": steps}
    settings |= {key: json.dumps(value) for key, value in variant.settings.items()}
    if variant.config == "raw-rankcse":
        settings["train.method.teacher"] = root / named(group, "simcse", seed, steps) / "train/encoder"
    return [*(f"{key}={value}" for key, value in settings.items()), "tracking.enabled=false"]


def digest(variant: Variant, settings: Sequence[str]) -> str:
    """Changes with anything that the run's config says."""
    from pipeline.config import load_config

    return hashlib.sha256(load_config(variant.config, settings).model_dump_json().encode()).hexdigest()[:12]


def run(variant: Variant, settings: Sequence[str], name: str, group: str, root: Path) -> dict[str, float]:
    """Train and score one variant; returns what its line shows."""
    command = [sys.executable, str(ROOT / "pipeline/run.py"), "--config", variant.config]
    command += [part for setting in settings for part in ("--set", setting)]
    if group in ("unsupervised", "wsscse"):
        command += ["--until", "train"]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    minutes = (time.monotonic() - started) / 60
    if group in ("unsupervised", "wsscse"):
        scores = averages(root / name / "train/encoder")
    else:
        after = json.loads((root / name / "summary.json").read_text())["scores"]["after"]
        if group == "sts-b":
            scores = {"Spearman": after["sts"]["STS-B"]["spearman"], "SICK-R": after["sts"]["SICK-R"]["spearman"]}
        else:
            (found,) = after["similarity"].values()
            scores = {"accuracy": found["accuracy"], "average precision": found["average_precision"]}
    return scores | {"minutes": minutes}


def averages(encoder: Path) -> dict[str, float]:
    """The mean Spearman of the seven STS sets for the encoder's own pooling, [CLS] and the mean, from one pass."""
    from cluster.config import ClusterConfig
    from stages.encoder import max_positions, saved_config
    from stages.evaluate.config import EvaluateConfig
    from stages.evaluate.encode import encode
    from stages.evaluate.evaluate import sts_scores
    from stages.evaluate.sts import load_tasks, pair_cosines

    config = saved_config(str(encoder))
    assert config is not None
    poolings = {"h": config.pooling, "[CLS]": "cls", "mean": "mean"}
    tasks, _ = load_tasks(EvaluateConfig(data=str(SHARED / "data/senteval")))
    encoded = encode(
        str(encoder), [text for each in tasks.values() for text in each.sentences], tuple(set(poolings.values())), 64,
        max_positions(str(encoder)), ClusterConfig(), lambda done, total: None,
    )  # fmt: skip
    found = {}
    for label, pooling in poolings.items():
        vectors = partial(encoded.of, pooling)
        scores = [sts_scores(each, pair_cosines(vectors(each.first), vectors(each.second))) for each in tasks.values()]
        found[label] = statistics.mean(float(score["spearman"]) for score in scores)     # type: ignore[arg-type]
    return found


def table(group: str, results: dict[str, list[dict[str, float]]], steps: int) -> str:
    """Markdown: mean ± standard deviation over seeds."""
    columns = list(dict.fromkeys(column for runs in results.values() for each in runs for column in each))
    lines = [
        f"{group}: {REPORTED.get(group, 'test pairs')}, {steps} steps of 64, "
        f"{max(map(len, results.values()))} seed(s)",
        "",
        f"| method | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for label, runs in results.items():
        cells = [_cell([each[column] for each in runs]) for column in columns]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def main() -> None:
    """Parse the command line, run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="labels of lines, or what they begin with")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 300, or about three epochs)")
    parser.add_argument("--set", nargs="+", default=[], dest="settings", metavar="KEY=VALUE", help="for all lines")
    parser.add_argument("--root", type=Path, default=Path("runs/methods"))
    options = parser.parse_args()
    root = options.root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    steps = options.steps or STEPS[options.group]
    kept = root / "results.json"
    known: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.is_file() else {}
    results: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for variant in variants(options.group, root):
            if options.only and not any(variant.label.startswith(label) for label in options.only):
                continue
            settings = [*overrides(variant, seed, steps, options.group, root), *options.settings]
            name = named(options.group, variant.label, seed, steps)
            key = f"{name} {digest(variant, settings)}"
            if key not in known:
                print(key, file=sys.stderr, flush=True)
                known[key] = run(variant, settings, name, options.group, root)
                with tempfile.NamedTemporaryFile("w", dir=root, delete=False) as file:
                    json.dump(known, file, indent=1)
                Path(file.name).replace(kept)
            results.setdefault(variant.label, []).append(known[key])
    print(table(options.group, results, steps))


if __name__ == "__main__":
    main()
