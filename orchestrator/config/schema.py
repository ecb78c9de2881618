"""The sections of an experiment as frozen data.

The dataclasses are the schema: OmegaConf refuses unknown keys and wrong types by them. Units stand in the names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from omegaconf import MISSING

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
class Search:
    """Which points are tried: variants plus the product of the grid, or draws from the space.

    launches: the most starts of one point. Points that can no longer win have fewer.
    """

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    sampler: Literal["grid", "random", "tpe"] = "grid"
    num_samples: int = 10
    seed: int = 0
    baseline: str | None = None
    stop_early: bool = False
    time_budget_s: float | None = None
    launches: int = 5

    def __post_init__(self) -> None:
        _require(self.launches >= 1, "search.launches", self.launches, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What "best" means. `metric` is WORKLOAD/NAME; `mix` weighs workloads by their share of the tokens.

    tie: the share of the objective that may be lost for a preferred configuration (0.02 is 2%).
    """

    metric: str | None = None
    mix: dict[str, float] | None = None
    mode: Mode = "max"
    constraints: list[str] = field(default_factory=list)
    tie: float = 0.02
    # Values are max or min (OmegaConf cannot check a Literal inside a mapping).
    prefer: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, mode in self.prefer.items():
            _require(mode in ("max", "min"), f"objective.prefer.{key}", mode, "max or min")
        _require(0 < self.tie < 1, "objective.tie", self.tie, "a share between 0 and 1, for example 0.02")


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

    def with_key(self, parts: Mapping[str, str | None] | None = None) -> TrialSpec:
        """The same point, keyed by its content and the given parts: what makes a finished trial reusable."""
        engine = {k: v for k, v in asdict(self.engine).items() if k not in ("ready", "stop", "root")}
        content = [engine, asdict(self.placement), {n: asdict(w) for n, w in self.workloads.items()}]
        text = json.dumps([content, dict(parts or {})], sort_keys=True, default=str)
        return replace(self, key=hashlib.sha256(text.encode()).hexdigest()[:12])


def _require(ok: bool, key: str, found: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: found {found!r}, allowed is {allowed}")
