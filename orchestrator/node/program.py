"""What an engine's program is given: its command line for a shell, its environment, and whether it is there at all."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from orchestrator.engines import ENGINES
from orchestrator.engines.base import LaunchPlan
from orchestrator.errors import MachineError
from orchestrator.masking import mask_env

# What Ray, a launcher and our own environment put into this process and an engine must not inherit: it would change
# how it runs, or where its processes meet.
_NOT_INHERITED = re.compile(
    r"^(RAY_|TUNE_|SERVE_|MLFLOW_|PYTEST_|PYTHONHOME$|PYTHONPATH$|PYTHONSTARTUP$|VIRTUAL_ENV|CONDA_|OMP_NUM_THREADS$"
    r"|CUDA_VISIBLE_DEVICES$|MASTER_ADDR$|MASTER_PORT$|(LOCAL_|GROUP_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|TORCHELASTIC_)"
)
# What a person has set for the engines' libraries in the shell reaches them, and is written down with the result.
_LIBRARY_SETTINGS = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "TRITON_", "FLASHINFER_", "HF_", "OMP_", "MKL_", "KMP_")


def public_env(plan: LaunchPlan) -> dict[str, str]:
    """What the plan adds to the environment, secrets masked."""
    return mask_env(plan.env)


def shell_line(plan: LaunchPlan) -> str:
    """The plan as one line for a shell, secrets masked."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in public_env(plan).items()]
    return " ".join([*variables, shlex.join(plan.argv)])


def check_program(plan: LaunchPlan) -> None:
    """Raises MachineError when the program of the plan is not there."""
    path = os.pathsep.join(filter(None, [plan.path_prefix, os.environ.get("PATH")]))
    program = plan.argv[0]
    found = next((p for p in path.split(os.pathsep) if os.access(Path(p) / program, os.X_OK)), None)
    if found is None and not ("/" in program and os.access(program, os.X_OK)):
        name = Path(plan.path_prefix).parent.name if plan.path_prefix else "NAME"
        raise MachineError(
            f"{program}: there is no such program; install the engine's environment with "
            f"`python -m orchestrator engine install {name}`, or set engine.command"
        )


def query_environment(plan: LaunchPlan) -> dict[str, str]:
    """What the program of `plan` gets when it is only asked something: no GPU, none of the claims of a start."""
    return engine_environment(plan, (), {})[0]


def engine_environment(
    plan: LaunchPlan, gpu_ids: tuple[str, ...], given: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(everything the engine gets, the part of it that is written down beside the plan's own, secrets masked)."""
    env = {name: value for name, value in os.environ.items() if is_inherited(name)}
    recorded = {name: value for name, value in env.items() if is_setting(name)}
    # An empty list hides every GPU on purpose: a CPU trial must not take a context on a busy one. The order is NVML's,
    # so that an index means the same GPU to the engine and to us.
    recorded |= {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **given}
    if plan.rendezvous_variable:
        recorded[plan.rendezvous_variable] = str(rendezvous_port(plan))
    env |= {**recorded, **plan.env}
    if plan.path_prefix:
        env["PATH"] = os.pathsep.join([plan.path_prefix, env.get("PATH", os.defpath)])
    return env, {name: value for name, value in mask_env(recorded).items() if name not in plan.env}


def is_inherited(name: str) -> bool:
    """Whether an engine gets this variable of our environment. What belongs to a server of any engine stays behind."""
    of_servers = (pattern for engine in ENGINES.values() for pattern in engine.not_inherited)
    return not _NOT_INHERITED.match(name) and not any(fnmatchcase(name, pattern) for pattern in of_servers)


def is_setting(name: str) -> bool:
    """Whether this variable sets something of an engine or of the libraries that engines use."""
    prefixes = (prefix for engine in ENGINES.values() for prefix in engine.setting_prefixes)
    return name.startswith((*_LIBRARY_SETTINGS, *prefixes))


def rendezvous_port(plan: LaunchPlan) -> int:
    """The first port of the block behind the HTTP port, for the engine's own processes."""
    return int(plan.base_url.rsplit(":", 1)[1]) + 1
