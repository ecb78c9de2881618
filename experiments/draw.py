"""Draw a campaign's figures from the result.json files kept with an experiment.

    python experiments/draw.py FOLDER METRIC...     FOLDER/results/*.json -> FOLDER/figures/*.png

METRIC is WORKLOAD/NAME, one sweep figure each; memory and acceptance are drawn for what was measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator import trial
from orchestrator.tracking import figures


def main(folder: Path, metrics: list[str]) -> None:
    results = [trial.from_json(path.read_bytes()) for path in sorted((folder / "results").glob("*.json"))]
    target = folder / "figures"
    target.mkdir(exist_ok=True)
    for metric in metrics:
        figures.sweep(results, metric).savefig(target / f"{metric.replace('/', '-')}.png", dpi=110)
    figures.acceptance_by_position(results).savefig(target / "acceptance-by-position.png", dpi=110)
    for result in results:
        figures.memory_over_time(result).savefig(target / f"memory-{result.spec.name}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
