"""TrialSpec -> TrialResult: the whole experiment of one configuration in one readable function."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config import TrialSpec
from orchestrator.engines import find_engine
from orchestrator.errors import ConfigError, EngineFailure, MachineError
from orchestrator.measure.run import Stalled
from orchestrator.node.launch import run_engine
from orchestrator.outcome import Diagnosis, TrialStatus
from orchestrator.trial.recorder import OnMeasurement, OnProgress, TrialRecorder
from orchestrator.trial.result import TrialResult, write_result

STALL_LEVER = "read the end of the log; raise stall_s of the workload for long prefills"


def run(
    spec: TrialSpec,
    workdir: Path,
    *,
    gpu_ids: tuple[str, ...] = (),
    engine_version: str | None = None,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
    on_measurement: OnMeasurement = lambda _workload, _measurement: True,
) -> TrialResult:
    """Start the engine, measure every workload on it, stop it, and return what happened.

    gpu_ids are the GPUs that Ray assigned. on_progress(phase, done, total) reports starting, warming, measuring and
    stopping; on_measurement(workload, so_far) is asked after every repeat and ends the trial (pruned) with False.
    Never raises for a fault of the engine or the machine: that is a result. Writes result.json last.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    # A retry or a resumed campaign comes back to this folder: what an earlier attempt left is not this one's.
    for stale in ("result.json", "memory.csv", "traces.jsonl", "plan.json", "engine.log"):
        (workdir / stale).unlink(missing_ok=True)
    engine = find_engine(spec.engine.kind)
    recorder = TrialRecorder(spec=spec, workdir=workdir, engine_version=engine_version, on_progress=on_progress)
    recorder.enter("starting")
    try:
        _check_assigned(spec, gpu_ids)
        with (
            run_engine(
                engine,
                spec.engine,
                workdir=workdir,
                ports=(spec.placement.ports[0], spec.placement.ports[1]),
                gpu_ids=gpu_ids,
                on_start=recorder.take_server,
            ) as running,
            recorder.mark_stopping(),
        ):
            for name, workload in spec.workloads.items():
                recorder.measure(running, name, workload, on_measurement)
                running.check_alive()
                if recorder.outcome.status is not TrialStatus.COMPLETE:
                    break
    except EngineFailure as failure:
        recorder.outcome = failure.diagnosis
    except Stalled as stalled:
        recorder.keep(stalled.workload, stalled.run)
        recorder.outcome = recorder.explain(
            Diagnosis(status=TrialStatus.FAILED, cause="no_token", summary=str(stalled), lever=STALL_LEVER)
        )
    except (MachineError, ConfigError, OSError) as error:
        cause = "machine" if not isinstance(error, ConfigError) else "configuration"
        recorder.outcome = Diagnosis(status=TrialStatus.INFRASTRUCTURE, cause=cause, summary=str(error))
    finally:
        recorder.stop_sampling()
    result = recorder.to_result()
    write_result(result, workdir)
    return result


def _check_assigned(spec: TrialSpec, gpu_ids: tuple[str, ...]) -> None:
    """A scheduler that hands out other GPUs than were asked for would have two trials share one."""
    if len(set(gpu_ids)) != spec.placement.gpus:
        raise MachineError(
            f"placement.gpus: the trial needs {spec.placement.gpus} GPUs and was given "
            f"{', '.join(gpu_ids) or 'none'} (CUDA_VISIBLE_DEVICES of its process)"
        )
