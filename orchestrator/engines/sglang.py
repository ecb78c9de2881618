"""SGLang: its command line, its metrics page, its log. Facts hold for 0.5.12 to 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config import EngineSpec
from orchestrator.engines.base import Diagnosis, EngineStats, LaunchPlan, TrialStatus, resolve_command, resolve_model
from orchestrator.engines.flags import argument, refuse_owned, render_args, scalar, whole_number

_OWNED = {
    "--host": "an engine listens on 127.0.0.1 only",
    "--port": "use placement.ports",
    "--model-path": "use engine.model",
    "--model": "use engine.model",
    "--served-model-name": "use engine.served_model_name",
    "--api-key": "a random key is made for every start",
    "--enable-metrics": "it is always on",
}


class SGLang:
    """`python -m sglang.launch_server --model-path MODEL ...`."""

    kind = "sglang"
    health_path = "/health"
    server_info_path: str | None = "/server_info"

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("SGLang", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["python", "-m", "sglang.launch_server"])
        if command[-1] not in ("--model-path", "--model"):
            command.append("--model-path")
        model = resolve_model(spec)
        argv = [*command, model, "--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
        if spec.served_model_name:
            argv += ["--served-model-name", spec.served_model_name]
        proposals, warnings = _proposals(spec.args)
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, _render)),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=spec.served_model_name or model,
            path_prefix=path_prefix,
            parallel_size=_parallel_size(spec.args),
            proposals=proposals,
            synthetic_acceptance=_simulates_acceptance(spec.env),
            api_key_flag="--api-key",
            warnings=warnings,
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        command, _ = resolve_command(spec, ["python", "-m", "sglang.launch_server"])
        return (*(word for word in command if word not in ("--model-path", "--model")), "--help")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        return EngineStats()

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        return Diagnosis(status=TrialStatus.COMPLETE if exit_code is None else TrialStatus.FAILED)


def _render(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *(scalar(item) for item in value)]
    return [flag, scalar(value)]


def _parallel_size(args: Mapping[str, Any]) -> int:
    tensor = whole_number("SGLang", args, "tp-size", "tensor-parallel-size", "tp", default=1) or 1
    pipeline = whole_number("SGLang", args, "pp-size", "pipeline-parallel-size", "pp", default=1) or 1
    data = whole_number("SGLang", args, "dp-size", "data-parallel-size", "dp", default=1) or 1
    # With attention data parallelism the replicas share the tensor-parallel GPUs.
    return tensor * pipeline * (1 if argument(args, "enable-dp-attention") else data)


def _proposals(args: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Draft tokens proposed per step: one less than speculative-num-draft-tokens, which counts the bonus token."""
    algorithm = argument(args, "speculative-algorithm")
    if algorithm is None or str(algorithm).upper() == "NONE":
        return None, ()
    draft_tokens = whole_number("SGLang", args, "speculative-num-draft-tokens")
    block = whole_number("SGLang", args, "speculative-dspark-block-size")
    steps = whole_number("SGLang", args, "speculative-num-steps")
    name = str(algorithm).upper()
    if draft_tokens is not None:
        return draft_tokens - 1, ()
    if name == "DSPARK" and block is not None:
        return block, ()
    if name not in ("DSPARK", "NGRAM") and steps is not None:
        return steps, ()
    if name == "NGRAM":
        return 11, ()
    return None, (f"{name}: how many tokens are proposed is left to the engine; set speculative-num-draft-tokens",)


def _simulates_acceptance(env: Mapping[str, str]) -> bool:
    try:
        return float(env.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0
    except ValueError:
        return True
