"""YAML -> Experiment -> TrialSpec. The only room that knows OmegaConf; everything that leaves it is frozen data.

The dataclasses are the schema: OmegaConf refuses unknown keys and wrong types by them. Units stand in the names.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.errors import ConfigError

WorkloadKind = Literal["chat", "completion", "prefill", "tokens"]
Mode = Literal["max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """How long to wait for an engine: in all, and without any progress in its log."""

    timeout_s: float = 3600.0
    stall_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How long an engine may take to end by itself after SIGTERM."""

    grace_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How one engine is started. `args` and `env` are the engine's own names and reach it unchanged.

    kind: one of `orchestrator.engines.ENGINES`; `find_engine` checks it.
    """

    kind: str = MISSING
    model: str = MISSING
    command: list[str] | None = None
    environment: str | None = None
    served_model_name: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    ready: Ready = field(default_factory=Ready)
    stop: Stop = field(default_factory=Stop)
    # Folder that relative paths (model, .engines) are resolved against; set when a file is loaded.
    root: str = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one trial occupies: a single Ray bundle, so that all its GPUs are on one node."""

    gpus: int = 0
    cpus: int = 1
    timeout_s: float = 600.0
    node_label: str | None = None
    ports: list[int] = field(default_factory=lambda: [21000, 21999])

    def __post_init__(self) -> None:
        _require(self.gpus >= 0, "placement.gpus", self.gpus, "0 or more whole GPUs")
        _require(self.cpus >= 1, "placement.cpus", self.cpus, "1 or more")
        _require(
            len(self.ports) == 2 and 1024 <= self.ports[0] <= self.ports[1] <= 65535,
            "placement.ports",
            self.ports,
            "[first, last] between 1024 and 65535",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of work that every trial is measured on. A list in prompt_tokens or concurrency becomes one each."""

    kind: WorkloadKind = "chat"
    prompts: str | None = None
    prompt_tokens: int | None = None
    prompt_tokens_spread: float = 0.0
    output_tokens: int = 256
    num_prompts: int = 5
    repeats: int = 3
    concurrency: int = 1
    request_rate: float | None = None
    arrival: Literal["poisson", "constant"] = "poisson"
    warmup: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    nonce: bool = True
    stall_s: float = 120.0
    max_error_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("output_tokens", "num_prompts", "repeats", "concurrency"):
            _require(getattr(self, name) >= 1, f"workloads.*.{name}", getattr(self, name), "1 or more")
        _require(self.warmup >= 0, "workloads.*.warmup", self.warmup, "0 or more")
        _require(
            self.prompt_tokens is None or self.prompt_tokens >= 1,
            "workloads.*.prompt_tokens",
            self.prompt_tokens,
            "1 or more, or null",
        )
        _require(
            self.request_rate is None or 0 < self.request_rate < math.inf,
            "workloads.*.request_rate",
            self.request_rate,
            "a finite rate in requests per second, or null for a closed loop",
        )
        _require(
            0 <= self.prompt_tokens_spread < 1,
            "workloads.*.prompt_tokens_spread",
            self.prompt_tokens_spread,
            "a share from 0 up to 1",
        )
        _require(self.temperature >= 0, "workloads.*.temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "workloads.*.top_p", self.top_p, "above 0, up to 1")
        _require(self.stall_s > 0, "workloads.*.stall_s", self.stall_s, "more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Start the finalists again, interleaved, before one is called the best."""

    top: int = 0
    launches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which points are tried: variants plus the product of the grid, or draws from the space."""

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    sampler: Literal["grid", "random", "tpe"] = "grid"
    num_samples: int = 10
    seed: int = 0
    baseline: str | None = None
    stop_early: bool = False
    time_budget_s: float | None = None
    confirm: Confirm = field(default_factory=Confirm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What "best" means. `metric` is WORKLOAD/NAME; `mix` weighs workloads by their share of the tokens."""

    metric: str | None = None
    mix: dict[str, float] | None = None
    mode: Mode = "max"
    constraints: list[str] = field(default_factory=list)
    tie: float | None = None
    # Values are max or min (OmegaConf cannot check a Literal inside a mapping).
    prefer: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, mode in self.prefer.items():
            _require(mode in ("max", "min"), f"objective.prefer.{key}", mode, "max or min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Where MLflow keeps its records. `folder` holds the default database, artifacts and campaign files."""

    uri: str | None = None
    experiment: str | None = None
    folder: str = "mlruns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """The check a promoted service must pass: this workload, at most this share slower than recorded."""

    workload: str | None = None
    tolerance: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Where and how the best configuration is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    route: str = "/"
    api_key_env: str | None = None
    replicas: int = 1
    autoscaling: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 3600.0
    max_request_mib: float = 64.0
    verify: Verify = field(default_factory=Verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One complete, resolved experiment."""

    name: str = MISSING
    engine: EngineSpec = field(default_factory=EngineSpec)
    placement: Placement = field(default_factory=Placement)
    workloads: dict[str, Workload] = field(default_factory=dict)
    search: Search = field(default_factory=Search)
    objective: Objective = field(default_factory=Objective)
    tracking: Tracking = field(default_factory=Tracking)
    serving: Serving = field(default_factory=Serving)

    @property
    def tracking_uri(self) -> str:
        return self.tracking.uri or f"sqlite:///{self.tracking.folder}/mlflow.db"

    @property
    def tracking_name(self) -> str:
        return self.tracking.experiment or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One point: a complete engine configuration and the work it is measured on. `key` identifies its content."""

    name: str
    params: dict[str, Any]
    engine: EngineSpec
    placement: Placement
    workloads: dict[str, Workload]
    key: str = ""

    def with_key(self, engine_version: str | None, model_fingerprint: str | None) -> TrialSpec:
        """The same point, keyed by content, engine version and model: what makes a finished trial reusable."""
        engine = {k: v for k, v in asdict(self.engine).items() if k not in ("ready", "stop", "root")}
        content = [engine, asdict(self.placement), {n: asdict(w) for n, w in self.workloads.items()}]
        text = json.dumps([content, engine_version, model_fingerprint], sort_keys=True, default=str)
        return replace(self, key=hashlib.sha256(text.encode()).hexdigest()[:12])


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
    """The experiment with `params` (dotted key -> value) applied. Raises ConfigError on an unknown key."""
    plain = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(experiment)))
    for dotted, value in params.items():
        section = dotted.split(".", 1)[0]
        if section not in ("engine", "placement", "workloads"):
            raise ConfigError(
                f"search: {dotted!r} cannot differ between trials; only keys under engine, placement and workloads can"
            )
        _set(plain, dotted.split("."), value)
    point = _to_experiment(f"point {name!r}", OmegaConf.create(plain))
    return TrialSpec(
        name=name, params=dict(params), engine=point.engine, placement=point.placement, workloads=point.workloads
    )


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


def _require(ok: bool, key: str, found: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: found {found!r}, allowed is {allowed}")


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
