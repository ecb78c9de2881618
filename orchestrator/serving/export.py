"""A promoted configuration as files that run elsewhere: a shell script, a Serve config, a ray.serve.llm config.

JSON is YAML, so the configs are written as strict JSON under the names that `serve deploy` expects.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.config import Experiment
from orchestrator.engines import find_engine
from orchestrator.engines.base import LaunchPlan
from orchestrator.errors import MachineError
from orchestrator.masking import is_secret_variable, mask_env
from orchestrator.serving.gateway import ListenerConfig, gateway_name
from orchestrator.serving.promotion import public_record
from orchestrator.serving.replica import ENGINE, EngineDeploymentSpec, application_args
from orchestrator.tracking import Recorded

# Stands for the port while the command line is planned; no argument has this value by chance.
PORT_MARK = 65529
# Engine settings that are the server's own and that ray.serve.llm sets itself.
NOT_ENGINE_KWARGS = frozenset({"host", "port", "served-model-name", "uvicorn-log-level", "api-key"})


def export(experiment: Experiment, recorded: Recorded, folder: Path) -> list[Path]:
    """Write the files of one run into `folder`. Returns them. Raises MachineError when it cannot be written."""
    files = {
        "serve.sh": (shell_script(experiment, recorded), 0o755),
        "serve.yaml": (_json(serve_config(experiment, recorded)), 0o644),
    }
    llm = llm_config(recorded)
    if llm is not None:
        files["serve-llm.yaml"] = (_json(llm_application(experiment, llm)), 0o644)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (text, mode) in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(mode)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from None
    return [folder / name for name in files]


def shell_script(experiment: Experiment, recorded: Recorded) -> str:
    """The engine's plain command line with its environment; PORT chooses the port, secrets come from outside."""
    spec = recorded.result.spec
    plan = find_engine(spec.engine.kind).plan(spec.engine, PORT_MARK, Path("."))
    gpus = ",".join(str(i) for i in range(spec.placement.gpus))
    lines = [
        "#!/bin/sh",
        f"# {spec.name} of {experiment.name}, MLflow run {recorded.run_id}. All GPUs belong to this one machine.",
        "set -eu",
        'PORT="${PORT:-8000}"',
        # What the engine's trial did not inherit either.
        "unset PYTHONPATH PYTHONHOME VIRTUAL_ENV || true",
        f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES-{gpus}}}"',
        *(_assignment(name, value) for name, value in plan.env.items()),
    ]
    if plan.path_prefix:
        lines.append(f'export PATH={shlex.quote(plan.path_prefix)}:"$PATH"')
    if plan.api_key_variable:
        lines.append(f"# Set {plan.api_key_variable} to ask clients for that key.")
    return "\n".join([*lines, f"exec {_command(plan)}", ""])


def _command(plan: LaunchPlan) -> str:
    words = ['"$PORT"' if word == str(PORT_MARK) else shlex.quote(word) for word in plan.argv]
    if plan.api_key_flag:
        words.append(f'${{API_KEY:+{plan.api_key_flag} "$API_KEY"}}')
    return " ".join(words)


def _assignment(name: str, value: str) -> str:
    if is_secret_variable(name):
        return f'export {name}="${{{name}:?must be set: its value was not recorded}}"'
    return f"export {name}={shlex.quote(value)}"


def serve_config(experiment: Experiment, recorded: Recorded) -> dict[str, Any]:
    """For `serve deploy`: the applications that `promote` deploys, STRICT_PACK written out."""
    spec, serving = recorded.result.spec, experiment.serving
    engine = replace(spec.engine, env=mask_env(spec.engine.env))
    deployed = EngineDeploymentSpec(
        run_id=recorded.run_id or "",
        version=recorded.run_id or "exported",
        engine=asdict(engine),
        gpus=spec.placement.gpus,
        ports=(spec.placement.ports[0], spec.placement.ports[1]),
        folder=str(Path(experiment.tracking.folder).absolute() / "serving" / experiment.name),
        record=public_record(recorded, experiment),
    )
    listener = ListenerConfig(
        host=serving.host,
        port=serving.port,
        route=serving.route,
        api_key_env=serving.api_key_env,
        max_request_mib=serving.max_request_mib,
    )
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": experiment.name,
                "route_prefix": None,
                "import_path": "orchestrator.serving.replica:engines",
                "args": application_args(deployed, spec.placement, serving),
                "deployments": [{"name": ENGINE, "placement_group_strategy": "STRICT_PACK"}],
            },
            {
                "name": gateway_name(experiment.name),
                "route_prefix": None,
                "import_path": "orchestrator.serving.gateway:gateway",
                "args": asdict(listener),
            },
        ],
    }


def llm_config(recorded: Recorded) -> dict[str, Any] | None:
    """One LLMConfig of ray.serve.llm; None where the engine is none of its own (it runs vLLM inside the replica)."""
    spec = recorded.result.spec
    if spec.engine.kind != "vllm":
        return None
    plan = find_engine(spec.engine.kind).plan(spec.engine, PORT_MARK, Path("."))
    kwargs = {
        name.replace("-", "_"): value
        for name, value in spec.engine.args.items()
        if value is not None and name not in NOT_ENGINE_KWARGS
    }
    workers = max(plan.parallel_size, 1)
    # One bundle: one node, and Serve's own default (PACK, a bundle per worker) may cross nodes.
    bundle: dict[str, float] = {"CPU": spec.placement.cpus, "GPU": spec.placement.gpus}
    return {
        "model_loading_config": {"model_id": plan.model_name, "model_source": spec.engine.model},
        "engine_kwargs": kwargs,
        "placement_group_config": {
            "bundles": [{name: amount for name, amount in bundle.items() if amount}]
            if workers == 1
            else [{"CPU": max(1, spec.placement.cpus // workers), "GPU": 1} for _ in range(workers)],
            "strategy": "STRICT_PACK",
        },
        "runtime_env": {"env_vars": mask_env(spec.engine.env)},
    }


def llm_application(experiment: Experiment, llm: Mapping[str, Any]) -> dict[str, Any]:
    """The Serve config of one LLMConfig, for `serve deploy` where ray[llm] is installed."""
    serving = experiment.serving
    deployment = (
        {"autoscaling_config": dict(serving.autoscaling)} if serving.autoscaling else {"num_replicas": serving.replicas}
    )
    return {
        "http_options": {"host": serving.host, "port": serving.port},
        "applications": [
            {
                "name": experiment.name,
                "route_prefix": serving.route,
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [{**llm, "deployment_config": deployment}]},
            }
        ],
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False, indent=2, ensure_ascii=False) + "\n"
