"""Thirty SIGKILLs of a driver at random moments (fixed seed), each followed by a resume. Writes results.csv.

python experiments/kill-anywhere/run.py
"""

from __future__ import annotations

import csv
import random
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.integration.test_kill_anywhere import Kill, killed_until_done  # noqa: E402

NUM_KILLS = 30
MOST_PER_CAMPAIGN = 6


def main() -> None:
    chance, kills, campaigns = random.Random(7), 0, 0
    with (HERE / "results.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["campaign", *(field.name for field in fields(Kill))], lineterminator="\n")
        rows.writeheader()
        while kills < NUM_KILLS:
            campaigns += 1
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                for kill in killed_until_done(Path(folder), chance, min(MOST_PER_CAMPAIGN, NUM_KILLS - kills)):
                    kills += 1
                    rows.writerow({"campaign": campaigns, **asdict(kill)})
                    file.flush()
                    print(f"{kills} of {NUM_KILLS}: {kill}", flush=True)
    print(f"{kills} kills in {campaigns} campaigns; every table complete, nothing run twice, no engine left")


if __name__ == "__main__":
    main()
