"""The root config: each stage's own, composed; read from YAML and dotted overrides."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from cluster.config import ClusterConfig
from cluster.errors import InputError
from pipeline import configs
from stages.corpus.config import CorpusConfig
from stages.encoder import EncoderConfig
from stages.evaluate.config import EvaluateConfig
from stages.labelled.config import LabelledConfig
from stages.tracking import TrackingConfig
from stages.train import TrainConfig

DISCRIMINATORS: dict[tuple[str, ...], tuple[str, str]] = {
    ("corpus",): ("kind", "sentences"),
    ("corpus", "source"): ("kind", "python-docs"),
    ("train", "method"): ("name", "apincse"),
}
"""Where a part of the config is one of several kinds: the field that says which, and the kind meant without it."""

RESERVED = ("store", "mlartifacts", "mlflow.db")               # what lies in root beside the runs' folders

EXPECTED = {                                                   # pydantic's faults -> what is wanted
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "string_pattern_mismatch": "text of the form {pattern}",
}


class Config(BaseModel, extra="forbid", frozen=True):
    """One experiment."""

    name: str = "demo"                                         # of the run's folder and the MLflow experiment
    root: str = "runs"                                         # folder of the store, the runs and MLflow's database
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    corpus: CorpusConfig | LabelledConfig = Field(CorpusConfig(), discriminator="kind")
    encoder: EncoderConfig = EncoderConfig()
    train: TrainConfig | None = TrainConfig()                  # null: score the encoder as it is
    evaluate: EvaluateConfig = EvaluateConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("it may have letters, digits and . _ - and starts with a letter or digit")
        if name in RESERVED:
            raise ValueError("that is where root keeps other things; choose another name")
        return name


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a config by name or file and apply ``a.b.c=VALUE`` overrides, whose order does not matter.

    Raises:
        InputError: no such config, not YAML, an unknown key (the nearest known one is named), a bad value.
    """
    file = _config_file(name)
    values = _read(file)
    changes: dict[str, Any] = {}
    for override in overrides:
        changes = _overlay(changes, _parse_override(override))
    merged = _with_kinds(merge({"name": _name_of(file)} | values, changes))
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise InputError(_explain(error)) from error


def _read(file: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's values over those of the config that it ``extends``, if it does, whose name it does not take over."""
    try:
        values = _parse(file.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as a config: {error}") from error
    except ValueError as error:
        raise InputError(f"{file} is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{file} holds a {type(values).__name__}; a config is a mapping such as `seed: 1`")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise InputError(f"{file}: extends={_as_yaml(base)}: it must be the name or file of one other config")
    beside = file.parent / base                                # a file names others as seen from where it lies
    base_file = beside if beside.is_file() else _config_file(base)
    if base_file.resolve() in (file.resolve(), *extending):
        raise InputError(f"{file} extends {base}, which extends it in turn; leave one of the two out")
    inherited = _read(base_file, (file.resolve(), *extending))
    inherited.pop("name", None)
    return merge(inherited, values)


def merge(base: Mapping[str, Any], change: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Lay one nested mapping over another; another kind of source or method starts from its own defaults."""
    if path in DISCRIMINATORS:
        field, usual = DISCRIMINATORS[path]
        before = base.get(field, usual)
        if change.get(field, before) != before:
            return dict(change)
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        both_nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value, (*path, key)) if both_nested else value  # type: ignore[arg-type]
    return merged


def _overlay(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """As ``merge``, whatever the kinds: what the user says in one breath belongs together."""
    nested = {
        key: _overlay(base[key], value)
        for key, value in change.items()
        if isinstance(base.get(key), Mapping) and isinstance(value, Mapping)
    }
    return {**base, **change, **nested}


def _with_kinds(values: dict[str, Any]) -> dict[str, Any]:
    """Add the usual kind where a part is described without one, so that one of its fields can be set alone."""
    for path, (field, usual) in DISCRIMINATORS.items():
        values = _with_kind(values, path, field, usual)
    return values


def _with_kind(values: Mapping[str, Any], path: tuple[str, ...], field: str, usual: str) -> dict[str, Any]:
    if not path:
        return {field: usual, **values}
    part = values.get(path[0])
    described = {path[0]: _with_kind(part, path[1:], field, usual)} if isinstance(part, Mapping) else {}
    return {**values, **described}


def _config_file(name: str) -> Path:
    ready = configs.FOLDER / f"{name}.yaml"
    if ready.is_file():
        return ready
    file = Path(name).expanduser()
    if file.is_file():
        return file
    near = difflib.get_close_matches(name, configs.names(), n=1)
    ready_ones = f"the ready configs are {', '.join(configs.names())}; any other is given as a YAML file"
    raise InputError(_with_hint(f"there is no config {name!r}", near, ready_ones))


def _name_of(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or "experiment"


def _parse(text: str) -> Any:
    """YAML, with ``${NAME}`` replaced by environment variables.

    Raises:
        ValueError: it is not YAML; says where and why.
    """
    try:
        return _plain(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark and "\n" in text else ""
        raise ValueError(f"{line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class _Loader(yaml.SafeLoader):
    """A safe loader that takes no key twice: YAML itself would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class, once all keys are known to differ."""
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _plain(value: Any) -> Any:
    """Expand variables, and read 1e-4 as a number, which YAML 1.1 takes for text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"\$\{(\w+)\}", _variable, value)
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else text


def _variable(match: re.Match[str]) -> str:
    name = match[1]
    if name not in os.environ:
        raise InputError(f"the config uses ${{{name}}}, which is not set; export {name}=... first")
    return os.environ[name]


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set {override!r} is no KEY=VALUE; write for example --set train.learning_rate=1e-4")
    try:
        value = _parse(text)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"--set {override!r}: the value is not YAML: {error}") from error
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _explain(error: ValidationError) -> str:
    """One line for the first fault: what is, what may be. Unknown keys come first, for they cause others."""
    by_place: dict[str, list[ErrorDetails]] = {}
    for fault in sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"):
        by_place.setdefault(_dotted(_walk(fault["loc"])[0]), []).append(fault)
    place, alike = next(iter(by_place.items()))                # a union has a fault for each of its members
    more = len(by_place) - 1
    return _explain_one(place, alike) + (f" ({more} more fault{'s' if more > 1 else ''})" if more else "")


def _explain_one(place: str, faults: Sequence[ErrorDetails]) -> str:
    fault = faults[0]
    value = fault["input"]
    given = f"{place}={_as_yaml(value)}"
    match fault["type"]:
        case "extra_forbidden":
            return _explain_unknown(fault["loc"])
        case "missing":
            return f"{place} is missing; set it"
        case "union_tag_invalid":
            tag = fault["ctx"]["tag"]
            kinds = [kind.strip(" '") for kind in fault["ctx"]["expected_tags"].split(",")]
            near = difflib.get_close_matches(tag, kinds, n=1)
            field = _field_of_kind(_walk(fault["loc"])[0])
            return _with_hint(f"{place}.{field}={tag} is unknown", near, f"it may be {_or(kinds)}")
        case "model_type" | "model_attributes_type" | "dict_type":
            path, models = _walk(fault["loc"])
            first = [_field_of_kind(path)] if path in DISCRIMINATORS else list(models[0].model_fields)[:2]
            return f"{given}: it has fields of its own, such as {_or([f'{place}.{name}' for name in first])}; set those"
        case "tuple_type":
            return f"{given}: it must be a list" + ("" if value is None else f" such as [{_as_yaml(value)}]")
        case "string_type":
            quoted = f", so write '{value}' with the quotes" if isinstance(value, int | float) else ""
            return f"{given}: it must be text{quoted}"
        case "value_error":
            return f"{place if isinstance(value, dict) else given}: {fault['ctx']['error']}"
        case _:
            return f"{given}: it must be {_or(list(dict.fromkeys(map(_expected, faults))))}"


def _expected(fault: ErrorDetails) -> str:
    if fault["type"] == "literal_error":
        return _or(re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
    if fault["type"] in EXPECTED:
        return EXPECTED[fault["type"]].format(**fault.get("ctx", {}))
    return fault["msg"].removeprefix("Input should be ")


def _explain_unknown(location: tuple[int | str, ...]) -> str:
    """An unknown key: the kind that has it, the nearest key beside it, or one of this name elsewhere."""
    path, models = _walk(location[:-1])
    parent, key = _dotted(path), str(location[-1])
    before = f"{parent}." if parent else ""
    if path in DISCRIMINATORS:
        field = _field_of_kind(path)
        having = [_kind(model, field) for model in _walk(location[:-2])[1] if key in model.model_fields]
        if having:
            return f"{parent} of {field} {location[-2]} has no {key}; {before}{field}={_or(having)} has"
    known = list(dict.fromkeys(name for model in models for name in model.model_fields))
    near = [before + name for name in difflib.get_close_matches(key, known, n=1)]
    near = near or [dotted for dotted in _all_keys(Config) if dotted.rpartition(".")[2] == key]
    return _with_hint(f"unknown key {before}{key}", near, f"{parent or 'the config'} has {', '.join(known)}")


def _walk(location: Sequence[int | str]) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """Pydantic's path without the tags of unions, and the models that may stand at its end.

    The tag of a kind, as in ``train.method.apincse``, leaves the model of that kind alone.
    """
    path: tuple[str, ...] = ()
    models: list[type[BaseModel]] = [Config]
    for part in location:
        having = [model for model in models if part in model.model_fields]
        if having:
            models = [inner for model in having for inner in _models_in(model.model_fields[str(part)].annotation)]
            path = (*path, str(part))
        elif isinstance(part, int):
            path = (*path, f"[{part}]")
        elif path in DISCRIMINATORS:
            models = [model for model in models if _kind(model, _field_of_kind(path)) == part]
    return path, models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def _field_of_kind(path: tuple[str, ...]) -> str:
    return DISCRIMINATORS[path][0]


def _kind(model: type[BaseModel], field: str) -> str:
    return str(get_args(model.model_fields[field].annotation)[0])


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path).replace(".[", "[")


def _as_yaml(value: Any) -> str:
    """As the user would write it, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _or(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _with_hint(fault: str, near: Sequence[str], known: str) -> str:
    return f"{fault}; did you mean {_or(near)}? ({known})" if near else f"{fault}; {known}"
