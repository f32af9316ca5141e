from pathlib import Path

import pytest

from cluster.errors import InputError
from pipeline import configs
from pipeline.config import Config, load_config
from stages.methods.simcse import SimCSEConfig

POOLINGS = (
    "cls, mean, first-last-mean, layer-attention, cls@LAYER, mean@LAYER, mean@LAYER+LAYER, "
    "layer 0 being the embeddings"
)


def written(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def refused(name: str, *overrides: str) -> str:
    """The one line that loading ends in."""
    with pytest.raises(InputError) as caught:
        load_config(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_states_only_its_differences_from_the_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "train: {steps: 7}\n"))
    assert config.train is not None
    assert config.train.steps == 7
    assert config.model_copy(update={"train": Config().train, "name": "demo"}) == Config()


@pytest.mark.parametrize(
    ("file", "name"), [("mine.yaml", "mine"), ("my best try.yaml", "my-best-try"), ("é.yaml", "experiment")]
)
def test_a_config_without_a_name_is_named_after_its_file(tmp_path: Path, file: str, name: str) -> None:
    assert load_config(written(tmp_path, "", file)).name == name


def test_every_ready_config_is_found_by_name() -> None:
    assert "demo" in configs.names()
    assert load_config("demo").name == "demo"


def test_overrides_reach_nested_fields_and_the_last_of_a_field_counts() -> None:
    config = load_config("demo", ["train.method.beta=3", "seed=1", "encoder.layer_attention.rsn=cls_tanh", "seed=2"])
    assert config.train is not None
    assert config.train.method.beta == 3.0                     # type: ignore[union-attr]
    assert config.encoder.layer_attention.rsn == "cls_tanh"
    assert config.seed == 2


def test_another_method_starts_from_its_own_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "train: {method: {name: apincse, queue_length: 512, temperature: 0.1}}\n")
    config = load_config(file, ["train.method.name=simcse"])
    assert config.train is not None
    assert config.train.method == SimCSEConfig(name="simcse")


def test_another_source_starts_from_its_own_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "corpus: {source: {kind: csv, path: a.csv, columns: [a, b]}}\n")
    source = load_config(file, ["corpus.source.kind=tsv", "corpus.source.path=b.tsv"]).corpus.source
    assert source.model_dump(mode="json") == {
        "kind": "tsv", "path": "b.tsv", "columns": ["text"], "on_invalid_utf8": "error",
    }  # fmt: skip


def test_the_order_of_overrides_does_not_matter() -> None:
    changes = ["corpus.source.path=a.txt", "corpus.source.kind=text"]
    assert load_config("demo", changes) == load_config("demo", changes[::-1])


def test_one_field_of_the_usual_method_can_be_set_alone(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""), ["train.method.temperature=0.1"])
    assert config.train is not None
    assert (config.train.method.name, config.train.method.temperature) == ("apincse", 0.1)


def test_a_field_of_the_same_method_keeps_the_files_others(tmp_path: Path) -> None:
    file = written(tmp_path, "train: {method: {queue_length: 512}}\n")
    config = load_config(file, ["train.method.name=apincse", "train.method.beta=3"])
    assert config.train is not None
    assert config.train.method.queue_length == 512             # type: ignore[union-attr]


def test_training_can_be_left_out_and_put_back(tmp_path: Path) -> None:
    file = written(tmp_path, "train: null\n")
    assert load_config(file).train is None
    assert load_config("demo", ["train=null"]).train is None
    again = load_config(file, ["train.method.temperature=0.1"]).train
    assert again is not None
    assert again.method.name == "apincse"


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.0e-4", "0.0001"])
def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path, number: str) -> None:
    for config in (
        load_config("demo", [f"train.learning_rate={number}"]),
        load_config(written(tmp_path, f"train: {{learning_rate: {number}}}\n")),
    ):
        assert config.train is not None
        assert config.train.learning_rate == 1e-4


def test_whole_numbers_may_be_written_so_too() -> None:
    assert load_config("demo", ["corpus.sample=1e5"]).corpus.sample == 100_000


def test_environment_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA", "/data: with # signs")
    file = written(tmp_path, "encoder: {name: '${MY_DATA}/encoder'}\n# a comment may say ${ANYTHING}\n")
    assert load_config(file).encoder.name == "/data: with # signs/encoder"
    assert load_config("demo", ["encoder.name=${MY_DATA}"]).encoder.name == "/data: with # signs"


def test_an_environment_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_DATA", raising=False)
    message = refused(written(tmp_path, "encoder: {name: '${MY_DATA}/encoder'}\n"))
    assert message == "the config uses ${MY_DATA}, which is not set; export MY_DATA=... first"


UNKNOWN_KEYS = {
    "nme=x": "nme; did you mean name?",
    "trian.steps=3": "trian; did you mean train?",
    "x.y.z=3": "x; the config has name, root, seed, corpus, encoder, train, evaluate, cluster, tracking",
    "train.lerning_rate=1": "train.lerning_rate; did you mean train.learning_rate?",
    "learning_rate=1": "learning_rate; did you mean train.learning_rate?",
    "batch_size=1": "batch_size; did you mean train.batch_size or evaluate.batch_size?",
    "train.method.queue_lenght=4": "train.method.queue_lenght; did you mean train.method.queue_length?",
    "encoder.layer_attention.inti=x": "encoder.layer_attention.inti; did you mean encoder.layer_attention.init?",
    "train.validation.paht=x": "train.validation.paht; did you mean train.validation.path?",
    "corpus.source.kind=csv corpus.source.path=x corpus.source.colums=[a]":
        "corpus.source.colums; did you mean corpus.source.columns? (corpus.source has path, ",
}  # fmt: skip


@pytest.mark.parametrize("overrides", UNKNOWN_KEYS)
def test_an_unknown_key_names_the_nearest_known_one_or_what_may_stand_there(overrides: str) -> None:
    assert refused("demo", *overrides.split()).startswith(f"unknown key {UNKNOWN_KEYS[overrides]}")


def test_a_key_of_another_kind_names_the_kinds_that_have_it() -> None:
    assert refused("demo", "corpus.source.path=x") == (
        "corpus.source of kind python-docs has no path; "
        "corpus.source.kind=text, csv, tsv, jsonl, parquet, hub or sts has"
    )
    assert refused("demo", "train.method.name=simcse", "train.method.beta=2").startswith(
        "train.method of name simcse has no beta; train.method.name=apincse"
    )


WRONG_VALUES = {
    "train.method.name=simcs": "train.method.name=simcs is unknown; did you mean simcse? (it may be apincse",
    "corpus.source.kind=txt": "corpus.source.kind=txt is unknown; did you mean text? (it may be text, csv, tsv, ",
    "corpus.source.kind=text": "corpus.source.path is missing; set it",
    "corpus.source=text": "corpus.source=text: it has fields of its own, such as corpus.source.kind; set those",
    "train.method=simcse": "train.method=simcse: it has fields of its own, such as train.method.name; set those",
    "train=5": "train=5: it has fields of its own, such as train.method or train.batch_size; set those",
    "train.method.temperature=0": "train.method.temperature=0: it must be more than 0",
    "train.method.negative_layer=first": "train.method.negative_layer=first: it must be argmax or a whole number",
    "train.method.negative_layer=0": "train.method.negative_layer=0: it must be argmax or at least 1",
    "train.method.negatives=all": "train.method.negatives=all: it must be batch or own",
    "train.steps=many": "train.steps=many: it must be a whole number",
    "train.steps=1.5": "train.steps=1.5: it must be a whole number",
    "train.dropout=1": "train.dropout=1: it must be less than 1",
    "train.warmup=-0.5": "train.warmup=-0.5: it must be at least 0",
    "train.learning_rate=fast": "train.learning_rate=fast: it must be a number",
    "corpus.segment=perhaps": "corpus.segment=perhaps: it must be true or false",
    "corpus.min_words=70": "corpus: min_words=70 is more than max_words=64",
    "encoder.pooling=max": "encoder.pooling=max: it may be " + POOLINGS,
    "encoder.name=5": "encoder.name=5: it must be text, so write '5' with the quotes",
    "evaluate.baseline_poolings=[cls,maen]":
        "evaluate.baseline_poolings[1]=maen: it may be " + POOLINGS,
    "evaluate.baseline_poolings=cls": "evaluate.baseline_poolings=cls: it must be a list such as [cls]",
    "cluster.workers=0": "cluster.workers=0: it must be more than 0",
    "cluster.strategy=zero4": "cluster.strategy=zero4: it must be ddp, zero1, zero2 or zero3",
    "cluster.cpus_per_worker=half": "cluster.cpus_per_worker=half: it must be a whole number or auto",
    "name=a/b": "name=a/b: it may have letters, digits and . _ - and starts with a letter or digit",
    "name=store": "name=store: that is where root keeps other things; choose another name",
    "seed=": "seed=null: it must be a whole number",
    "seed.x=3": "seed={x: 3}: it must be a whole number",
    "seed=-1 cluster.workers=0 train.steps=0": "seed=-1: it must be at least 0 (2 more faults)",
}  # fmt: skip


@pytest.mark.parametrize("overrides", WRONG_VALUES)
def test_a_wrong_value_says_what_is_and_what_may_be(overrides: str) -> None:
    assert refused("demo", *overrides.split()).startswith(WRONG_VALUES[overrides])


@pytest.mark.parametrize("override", ["seed", "=3", "train..steps=3", ".=1"])
def test_an_override_that_is_no_assignment_shows_how_one_looks(override: str) -> None:
    assert refused("demo", override) == (
        f"--set {override!r} is no KEY=VALUE; write for example --set train.learning_rate=1e-4"
    )


def test_an_override_whose_value_is_no_yaml_is_shown() -> None:
    assert refused("demo", "seed=[1") == (
        "--set 'seed=[1': the value is not YAML: expected ',' or ']', but got '<stream end>'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nseed: [1\n", " is not YAML: line 3: expected ',' or ']', but got '<stream end>'"),
        ("name: a: b\n", " is not YAML: line 1: mapping values are not allowed here"),
        ("- a\n", " holds a list; a config is a mapping such as `seed: 1`"),
        ("just words\n", " holds a str; a config is a mapping such as `seed: 1`"),
    ],
)
def test_a_file_that_is_no_config_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    assert refused(file) == file + message


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"name: caf\xe9\n")
    assert refused(str(file)).startswith(f"{file} cannot be read as a config: 'utf-8' codec can't decode byte 0xe9")


def test_a_config_that_does_not_exist_names_the_nearest_and_all() -> None:
    assert refused("demi").startswith("there is no config 'demi'; did you mean demo? (the ready configs are ")
    assert refused("none.yaml").startswith("there is no config 'none.yaml'; the ready configs are ")


def test_a_config_extends_a_ready_one_or_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: base\nextends: demo\nseed: 7\ntrain: {steps: 9}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\ntrain: {batch_size: 16, method: {name: simcse}}\n")
    found, demo = load_config(str(tmp_path / "mine.yaml"), ["train.steps=8"]), load_config("demo")
    assert found.train is not None
    assert demo.train is not None
    assert (found.name, found.seed, found.train.steps, found.train.batch_size) == ("mine", 7, 8, 16)
    assert found.train.learning_rate == demo.train.learning_rate
    assert found.train.method.model_dump() == {"name": "simcse", "temperature": 0.05, "mlp": "train-only"}


def test_configs_that_extend_each_other_or_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(InputError, match=r"b\.yaml extends a\.yaml, which extends it in turn"):
        load_config(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("extends: [demo]\n")
    with pytest.raises(InputError, match=r"extends=\[demo\]: it must be the name or file of one other config"):
        load_config(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("extends: dem\n")
    with pytest.raises(InputError, match="there is no config 'dem'; did you mean demo"):
        load_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.similarity=[x]", r"similarity\[0\]=x: it has fields of its own, such as .*\.name or .*\.path; set"),
        ("evaluate.similarity=[{name: a}]", r"evaluate\.similarity\[0\]\.path is missing; set it"),
        ("evaluate.similarity=[{name: a, path: b, colum: [1, 2, 3]}]", r"colum; did you mean .*\[0\]\.columns\?"),
        ("evaluate.similarity=[{name: '', path: b}]", r"similarity\[0\]\.name='': it must be text of the form"),
        ("evaluate.similarity=[{name: a, path: 'http://b/c.tsv'}]", "is a URL; fetch the file first"),
        ("evaluate.sts=none", "there is nothing to score; set evaluate.sts to all"),
        ("evaluate.max_length=1", r"evaluate\.max_length=1: it must be at least 3"),
    ],
)
def test_a_wrong_set_of_pairs_is_named_by_its_place(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config("demo", [override])


def test_a_key_that_is_there_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("seed: 1\ntrain:\n  steps: 5\n  steps: 6\n")
    with pytest.raises(InputError, match=r"twice\.yaml is not YAML: line 4: the key steps is there twice"):
        load_config(str(tmp_path / "twice.yaml"))
