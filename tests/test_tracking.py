"""Real MLflow on SQLite: what is logged, that nothing is logged twice, and that nothing stops a training run."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from transformers import BertConfig, BertModel, BertTokenizerFast

from cluster.errors import InputError
from stages.encoder import Encoder, EncoderConfig, load_tokenizer
from stages.environment import environment
from stages.served_model import SentenceEncoder
from stages.tracking import (
    LiveMetrics,
    TrackingError,
    fail_run,
    finish_run,
    log_config,
    read_metrics,
    replay,
    start_run,
    tracking_uri,
)

SENTENCES = ["a cab", "dead beef cafe faded", "b", "deaf bed " * 40]
SCORE = {
    "sts": {"STS12": {"n": 9, "spearman": 61.5, "subsets": {"MSRvid": {"spearman": 1.0}}}, "avg_spearman": 61.5},
    "transfer": {},
    "geometry": {"alignment": None, "uniformity": -2.5, "layer_similarity": [0.1, 0.7, 1.0]},
    "n_truncated": 3,
    "warnings": ["partial"],
}
SUMMARY = {
    "scores": {"before": {"cls": SCORE, "first-last-mean": SCORE}, "after": SCORE},
    "stages": [{"name": "train", "seconds": 12.5, "status": "ran"}],
}


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store without experiments, made once: making its tables takes seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def run(tmp_path: Path, empty_store: Path) -> tuple[str, str]:
    """A store of its own with a run in it: its URI and the run's id."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs")
    uri = tracking_uri(tmp_path / "runs")
    return uri, start_run(uri, "demo", "demo", tmp_path / "runs")


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved encoder of three small layers with random weights, whose tokens are the letters."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=48,
    )  # fmt: skip
    made = Encoder(BertModel(config, add_pooling_layer=False), EncoderConfig(name="tiny"))
    made.save(folder / "encoder", BertTokenizerFast(vocab=str(folder / "vocab.txt")))
    return folder / "encoder"


def steps_of(run: tuple[str, str], metric: str) -> list[int]:
    uri, run_id = run
    return sorted(point.step for point in MlflowClient(uri).get_metric_history(run_id, metric))


def write_metrics(path: Path, steps: Any) -> Path:
    lines = [{"step": step, "loss": 1 / (1 + step), "layer_histogram": {"1": 0.25, "2": 0.75}} for step in steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_importing_tracking_does_not_import_mlflow() -> None:
    code = "import sys, stages.tracking; sys.exit('mlflow' in sys.modules)"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_the_store_lies_in_the_root_unless_the_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking_uri(Path("runs")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://example.org:5000")
    assert tracking_uri(tmp_path) == "http://example.org:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    assert tracking_uri(tmp_path / "runs") == f"sqlite:///{tmp_path}/mine.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(InputError, match=r"MLFLOW_TRACKING_URI=./mlruns is a folder"):
        tracking_uri(tmp_path)


def test_a_server_that_is_away_is_named_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match=r"MLflow cannot be used at http://127\.0\.0\.1") as error:
        start_run(f"http://127.0.0.1:{free_port()}", "demo", "demo", tmp_path)
    assert "\n" not in str(error.value)


def test_an_interrupted_run_is_reopened_and_a_deleted_one_replaced(run: tuple[str, str], tmp_path: Path) -> None:
    uri, run_id = run
    client = MlflowClient(uri)
    fail_run(uri, run_id, "the cable\nwas pulled")
    failed = client.get_run(run_id)
    assert (failed.info.status, failed.data.tags["failure"]) == ("FAILED", "the cable\nwas pulled")
    assert start_run(uri, "demo", "demo", tmp_path / "runs", run_id) == run_id
    reopened = client.get_run(run_id)
    assert reopened.info.status == "RUNNING"
    assert "failure" not in reopened.data.tags
    client.delete_run(run_id)
    assert start_run(uri, "demo", "demo", tmp_path / "runs", run_id) != run_id
    assert start_run(uri, "demo", "demo", tmp_path / "runs", "0" * 32) != run_id


def test_a_deleted_experiment_is_restored(run: tuple[str, str], tmp_path: Path) -> None:
    uri, run_id = run
    client = MlflowClient(uri)
    experiment = client.get_run(run_id).info.experiment_id
    client.delete_experiment(experiment)
    again = start_run(uri, "demo", "demo", tmp_path / "runs")
    assert client.get_run(again).info.experiment_id == experiment


def test_the_whole_config_becomes_parameters_named_as_on_the_command_line(run: tuple[str, str]) -> None:
    uri, run_id = run
    config = {
        "name": "demo",
        "train": {"method": {"name": "apincse", "k": 16, "detach": False}, "patience": None, "empty": {}},
        "evaluate": {"sts": ["STS12", "STS-B"]},
        "long": "x" * 10_000,
        "many": {f"field{i}": i for i in range(250)},
    }
    log_config(uri, run_id, config, environment() | {"stage": {"train": "ab12"}, "absent": None})
    data = MlflowClient(uri).get_run(run_id).data
    assert data.params["train.method.name"] == "apincse"
    assert data.params["train.method.detach"] == "false"
    assert data.params["train.patience"] == "null"
    assert data.params["train.empty"] == "{}"
    assert data.params["evaluate.sts"] == '["STS12", "STS-B"]'
    assert data.params["many.field249"] == "249"
    assert len(data.params["long"]) == 6000
    assert data.tags["packages.torch"] == torch.__version__
    assert data.tags["stage.train"] == "ab12"
    assert "absent" not in data.tags


def test_the_commit_is_a_tag_and_mlflows_own_column(run: tuple[str, str]) -> None:
    uri, run_id = run
    log_config(uri, run_id, {}, {"git": {"commit": "c0ffee", "dirty": True}})
    tags = MlflowClient(uri).get_run(run_id).data.tags
    assert (tags["git.commit"], tags["git.dirty"], tags["mlflow.source.git.commit"]) == ("c0ffee", "true", "c0ffee")


def test_a_reopened_run_may_have_another_config(run: tuple[str, str]) -> None:
    uri, run_id = run
    log_config(uri, run_id, {"cluster": {"workers": 2}}, {})
    log_config(uri, run_id, {"cluster": {"workers": 1, "device": "cpu"}}, {})
    data = MlflowClient(uri).get_run(run_id).data
    assert data.params == {"cluster.workers": "2", "cluster.device": "cpu"}
    assert data.tags["now.cluster.workers"] == "1"


def test_live_metrics_arrive_while_training_runs(run: tuple[str, str]) -> None:
    live = LiveMetrics(run, interval=0.05)
    live.log(1, {"loss": 2.5, "layer_histogram": {"1": 0.5}, "note": "text", "best": True, "none": None})
    deadline = time.monotonic() + 20
    while not steps_of(run, "train/loss") and time.monotonic() < deadline:
        time.sleep(0.05)
    live.log(2, {"loss": float("nan")})
    live.close()
    assert live.lost == 0
    assert steps_of(run, "train/loss") == [1, 2]
    metrics = MlflowClient(run[0]).get_run(run[1]).data.metrics
    assert set(metrics) == {"train/loss", "train/layer_histogram/1"}


def test_replay_sends_each_step_once(run: tuple[str, str], tmp_path: Path) -> None:
    with LiveMetrics(run, interval=0.01) as live:
        for step in range(10):
            live.log(step, {"loss": 1 / (1 + step)})
    with LiveMetrics(run, interval=0.01) as resumed:                               # from the checkpoint at step 7
        for step in range(7, 12):
            resumed.log(step, {"loss": 1 / (1 + step)})
    file = write_metrics(tmp_path / "metrics.jsonl", range(1500))
    assert replay(*run, file) == 1488 + 2 * 1500
    assert replay(*run, file) == 0
    assert steps_of(run, "train/loss") == list(range(1500))
    assert steps_of(run, "train/layer_histogram/2") == list(range(1500))


def test_records_of_a_step_are_merged_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    lines = ['{"step": 2, "loss": 3.0}', '{"step": 1, "loss": 4.0}', '{"step": 2, "loss": 2.5}']
    lines += ['{"step": 2, "validation_spearman": 60.0}', '{"step": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 2.5, "validation_spearman": 60.0},
    ]


def test_a_server_that_is_away_costs_training_neither_time_nor_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING, logger="stages.tracking"), LiveMetrics((uri, "a" * 32), 0.01) as live:
        start = time.perf_counter()
        for step in range(2000):
            live.log(step, {"loss": 1.0})
            time.sleep(0.0001)
        assert (time.perf_counter() - start) / 2000 < 0.005
    assert live.lost == 2000
    assert [record.message.startswith("live metrics do not reach MLflow") for record in caplog.records] == [True]
    fail_run(uri, "a" * 32, "reason")
    with pytest.raises(TrackingError, match=f"MLflow at {uri} did not take the results"):
        finish_run(uri, "a" * 32, SUMMARY)


def test_a_server_that_hangs_fills_the_buffer_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:                         # accepts, never answers
        live = LiveMetrics((f"http://127.0.0.1:{silent.getsockname()[1]}", "a" * 32), 0.01, capacity=10)
        start = time.perf_counter()
        for step in range(500):
            live.log(step, {"loss": 1.0})
            time.sleep(0.001)
        live.close(timeout=0.1)
        assert time.perf_counter() - start < 5
        assert live.lost > 400
        assert len(caplog.records) == 1                        # before the socket closes, of which urllib3 may warn


def test_without_tracking_live_metrics_go_nowhere() -> None:
    with LiveMetrics(None) as live:
        live.log(1, {"loss": 1.0})
    assert live.lost == 0


def test_a_finished_run_has_scores_files_and_status_and_a_second_call_adds_nothing(
    run: tuple[str, str], tmp_path: Path
) -> None:
    uri, run_id = run
    (tmp_path / "scores.md").write_text("| a |")
    for _ in range(2):
        assert finish_run(uri, run_id, SUMMARY, [tmp_path / "scores.md"]) is None
    client = MlflowClient(uri)
    finished = client.get_run(run_id)
    assert finished.info.status == "FINISHED"
    assert finished.data.metrics["after/STS12/spearman"] == 61.5
    assert finished.data.metrics["before/first-last-mean/avg_spearman"] == 61.5
    assert finished.data.metrics["after/geometry/uniformity"] == -2.5
    assert finished.data.metrics["after/n_truncated"] == 3
    assert finished.data.metrics["seconds/train"] == 12.5
    assert not [name for name in finished.data.metrics if "MSRvid" in name or "alignment" in name]
    assert steps_of(run, "after/layer_similarity") == [0, 1, 2]
    assert steps_of(run, "after/STS12/spearman") == [0]
    assert [file.path for file in client.list_artifacts(run_id)] == ["scores.md"]
    assert list((tmp_path / "runs" / "mlartifacts" / "demo").iterdir())
    assert not (tmp_path / "mlruns").exists()


def test_other_sets_and_shares_of_variance_are_metrics_and_what_was_amiss_is_a_tag(run: tuple[str, str]) -> None:
    mine = {"n": 9, "spearman": 50.5, "average_precision": 80.0, "n_validation": 4, "f1": 70.0, "f1_threshold": 0.5}
    score = {
        "sts": {"avg_spearman": None},
        "similarity": {"LCQMC": mine, "MRPC": mine},
        "transfer": {"MRPC": {"n_train": 5, "test_accuracy": 72.5, "f1": 81.0, "protocol": "10-fold"}},
        "geometry": {"variance_share": {"1": 0.25, "10": 0.75}, "over": "STS-B"},
    }
    finish_run(*run, {"scores": {"after": score}, "stages": []}, tags={"incomplete_data": "7 pairs", "none": ""})
    finished = MlflowClient(run[0]).get_run(run[1]).data
    assert finished.metrics == {
        "after/LCQMC/spearman": 50.5,
        "after/LCQMC/average_precision": 80.0,
        "after/LCQMC/f1": 70.0,
        "after/LCQMC/f1_threshold": 0.5,
        "after/MRPC/test_accuracy": 72.5,
        "after/MRPC/f1": 81.0,
        "after/similarity/MRPC/spearman": 50.5,
        "after/similarity/MRPC/average_precision": 80.0,
        "after/similarity/MRPC/f1": 70.0,
        "after/similarity/MRPC/f1_threshold": 0.5,
        "after/geometry/variance_share/1": 0.25,
        "after/geometry/variance_share/10": 0.75,
    }
    assert finished.tags["incomplete_data"] == "7 pairs"
    assert "none" not in finished.tags


def test_poolings_that_mlflow_would_name_alike_are_told_apart(run: tuple[str, str]) -> None:
    scores = {name: {"sts": {"avg_spearman": value}} for name, value in (("mean@1+12", 1.0), ("mean@1@12", 2.0))}
    finish_run(*run, {"scores": {"before": scores, "after": {}}, "stages": []})
    assert MlflowClient(run[0]).get_run(run[1]).data.metrics == {
        "before/mean_1_12/avg_spearman": 1.0,
        "before/mean_1_12_2/avg_spearman": 2.0,
    }


def test_an_encoder_without_a_name_is_not_copied(run: tuple[str, str], encoder: Path) -> None:
    assert finish_run(*run, SUMMARY, encoder=encoder) is None
    assert MlflowClient(run[0]).search_registered_models() == []


def test_names_that_mlflow_refuses_are_made_acceptable(run: tuple[str, str], tmp_path: Path) -> None:
    odd = start_run(run[0], "a: b/../c?", "odd", tmp_path / "runs")
    score = {"sts": {"STS 12 (é)/../x": {"spearman": 1.0}}}
    finish_run(run[0], odd, {"scores": {"after": score}, "stages": []})
    assert set(MlflowClient(run[0]).get_run(odd).data.metrics) == {"after/STS 12 _é_/x/spearman"}


LOAD_ELSEWHERE = """
import json, sys
for name in ("ray", "deepspeed", "accelerate", "datasets", "sentence_transformers"):
    sys.modules[name] = None                                   # importing it fails, as where it is not installed
import mlflow, numpy, pandas
uri, sentences, out = sys.argv[1:]
sentences = json.loads(sentences)
model = mlflow.pyfunc.load_model(uri)
import stages.encoder
assert "/code/stages/" in stages.encoder.__file__, stages.encoder.__file__
inputs = [sentences, numpy.array(sentences), pandas.Series(sentences), pandas.DataFrame({"any name": sentences})]
numpy.savez(out, *(model.predict(given) for given in inputs), one=model.predict("a cab"))
"""


@pytest.fixture(scope="module")
def registered(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A finished run with the encoder as its model: tracking URI, run id, model URI."""
    root = tmp_path_factory.mktemp("registered runs")
    uri = tracking_uri(root)
    before = (os.environ.get("MLFLOW_TRACKING_URI"), list(sys.path))
    run_id = start_run(uri, "demo", "demo", root)
    model = finish_run(uri, run_id, SUMMARY, encoder=encoder, registered_name="demo: it/self")
    assert (os.environ.get("MLFLOW_TRACKING_URI"), sys.path) == before
    assert model is not None
    return uri, run_id, model


def own_embeddings(folder: Path) -> list[np.ndarray]:
    encoder, tokenizer = Encoder.load(str(folder)), load_tokenizer(str(folder))
    with torch.no_grad():
        batches = [tokenizer(text, truncation=True, max_length=48, return_tensors="pt") for text in SENTENCES]
        return [
            encoder.pool(encoder.layers(batch["input_ids"], batch["attention_mask"]))[0].numpy() for batch in batches
        ]


def test_the_logged_encoder_encodes_where_this_project_is_not_installed(
    registered: tuple[str, str, str], encoder: Path, tmp_path: Path
) -> None:
    uri, _, _ = registered
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-I", "-c", without_the_project(LOAD_ELSEWHERE), "models:/demo_ it_self@latest",
         json.dumps(SENTENCES), str(tmp_path / "out.npz")],
        cwd=tmp_path, env=environ | {"MLFLOW_TRACKING_URI": uri}, check=True, timeout=120,
    )  # fmt: skip
    out = np.load(tmp_path / "out.npz")
    for name in ("arr_0", "arr_1", "arr_2", "arr_3"):
        assert (out[name].dtype, out[name].shape) == (np.float32, (4, 16))
        np.testing.assert_allclose(out[name], own_embeddings(encoder), atol=1e-6)
    np.testing.assert_allclose(out["one"], own_embeddings(encoder)[:1], atol=1e-6)


def without_the_project(code: str) -> str:
    """Take this checkout off the paths of a process that runs ``code``, also where it is installed as editable."""
    root = str(Path(__file__).parent.parent)
    return (
        f"import sys; sys.path = [path for path in sys.path if path != {root!r}]\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in getattr(finder, '__module__', '')"
        " and 'editable' not in getattr(finder, '__name__', '').lower()]\n" + code
    )


def test_the_model_has_a_signature_an_example_and_requirements_that_an_index_has(
    registered: tuple[str, str, str], encoder: Path
) -> None:
    import mlflow

    uri, run_id, model = registered
    mlflow.set_tracking_uri(uri)
    try:
        info = mlflow.models.get_model_info(model)
        requirements = Path(mlflow.pyfunc.get_model_dependencies(model)).read_text().split()
    finally:
        mlflow.set_tracking_uri(None)
    assert str(info.signature.outputs.inputs[0].shape) == "(-1, 16)"
    assert info.saved_input_example_info is not None
    assert {line.partition("==")[0] for line in requirements} >= {"mlflow", "numpy", "torch", "transformers"}
    assert not {line.partition("==")[0] for line in requirements} & {"ray", "deepspeed", "accelerate"}
    assert all("==" in line and "+" not in line and "/" not in line for line in requirements)
    client = MlflowClient(uri)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert client.get_run(run_id).data.tags["model"] == model
    finish_run(uri, run_id, SUMMARY, encoder=encoder, registered_name="demo: it/self")
    assert [version.run_id for version in client.search_model_versions("name='demo_ it_self'")] == [run_id]


def test_a_missing_sentence_is_named_and_no_sentence_is_no_embedding(encoder: Path) -> None:
    served = SentenceEncoder(str(encoder))
    assert served.predict([]).shape == (0, 16)
    with pytest.raises(ValueError, match="sentence 1 is nan, not a str"):
        served.predict(np.array(["a", float("nan")], dtype=object))


def test_many_sentences_keep_their_order(encoder: Path) -> None:
    served = SentenceEncoder(str(encoder))
    texts = ["abcdefghij"[: 1 + i % 10] + "xyz"[i % 3] for i in range(150)]
    alone = np.concatenate([served.predict([text]) for text in texts])
    np.testing.assert_allclose(served.predict(texts), alone, atol=1e-6)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
