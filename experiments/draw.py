"""Draw the figures of a record from the results that it keeps.

    python experiments/draw.py FOLDER METRIC...     FOLDER/results/* -> FOLDER/figures/*.png

METRIC is WORKLOAD/NAME; each gives one sweep figure. Acceptance by position is drawn when it was measured, memory over
time for each NAME.json that has its series beside it, in NAME.memory.csv.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator import trial
from orchestrator.tracking import figures
from orchestrator.trial import TrialResult


def main(folder: Path, metrics: list[str]) -> None:
    results = [_read(path) for path in sorted((folder / "results").glob("*.json"))]
    target = folder / "figures"
    target.mkdir(exist_ok=True)
    for metric in metrics:
        figures.sweep(results, metric).savefig(target / f"{metric.replace('/', '-')}.png", dpi=110)
    if any(m.acceptance_by_position for result in results for m in result.measurements.values()):
        figures.acceptance_by_position(results).savefig(target / "acceptance-by-position.png", dpi=110)
    for result in results:
        if result.memory_series:
            figures.memory_over_time(result).savefig(target / f"memory-{result.spec.name}.png", dpi=110)


def _read(path: Path) -> TrialResult:
    series = trial.read_memory(path.with_suffix(f".{trial.MEMORY_FILE}"))
    return replace(trial.from_json(path.read_bytes()), memory_series=series)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
