"""The published sweep over k as trials that have ended, with every file that a trial leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import trial
from orchestrator.config import EngineSpec, Experiment
from orchestrator.measure.formulas import RequestTrace
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.outcome import Fact, TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import WORKLOAD, make_experiment, make_measurement, make_result, make_spec

MEMORY_SERIES = {"gpu0_gib": [(i * 0.5, min(92.9, i * 2.0)) for i in range(100)]}
REFUSED = {
    "status": TrialStatus.REFUSED,
    "cause": "k_below_block_size",
    "lever": "num_speculative_tokens of 5 or more",
}


def sweep_experiment(folder: Path, **sections: Any) -> Experiment:
    """The sweep's experiment, with its store in `folder` unless `sections` says otherwise."""
    engine = EngineSpec(kind="vllm", model="dsv4", root=str(folder))
    return replace(make_experiment(folder, name="dspark-k-sweep", engine=engine, baseline="no-spec"), **sections)


def sweep_measurement(decode: float, k: int | None, noise: float = 0.005, **metrics: Quantity | None) -> Measurement:
    """Three repeats around a decode rate, with the acceptance of a drafter where there is one."""
    rates = (decode * (1 - noise), decode, decode * (1 + noise))
    accepted = {"acceptance_rate": Quantity(value=0.71, n=3), "acceptance_length": Quantity(value=3.2, n=3)}
    made = make_measurement(decode_tok_s=rates, ttft_s=(0.94, None, 0.95))
    headlines = {
        "ttft_s": Quantity(value=0.941, low=0.93, high=0.95, n=15),
        "tpot_s": Quantity(value=1 / decode, low=1 / rates[2], high=1 / rates[0], n=15),
        "decode_tok_s": Quantity(value=decode, low=rates[0], high=rates[2], n=15),
        "prefill_tok_s": None,
        **(accepted if k else dict.fromkeys(accepted)),
        **metrics,
    }
    return replace(
        made,
        metrics=headlines,
        acceptance_by_position=tuple(0.9**i for i in range(1, k + 1)) if k else None,
        cold={"ttft_s": 2.5},
        num_requests=15,
    )


def sweep_result(owner: Experiment, k: int | None, decode: float | None, folder: Path, **changes: Any) -> TrialResult:
    """A complete and valid trial, or, without a decode rate, one that the engine refused. Its files are in `folder`."""
    point = changes.pop("spec", None) or make_spec(k=k, experiment=owner)
    workdir = folder / point.name.replace("/", "_")
    refused = {"reason": f"the engine refuses k={k}: below the checkpoint's block size 5", **REFUSED}
    fields = {
        "memory": {
            "gpu0_peak_gib": Fact(value=92.94, source="NVML"),
            "gpu1_peak_gib": Fact(value=93.16, source="NVML"),
            "kv_tokens": Fact(value=1371214.0, source="GPU KV cache size: 1,371,214 tokens"),
        },
        "phases_s": {"starting": 190.0, "measuring": 60.0},
        "started_at": "2026-11-29T15:00:00+00:00",
        "ended_at": "2026-11-29T15:05:00+00:00",
        "launch": {"argv": ["vllm", "serve", "dsv4"], "env": {"HF_TOKEN": "***"}},
        "provenance": {"hostname": "node", "engine_version": "0.26.0", "gpus": ["H200"], "versions": {"ray": "2.60.0"}},
        "workdir": str(workdir),
        **({} if decode else refused),
        **changes,
    }
    measurements = {WORKLOAD: sweep_measurement(decode, k)} if decode else {}
    made = replace(make_result(point, k=k, measurements=measurements), **fields)
    write_files(made, workdir)
    return made


def write_files(made: TrialResult, workdir: Path) -> None:
    """What a trial leaves behind: result.json and memory.csv, plan.json, the engine's log and the requests' traces."""
    workdir.mkdir(parents=True, exist_ok=True)
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
