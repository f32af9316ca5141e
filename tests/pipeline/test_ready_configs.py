"""Every ready config: it loads, says only what is different, and passes all checks that come before a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig, RobertaConfig

from cluster.errors import InputError
from pipeline import configs
from pipeline.config import Config, load_config
from pipeline.dag import plan
from pipeline.graph import graph
from pipeline.store import Store
from stages.corpus.config import CorpusConfig
from stages.encoder import PACKAGED
from stages.methods.apincse import APINCSEConfig
from tests import tiny

BACKBONES = {
    "google-bert/bert-base-uncased": BertConfig(num_hidden_layers=12),
    "google-bert/bert-large-uncased": BertConfig(num_hidden_layers=24),
    "FacebookAI/roberta-base": RobertaConfig(num_hidden_layers=12, max_position_embeddings=514, pad_token_id=1),
    "FacebookAI/roberta-large": RobertaConfig(num_hidden_layers=24, max_position_embeddings=514, pad_token_id=1),
}
"""What the hub's encoders are, as far as checks look at it."""

PAPER = {                                                      # batch, learning rate, layer M of the hard negative
    "bert-base": (64, 3e-5, 11),
    "bert-large": (64, 1e-5, 23),
    "roberta-base": (512, 1e-5, 11),
    "roberta-large": (512, 3e-5, 23),
}


METHODS = {                                                    # batch, learning rate and pooling of BERT-base
    "is-cse": ("is-cse", 64, 3e-5, "cls"),
    "cluster-ns": ("cluster-ns", 256, 5e-5, "cls"),
    "rankcse": ("rankcse", 128, 3e-5, "cls"),
    "arccse": ("arccse", 64, 3e-5, "cls"),
    "lapcse": ("simcse", 64, 3e-5, "layer-attention"),
}


@pytest.fixture(autouse=True)
def _anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the research data that configs name through the environment."""
    monkeypatch.setenv("APINCSE_SHARED", str(tmp_path / "shared"))


def yaml_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((configs.FOLDER / f"{name}.yaml").read_text())
    return values


def with_data_made_here(config: Config, folder: Path) -> Config:
    """The config with an encoder of the same kind and depth, a generator, sentences and pairs that are at hand."""
    values = config.model_dump()
    values["evaluate"]["data"] = None                          # the graded sample
    if values["evaluate"]["sts"] != "none":
        values["evaluate"]["sts"] = "all"
    pairs = folder / "pairs.tsv"
    pairs.write_text("A few words\tmake a sentence.\t1\nOther words\tmake another.\t0\n")
    if isinstance(config.corpus, CorpusConfig):
        if config.corpus.source.kind == "text":
            (folder / "sentences.txt").write_text("A few words make a sentence.\n")
            values["corpus"]["source"]["path"] = str(folder / "sentences.txt")
    elif config.corpus.source.kind != "hub":
        values["corpus"]["source"] = {"kind": "tsv", "path": str(pairs), "columns": [0, 1, 2]}
    if config.train is not None and config.train.validation is not None:
        values["train"]["validation"] = {"path": str(pairs), "columns": [0, 1, 2]}
    for each in values["evaluate"]["similarity"]:
        other = folder / "others.tsv"
        other.write_text("One more\tmakes three.\t1\nAnd yet another\tmakes four.\t0\n")
        each |= {"path": str(pairs), "validation": str(other), "columns": [0, 1, 2]}
    if config.encoder.name not in PACKAGED:
        backbone = BACKBONES.get(config.encoder.name, BertConfig())
        backbone.save_pretrained(folder / "encoder")
        tiny.tokenizer().save_pretrained(folder / "encoder")
        values["encoder"]["name"] = str(folder / "encoder")
    if config.train is not None:                               # a teacher or generator like the encoder
        values["train"]["method"] = config.train.method.located(lambda _: str(folder / "encoder")).model_dump()
    return Config.model_validate(values)


@pytest.mark.parametrize("name", configs.names())
def test_a_ready_config_passes_every_check_and_can_be_planned(name: str, tmp_path: Path) -> None:
    config = with_data_made_here(load_config(name), tmp_path)
    planned = plan(graph(config), Store(tmp_path / "runs"))
    assert planned[-1].stage.name == "after"
    assert not any(item.cached for item in planned)


@pytest.mark.parametrize("name", configs.names())
def test_a_ready_config_says_in_a_line_what_it_is_and_then_only_what_is_no_default(name: str, tmp_path: Path) -> None:
    text = (configs.FOLDER / f"{name}.yaml").read_text()
    comment, first, *_ = text.splitlines()
    assert comment.startswith("# ")
    assert not first.startswith("#")
    whole = load_config(name)
    repeated = []
    for path in leaves(yaml_of(name)):
        if path[-1] not in ("kind", "name") and without(path, yaml_of(name), tmp_path / f"{name}.yaml") == whole:
            repeated.append(".".join(path))                    # a part's name says to whom the fields beside it belong
    assert repeated == []


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of nested values."""
    return [
        deeper
        for key, value in values.items()
        for deeper in (leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)])
    ]


def without(path: tuple[str, ...], values: dict[str, Any], file: Path) -> Config | None:
    """The config if the value at a path were left to its default; None if it has none."""
    parent = values
    for part in path[:-1]:
        parent = parent[part]
    del parent[path[-1]]
    file.write_text(yaml.safe_dump(values))
    try:
        return load_config(str(file))
    except InputError:
        return None


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings_are_the_papers(name: str) -> None:
    config = load_config(name)
    assert config.train is not None
    train, method = config.train, config.train.method
    assert isinstance(method, APINCSEConfig)
    batch, learning_rate, layer = PAPER[name]
    assert (train.batch_size, train.learning_rate, method.negative_layer) == (batch, learning_rate, layer)
    assert (method.queue_length, method.neighbours, method.beta, method.temperature) == (1024, 16, 2.0, 0.05)
    assert (method.instance_weight, method.augmented_weight, method.negative_weight) == (1, 1, 1)
    assert (train.dropout, train.eval_every, train.warmup, train.steps, train.epochs) == (0.05, 125, 0.0, None, 1)
    assert config.encoder.max_length == 32
    assert config.encoder.pooling == "layer-attention"
    assert config.evaluate.max_length is None                  # no cap at test
    assert config.evaluate.sts == "all"


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_have_their_papers_settings_for_bert_base(name: str) -> None:
    config = load_config(name)
    assert config.train is not None
    train = config.train
    assert (train.method.name, train.batch_size, train.learning_rate, config.encoder.pooling) == METHODS[name]
    assert (train.dropout, train.eval_every, train.warmup, train.steps, train.epochs) == (0.1, 125, 0.0, None, 1)
    assert (config.encoder.name, config.encoder.max_length) == ("google-bert/bert-base-uncased", 32)
    assert (config.cluster.device, config.cluster.precision) == ("gpu", "bf16")


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_configs_run_on_gpus_in_bf16_under_zero(name: str) -> None:
    cluster = load_config(name).cluster
    assert (cluster.device, cluster.precision) == ("gpu", "bf16")
    assert cluster.strategy.startswith("zero")
