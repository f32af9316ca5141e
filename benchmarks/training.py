"""Training throughput: the pipeline with one worker against a bare PyTorch loop.

Both compute APINCSE's loss on the same batches, which the script checks; the loop is written here without any of the
project's training code. They take turns, and the figure is a ratio of medians.

    python benchmarks/training.py [--steps 12] [--encoder all-MiniLM-L6-v2]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from stages.batches import TokenisedSentences, global_rows
from stages.encoder import load_tokenizer, resolve

ROOT = Path(__file__).resolve().parent.parent
BATCH, SEED, LEARNING_RATE, LENGTH = 64, 1, 1e-5, 32
TEMPERATURE, QUEUE, NEIGHBOURS, BETA = 0.05, 256, 16, 2.0


def through_the_pipeline(root: Path, encoder: str, steps: int, turn: int) -> tuple[list[float], list[float], Path]:
    """Sentences/s and losses of each step but the first, and where the corpus lies."""
    settings = {
        "name": f"turn-{turn}", "root": root, "seed": SEED, "encoder.name": encoder, "encoder.max_length": LENGTH,
        "encoder.pooling": "layer-attention", "corpus.sample": BATCH * (steps + 1), "cluster.workers": 1,
        "cluster.strategy": "ddp", "train.steps": steps, "train.batch_size": BATCH, "train.dropout": 0,
        "train.learning_rate": LEARNING_RATE, "train.log_every": 1, "train.eval_every": 10_000,
        "train.checkpoint_every": 10_000, "train.method.queue_length": QUEUE, "train.method.neighbours": NEIGHBOURS,
        "train.method.beta": BETA, "train.method.anchor_norm": "unit", "tracking.enabled": "false",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "pipeline/run.py"), "--config", "demo", "--until", "train"]
    command += ["--fresh", "train", *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    folder = root / f"turn-{turn}"
    lines = [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    return [line["sentences_per_second"] for line in logged[1:]], [line["loss"] for line in logged], folder / "corpus"


def bare_loop(corpus: Path, encoder: str, steps: int) -> tuple[list[float], list[float]]:
    """The same training as a plain loop: sentences/s of each step but the first, and losses."""
    torch.manual_seed(SEED)
    transformers_logging.set_verbosity_error()
    model = AutoModel.from_pretrained(resolve(encoder), add_pooling_layer=False, dtype=torch.float32)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    d = model.config.hidden_size
    query, key, value = (torch.nn.Linear(d, d, bias=False) for _ in range(3))
    residual = torch.nn.Linear(2 * d, d)
    with torch.no_grad():
        for projection, scale in ((query, 3.0**0.5), (key, 3.0**0.5), (value, 1.0)):
            projection.weight.copy_(torch.eye(d) * scale)
        residual.weight.zero_()
        residual.bias.zero_()
    parameters = [p for module in (model, query, key, value, residual) for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    sentences, pad = TokenisedSentences.read(corpus), load_tokenizer(encoder).pad_token_id
    ring, pushed = torch.zeros(QUEUE, d), 0
    speeds, losses = [], []
    for step in range(steps):
        started = time.perf_counter()
        batch = sentences.batch(global_rows(len(sentences), BATCH, step, SEED), pad)
        mask = batch.attention_mask.repeat(2, 1)
        states = model(batch.input_ids.repeat(2, 1), mask, output_hidden_states=True).hidden_states[1:]
        cls = torch.stack([state[:, 0] for state in states], dim=1)
        weights = mask[:, :, None].float()
        means = torch.stack([(state * weights).sum(1) / weights.sum(1) for state in states], dim=1)
        outputs = (query(cls) @ key(means).transpose(1, 2) / d**0.5).softmax(-1) @ value(means)
        h = outputs[:, -1] + torch.tanh(residual(torch.cat([cls[:, -1], outputs.mean(1)], dim=1)))
        anchors, positives = F.normalize(h, dim=-1).split(BATCH)
        targets = torch.arange(BATCH)
        instance = F.cross_entropy(anchors @ positives.T / TEMPERATURE, targets)
        places = (pushed + targets) % QUEUE
        ring[places] = positives.detach()
        pushed += BATCH
        loss = instance
        if pushed >= QUEUE:
            found = (positives.detach() @ ring.T).scatter(1, places[:, None], -torch.inf).topk(NEIGHBOURS).indices
            stacked = torch.cat([positives[:, None], ring[found]], dim=1)
            share = ((stacked * positives[:, None]).sum(-1) / BETA).softmax(-1)
            augmented = F.normalize((share[:, :, None] * stacked).sum(1), dim=-1)
            loss = loss + F.cross_entropy(anchors @ augmented.T / TEMPERATURE, targets)
        layers = cls[:BATCH]
        nearest = F.cosine_similarity(layers[:, :-1].detach(), layers[:, -1:].detach(), dim=-1).argmax(1)
        negatives = F.normalize(layers[targets, nearest], dim=-1)
        loss = loss + F.cross_entropy(anchors @ torch.cat([positives, negatives]).T / TEMPERATURE, targets)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (steps - step) / steps
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speeds.append(BATCH / (time.perf_counter() - started))
    return speeds[1:], losses


def main() -> None:
    """Take turns and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--steps", type=int, default=12, help="optimizer steps a turn (default 12)")
    options.add_argument("--turns", type=int, default=2, help="turns each (default 2)")
    options.add_argument("--encoder", default="all-MiniLM-L6-v2")
    chosen = options.parse_args()
    piped: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(chosen.turns):
            speeds, losses, corpus = through_the_pipeline(Path(folder), chosen.encoder, chosen.steps, turn)
            piped += speeds
            speeds, own_losses = bare_loop(corpus, chosen.encoder, chosen.steps)
            bare += speeds
            apart = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, own_losses, strict=True))
            if apart > 1e-2:
                sys.exit(f"the losses differ by {apart:.1%}, so this is no comparison\n{losses}\n{own_losses}")
    ratio = statistics.median(piped) / statistics.median(bare)
    print(f"encoder             {chosen.encoder}, batch {BATCH}, at most {LENGTH} tokens")
    print(f"pipeline, 1 worker  {statistics.median(piped):.1f} sentences/s (median of {len(piped)} steps)")
    print(f"bare PyTorch loop   {statistics.median(bare):.1f} sentences/s (median of {len(bare)} steps)")
    print(f"ratio of medians    {ratio:.2f}; losses of the two differ by at most {apart:.1e} (relative)")


if __name__ == "__main__":
    main()
