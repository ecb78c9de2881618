"""Start and stop an engine many times: what does a trial cost beside the engine, and what is left behind?

    python experiments/lifecycle/cycles.py --cycles 200

Each cycle runs the same stand-in engine twice: bare (started, polled until it is healthy, asked for one token, ended
with TERM) and as a trial (orchestrator.trial.run with one short workload). What the trial takes beyond its warming and
measuring and beyond the bare start and stop is our own overhead. Every tenth engine has a child and a grandchild in a
session of its own that ignore TERM; every engine leaves a file in /dev/shm. Prints percentiles, writes results.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.config import EngineSpec, Placement, Stop, TrialSpec, Workload  # noqa: E402
from orchestrator.node.leftovers import MARKER  # noqa: E402
from orchestrator.outcome import TrialStatus  # noqa: E402
from orchestrator.trial.run import run  # noqa: E402

KINDS = ("vllm", "sglang", "llamacpp")
NAMED = {"vllm": ["org/model"], "sglang": ["--model-path", "org/model"], "llamacpp": ["-m", "org/model"]}
PORTS = (26000, 26199)
BARE_PORT = 26300
WORKLOAD = Workload(output_tokens=8, num_prompts=1, repeats=1, warmup=1)
TARGET_S = 1.5


def command(kind: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "support" / "fake_engine.py"), kind]


def bare_cycle_s(kind: str) -> float:
    """The engine alone: start, healthy, one token, TERM, gone."""
    env = {**os.environ, "FAKE_ENGINE": json.dumps({"load_s": 0.0, "max_life_s": 60})}
    argv = [*command(kind), *NAMED[kind], "--port", str(BARE_PORT)]
    base_url, began = f"http://127.0.0.1:{BARE_PORT}", time.monotonic()
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{base_url}/health", timeout=5):
                break
            time.sleep(0.01)
        body = {"model": "org/model", "prompt": "Yes", "max_tokens": 1}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=30).read()
        engine.terminate()
        engine.wait(30)
    return time.monotonic() - began


def trial_cycle(kind: str, root: Path, stubborn: bool) -> tuple[float, float]:
    """(seconds of the whole trial, seconds of it spent in warming and measuring)."""
    behaviour: dict[str, object] = {"load_s": 0.0, "max_life_s": 60, "shm_file": True}
    if stubborn:
        behaviour["children"] = str(root / "children")
    engine = EngineSpec(
        kind=kind,  # type: ignore[arg-type]
        model="org/model",
        command=command(kind),
        env={"FAKE_ENGINE": json.dumps(behaviour)},
        stop=Stop(grace_s=1.0),
        root=str(root),
    )
    spec = TrialSpec(
        name="cycle",
        params={},
        engine=engine,
        placement=Placement(ports=list(PORTS)),
        workloads={"chat": WORKLOAD},
    )
    began = time.monotonic()
    result = run(spec, root / "trial")
    wall_s = time.monotonic() - began
    if result.status is not TrialStatus.COMPLETE:
        log = (root / "trial" / "engine.log").read_text(errors="replace")
        raise SystemExit(f"{kind}: {result.status}: {result.reason}\n{log[-3000:]}")
    return wall_s, result.phases_s["warming"] + result.phases_s["measuring"]


def state() -> dict[str, object]:
    """What must be equal before the first cycle and after the last."""
    mine = f":{os.getpid()}:"
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mine in process.environ().get(MARKER, ""):
                marked.append(process.pid)
    scraps = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / "scraps"
    listening = [
        c.laddr.port
        for c in psutil.net_connections("tcp")
        if c.status == "LISTEN" and PORTS[0] <= c.laddr.port <= PORTS[1]
    ]
    return {
        "processes of engines": marked,
        "children of this process": [child.pid for child in psutil.Process().children(recursive=True)],
        "listening sockets": listening,
        "open descriptors": psutil.Process().num_fds(),
        "threads": threading.active_count(),
        "files in /dev/shm": sorted(p.name for p in Path("/dev/shm").glob("fake_engine_*") if _is_ours(p)),
        "scraps": sorted(path.name for path in scraps.iterdir() if path.is_dir()),
    }


_BEGAN_S = time.time()


def _is_ours(path: Path) -> bool:
    """Whether a file was made after this program had begun."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ctime > _BEGAN_S
    return False


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    cycles = parser.parse_args().cycles
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        # Claims of its own: others may run engines on this machine at the same time.
        tempfile.tempdir = folder
        trial_cycle("vllm", Path(folder), False)
        before = state()
        for number in range(cycles):
            kind, stubborn = KINDS[number % 3], number % 10 == 9
            bare_s = bare_cycle_s(kind)
            wall_s, work_s = trial_cycle(kind, Path(folder), stubborn)
            row = {"cycle": number, "engine": kind, "stubborn": int(stubborn), "load": round(os.getloadavg()[0], 2)}
            times = {"bare_s": bare_s, "trial_s": wall_s, "work_s": work_s, "overhead_s": wall_s - work_s - bare_s}
            rows.append(row | {name: round(value, 3) for name, value in times.items()})
            print(rows[-1], flush=True)
        after = state()
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    # An engine that ignores TERM uses up its grace. That time is not our overhead.
    for column in ("bare_s", "trial_s", "work_s", "overhead_s"):
        values = [float(str(row[column])) for row in rows if not row["stubborn"]]
        shares = "  ".join(f"p{round(share * 100)} {percentile(values, share):.2f}" for share in (0.05, 0.5, 0.9, 0.99))
        print(f"{column:<12} n {len(values)}  {shares}  max {max(values):.2f}")
    changed = {name: (value, after[name]) for name, value in before.items() if value != after[name]}
    print(f"left behind: {changed or 'nothing'}; median overhead at most {TARGET_S} s wanted")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
