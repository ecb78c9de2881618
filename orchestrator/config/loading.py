"""YAML -> Experiment -> TrialSpec: groups, overrides, dotted keys, ladders, and errors that name file and key."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.schema import EngineSpec, Experiment, Placement, TrialSpec, Workload
from orchestrator.errors import ConfigError

# The sections whose keys may differ between trials, each with its schema.
_SCHEMAS: dict[str, Any] = {
    "engine": OmegaConf.structured(EngineSpec),
    "placement": OmegaConf.structured(Placement),
    "workloads": DictConfig({}, element_type=Workload),
}

# Keys of earlier versions: (section, key, what does it now).
_GONE = (
    ("search", "confirm", "every campaign ends with more launches of what may win, at most search.launches of a point"),
)


def load(path: str | Path, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file, its groups and `key=value` overrides. Raises ConfigError, naming file and key."""
    path = Path(path)
    body = _read_yaml(path)
    defaults = body.pop("defaults", None) or {}
    layers = [(str(p), _read_yaml(p)) for p in _group_files(path, defaults)]
    layers.append((str(path), body))
    layers.extend((text, _override(text)) for text in overrides or [])
    merged = OmegaConf.create({"name": path.stem, "engine": {"root": str(Path.cwd())}})
    for origin, layer in layers:
        merged = _merge(origin, merged, _merge_dotted(layer))
    return _to_experiment(str(path), merged)


def trial_spec(experiment: Experiment, name: str, params: Mapping[str, Any]) -> TrialSpec:
    """The experiment with `params` (dotted key -> value) applied. Raises ConfigError on an unknown key.

    For many points of one experiment `point_builder` is faster: it reads the experiment once.
    """
    return point_builder(experiment)(name, params)


def point_builder(experiment: Experiment) -> Callable[[str, Mapping[str, Any]], TrialSpec]:
    """build(name, params) -> TrialSpec for the points of one experiment, as `trial_spec` makes each.

    Only the sections that a point changes go through the schema again: the whole of it costs 40 ms a point.
    """
    plain = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(experiment)))
    unchanged = {section: getattr(experiment, section) for section in _SCHEMAS}

    def build(name: str, params: Mapping[str, Any]) -> TrialSpec:
        sections = {dotted.split(".", 1)[0]: dotted for dotted in params}
        for section, dotted in sections.items():
            if section not in _SCHEMAS:
                raise ConfigError(
                    f"search: {dotted!r} cannot differ between trials; only keys under engine, placement and "
                    "workloads can"
                )
        tree = {section: copy.deepcopy(plain[section]) for section in sections}
        for dotted, value in params.items():
            _set(tree, dotted.split("."), value)
        point = unchanged | _to_sections(f"point {name!r}", tree, plain)
        return TrialSpec(name=name, params=dict(params), **point)

    return build


def _to_sections(origin: str, tree: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The typed sections of `tree`. whole: what a reference such as ${engine.model} is looked up in."""
    try:
        if "${" in repr(tree):
            resolved = OmegaConf.to_container(OmegaConf.create({**whole, **tree}), resolve=True)
            tree = {section: cast("dict[str, Any]", resolved)[section] for section in tree}
        schema = OmegaConf.create({section: _SCHEMAS[section] for section in tree})
        merged = OmegaConf.to_object(OmegaConf.merge(schema, _as_schema(tree)))
        return cast("dict[str, Any]", merged)
    except (OmegaConfBaseException, ConfigError) as error:
        raise ConfigError(f"{origin}: {_sentence(error)}") from None


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as YAML, as it is stored with a run."""
    return OmegaConf.to_yaml(OmegaConf.structured(experiment))


def parse_value(text: str) -> Any:
    """One YAML or JSON value as it would be read from a file."""
    return yaml.load(text, Loader=_TextLoader)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _TextLoader(yaml.SafeLoader):
    """YAML in which a scalar is a number or a boolean only when it is written the way it would be printed.

    Everything else (0731, 6e1234, 1.10, on, yes, dates) stays the text that was meant: an engine sees what was typed.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 (declared by PyYAML as an instance variable)


def _construct_number(loader: yaml.SafeLoader, node: yaml.Node) -> int | float | str:
    text = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value) and str(value) == text:
            return value
    return text


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_scalar(key_node)) if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is written twice" if key else "a key must be text", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False)$"), list("tTfF"))
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_TextLoader.add_implicit_resolver("!number", re.compile(r"^[-+.\d][-+.\deE]*$"), list("-+.0123456789"))
_TextLoader.add_constructor("!number", _construct_number)
_TextLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = sorted(p.stem for p in path.parent.glob("*.yaml"))
        known = f"; {path.parent} holds: {', '.join(beside)}" if beside else ""
        raise ConfigError(f"{path}: there is no such file{known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        body = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if body is None:
        body = {}
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, found {type(body).__name__}")
    return body


def _group_files(path: Path, defaults: Any) -> Iterator[Path]:
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path}: defaults: expected {{machine: NAME, engine: NAME, workloads: [NAME, ...]}}")
    groups = {"machine": "machine", "engine": "engine", "workloads": "workload"}
    for key in defaults:
        if key not in groups:
            raise ConfigError(f"{path}: defaults.{key}: unknown group, allowed are {', '.join(groups)}")
    for key, folder in groups.items():
        names = defaults.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            roots = [path.parent, Path("conf")]
            found = [r / folder / f"{name}.yaml" for r in roots if (r / folder / f"{name}.yaml").is_file()]
            yield found[0] if found else path.parent / folder / f"{name}.yaml"


def _override(text: str) -> dict[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {text!r}: expected key=value, for example placement.gpus=1")
    try:
        parsed = parse_value(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {' '.join(str(error).split())}") from None
    tree: dict[str, Any] = {}
    _set(tree, key.strip().split("."), parsed)
    return tree


def _merge_dotted(layer: dict[str, Any]) -> dict[str, Any]:
    """Top-level keys may be dotted (engine.args.max-model-len: 4096), as in overrides."""
    tree: dict[str, Any] = {}
    for key, value in layer.items():
        _set(tree, key.split("."), value)
    return tree


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if isinstance(value, dict) and isinstance(tree.get(path[-1]), dict):
        for key, inner in value.items():
            _set(tree[path[-1]], [key], inner)
    else:
        tree[path[-1]] = value


def _merge(origin: str, base: Any, layer: dict[str, Any]) -> Any:
    """Merge one layer, checking it against the schema first so that the message names the layer's origin."""
    for section, key, instead in _GONE:
        if isinstance(layer.get(section), dict) and key in layer[section]:
            raise ConfigError(f"{origin}: {section}.{key}: is gone; {instead}")
    try:
        OmegaConf.merge(OmegaConf.structured(Experiment), _as_schema(layer))
        return OmegaConf.merge(base, layer)
    except (OmegaConfBaseException, ConfigError) as error:
        raise ConfigError(f"{origin}: {_sentence(error)}") from None


def _as_schema(tree: dict[str, Any]) -> dict[str, Any]:
    """Ladders as one workload per rung; a variable that is null is not set: null takes away an earlier layer's."""
    engine = tree.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("env"), dict):
        kept = {name: value for name, value in engine["env"].items() if value is not None}
        tree = {**tree, "engine": {**engine, "env": kept}}
    return _expand_ladders(tree)


def _expand_ladders(tree: dict[str, Any]) -> dict[str, Any]:
    """A workload whose prompt_tokens or concurrency is a list becomes one workload per value, named NAME-VALUE."""
    workloads = tree.get("workloads")
    if not isinstance(workloads, dict):
        return tree
    expanded: dict[str, Any] = {}
    for name, body in workloads.items():
        ladders = {
            key: body[key]
            for key in ("prompt_tokens", "concurrency")
            if isinstance(body, dict) and isinstance(body.get(key), list)
        }
        for values in itertools.product(*ladders.values()):
            suffix = "".join(f"-{value}" for value in values)
            rung = {**body, **dict(zip(ladders, values, strict=True))} if ladders else body
            earlier = expanded.get(f"{name}{suffix}")
            expanded[f"{name}{suffix}"] = {**earlier, **rung} if earlier and rung else rung
    return {**tree, "workloads": expanded}


def _to_experiment(origin: str, merged: Any) -> Experiment:
    try:
        plain = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
        typed = OmegaConf.merge(OmegaConf.structured(Experiment), _as_schema(plain))
        experiment = OmegaConf.to_object(typed)
    except (OmegaConfBaseException, ConfigError) as error:
        raise ConfigError(f"{origin}: {_sentence(error)}") from None
    assert isinstance(experiment, Experiment)
    return experiment


def _sentence(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first = str(error).splitlines()[0]
    key = getattr(error, "full_key", None)
    if "MissingMandatoryValue" in type(error).__name__ or "Missing mandatory" in first:
        return f"{key}: must be given"
    return f"{key}: {first}" if key else first
