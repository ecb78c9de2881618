"""How often the 95% intervals of measure/quantity.py hold the true value, by simulation of repeats with a known truth.

    python experiments/decision-quality/coverage.py

Prints one row a setting and writes coverage.csv. `coverage` is what the functions of this checkout reach, `before` what
those of commit f668ef1 reached (bootstraps; those of 8c17e07 are the same). `before` was taken once, with 400
simulations for tails and 2,000 for the rest, and is copied from the CSV that is there. `one_sided`: share of the
intervals of this checkout without a bound on a side or on both; a missing bound counts as one that holds.

Requests are lognormal (sigma 0.5); `spread` is the standard deviation between repeats on the logarithm, and the true
quantile is that of requests of all possible repeats together.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from orchestrator.measure.quantity import Quantity, over_repeats, ratio, tail

FILE = Path(__file__).with_name("coverage.csv")
SIGMA, NOISE = 0.5, 0.03
SIMULATIONS, SIMULATIONS_OF_TAILS = 2000, 1000
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One simulated situation. draw: one interval from a random generator, None where the number is absent."""

    interval: str
    shape: str
    repeats: int
    requests: int
    spread: float
    truth: float
    draw: Callable[[np.random.Generator], Quantity | None]

    @property
    def key(self) -> tuple[str, ...]:
        return (self.interval, self.shape, str(self.repeats), str(self.requests), str(self.spread))


def noise(draw: np.random.Generator, shape: str, repeats: int) -> np.ndarray:
    """Logarithms of the values of one launch's repeats."""
    return draw.exponential(NOISE, repeats) if shape == "skewed" else draw.normal(0, NOISE, repeats)


def headlines() -> Iterator[Setting]:
    """The median over repeats, and the median of the requests of a single repeat."""
    for shape, truth in (("normal", 1.0), ("skewed", math.exp(NOISE * math.log(2)))):
        for repeats in (2, 3, 5, 10):

            def draw(random: np.random.Generator, shape: str = shape, repeats: int = repeats) -> Quantity | None:
                return over_repeats(list(np.exp(noise(random, shape, repeats))))

            yield Setting(
                interval="over_repeats", shape=shape, repeats=repeats, requests=0, spread=NOISE, truth=truth, draw=draw
            )
    for requests in (5, 34, 100, 400):

        def draw_single(random: np.random.Generator, requests: int = requests) -> Quantity | None:
            samples = list(np.exp(random.normal(0, SIGMA, requests)))
            return over_repeats([float(np.median(samples))], samples)

        yield Setting(
            interval="over_repeats",
            shape="normal",
            repeats=1,
            requests=requests,
            spread=0.0,
            truth=1.0,
            draw=draw_single,
        )


def tails() -> Iterator[Setting]:
    """Quantiles of the requests of several repeats, and of one."""
    grid = [(r, n, spread) for r in (2, 3, 5, 10) for n in (34, 100, 400) for spread in (0.0, 0.2)]
    for repeats, requests, spread in [*grid, (1, 34, 0.0), (1, 100, 0.0), (1, 400, 0.0), (1, 1000, 0.0)]:
        for which, q in QUANTILES.items():

            def draw(
                random: np.random.Generator,
                size: tuple[int, int] = (repeats, requests),
                spread: float = spread,
                which: str = which,
            ) -> Quantity | None:
                logs = random.normal(0, SIGMA, size) + random.normal(0, spread, (size[0], 1))
                return tail([list(samples) for samples in np.exp(logs)], which)

            truth = math.exp(float(ndtri(q)) * math.hypot(SIGMA, spread))
            yield Setting(
                interval=f"tail {which}",
                shape="normal",
                repeats=repeats,
                requests=requests,
                spread=spread,
                truth=truth,
                draw=draw,
            )


def ratios() -> Iterator[Setting]:
    """Two launches that are alike, whose repeats have noise of their own and share what the prompts of each bring."""
    for shape in ("normal", "skewed"):
        for shared in (0.0, 0.05):
            for repeats in (2, 3, 5, 12):

                def draw(
                    random: np.random.Generator, shape: str = shape, shared: float = shared, repeats: int = repeats
                ) -> Quantity | None:
                    prompts = random.normal(0, shared, repeats)
                    a, b = (list(100 * np.exp(prompts + noise(random, shape, repeats))) for _ in range(2))
                    return ratio(a, b)

                yield Setting(
                    interval="ratio, paired",
                    shape=shape,
                    repeats=repeats,
                    requests=0,
                    spread=shared,
                    truth=1.0,
                    draw=draw,
                )
        for repeats in (2, 3, 5, 12):

            def draw_unpaired(
                random: np.random.Generator, shape: str = shape, repeats: int = repeats
            ) -> Quantity | None:
                a, b = (list(100 * np.exp(noise(random, shape, repeats))) for _ in range(2))
                return ratio([*a, *[None] * repeats], [*[None] * repeats, *b])

            yield Setting(
                interval="ratio, unpaired",
                shape=shape,
                repeats=repeats,
                requests=0,
                spread=0.0,
                truth=1.0,
                draw=draw_unpaired,
            )


def simulate(setting: Setting, times: int) -> tuple[float, float] | None:
    """(share of the intervals that hold the truth, share without a bound somewhere); None where there is no number."""
    random = np.random.default_rng(2026)
    held = one_sided = 0
    for _ in range(times):
        found = setting.draw(random)
        if found is None:
            return None
        held += (found.low is None or found.low <= setting.truth) and (
            found.high is None or setting.truth <= found.high
        )
        one_sided += found.low is None or found.high is None
    return held / times, one_sided / times


def settings() -> list[Setting]:
    return [*headlines(), *tails(), *ratios()]


def main() -> None:
    columns = ["interval", "shape", "repeats", "requests", "spread", "simulations", "coverage", "one_sided", "before"]
    before: dict[tuple[str, ...], str] = {}
    if FILE.exists():
        with FILE.open(encoding="utf-8", newline="") as file:
            before = {tuple(row[c] for c in columns[:5]): row["before"] for row in csv.DictReader(file)}
    rows: list[list[str]] = []
    for setting in settings():
        times = SIMULATIONS_OF_TAILS if setting.interval.startswith("tail") else SIMULATIONS
        found = simulate(setting, times)
        shares = [f"{share:.3f}" for share in found] if found else ["", ""]
        rows.append([*setting.key, str(times), *shares, before.get(setting.key, "")])
        print(",".join(rows[-1]), flush=True)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


if __name__ == "__main__":
    main()
