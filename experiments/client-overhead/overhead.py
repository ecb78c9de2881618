"""Is the client the bottleneck? 64 streams of 80 chunks/s each from the stand-in engine, on one core.

    python experiments/client-overhead/overhead.py [--streams 64] [--rate 80] [--seconds 10]

The engine's schedule is known exactly (one token per chunk, 1/rate apart), so what a client adds is what it measures
beyond that. Ours and `vllm bench serve` take turns on the same server and the same core. Writes results.csv; the last
line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orchestrator.config import Workload
from orchestrator.measure.client import RequestError, Target, list_models
from orchestrator.measure.run import measure
from orchestrator.measure.workload import load_texts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import vllm_bench  # noqa: E402  (a neighbour of this folder, which is no package)

ENGINE = vllm_bench.ROOT / "tests" / "support" / "fake_engine.py"
MODEL = "org/model"
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=80.0, help="chunks per second and stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    workload = Workload(
        num_prompts=asked.streams,
        concurrency=asked.streams,
        output_tokens=int(asked.rate * asked.seconds),
        repeats=1,
    )
    engine, base_url = start(asked.rate)
    cores = spread(engine)
    rows: list[Row] = []
    try:
        wait(base_url)
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(asked.repeats):
                for client in (ours, theirs) if repeat % 2 == 0 else (theirs, ours):
                    row = client(base_url, workload, Path(folder), asked.rate)
                    rows.append({"repeat": repeat, **row, "load_1min": round(psutil.getloadavg()[0], 2)})
                    print(rows[-1], file=sys.stderr)
    finally:
        engine.terminate()
        engine.wait()
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    document = {
        "streams": asked.streams,
        "rate": asked.rate,
        "seconds": asked.seconds,
        "cores": cores,
        "python": platform.python_version(),
        "vllm": vllm_bench.version(),
        "rows": rows,
    }
    print(json.dumps(document))


def start(rate: float) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The load is decoding, not prefill: the first token comes at once.
    wishes = {"tokens_per_s": rate, "ttft_s": 0.3, "load_s": 0.0, "max_life_s": 900}
    process = subprocess.Popen(
        [sys.executable, str(ENGINE), "vllm", MODEL, "--port", str(port)],
        env={**os.environ, "FAKE_ENGINE": json.dumps(wishes)},
        stdout=subprocess.DEVNULL,
    )
    return process, f"http://127.0.0.1:{port}"


def spread(engine: subprocess.Popen[bytes]) -> str:
    """Where there are two cores, the client runs on one and the engine on the other."""
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


def ours(base_url: str, workload: Workload, workdir: Path, rate: float) -> Row:
    """One repeat by our client, in this process; its CPU is counted from the end of warm-up to the last answer."""
    marks: list[float] = []

    def progress(phase: str, done: int, total: int) -> None:
        if done == total:
            marks.append(time.process_time())

    run = measure(Target(base_url=base_url, model=MODEL), None, "client-overhead", workload, on_progress=progress)
    chunks = sum(len(trace.chunk_times_s) for trace in run.traces)
    first_s = min(trace.chunk_times_s[0] for trace in run.traces)
    last_s = max(trace.chunk_times_s[-1] for trace in run.traces)
    metrics = {name: quantity.value for name, quantity in run.measurement.metrics.items() if quantity is not None}
    return {
        "client": "orchestrator",
        "chunks": chunks,
        "chunks_per_s": round(chunks / (last_s - first_s), 1),
        **_row(metrics["tpot_s"], rate, marks[-1] - marks[-2], chunks),
        "client_cpu_share": round(metrics["client_cpu_share"], 4),
        "loop_lag_p99_ms": round(metrics["client_lag_p99_s"] * 1e3, 2),
        "reasons": " ".join(reason.code for reason in run.verdict.reasons),
    }


def theirs(base_url: str, workload: Workload, workdir: Path, rate: float) -> Row:
    """The same load by `vllm bench serve`; its CPU is counted from the line that announces the run to its results."""
    prompts = workdir / "prompts.jsonl"
    texts = [f"Case {i}. {text}" for i, text in enumerate(load_texts(workload) * workload.num_prompts)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[: workload.num_prompts]))
    arguments = [
        *("--base-url", base_url, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--model", MODEL, "--tokenizer", str(vllm_bench.MODEL_FOLDER), "--temperature", "0", "--disable-tqdm"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
        *("--num-prompts", str(workload.num_prompts), "--max-concurrency", str(workload.concurrency)),
        *("--custom-output-len", str(workload.output_tokens), "--save-result", "--save-detailed"),
        *("--result-dir", str(workdir), "--result-filename", "bench.json"),
    ]
    cpu_s = cpu_of([str(vllm_bench.BIN / "vllm"), "bench", "serve", *arguments])
    document = json.loads((workdir / "bench.json").read_text())
    chunks = sum(len(gaps) + 1 for gaps in document["itls"])
    return {
        "client": "vllm bench serve",
        "chunks": chunks,
        "chunks_per_s": round(chunks / (document["duration"] - min(document["ttfts"])), 1),
        **_row(document["median_tpot_ms"] / 1e3, rate, cpu_s, chunks),
    }


def cpu_of(command: list[str]) -> float:
    """Seconds of CPU that the benchmark used between two lines of its output; its imports come before the first."""
    environment = vllm_bench.environment({"PYTHONUNBUFFERED": "1"})
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        marks: list[float] = []
        output: list[str] = []
        for line in process.stdout:
            output.append(line)
            if "Starting main benchmark run" in line or "Serving Benchmark Result" in line:
                times = psutil.Process(process.pid).cpu_times()
                marks.append(times.user + times.system)
    if process.returncode or len(marks) != 2:
        raise SystemExit(f"vllm bench serve ended with {process.returncode}:\n{''.join(output)[-2000:]}")
    return marks[1] - marks[0]


def _row(tpot_s: float, rate: float, cpu_s: float, chunks: int) -> Row:
    return {
        "tpot_ms": round(tpot_s * 1e3, 4),
        "tpot_error_percent": round((tpot_s * rate - 1) * 100, 3),
        "cpu_s": round(cpu_s, 3),
        "cpu_us_per_chunk": round(cpu_s / chunks * 1e6, 1),
    }


if __name__ == "__main__":
    main()
