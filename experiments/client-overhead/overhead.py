"""Is the client the bottleneck? 64 streams of 80 chunks/s each from the stand-in engine, on one core.

    python experiments/client-overhead/overhead.py [--streams 64] [--rate 80] [--seconds 10]

The engine's schedule is known exactly (one token per chunk, 1/rate apart), so what the client adds is what it measures
beyond that. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from orchestrator.client import RequestError, Target, list_models
from orchestrator.config import Workload
from orchestrator.measure import WorkloadRun, measure

ENGINE = Path(__file__).resolve().parent.parent.parent / "tests" / "fake_engine.py"
MODEL = "org/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=80.0, help="chunks per second and stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    engine, base_url = start(asked.rate)
    cores = spread(engine)
    try:
        wait(base_url)
        workload = Workload(
            num_prompts=asked.streams,
            concurrency=asked.streams,
            output_tokens=int(asked.rate * asked.seconds),
            repeats=3,
        )
        run = measure(Target(base_url=base_url, model=MODEL), None, "client-overhead", workload)
    finally:
        engine.terminate()
        engine.wait()
    document = {
        "streams": asked.streams,
        "rate": asked.rate,
        "seconds": asked.seconds,
        "cores": cores,
        **told(run, asked.rate),
    }
    for name, value in document.items():
        print(f"{name:32} {value}")
    print(json.dumps(document))


def start(rate: float) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Tokens, not prefill, are the load: the first token comes at once.
    wishes = {"tokens_per_s": rate, "ttft_s": 0.3, "load_s": 0.0, "max_life_s": 300}
    process = subprocess.Popen(
        [sys.executable, str(ENGINE), "vllm", MODEL, "--port", str(port)],
        env={**os.environ, "FAKE_ENGINE": json.dumps(wishes)},
        stdout=subprocess.DEVNULL,
    )
    return process, f"http://127.0.0.1:{port}"


def spread(engine: subprocess.Popen[bytes]) -> str:
    """The client on one core, the engine on another, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    os.sched_setaffinity(engine.pid, {cores[-1]})
    return f"client {cores[0]}, engine {cores[-1]}"


def wait(base_url: str) -> None:
    for _ in range(100):
        try:
            list_models(base_url)
            return
        except RequestError:
            time.sleep(0.1)
    raise SystemExit("the stand-in engine did not start")


def told(run: WorkloadRun, rate: float) -> dict[str, object]:
    """What the client measured, beside what the schedule says."""
    metrics = run.measurement.metrics
    tpot, cpu, lag = (metrics[name] for name in ("tpot_s", "client_cpu_share", "client_lag_p99_s"))
    assert tpot is not None
    assert cpu is not None
    assert lag is not None
    chunks = sum(len(trace.chunk_times_s) for trace in run.traces)
    repeats = sorted({trace.repeat for trace in run.traces})
    spans = [[t for t in run.traces if t.repeat == repeat] for repeat in repeats]
    wall_s = sum(max(t.chunk_times_s[-1] for t in traces) - min(t.sent_s for t in traces) for traces in spans)
    streaming_s = sum(
        max(t.chunk_times_s[-1] for t in traces) - min(t.chunk_times_s[0] for t in traces) for traces in spans
    )
    return {
        "chunks": chunks,
        "chunks_per_s": round(chunks / streaming_s, 1),
        "tpot_ms": round(tpot.value * 1e3, 4),
        "tpot_error_percent": round((tpot.value * rate - 1) * 100, 3),
        "client_cpu_share": round(cpu.value, 4),
        "cpu_us_per_chunk": round(cpu.value * wall_s / chunks * 1e6, 1),
        "loop_lag_p99_ms": round(lag.value * 1e3, 2),
        "verdict": run.verdict.level.value,
        "reasons": [reason.code for reason in run.verdict.reasons],
        "python": platform.python_version(),
        "load_1min": psutil.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
