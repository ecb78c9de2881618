"""Start one point of an experiment and record its engine's output as fixtures for the tests of the engine modules.

    .engines/orchestrator/bin/python -m tools.airgap.record conf/h200_smollm2_sglang.yaml NAME FOLDER

Run it in the project's folder. NAME is a point as `tune --dry-run` shows it. FOLDER receives NAME.log (the engine's
log). A start that succeeds adds NAME.metrics.txt, NAME.server_info.json and NAME.stream.txt (one streamed completion,
byte for byte).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from orchestrator import config
from orchestrator.engines import ENGINES
from orchestrator.errors import EngineFailure
from orchestrator.node.launch import run_engine
from orchestrator.search import space

STREAM: dict[str, Any] = {
    "prompt": "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return a +",
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def record(conf: str, name: str, folder: Path) -> int:
    """Start the engine of the point, read its pages, stop it. Returns the exit code."""
    points, _ = space.points(config.load(conf))
    chosen = [point for point in points if point.name == name]
    if not chosen:
        print(f"{conf} has no point {name!r}; it has {', '.join(p.name for p in points)}", file=sys.stderr)
        return 2
    spec, placement = chosen[0].engine, chosen[0].placement
    engine = ENGINES[spec.kind]
    folder.mkdir(parents=True, exist_ok=True)
    gpu_ids = tuple(str(number) for number in range(placement.gpus))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with run_engine(
                engine, spec, workdir=Path(scratch), ports=(placement.ports[0], placement.ports[1]), gpu_ids=gpu_ids
            ) as running:
                target = running.target
                body = json.dumps(STREAM | {"model": target.model}).encode()
                (folder / f"{name}.stream.txt").write_bytes(
                    _read(target.base_url, "/v1/completions", target.api_key, body)
                )
                (folder / f"{name}.metrics.txt").write_bytes(_read(target.base_url, "/metrics", target.api_key))
                if engine.server_info_path:
                    info = _read(target.base_url, engine.server_info_path, target.api_key)
                    (folder / f"{name}.server_info.json").write_bytes(_without(info, target.api_key))
        except EngineFailure as failure:
            print(f"{name}: {failure}")
        shutil.copy(Path(scratch) / "engine.log", folder / f"{name}.log")
    print(f"{name}: recorded in {folder}: {', '.join(sorted(os.listdir(folder)))}")
    return 0


def _read(base_url: str, path: str, api_key: str | None, body: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + path, data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
    return content


def _without(content: bytes, api_key: str | None) -> bytes:
    """Mask the API key: SGLang includes it in its server info."""
    return content.replace(api_key.encode(), b"****") if api_key else content


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(record(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
