"""Three points on one engine: who picks which winner, `vllm bench sweep serve` or `orchestrator tune`, and why.

    python experiments/against-vllm-bench-sweep/compare.py [--runs 3]

`sweep` is vLLM's own with its defaults, the number of prompts apart. `sweep, our prompts` is the same command asked
our texts, greedy and one at a time: what the prompts alone change. `tune` is conf/quickstart.yaml. Writes results.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from orchestrator import config
from orchestrator.measure.workload import load_texts
from orchestrator.node.claims import reserve_port

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import vllm_bench  # noqa: E402  (a neighbour of this folder, which is no package)

CONF = vllm_bench.ROOT / "conf" / "quickstart.yaml"
METRICS = ("output_tok_s", "decode_tok_s", "ttft_s", "acceptance_rate")
COLUMNS = ("tool", "point", "run", *METRICS, "requests", "load_1min")
NO_SPEC = "no-spec"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs per point of the sweeps (their default)")
    asked = parser.parse_args()
    os.chdir(vllm_bench.ROOT)
    rows: list[Row] = []
    summary: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[Path], tuple[list[Row], str]]] = {
            "sweep": lambda workdir: sweep(workdir, [], 8, asked.runs),
            "sweep, our prompts": lambda workdir: sweep(workdir, *our_prompts(workdir), asked.runs),
            "tune": tune,
        }
        for tool, way in ways.items():
            workdir = Path(folder) / tool.replace(", ", "-").replace(" ", "-")
            workdir.mkdir()
            load, began_s = psutil.getloadavg()[0], time.monotonic()
            found, winner = way(workdir)
            summary.append(
                f"{tool}: picks {winner} after {time.monotonic() - began_s:.0f} s (load {load:.1f} at its start)"
            )
            print(summary[-1], file=sys.stderr)
            rows += [{"tool": tool, "load_1min": round(load, 2), **row} for row in found]
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    print("\n".join(["", *summary]))


def points() -> dict[str, dict[str, object] | None]:
    """The points of the quickstart: name -> speculative configuration."""
    experiment = config.load(CONF)
    base = experiment.engine.args["speculative-config"]
    key = "engine.args.speculative-config.num_speculative_tokens"
    return {NO_SPEC: None} | {f"ngram-{k}": {**base, "num_speculative_tokens": k} for k in experiment.search.grid[key]}


def sweep(workdir: Path, asking: list[str], num_prompts: int, runs: int) -> tuple[list[Row], str]:
    """`vllm bench sweep serve` over the points; its winner is the best mean output throughput of its summary."""
    engine = config.load(CONF).engine
    records = [{"_benchmark_name": n, **({"speculative_config": spec} if spec else {})} for n, spec in points().items()]
    (workdir / "points.json").write_text(json.dumps(records))
    model = str(vllm_bench.MODEL_FOLDER)
    limits = [word for name in ("max-model-len", "max-num-seqs") for word in (f"--{name}", str(engine.args[name]))]
    with reserve_port((8100, 8900)) as port, (workdir / "sweep.log").open("w") as log:
        server = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *limits]
        bench = ["vllm", "bench", "serve", "--model", model, "--port", str(port), "--num-prompts", str(num_prompts)]
        command = ["vllm", "bench", "sweep", "serve", "--serve-params", str(workdir / "points.json")]
        command += ["--serve-cmd", " ".join(server), "--bench-cmd", " ".join([*bench, *asking])]
        command += ["--num-runs", str(runs), "-o", str(workdir), "-e", "sweep"]
        subprocess.run(command, env=vllm_bench.environment(), stdout=log, stderr=log, timeout=1500, check=True)
    rows = [
        swept(record) for path in (workdir / "sweep").glob("*/summary.json") for record in json.loads(path.read_text())
    ]
    rows.sort(key=lambda row: (list(points()).index(row["point"]), row["run"]))
    return rows, max(points(), key=lambda name: mean(row["output_tok_s"] for row in rows if row["point"] == name))


def swept(record: dict[str, Any]) -> Row:
    acceptance = record.get("spec_decode_acceptance_rate")
    return {
        "point": record["_benchmark_name"],
        "run": record["run_number"],
        "output_tok_s": record["output_throughput"],
        "decode_tok_s": 1e3 / record["median_tpot_ms"],
        "ttft_s": record["median_ttft_ms"] / 1e3,
        "acceptance_rate": None if acceptance is None else acceptance / 100,
        "requests": record["completed"],
    }


def our_prompts(workdir: Path) -> tuple[list[str], int]:
    """The sweep's options for the requests of the quickstart, as far as it has them, and the number of prompts."""
    (workload,) = config.load(CONF).workloads.values()
    texts = load_texts(workload)
    prompts = workdir / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    arguments = [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--temperature", "0"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
        *("--custom-output-len", str(workload.output_tokens), "--max-concurrency", str(workload.concurrency)),
    ]
    return arguments, workload.num_prompts


def tune(workdir: Path) -> tuple[list[Row], str]:
    """`python -m orchestrator tune conf/quickstart.yaml`; the winner is the best in its JSON document."""
    command = [sys.executable, "-m", "orchestrator", "tune", str(CONF), f"tracking.folder={workdir}", "--json"]
    with (workdir / "tune.log").open("w") as log:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=1500)
    if ended.returncode > 1:
        raise SystemExit(f"tune ended with {ended.returncode}:\n{(workdir / 'tune.log').read_text()[-2000:]}")
    rows: list[Row] = []
    for path in workdir.glob("campaigns/*/*/trials/*/result.json"):
        trial = json.loads(path.read_text())
        for name, measured in trial["measurements"].items():
            repeats = measured["repeats"]
            for run in range(len(repeats["ttft_s"])):
                values = {metric: repeats[metric][run] for metric in METRICS}
                rows.append({"point": point_name(trial), "run": run, **values, "requests": requests(trial, name)})
    rows.sort(key=lambda row: (list(points()).index(row["point"]), row["run"]))
    best = json.loads(ended.stdout)["best"]
    return rows, f"{best['name']}" if best else "none"


def point_name(trial: dict[str, Any]) -> str:
    spec = trial["spec"]["engine"]["args"].get("speculative-config")
    return f"ngram-{spec['num_speculative_tokens']}" if spec else NO_SPEC


def requests(trial: dict[str, Any], workload: str) -> int:
    return int(trial["spec"]["workloads"][workload]["num_prompts"])


def table(rows: list[Row]) -> str:
    lines = [
        "| tool | point | run | output tok/s | decode tok/s | TTFT, s | acceptance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        acceptance = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
        numbers = f"{row['output_tok_s']:.1f} | {row['decode_tok_s']:.1f} | {row['ttft_s']:.3f} | {acceptance}"
        lines.append(f"| {row['tool']} | {row['point']} | {row['run']} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
