"""What every engine module has in common: the Protocol and the frozen data that passes through it.

An engine is a program that is started, never a library that is imported. Its module is three pure functions:
a command line from a spec, counters from a metrics page, and an explanation from a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config import EngineSpec
from orchestrator.outcome import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as one engine start asks for it; None in place of it where nothing is drafted.

    method: where drafts come from, as the engine names it. proposals: draft tokens proposed per step, comparable
    between engines; None where the engine decides. forget_path: a GET of it makes a drafter forget earlier answers,
    where it learns from them. is_synthetic: acceptance is simulated.
    """

    method: str | None = None
    proposals: int | None = None
    forget_path: str | None = None
    is_synthetic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One engine start, as data. `env` is what is added to the inherited environment.

    parallel_size is the number of GPUs the command line asks for (tensor x pipeline parallel).
    api_key_variable or api_key_flag says how the engine is told its key; the key itself is made at the start.
    rendezvous_variable or rendezvous_flag says how it is told the port that its own processes meet on.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    base_url: str
    log_path: Path
    model_name: str
    path_prefix: str | None = None
    parallel_size: int = 1
    speculation: Speculation | None = None
    api_key_variable: str | None = None
    api_key_flag: str | None = None
    rendezvous_variable: str | None = None
    rendezvous_flag: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters as read from the engine since its start; None when the engine does not tell.

    prompt_tokens counts all tokens of the prompts, those answered from the prefix cache (prefix_hit_tokens) included.
    All are cumulative token or event counts except start_time_s (seconds since the epoch, tells a restart) and
    kv_tokens (capacity, tokens). accepted_by_position[i] counts drafts whose token i was accepted.
    acceptance_length_gauge is a lifetime or interval mean, used only when no counter exists.
    """

    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_by_position: tuple[float, ...] | None = None
    preemptions: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_tokens: float | None = None
    acceptance_length_gauge: float | None = None
    start_time_s: float | None = None


class Engine(Protocol):
    """The contract of an engine module. All methods are pure."""

    kind: str
    health_path: str
    server_info_path: str | None

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line and environment that start `spec` on 127.0.0.1:`port`. Raises ConfigError."""

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine, for `flags.check_flags`."""

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from a Prometheus page and, where the engine has one, its server-info document."""

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        """Explain a log. exit_code is None while the engine runs, negative for a signal."""


def resolve_command(spec: EngineSpec, default: list[str]) -> tuple[list[str], str | None]:
    """The command of `spec` and the folder that must lead PATH (None: PATH as it is).

    With `environment`, a first word without a slash is looked up in that engine environment's `bin`
    (`ROOT/.engines/NAME/bin`, or NAME/bin below ROOT when it has a slash). A wrapper (`numactl`, `nice`) is found on
    PATH: the environment lacks it and has the program behind it.
    """
    command = list(spec.command or default)
    if spec.environment is None:
        return command, None
    place = spec.environment if "/" in spec.environment else f".engines/{spec.environment}"
    bin_folder = Path(spec.root) / place / "bin"
    own = bin_folder / command[0]
    wraps = not own.exists() and any((bin_folder / word).is_file() for word in command[1:])
    if "/" not in command[0] and not wraps:
        command[0] = str(own)
    return command, str(bin_folder)


def resolve_model(spec: EngineSpec) -> str:
    """The model as the engine is told it: a path relative to the experiment's root becomes absolute when it exists."""
    candidate = Path(spec.root) / spec.model
    return str(candidate) if candidate.exists() else spec.model
