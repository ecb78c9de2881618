"""vLLM: its command line, its metrics page, its log. Facts hold for 0.26 to 0.33; the log says which one runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import EngineSpec
from orchestrator.engines.base import Diagnosis, EngineStats, LaunchPlan, TrialStatus, resolve_command, resolve_model
from orchestrator.engines.flags import argument, compact_json, refuse_owned, render_args, scalar, whole_number
from orchestrator.errors import ConfigError

_OWNED = {
    "--host": "an engine listens on 127.0.0.1 only",
    "--port": "use placement.ports",
    "--model": "use engine.model",
    "--served-model-name": "use engine.served_model_name",
    "--api-key": "a random key is made for every start",
    "--uds": "an engine listens on 127.0.0.1 only",
}
# These take one JSON list where every other list is written as separate words.
_JSON_LISTS = {"--allowed-origins", "--allowed-methods", "--allowed-headers"}


class VLLM:
    """`vllm serve MODEL ...`; any command works that takes the model as its next word."""

    kind = "vllm"
    health_path = "/health"
    server_info_path: str | None = None

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("vLLM", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["vllm", "serve"])
        if command[-1].endswith("api_server"):
            command.append("--model")
        model = resolve_model(spec)
        argv = [*command, model, "--host", "127.0.0.1", "--port", str(port)]
        if spec.served_model_name:
            argv += ["--served-model-name", spec.served_model_name]
        speculative = _speculative_config(spec.args)
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, _render)),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=spec.served_model_name or model,
            path_prefix=path_prefix,
            parallel_size=_parallel_size(spec.args),
            proposals=_proposals(speculative),
            synthetic_acceptance=speculative.get("rejection_sample_method") == "synthetic",
            api_key_variable="VLLM_API_KEY",
            warnings=_warnings(speculative),
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        command, _ = resolve_command(spec, ["vllm", "serve"])
        return (*(word for word in command if word != "--model"), "--help=all" if "serve" in command else "--help")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        return EngineStats()

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        return Diagnosis(status=TrialStatus.COMPLETE if exit_code is None else TrialStatus.FAILED)


def _render(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list):
        return [flag, compact_json(value)] if flag in _JSON_LISTS else [flag, *(scalar(item) for item in value)]
    return [flag, scalar(value)]


def _parallel_size(args: Mapping[str, Any]) -> int:
    size = 1
    for names in (
        ("tensor-parallel-size", "-tp"),
        ("pipeline-parallel-size", "-pp"),
        ("data-parallel-size", "-dp"),
    ):
        size *= whole_number("vLLM", args, *names, default=1) or 1
    return size


def _speculative_config(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The speculative-config of `args` with its dotted keys and shorthands folded in."""
    value = argument(args, "speculative-config", "-sc")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"engine.args.speculative-config: not valid JSON: {error}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"engine.args.speculative-config: found {value!r}, allowed is a mapping or null")
    config = {k: v for k, v in (value or {}).items() if v is not None}
    for short, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if (given := argument(args, short)) is not None:
            config[key] = given
    for key, given in args.items():
        head, dot, tail = key.partition(".")
        if dot and head.replace("_", "-") == "speculative-config" and given is not None:
            config[tail] = given
    return config


def _proposals(speculative: Mapping[str, Any]) -> int | None:
    value = speculative.get("num_speculative_tokens")
    # A value the engine will refuse is the engine's to refuse; it is then no number of proposals either.
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _warnings(speculative: Mapping[str, Any]) -> tuple[str, ...]:
    if speculative and "num_speculative_tokens" not in speculative:
        return ("speculative-config has no num_speculative_tokens: the engine decides how many tokens are proposed",)
    return ()
