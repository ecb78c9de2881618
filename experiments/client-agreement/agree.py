"""`orchestrator bench` beside `vllm bench serve`: the same real server, the same shapes, in turns.

    python experiments/client-agreement/agree.py [--pairs 6]

Starts the engine, runs both clients in alternating order, stops the engine, and writes results.csv beside this file.
Both are programs of their own and send prompts that the server has never seen: the same texts, each behind a new nonce.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from orchestrator import config
from orchestrator.config import Workload
from orchestrator.engines import ENGINES
from orchestrator.measure.quantity import median, ratio
from orchestrator.measure.workload import SizedText, build_prompts, load_texts
from orchestrator.node.launch import run_engine
from orchestrator.node.server import Server

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import vllm_bench  # noqa: E402  (a neighbour of this folder, which is no package)

CONF = HERE / "agreement.yaml"
METRICS = ("ttft_s", "tpot_s", "output_tok_s")
OURS, THEIRS = "orchestrator bench", "vllm bench serve"
COLUMNS = (
    "pair",
    "order",
    "workload",
    "client",
    *METRICS,
    "prompt_tokens",
    "completion_tokens",
    "answered",
    "reasons",
    "load_1min",
)
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="how often both clients measure each workload")
    asked = parser.parse_args()
    os.chdir(vllm_bench.ROOT)
    experiment = config.load(CONF)
    ports = experiment.placement.ports
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        engine = ENGINES[experiment.engine.kind]
        with run_engine(engine, experiment.engine, workdir=workdir, ports=(ports[0], ports[1])) as server:
            for pair in range(asked.pairs):
                clients = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
                for order, client in enumerate(clients):
                    for row in client(server, experiment.workloads, workdir, pair):
                        rows.append(
                            {"pair": pair, "order": order, **row, "load_1min": round(psutil.getloadavg()[0], 2)}
                        )
                        print(rows[-1], file=sys.stderr)
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


def ours(server: Server, workloads: dict[str, Workload], workdir: Path, pair: int) -> Iterator[Row]:
    """All workloads by `python -m orchestrator bench`, warm-up included, as a user would run it."""
    command = [sys.executable, "-m", "orchestrator", "bench", str(CONF), "--base-url", server.target.base_url]
    ended = subprocess.run(
        [*command, "--api-key-env", "SERVER_KEY", "--json"],
        env={**os.environ, "SERVER_KEY": server.target.api_key or ""},
        capture_output=True,
        timeout=600,
    )
    # Exit code 1: measured, but the verdict is not valid. The row holds its reasons.
    if ended.returncode > 1:
        raise SystemExit(f"bench ended with {ended.returncode}: {ended.stderr.decode()[-2000:]}")
    for name, measured in json.loads(ended.stdout)["measurements"].items():
        values = {metric: value and value["value"] for metric, value in measured.items() if metric != "verdict"}
        yield {
            "workload": name,
            "client": OURS,
            **{metric: values[metric] for metric in METRICS},
            "prompt_tokens": values["prompt_tokens"],
            "completion_tokens": values["completion_tokens"],
            "answered": measured["ttft_s"]["n"],
            "reasons": " ".join(reason["code"] for reason in measured["verdict"]["reasons"]),
        }


def theirs(server: Server, workloads: dict[str, Workload], workdir: Path, pair: int) -> Iterator[Row]:
    """All workloads by `vllm bench serve`, on a file of the same texts; what it reports in ms becomes seconds."""
    for name, workload in workloads.items():
        prompts = workdir / "prompts.jsonl"
        texts = load_texts(workload)
        sized = [SizedText(text=texts[i % len(texts)], tokens=None) for i in range(workload.num_prompts)]
        made = build_prompts(workload, name, sized, 0, f"vllm bench serve {pair}")
        prompts.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in made))
        report = vllm_bench.serve(
            server.target.base_url, arguments(workload, server, prompts), workdir, server.target.api_key
        )
        yield {
            "workload": name,
            "client": THEIRS,
            "ttft_s": report["median_ttft_ms"] / 1e3,
            "tpot_s": report["median_tpot_ms"] / 1e3,
            "output_tok_s": report["output_throughput"],
            "prompt_tokens": report["total_input_tokens"] / report["completed"],
            "completion_tokens": report["total_output_tokens"] / report["completed"],
            "answered": report["completed"],
        }


def arguments(workload: Workload, server: Server, prompts: Path) -> list[str]:
    """Its options for the same requests: chat with the server's template, greedy, full length, as many streams."""
    return [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--model", str(vllm_bench.MODEL_FOLDER), "--served-model-name", server.target.model),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle"),
        *("--num-prompts", str(workload.num_prompts), "--custom-output-len", str(workload.output_tokens)),
        *("--max-concurrency", str(workload.concurrency), "--ignore-eos", "--temperature", "0", "--top-p", "1"),
    ]


def table(rows: list[Row]) -> str:
    """Medians over the pairs, and the ratio within a pair with its interval: the same unless that excludes 1."""
    lines = [f"| workload | metric | {OURS} | {THEIRS} | ratio in a pair (95%) | |", "|---|---|---|---|---|---|"]
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for metric in METRICS:
            left, right = (
                [float(str(r[metric])) for r in rows if (r["workload"], r["client"]) == (workload, client)]
                for client in (OURS, THEIRS)
            )
            # Both clients of a pair ran in the same minutes of a shared machine.
            found = ratio([a / b for a, b in zip(left, right, strict=True)], [1.0] * len(left))
            if found is None or found.low is None or found.high is None:
                raise SystemExit("two pairs at least are needed to compare")
            verdict = "agree" if found.low <= 1 <= found.high else "differ"
            interval = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
            lines.append(f"| {workload} | {metric} | {spread(left)} | {spread(right)} | {interval} | {verdict} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


if __name__ == "__main__":
    main()
