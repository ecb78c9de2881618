"""A campaign as a person runs it: a folder, an experiment over the stand-in engine, `tune` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.paths import FAKE_ENGINE

SPECULATION = "engine.args.speculative-config"


class Driver:
    """One folder with conf/fake.yaml. behaviour: keys of FAKE_ENGINE, the same for every trial."""

    def __init__(self, folder: Path, *, behaviour: dict[str, Any] | None = None, **sections: Any) -> None:
        self.folder = folder
        self.starts_path = folder / "starts.jsonl"
        (folder / "conf").mkdir(parents=True, exist_ok=True)
        self.conf = folder / "conf" / "fake.yaml"
        self.process: subprocess.Popen[str] | None = None
        self.write(behaviour=behaviour, **sections)

    def write(self, *, behaviour: dict[str, Any] | None = None, **sections: Any) -> None:
        """(Over)write the experiment: three fast points, unless `sections` say otherwise."""
        settings = {"load_s": 0.1, "record": str(self.starts_path), "tokens_per_s": 2000, **(behaviour or {})}
        body = {
            "name": "fake",
            "engine": {
                "kind": "vllm",
                "model": "org/model",
                "command": [sys.executable, str(FAKE_ENGINE), "vllm"],
                "args": {"max-model-len": 8192, "speculative-config": {"method": "ngram", "num_speculative_tokens": 4}},
                "env": {"FAKE_ENGINE": json.dumps(settings)},
                "stop": {"grace_s": 2.0},
            },
            "placement": {"gpus": 0, "cpus": 1},
            "workloads": {"chat": {"kind": "chat", "output_tokens": 24, "num_prompts": 1, "repeats": 3}},
            "search": {
                "variants": {"no-spec": {SPECULATION: None}},
                "grid": {f"{SPECULATION}.num_speculative_tokens": [2, 4]},
                "baseline": "no-spec",
                # One pass, whose random order is the written one with this seed.
                "launches": 1,
                "seed": 0,
            },
            "objective": {"metric": "chat/decode_tok_s"},
        }
        self.conf.write_text(yaml.safe_dump(_merged(body, sections)))

    def start(self, *arguments: str, verb: str = "tune") -> subprocess.Popen[str]:
        """`tune` in a session of its own, as a terminal would start it; stderr is in driver.log."""
        self.log = (self.folder / "driver.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", verb, "conf/fake.yaml", *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        return self.process

    def run(self, *arguments: str, verb: str = "tune", timeout_s: float = 150) -> tuple[int, dict[str, Any]]:
        """(exit code, the JSON document) of a run to its end; {} when it printed none."""
        process = self.start(*arguments, "--json", verb=verb)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, json.loads(output) if output.strip() else {}

    @property
    def said(self) -> str:
        return (self.folder / "driver.log").read_text()

    def wait_said(self, text: str, timeout_s: float = 90) -> None:
        assert self.process is not None
        wait_until(lambda: text in self.said or self.process.poll() is not None, timeout_s, f"{text!r}")  # type: ignore[union-attr]
        assert text in self.said, self.said

    def end(self) -> None:
        """Leave nothing behind, however the test ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.engines_alive():
            os.kill(pid, signal.SIGKILL)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """One entry per start of the stand-in, in order."""
        try:
            lines = self.starts_path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def engines_alive(self) -> list[int]:
        return [pid for start in self.starts if _is_engine(pid := start["pid"])]

    def runs(self) -> list[tuple[str, str]]:
        """(name, status) of every MLflow run, read from the database itself."""
        with sqlite3.connect(f"file:{self.folder}/mlruns/mlflow.db?mode=ro", uri=True) as database:
            return list(database.execute("select name, status from runs order by start_time"))

    def finished(self) -> dict[str, float]:
        """Launch id -> modification time of each result on disk."""
        paths = self.folder.glob("mlruns/campaigns/fake/*/trials/*/result.json")
        return {path.parent.name: path.stat().st_mtime for path in paths}


def _is_engine(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and str(FAKE_ENGINE) in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key, the workload deeper; search is replaced whole."""
    merged = {**base, **over}
    for section in ("engine", "placement"):
        merged[section] = {**base[section], **over.get(section, {})}
    chat = {**base["workloads"]["chat"], **over.get("workloads", {}).get("chat", {})}
    return {**merged, "workloads": {**over.get("workloads", {}), "chat": chat}}


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def names(document: dict[str, Any]) -> Sequence[str]:
    return [trial["name"] for trial in document["trials"]]
