"""LaunchPlan -> ready process -> gone, with the GPU memory free again.

An engine runs below a keeper (keeper.py) in its own session, on ports, GPUs and a compile-cache slot that nobody else
on this node uses. What it leaves behind all the same is found by its mark (leftovers.py).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from orchestrator.config import EngineSpec
from orchestrator.engines.base import Engine, LaunchPlan
from orchestrator.errors import EngineFailure, MachineError
from orchestrator.measure.client import Target
from orchestrator.node import claims, gpus, leftovers
from orchestrator.node.program import check_program, engine_environment, rendezvous_port
from orchestrator.node.readiness import wait_ready
from orchestrator.node.server import Server
from orchestrator.outcome import Diagnosis, TrialStatus

KEEPER = Path(__file__).with_name("keeper.py")
GPU_RELEASE_TIMEOUT_S = 90.0
# A process that was just killed is shown on its GPU for a moment longer.
GPU_BUSY_PATIENCE_S = 10.0


@contextlib.contextmanager
def run_engine(
    engine: Engine,
    spec: EngineSpec,
    *,
    workdir: Path,
    ports: tuple[int, int],
    gpu_ids: tuple[str, ...] = (),
    extra_env: Mapping[str, str] | None = None,
    on_start: Callable[[Server], None] = lambda _: None,
) -> Iterator[Server]:
    """Start `spec`, yield it once ready, and leave nothing of it behind.

    Raises EngineFailure when it does not become ready, MachineError when this node cannot start it at all.
    The Server that on_start was given names what outlived the end: `left` pids, `held` GPUs.
    """
    leftovers.sweep()
    with (
        claims.reserve_port(ports) as port,
        claims.claim_cache_slot(Path(spec.root) / ".engines" / ".cache") as caches,
        claims.claim_scrap_folder() as scraps,
    ):
        plan = engine.plan(spec, port, workdir)
        check_program(plan)
        with _claim_gpus(plan, gpu_ids) as baseline:
            given = {**caches, "TMPDIR": str(scraps), **(extra_env or {})}
            server = _spawn(engine, plan, spec, gpu_ids, given)
            hurried = False
            try:
                on_start(server)
                wait_ready(server, spec)
                server.note_traces()
                server.hidden_pids = gpus.find_hidden_users(gpu_ids) if gpu_ids else frozenset()
                yield server
            except EngineFailure as failure:
                if failure.diagnosis.cause == "cache_broken":
                    claims.empty_caches(caches)
                raise
            except (KeyboardInterrupt, SystemExit):
                # A person who interrupts does not wait for an orderly end.
                hurried = True
                raise
            finally:
                server.stop(spec.stop.grace_s, hurried)
                if gpu_ids:
                    server.held = gpus.wait_until_free(gpu_ids, baseline, GPU_RELEASE_TIMEOUT_S)


@contextlib.contextmanager
def _claim_gpus(plan: LaunchPlan, gpu_ids: tuple[str, ...]) -> Iterator[dict[str, float | None]]:
    """Claim the GPUs and yield their memory in use (per UUID, GiB) before the start; raises when one is in use."""
    if not gpu_ids:
        yield {}
        return
    if len(gpu_ids) != plan.parallel_size:
        raise MachineError(
            f"the command line asks for {plan.parallel_size} GPUs (tensor x pipeline parallel), "
            f"the trial was given {len(gpu_ids)}: {', '.join(gpu_ids)}"
        )
    seen = gpus.read_gpus(gpu_ids)
    if len(seen) != len(gpu_ids) and (here := gpus.read_gpus()):
        indexes = ", ".join(str(gpu.index) for gpu in here)
        raise MachineError(f"the trial was given the GPUs {', '.join(gpu_ids)}; this node has {indexes}")
    with claims.claim_gpus([gpu.uuid for gpu in seen]) as claimed:
        others = tuple(f"GPU {gpu.index}: another engine of ours has it" for gpu in seen if gpu.uuid in claimed)
        faults = tuple(f"GPU {gpu.index}: {gpu.fault}" for gpu in seen if gpu.fault)
        in_use = (
            faults or others or gpus.find_quarantined(gpu_ids) or gpus.wait_until_unused(gpu_ids, GPU_BUSY_PATIENCE_S)
        )
        if in_use:
            raise EngineFailure(
                Diagnosis(
                    status=TrialStatus.INFRASTRUCTURE,
                    cause="gpu_busy",
                    summary=f"the GPUs cannot be used: {'; '.join(in_use)}",
                    lever="end those processes or choose other GPUs",
                )
            )
        yield gpus.wait_until_settled(gpu_ids, GPU_RELEASE_TIMEOUT_S)


def new_key() -> str:
    """A key for one start. Hexadecimal: one that began with a dash would be taken for a flag on a command line."""
    return secrets.token_hex(24)


def _spawn(
    engine: Engine, plan: LaunchPlan, spec: EngineSpec, gpu_ids: tuple[str, ...], given: Mapping[str, str]
) -> Server:
    key, mark = new_key(), leftovers.new_mark()
    env, recorded = engine_environment(plan, gpu_ids, given)
    env[leftovers.MARKER] = mark
    argv = list(plan.argv)
    if plan.rendezvous_flag:
        argv += [plan.rendezvous_flag, str(rendezvous_port(plan))]
    if plan.api_key_variable:
        env[plan.api_key_variable] = key
    elif plan.api_key_flag:
        argv += [plan.api_key_flag, key]
    plan.log_path.parent.mkdir(parents=True, exist_ok=True)
    ours, keepers = socket.socketpair()
    with keepers, plan.log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-I", str(KEEPER), str(keepers.fileno()), str(spec.stop.grace_s), "--", *argv],
            pass_fds=(keepers.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    target = Target(base_url=plan.base_url, model=plan.model_name, api_key=key)
    return Server(
        plan=plan,
        engine=engine,
        target=target,
        keeper=keeper,
        owner_end=ours,
        mark=mark,
        gpu_ids=gpu_ids,
        given_env=recorded,
    )
