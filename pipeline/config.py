"""The root config: each stage's own, composed; read from YAML and dotted overrides."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError

from cluster.config import ClusterConfig
from cluster.errors import InputError
from stages.corpus.config import CorpusConfig
from stages.encoder import EncoderConfig
from stages.evaluate.config import EvaluateConfig
from stages.tracking import TrackingConfig
from stages.train import TrainConfig

CONFIGS = Path(__file__).resolve().parent / "configs"

DISCRIMINATORS: dict[tuple[str, ...], str] = {("corpus", "source"): "kind", ("train", "method"): "name"}
"""Where a part of the config is one of several kinds, and the field that says which."""


class Config(BaseModel, extra="forbid", frozen=True):
    """One experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "demo"   # of the run's folder and experiment
    root: str = "runs"                                         # folder of the store, the runs and MLflow's database
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    corpus: CorpusConfig = CorpusConfig()
    encoder: EncoderConfig = EncoderConfig()
    train: TrainConfig | None = TrainConfig()                  # null: score the encoder as it is
    evaluate: EvaluateConfig = EvaluateConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a config by name or file and apply ``a.b.c=VALUE`` overrides.

    Raises:
        InputError: no such config, not YAML, an unknown key (the nearest known one is named), a bad value.
    """
    file = _config_file(name)
    try:
        values = yaml.safe_load(_expand(file.read_text(encoding="utf-8"))) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} holds a {type(values).__name__}; a config is a mapping such as `seed: 1`")
    values.setdefault("name", file.stem)
    merged = merge(_defaults(), values)
    for override in overrides:
        merged = merge(merged, _parse_override(override))
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise InputError(_explain(error)) from error


def config_names() -> list[str]:
    """The ready configs."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def merge(base: Mapping[str, Any], change: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Lay one nested mapping over another; another kind of source or method starts from its own defaults."""
    discriminator = DISCRIMINATORS.get(path)
    if discriminator and discriminator in change and change[discriminator] != base.get(discriminator):
        return dict(change)
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        both_nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value, (*path, key)) if both_nested else value  # type: ignore[arg-type]
    return merged


def _defaults() -> dict[str, Any]:
    """The default kind of each part that has kinds, so that one of its fields can be set alone."""
    defaults = Config()
    assert defaults.train is not None
    return {
        "corpus": {"source": {"kind": defaults.corpus.source.kind}},
        "train": {"method": {"name": defaults.train.method.name}},
    }


def _config_file(name: str) -> Path:
    ready = CONFIGS / f"{name}.yaml"
    if ready.is_file():
        return ready
    file = Path(name).expanduser()
    if file.is_file():
        return file
    raise InputError(f"there is no config {name!r}{_nearest(name, config_names())}; give a YAML file, or one of: "
                     f"{', '.join(config_names())}")


def _expand(text: str) -> str:
    """Replace ``${NAME}`` by the environment variable."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise InputError(f"the config uses ${{{name}}}, which is not set; export {name}=... first")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", value, text)


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {override!r} is no KEY=VALUE; write for example --set train.learning_rate=1e-4")
    try:
        value = _number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise InputError(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}") from error
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-4 for a string; a user means a number."""
    if isinstance(value, str):
        try:
            return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
        except ValueError:
            return value
    return value


def _explain(error: ValidationError) -> str:
    """One line for the first fault: what is, what may be."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    place = [str(part) for part in _plain_location(fault["loc"])]
    dotted = ".".join(place)
    others = f" ({len(faults) - 1} more after this one)" if len(faults) > 1 else ""
    match fault["type"]:
        case "extra_forbidden":
            known = sorted(_fields_at(place[:-1]))
            near = _nearest(place[-1], known, ".".join(place[:-1]))
            parent = ".".join(place[:-1]) or "the config"
            return f"unknown key {dotted}{near}; {parent} has: {', '.join(known)}{others}"
        case "union_tag_invalid" | "union_tag_not_found":
            context = fault["ctx"]
            key = str(context["discriminator"]).strip("'")
            given = f"={context['tag']}" if "tag" in context else " is missing"
            return f"{dotted}.{key}{given}; it may be {context.get('expected_tags', 'one of the known kinds')}{others}"
        case "missing":
            return f"{dotted} is missing{others}"
        case _:
            message = fault["msg"].removeprefix("Value error, ")
            given = "" if isinstance(fault["input"], dict) else f"={fault['input']}"
            return f"{dotted}{given}: {message[:1].lower()}{message[1:]}{others}"


def _plain_location(location: tuple[int | str, ...]) -> Iterator[int | str]:
    """Pydantic's path without the tags of unions (``train.method.apincse.beta`` -> ``train.method.beta``)."""
    path: tuple[str, ...] = ()
    tagged = False
    for part in location:
        if tagged:
            tagged = False
            continue
        yield part
        path = (*path, str(part))
        tagged = path in DISCRIMINATORS


def _fields_at(path: Sequence[str]) -> set[str]:
    """The keys that may stand at a place of the config, those of all kinds together."""
    models: list[type[BaseModel]] = [Config]
    for part in path:
        models = [
            inner
            for model in models
            if part in model.model_fields
            for inner in _models_in(model.model_fields[part].annotation)
        ]
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _nearest(given: str, known: Sequence[str], parent: str = "") -> str:
    """``; did you mean X?`` if something known is near."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {parent + '.' if parent else ''}{near[0]}?" if near else ""
