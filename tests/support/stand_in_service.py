"""An experiment over the stand-in whose trials can be promoted: its file, their results, their campaign in MLflow."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from orchestrator import config, search
from orchestrator.config import Experiment, to_yaml
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.tracking import Tracker
from orchestrator.trial import TrialResult
from tests.support.builders import make_measurement, make_result
from tests.support.paths import FAKE_ENGINE

FAST = {"tokens_per_s": 400.0, "ttft_s": 0.01, "load_s": 0.2}


def service_experiment(folder: Path, name: str, port: int, *, gpus: int = 0, **serving: Any) -> Experiment:
    """One experiment; those of one folder share their store and their local Ray head."""
    args: dict[str, Any] = {"tensor-parallel-size": gpus} if gpus > 1 else {}
    body = {
        "name": name,
        "engine": {
            "kind": "vllm",
            "root": str(folder),
            "command": [sys.executable, str(FAKE_ENGINE), "vllm"],
            "model": "org/model",
            "served_model_name": "served",
            "args": args,
            "env": {"FAKE_ENGINE": json.dumps(FAST)},
            "stop": {"grace_s": 5},
        },
        "placement": {"gpus": gpus, "cpus": 1},
        "workloads": {
            "talk": {"kind": "chat", "output_tokens": 32, "num_prompts": 6, "repeats": 3, "warmup": 1, "concurrency": 1}
        },
        "objective": {"metric": "talk/decode_tok_s"},
        "tracking": {"folder": str(folder / "mlruns")},
        "serving": {"port": port, "deadline_s": 60, "verify": {"tolerance": 0.4}, **serving},
    }
    path = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return config.load(path)


def stand_in_result(
    experiment: Experiment,
    name: str,
    *,
    recorded_tok_s: float | None = None,
    level: Level = Level.VALID,
    **behaviour: Any,
) -> TrialResult:
    """A complete trial of a stand-in that decodes at behaviour's tokens_per_s, as three close repeats.

    recorded_tok_s: what the record claims, where the engine does otherwise.
    """
    behaviour = {**FAST, **behaviour}
    spec = config.trial_spec(experiment, name, {"engine.env.FAKE_ENGINE": json.dumps(behaviour)})
    rate = recorded_tok_s or behaviour["tokens_per_s"]
    repeats = (rate * 0.99, rate, rate * 1.01)
    measured = make_measurement(decode_tok_s=repeats)
    rates = {"decode_tok_s": Quantity(value=rate, low=repeats[0], high=repeats[2], n=18)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return make_result(
        spec.with_key(),
        level=level,
        measurements={"talk": replace(measured, metrics=rates, num_requests=18)},
        phases_s={"starting": 1.0, "measuring": 2.0, "stopping": 0.5},
        started_at=now,
        ended_at=now,
    )


def record_campaign(experiment: Experiment, *results: TrialResult) -> list[str]:
    """One campaign of these results in MLflow. Returns their run ids."""
    tracker = Tracker(experiment)
    tracker.start_campaign(to_yaml(experiment))
    run_ids = [tracker.record(each) for each in results]
    tracker.end_campaign("FINISHED", results, search.select(experiment, results).best)
    return run_ids
