"""drift.csv -> docs/launches.png: what a pass is and what cancels in it.

python experiments/decision-quality/picture.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent


def main() -> None:
    with (HERE / "drift.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    arms = sorted({row["launch"].partition("#")[0] for row in rows})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=(3, 2))
    for row, place in zip(rows, range(1, len(rows) + 1), strict=True):
        arm = arms.index(row["launch"].partition("#")[0])
        axes[0].plot(place, float(row["decode_tok_s"]), "o", color=f"C{arm}")
    for number in ("1", "2", "3"):
        places = [place for place, row in enumerate(rows, start=1) if row["pass"] == number]
        axes[0].axvspan(places[0] - 0.5, places[-1] + 0.5, color="0.5", alpha=0.06 * int(number))
        axes[0].text(np.mean(places), 403, f"pass {number}", ha="center")
    axes[0].set(xlabel="launch, in the order of the campaign", ylabel="decode tok/s", ylim=(380, 406))
    axes[0].set_title("seven identical arms, the machine slows down", fontsize=10)
    rates = {
        arm: {row["pass"]: float(row["decode_tok_s"]) for row in rows if row["launch"].partition("#")[0] == arm}
        for arm in arms
    }
    means = {number: np.mean([rates[arm][number] for arm in arms]) for number in ("1", "2", "3")}
    for place, arm in enumerate(arms):
        values = [100 * (rates[arm][number] / means[number] - 1) for number in means]
        axes[1].plot([place] * len(values), values, "o", color=f"C{place}")
        axes[1].plot(place, np.mean(values), "_", color=f"C{place}", markersize=18)
    axes[1].axhline(0, color="0.5", linewidth=0.8)
    axes[1].set_xticks(range(len(arms)), [arm.partition("=")[2] for arm in arms])
    axes[1].set(xlabel="arm", ylabel="% from the pass's mean")
    axes[1].set_title("the same, held within passes", fontsize=10)
    figure.savefig(HERE.parent.parent / "docs" / "launches.png", dpi=110)


if __name__ == "__main__":
    main()
