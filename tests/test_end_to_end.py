"""One real run through the command: killed, taken up again, found in the store, changed."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer

from pipeline.store import Lock
from stages.evaluate.sts import load_pairs, sts_sentences
from tests.command import Command, command, cpu_seconds, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

STEPS, CHECKPOINT = 40, 5

CONFIG = """
corpus:
  source: {{kind: text, path: {folder}/corpus.txt}}
encoder: {{name: {folder}/encoder, max_length: 16}}
train:
  method: {{queue_length: 32, neighbours: 4}}
  batch_size: 16
  steps: {steps}
  learning_rate: 1.0e-3
  log_every: 1
  eval_every: 20
  checkpoint_every: {checkpoint}
cluster: {{workers: 2, strategy: zero2, device: cpu}}
"""


@dataclass(frozen=True)
class Story:
    """What was run, in this order, in one folder."""

    folder: Path
    killed: Command                                            # SIGKILL in mid-training
    left: list[str]                                            # its metrics up to its newest checkpoint
    finished: Command                                          # the same command again
    cached: Command                                            # and again
    plan: Command                                              # of another learning rate
    changed: Command                                           # with that learning rate
    summaries: list[dict[str, Any]]                            # after finished, cached and changed

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "toy"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.folder}/runs/mlflow.db"

    def mlflow_runs(self) -> list[Any]:
        """Oldest first."""
        client = mlflow.MlflowClient(self.tracking_uri)
        experiment = client.get_experiment_by_name("toy")
        assert experiment is not None
        return client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])


def save_encoder(folder: Path, sentences: list[str]) -> None:
    """A random BERT of 4 layers of 32 numbers, with the characters of the sentences as word pieces."""
    letters = sorted(set("".join(sentences).lower()) - {" "})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}).save_pretrained(folder)


def save_corpus(file: Path) -> None:
    random = np.random.default_rng(0)
    words = ["the", "old", "new", "red", "man", "woman", "dog", "cat", "house", "river", "reads", "sees", "with"]
    file.write_text("".join(" ".join(random.choice(words, 8)).capitalize() + ".\n" for _ in range(300)))


def checkpoints(folder: Path) -> list[Path]:
    """What the training that is under way can go on from, the oldest first."""
    return sorted((folder / "runs" / "store").glob("train-*.partial/checkpoints/step-????????"))


def metrics_until_checkpoint(checkpoint: Path) -> list[str]:
    lines = (checkpoint.parent.parent / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["step"] <= int(checkpoint.name.removeprefix("step-"))]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("end-to-end")
    save_encoder(folder / "encoder", sts_sentences(None))
    save_corpus(folder / "corpus.txt")
    (folder / "toy.yaml").write_text(CONFIG.format(folder=folder, steps=STEPS, checkpoint=CHECKPOINT))
    summaries = []

    def remember(done: Command) -> Command:
        assert done.process.returncode == 0, done.stderr
        summaries.append(json.loads((folder / "runs" / "toy" / "summary.json").read_text()))
        return done

    with command(folder, "--config", "toy.yaml") as killed:
        killed.wait_until(lambda: checkpoints(folder))
        killed.interrupt(signal.SIGKILL)
        killed.wait()
    killed.assert_nothing_is_left()
    left = metrics_until_checkpoint(checkpoints(folder)[-1])
    finished = remember(run(folder, "--config", "toy.yaml"))

    lock = Lock(folder / "runs" / "store" / ".run-toy.lock")   # as if it ran elsewhere, too
    assert lock.acquire()
    with cpu_seconds(10), command(folder, "--config", "toy.yaml") as cached:
        cached.wait_until(lambda: "waiting" in cached.stderr)
        lock.release()
        cached.wait()
    remember(cached)

    another = ("--config", "toy.yaml", "--set", "train.learning_rate=1e-4")
    plan = run(folder, *another, "--plan")
    changed = remember(run(folder, *another))
    return Story(folder, killed, left, finished, cached, plan, changed, summaries)


def statuses(summary: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in summary["stages"]}


def keys(summary: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["key"] for stage in summary["stages"]}


def test_a_run_killed_in_training_goes_on_from_its_checkpoint(story: Story) -> None:
    assert story.killed.process.returncode == -signal.SIGKILL
    found = statuses(story.summaries[0])
    assert (found["corpus"], found["train"], found["after"]) == ("cached", "ran", "ran")
    folder = story.folder / "runs" / "store" / f"train-{keys(story.summaries[0])['train']}"
    assert len(story.left) > CHECKPOINT
    assert (folder / "metrics.jsonl").read_text().splitlines()[: len(story.left)] == story.left    # times and all


def test_metrics_have_every_step_once_though_the_run_was_killed(story: Story) -> None:
    lines = [json.loads(line) for line in (story.run_folder / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation_spearman" in line] == [0, 20, 40]
    parts = {"loss", "loss_instance", "loss_augmented", "loss_negative", "learning_rate", "gradient_norm"}
    assert parts | {"sentences_per_second"} <= set(lines[-2] | lines[1])


def test_the_summary_says_what_was_done_and_what_came_out(story: Story) -> None:
    summary = story.summaries[0]
    assert set(summary) == {"name", "config", "stages", "scores", "mlflow", "environment"}
    assert summary["name"] == "toy"
    assert summary["config"]["train"]["steps"] == STEPS
    for stage in summary["stages"]:
        assert set(stage) == {"name", "key", "status", "seconds", "path"}
        assert Path(stage["path"]).name == f"{stage['name']}-{stage['key']}"
        assert (Path(stage["path"]) / "manifest.json").is_file()
    assert set(summary["scores"]["before"]) == {"cls", "mean", "first-last-mean"}
    for score in (*summary["scores"]["before"].values(), summary["scores"]["after"]):
        sample = score["sts"]["graded-sample"]
        assert sample["n"] == len(load_pairs(None, "graded-sample").gold)
        assert -100 <= sample["spearman"] == score["sts"]["avg_spearman"] <= 100
    assert set(summary["mlflow"]) == {"tracking_uri", "experiment", "run_id"}
    assert summary["mlflow"]["tracking_uri"] == story.tracking_uri
    assert {"python", "packages", "git"} <= set(summary["environment"])


def test_the_runs_folder_has_what_a_reader_looks_for(story: Story) -> None:
    names = {path.name for path in story.run_folder.iterdir()}
    assert {"summary.json", "config.yaml", "scores.md", "train", "before", "after", "corpus", "encoder"} <= names
    assert {"loss.png", "cosine-against-gold.png", "layer-similarity.png"} <= names


def test_the_encoder_is_loaded_without_this_project(story: Story) -> None:
    folder = story.run_folder / "encoder"
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    states = model(**tokenizer("A man reads.", return_tensors="pt")).last_hidden_state
    assert states.shape[-1] == 32
    assert {"pooling.json", "pooling.safetensors"} <= {path.name for path in folder.iterdir()}
    start = AutoModel.from_pretrained(story.folder / "encoder")
    assert not torch.equal(start.encoder.layer[0].output.dense.weight, model.encoder.layer[0].output.dense.weight)


def test_mlflow_has_parameters_metrics_pictures_and_the_model(story: Story) -> None:
    first = story.mlflow_runs()[0]
    assert first.info.run_id == story.summaries[0]["mlflow"]["run_id"]
    assert first.info.status == "FINISHED"
    assert first.data.params["train.learning_rate"] == "0.001"
    assert first.data.params["train.method.name"] == "apincse"
    assert first.data.metrics["after/avg_spearman"] == story.summaries[0]["scores"]["after"]["sts"]["avg_spearman"]
    client = mlflow.MlflowClient(story.tracking_uri)
    losses = client.get_metric_history(first.info.run_id, "train/loss")    # in the order of their arrival
    assert sorted(metric.step for metric in losses) == list(range(1, STEPS + 1))
    artifacts = {artifact.path for artifact in client.list_artifacts(first.info.run_id)}
    assert {"summary.json", "config.yaml", "scores.md", "loss.png", "cosine-against-gold.png"} <= artifacts
    assert client.get_registered_model("toy").latest_versions
    assert first.data.tags["model"].startswith("models:/")


def test_the_same_command_again_only_reads_the_store(story: Story) -> None:
    assert set(statuses(story.summaries[1]).values()) == {"cached"}
    assert story.summaries[1]["scores"] == story.summaries[0]["scores"]
    assert story.summaries[1]["mlflow"] == story.summaries[0]["mlflow"]
    here = f"process {os.getpid()} on {os.uname().nodename}"
    assert story.cached.stderr == f"waiting for {here}, which runs toy in this root\n"


def test_another_learning_rate_reruns_training_and_what_follows_alone(story: Story) -> None:
    planned = {line.split()[0]: line.split()[2] for line in story.plan.stdout.splitlines()[1:]}
    assert planned == {"corpus": "cached", "before": "cached", "train": "run", "after": "run"}
    assert statuses(story.summaries[2]) == planned | {"train": "ran", "after": "ran"}
    first, changed = keys(story.summaries[0]), keys(story.summaries[2])
    assert {name for name in first if first[name] != changed[name]} == {"train", "after"}


def test_a_run_that_was_taken_up_again_is_one_run_in_mlflow(story: Story) -> None:
    assert [found.info.status for found in story.mlflow_runs()] == ["FINISHED", "FINISHED"]


def test_the_end_of_the_output_is_the_table_and_where_things_are(story: Story) -> None:
    lines = story.finished.stdout.splitlines()
    labels = [line[:23].strip() for line in lines]
    for label in ("before, cls", "before, mean", "before, first-last-mean", "after", "difference to *"):
        assert any(found.rstrip("*") == label.rstrip("*") for found in labels), label
    assert f"folder   {story.run_folder}" in lines
    assert lines[-1].startswith(f"MLflow   make ui, or: mlflow ui --backend-store-uri {story.tracking_uri}   (run ")
    assert "[" not in "".join(lines)                           # no markup
