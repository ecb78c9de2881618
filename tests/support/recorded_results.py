"""Real Experiments and TrialResults with chosen numbers, for the tests of tracking and report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import trial
from orchestrator.config import EngineSpec, Experiment, Objective, Search, Tracking, TrialSpec, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.formulas import RequestTrace
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Reason, Verdict
from orchestrator.outcome import Fact, TrialStatus
from orchestrator.trial import TrialResult

WORKLOAD = "code-review-8k"
MEMORY_SERIES = {"gpu0_gib": [(i * 0.5, min(92.9, i * 2.0)) for i in range(100)]}
K = "engine.args.speculative-config.num_speculative_tokens"


def experiment(folder: Path, **changes: Any) -> Experiment:
    made = Experiment(
        name="dspark-k-sweep",
        engine=EngineSpec(kind="vllm", model="dsv4", root=str(folder)),
        workloads={WORKLOAD: Workload()},
        search=Search(baseline="no-spec"),
        objective=Objective(metric=f"{WORKLOAD}/decode_tok_s"),
        tracking=Tracking(folder=str(folder / "mlruns")),
    )
    return replace(made, **changes)


def spec(made: Experiment, k: int | None, **changes: Any) -> TrialSpec:
    args = {"max-num-seqs": 1} | (
        {"speculative-config": {"method": "dspark", "num_speculative_tokens": k}} if k else {}
    )
    point = TrialSpec(
        name=f"k={k}" if k else "no-spec",
        params={K: k} if k else {"engine.args.speculative-config": None},
        engine=replace(made.engine, args=args),
        placement=made.placement,
        workloads=made.workloads,
        key=f"key{k}",
    )
    return replace(point, **changes)


def measurement(decode: float, k: int | None, noise: float = 0.005, **metrics: Quantity | None) -> Measurement:
    repeats = (decode * (1 - noise), decode, decode * (1 + noise))
    accepted = {"acceptance_rate": Quantity(value=0.71, n=3), "acceptance_length": Quantity(value=3.2, n=3)}
    return Measurement(
        metrics={
            "ttft_s": Quantity(value=0.941, low=0.93, high=0.95, n=15),
            "tpot_s": Quantity(value=1 / decode, low=1 / repeats[2], high=1 / repeats[0], n=15),
            "decode_tok_s": Quantity(value=decode, low=repeats[0], high=repeats[2], n=15),
            "prefill_tok_s": None,
            **(accepted if k else {"acceptance_rate": None, "acceptance_length": None}),
            **metrics,
        },
        repeats={"decode_tok_s": repeats, "ttft_s": (0.94, None, 0.95)},
        acceptance_by_position=tuple(0.9**i for i in range(1, k + 1)) if k else None,
        cold={"ttft_s": 2.5},
        num_requests=15,
    )


def result(made: Experiment, k: int | None, decode: float | None, folder: Path, **changes: Any) -> TrialResult:
    """A complete and valid trial, or, without a decode rate, one that the engine refused. Its files are in `folder`."""
    point = changes.pop("spec", None) or spec(made, k)
    workdir = folder / point.name.replace("/", "_")
    workdir.mkdir(parents=True, exist_ok=True)
    valid = Verdict(level=Level.VALID)
    told: dict[str, Any] = {
        "spec": point,
        "status": TrialStatus.COMPLETE,
        "measurements": {WORKLOAD: measurement(decode, k)} if decode else {},
        "verdicts": {WORKLOAD: valid},
        "verdict": valid,
        "memory": {
            "gpu0_peak_gib": Fact(value=92.94, source="NVML"),
            "gpu1_peak_gib": Fact(value=93.16, source="NVML"),
            "kv_tokens": Fact(value=1371214.0, source="GPU KV cache size: 1,371,214 tokens"),
        },
        "speculation": Speculation(method="dspark", proposals=k) if k else None,
        "phases_s": {"starting": 190.0, "measuring": 60.0},
        "started_at": "2026-11-29T15:00:00+00:00",
        "ended_at": "2026-11-29T15:05:00+00:00",
        "launch": {"argv": ["vllm", "serve", "dsv4"], "env": {"HF_TOKEN": "***"}},
        "provenance": {"hostname": "node", "engine_version": "0.26.0", "gpus": ["H200"], "versions": {"ray": "2.60.0"}},
        "workdir": str(workdir),
    }
    if decode is None:
        told |= {
            "status": TrialStatus.REFUSED,
            "cause": "k_below_block_size",
            "reason": f"the engine refuses k={k}: below the checkpoint's block size 5",
            "lever": "num_speculative_tokens of 5 or more",
            "verdicts": {},
            "verdict": None,
        }
    made_result = TrialResult(**{**told, **changes})
    write_files(made_result, workdir)
    return made_result


def write_files(made: TrialResult, workdir: Path) -> None:
    """What a trial leaves behind: result.json and memory.csv, plan.json, the engine's log and the requests' traces."""
    (workdir / "engine.log").write_text("INFO ready\n", encoding="utf-8")
    (workdir / "plan.json").write_text(json.dumps({"argv": ["vllm", "serve"]}), encoding="utf-8")
    traces = [
        {
            "workload": WORKLOAD,
            "index": i,
            "repeat": 0,
            "shape": "8k",
            "sent_s": 10.0,
            "chunk_times_s": [10.9 + i / 100],
        }
        for i in range(5)
    ]
    assert all(RequestTrace(**{key: x for key, x in trace.items() if key != "workload"}) for trace in traces)
    (workdir / "traces.jsonl").write_text("".join(f"{json.dumps(trace)}\n" for trace in traces), encoding="utf-8")
    trial.write_result(made, workdir)


def judged(made: TrialResult, level: Level, code: str) -> TrialResult:
    verdict = Verdict(level=level, reasons=(Reason(code=code, detail=f"{code} was seen"),))
    return replace(made, verdicts={WORKLOAD: verdict}, verdict=verdict)
