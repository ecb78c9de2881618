"""The same question to the program of 1 December 2026 (f668ef1), whose unit was the repeat: one launch of each arm.

git worktree add /tmp/before f668ef1
PYTHONPATH=/tmp/before python experiments/decision-quality/before.py     # before.csv, one minute
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
from machines import ARMS, KEY, MACHINES, METRIC, WORKLOAD, proposals

from orchestrator import search
from orchestrator.config import EngineSpec, Experiment, Objective, Search, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.quantity import over_repeats
from orchestrator.measure.verdict import Level, Verdict
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult

CAMPAIGNS = 500


def factors(rng: np.random.Generator, repeats: int, noise: dict[str, float]) -> list[list[float]]:
    """Per arm the factors of its repeats; the drift is over the whole campaign."""
    last, found = 0.0, []
    correlation = noise.get("autocorrelation", 0.0)
    for arm in range(len(ARMS)):
        own = rng.normal(0.0, noise["launch_sd"]) if "launch_sd" in noise else 0.0
        values = []
        for repeat in range(repeats):
            last = correlation * last + math.sqrt(1 - correlation**2) * rng.normal(0.0, noise["repeat_sd"])
            time = (arm + repeat / repeats) / len(ARMS)
            values.append(math.exp(own + last + noise.get("drift", 0.0) * time))
        found.append(values)
    return found


def main() -> None:
    rows = []
    for repeats in (3, 5):
        for name, noise in MACHINES.items():
            experiment = Experiment(
                name="simulated",
                engine=EngineSpec(kind="vllm", model="simulated", args={"speculative-config": {"method": "ngram"}}),
                workloads={WORKLOAD: Workload(repeats=repeats)},
                search=Search(grid={KEY: list(ARMS)}),
                objective=Objective(metric=f"{WORKLOAD}/{METRIC}", prefer={KEY: "min"}),
            )
            specs, _ = search.points(experiment)
            ahead, lost, bias = 0, 0, []
            for seed in range(CAMPAIGNS):
                results = []
                for spec, values in zip(specs, factors(np.random.default_rng([12, seed]), repeats, noise), strict=True):
                    rates = [100 * x for x in values]
                    measured = Measurement(metrics={METRIC: over_repeats(rates)}, repeats={METRIC: tuple(rates)})
                    verdict = Verdict(level=Level.VALID)
                    results.append(
                        TrialResult(
                            spec=spec,
                            status=TrialStatus.COMPLETE,
                            measurements={WORKLOAD: measured},
                            verdicts={WORKLOAD: verdict},
                            verdict=verdict,
                            speculation=Speculation(proposals=proposals(spec)),
                        )
                    )
                selection = search.select(experiment, results)
                ahead += "ahead of" in selection.reason
                lost += proposals(selection.best) != min(ARMS)
                number = selection.best.measurements[WORKLOAD].metrics[METRIC].value
                bias.append(number / (100 * math.exp(noise.get("drift", 0.0) / 2)) - 1)
            rows.append(
                {
                    "machine": name,
                    "repeats": repeats,
                    "campaigns": CAMPAIGNS,
                    "false_ahead": f"{ahead / CAMPAIGNS:.3f}",
                    "preferred_lost": f"{lost / CAMPAIGNS:.3f}",
                    "bias_of_number": f"{np.mean(bias):+.4f}",
                }
            )
            print(rows[-1], flush=True)
    with (Path(__file__).parent / "before.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
