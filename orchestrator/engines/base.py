"""What every engine module has in common: the Protocol and the frozen data that passes through it.

An engine is a program that is started, never a library that is imported. Its module turns a spec into a command line
and a metrics page into counters, and holds what only this engine spells its way as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from orchestrator.config import EngineSpec
from orchestrator.engines.diagnosis.dialect import LIBRARIES_ONLY, LogDialect
from orchestrator.engines.diagnosis.explain import explain
from orchestrator.engines.diagnosis.facts import FactPattern
from orchestrator.outcome import Diagnosis

# Where drafts come from, in one vocabulary for all engines: layers of the model itself, trained draft heads, another
# model, or text that was seen before.
FAMILIES = frozenset(
    {"mtp", "dspark", "dflash", "eagle", "eagle3", "medusa", "mlp_speculator", "draft_model", "ngram", "suffix"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as one engine start asks for it; None in place of it where nothing is drafted.

    method: where drafts come from, as the engine names it. family: the same as one of FAMILIES; None where it is none
    of them. proposals: draft tokens proposed per step, comparable between engines; None where the engine decides.
    forget_path: a GET of it makes a drafter forget earlier answers, where it learns from them. is_synthetic:
    acceptance is simulated.
    """

    method: str | None = None
    family: str | None = None
    proposals: int | None = None
    forget_path: str | None = None
    is_synthetic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One engine start, as data. `env` is what is added to the inherited environment.

    parallel_size is the number of GPUs the command line asks for (tensor x pipeline parallel).
    api_key_variable or api_key_flag passes the API key to the engine; the key itself is made at the start.
    rendezvous_variable or rendezvous_flag passes the port on which the engine's own processes meet.
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
    """Counters as read from the engine since its start; None where the engine does not report one.

    prompt_tokens counts all tokens of the prompts, those answered from the prefix cache (prefix_hit_tokens) included.
    All are cumulative token or event counts, except requests_running and requests_waiting (now), kv_tokens (capacity,
    tokens) and start_time_s (seconds since the epoch; it changes when the engine restarts). accepted_by_position[i]
    counts drafts whose token i was accepted. acceptance_length_gauge is a lifetime or interval mean, used only when no
    counter exists.
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
    """The contract of an engine module: pure methods, and the engine's own spellings as data.

    An engine is a subclass. It must define `kind`, `plan`, `help_command` and `stats`; the other attributes have a
    default that fits an engine without the feature. Arguments are spelled as the engine spells them, with dashes in
    place of underscores and without leading dashes. Environment variables are spelled whole.
    """

    kind: str
    """The name of the engine in a configuration (`engine.kind`)."""

    distributions: tuple[str, ...] = ()
    """Python distributions that can hold the engine. The version is that of the first one that is installed."""

    health_path: str = "/health"
    """The path that answers 200 once the engine has started."""

    server_info_path: str | None = None
    """The path of a JSON document that `stats` needs beside the metrics page; None where it needs none."""

    log: LogDialect = LIBRARIES_ONLY
    """How the engine writes its log. The phrases of the usual libraries are included."""

    facts: tuple[FactPattern, ...] = ()
    """The numbers that the log reports while the engine starts."""

    setting_prefixes: tuple[str, ...] = ()
    """Variables that begin so are settings of the engine: inherited from the shell and written into the result."""

    not_inherited: tuple[str, ...] = ()
    """Variables of another server of this engine (`*`: any text): ports, addresses, keys, flags. Never inherited."""

    cache_folders: Mapping[str, str] = MappingProxyType({})
    """Variables that name a folder for compiled code -> the folder's name in a cache slot."""

    memory_arguments: frozenset[str] = frozenset()
    """Arguments of which a larger value needs more memory."""

    kv_memory_arguments: frozenset[str] = frozenset()
    """Arguments of which a larger value leaves more memory to the KV cache and less to everything else."""

    speculation_prefix: str | None = None
    """Arguments that begin so configure speculation. Without any of them the engine drafts nothing."""

    proposals_argument: str | None = None
    """The argument, or key of one, whose value is exactly the number of draft tokens per step; None where none is."""

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line and environment that start `spec` on 127.0.0.1:`port`. Raises ConfigError."""

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine, for `flags.check_flags`."""

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from a Prometheus page and, where the engine has one, its server-info document."""

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        """Explain a log. exit_code is None while the engine runs, negative for a signal."""
        return explain(log_text, exit_code, self.log, self.facts)


def resolve_command(spec: EngineSpec, default: list[str]) -> tuple[list[str], str | None]:
    """The command of `spec` and the folder that must lead PATH (None: PATH as it is).

    With `environment`, a first word without a slash is looked up in that engine environment's `bin`
    (`ROOT/.engines/NAME/bin`, or NAME/bin below ROOT when it has a slash). A wrapper (`numactl`, `nice`) is looked up
    on PATH: the environment lacks it and has the program that it starts.
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
    """The model for the command line: a path relative to the experiment's root becomes absolute where it exists."""
    candidate = Path(spec.root) / spec.model
    return str(candidate) if candidate.exists() else spec.model
