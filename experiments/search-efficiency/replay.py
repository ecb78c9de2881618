"""How much measuring do early stopping and ordering save, and do they change the winner? A replay, no engine runs.

    python experiments/search-efficiency/replay.py [--first-seed 0] [--seeds 100] [--noise 0.03] [--results results.csv]

Every point of a published curve (experiments/reference) "measures" its published rate times log-normal noise, one
draw per repeat. All strategies see the same draws, so that differences come from the strategy alone. The strategies
run the program's own code: search.in_order, search.clearly_worse and search.select; Tune's own ASHA scheduler; and
Optuna's TPE sampler. Time is measuring time: the published tokens over the drawn rate, engine starts left out.
Writes results.csv and results.png beside this file.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from orchestrator import search
from orchestrator.config import EngineSpec, Experiment, Objective, Search, TrialSpec, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import Measurement, Quantity
from orchestrator.measure.verdict import Level, Verdict
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult

HERE = Path(__file__).resolve().parent
REFERENCE = HERE.parent / "reference"
WORKLOAD = "code-review-8k"
CONFIG = "engine.args.speculative-config"
KEY = f"{CONFIG}.num_speculative_tokens"
BASELINE = "no-spec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A published sweep: k -> rate in tokens per second (None: the engine refused), and the tokens of one repeat."""

    name: str
    metric: str
    rates: Mapping[int, float | None]
    tokens: int


@dataclass(slots=True, kw_only=True)
class Replay:
    """One campaign on one curve with one seed: hands out repeats and adds up their time."""

    curve: Curve
    experiment: Experiment
    noise: np.ndarray
    spent_s: float = 0.0

    def rate(self, spec: TrialSpec, repeat: int) -> float | None:
        k = proposals(spec)
        rate = self.curve.rates[k]
        row = sorted(self.curve.rates).index(k)
        return None if rate is None else rate * math.exp(self.noise[row, repeat])

    def measure(self, spec: TrialSpec, goes_on: Callable[[Measurement], bool]) -> TrialResult:
        """Measure repeat by repeat until all are done or goes_on returns False, as trial.run does."""
        values: list[float] = []
        repeats = self.experiment.workloads[WORKLOAD].repeats
        for repeat in range(repeats):
            rate = self.rate(spec, repeat)
            if rate is None:
                return TrialResult(spec=spec, status=TrialStatus.REFUSED, cause="refused_by_engine")
            values.append(rate)
            self.spent_s += self.curve.tokens / rate
            if not goes_on(self.so_far(values)):
                break
        status = TrialStatus.COMPLETE if len(values) == repeats else TrialStatus.PRUNED
        verdict = Verdict(level=Level.VALID)
        return TrialResult(
            spec=spec,
            status=status,
            measurements={WORKLOAD: self.so_far(values)},
            verdict=verdict,
            verdicts={WORKLOAD: verdict},
            speculation=Speculation(proposals=k) if (k := proposals(spec)) else None,
        )

    def so_far(self, values: list[float]) -> Measurement:
        quantity = Quantity(value=statistics.median(values), n=len(values))
        return Measurement(metrics={self.curve.metric: quantity}, repeats={self.curve.metric: tuple(values)})


def proposals(spec: TrialSpec) -> int:
    config = spec.engine.args["speculative-config"]
    return int(config["num_speculative_tokens"]) if config else 0


def grid(replay: Replay, specs: list[TrialSpec], _seed: int) -> list[TrialResult]:
    """Every point, every repeat: the reference."""
    return [replay.measure(spec, lambda _so_far: True) for spec in specs]


def early(replay: Replay, specs: list[TrialSpec], _seed: int) -> list[TrialResult]:
    """search.stop_early: the middle first, the baseline last, and a point that can no longer win is not measured on."""
    experiment, results = replay.experiment, list[TrialResult]()
    for spec in search.in_order(experiment, specs):
        best = search.select(experiment, results).best

        def goes_on(so_far: Measurement, spec: TrialSpec = spec, best: TrialResult | None = best) -> bool:
            return not search.clearly_worse(experiment.objective, WORKLOAD, so_far, best, spec=spec)

        results.append(replay.measure(spec, goes_on))
    return results


def some(replay: Replay, specs: list[TrialSpec], seed: int) -> list[TrialResult]:
    """Half of the points, drawn without replacement."""
    chosen = random.Random(seed).sample(specs, math.ceil(len(specs) / 2))
    return grid(replay, chosen, seed)


def tpe(replay: Replay, specs: list[TrialSpec], seed: int) -> list[TrialResult]:
    """Optuna's TPE over the same points with a budget of half of them; a point drawn twice is not measured twice."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=2))
    found: dict[int, TrialResult] = {}
    for _ in range(20 * len(specs)):
        if len(found) == math.ceil(len(specs) / 2):
            break
        asked = study.ask()
        index = asked.suggest_int("point", 0, len(specs) - 1)
        if index not in found:
            found[index] = replay.measure(specs[index], lambda _so_far: True)
        score = search.score(replay.experiment, found[index])
        # A refused point is infeasible: it is reported to the sampler as failed.
        study.tell(asked, score.value if score else None, state=None if score else optuna.trial.TrialState.FAIL)
    return list(found.values())


def asha(replay: Replay, specs: list[TrialSpec], _seed: int) -> list[TrialResult]:
    """Tune's AsyncHyperBandScheduler, one trial at a time in the written order, a rung per repeat."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

    scheduler = AsyncHyperBandScheduler(
        time_attr="repeat", metric="rate", mode="max", max_t=99, grace_period=1, reduction_factor=2
    )
    results = []
    for number, spec in enumerate(specs):
        running = SimpleNamespace(trial_id=str(number))
        scheduler.on_trial_add(None, running)

        def goes_on(so_far: Measurement, running: SimpleNamespace = running) -> bool:
            values = so_far.repeats[replay.curve.metric]
            report = {"repeat": len(values), "rate": statistics.median(v for v in values if v is not None)}
            return bool(scheduler.on_trial_result(None, running, report) == TrialScheduler.CONTINUE)

        results.append(replay.measure(spec, goes_on))
    return results


STRATEGIES = {"grid": grid, "random half": some, "tpe half": tpe, "asha": asha, "stop_early": early}


def curves() -> list[Curve]:
    """The published sweeps of experiments/reference."""
    sweep = {int(row["num_speculative_tokens"]): _rate(row["decode_tok_s"]) for row in _rows("dspark_k_sweep.csv")}
    found = [Curve(name="dspark", metric="decode_tok_s", rates=sweep, tokens=2048)]
    for checkpoint in ("canada-w4a16-fp8", "official"):
        rows = [row for row in _rows("mtp_depth.csv") if row["checkpoint"] == checkpoint]
        rates = {int(row["num_speculative_tokens"]): _rate(row["output_tok_s"]) for row in rows}
        found.append(Curve(name=f"mtp {checkpoint}", metric="output_tok_s", rates=rates, tokens=5 * 1024))
    return found


def experiment_of(curve: Curve, repeats: int) -> Experiment:
    """The experiment of conf/dspark.yaml and conf/mtp.yaml, reduced to what the curve holds."""
    config = {"method": "dspark", "num_speculative_tokens": 6}
    return Experiment(
        name=curve.name,
        engine=EngineSpec(kind="vllm", model="replayed", args={"speculative-config": config}),
        workloads={WORKLOAD: Workload(repeats=repeats)},
        search=Search(
            variants={BASELINE: {CONFIG: None}},
            grid={KEY: [k for k in sorted(curve.rates) if k]},
            baseline=BASELINE,
            stop_early=True,
        ),
        objective=Objective(metric=f"{WORKLOAD}/{curve.metric}", prefer={KEY: "min"}),
    )


def campaign(
    curve: Curve, experiment: Experiment, specs: list[TrialSpec], noise: float, seed: int, name: str
) -> tuple[str, float, int]:
    """(winner, measuring seconds, trials measured) of one strategy on one draw of the noise."""
    repeats = experiment.workloads[WORKLOAD].repeats
    draws = np.random.default_rng(seed).normal(0.0, noise, (len(curve.rates), repeats))
    replay = Replay(curve=curve, experiment=experiment, noise=draws)
    results = STRATEGIES[name](replay, specs, seed)
    best = search.select(experiment, results).best
    return best.spec.name if best else "none", replay.spent_s, len(results)


def table(noise: float, seeds: range) -> list[dict[str, object]]:
    """One row per curve, number of repeats and strategy."""
    rows: list[dict[str, object]] = []
    for curve in curves():
        for repeats in (3, 5):
            experiment = experiment_of(curve, repeats)
            run = partial(campaign, curve, experiment, search.points(experiment)[0], noise)
            reference = [run(seed, "grid") for seed in seeds]
            for name in STRATEGIES:
                runs = reference if name == "grid" else [run(seed, name) for seed in seeds]
                pairs = list(zip(runs, reference, strict=True))
                rows.append(
                    {
                        "curve": curve.name,
                        "repeats": repeats,
                        "strategy": name,
                        "first_seed": seeds.start,
                        "seeds": len(seeds),
                        "noise": noise,
                        "same_winner": sum(mine[0] == full[0] for mine, full in pairs),
                        "saved_share": round(1 - sum(m[1] for m, _ in pairs) / sum(f[1] for _, f in pairs), 3),
                        "measuring_s": round(statistics.mean(mine[1] for mine in runs), 1),
                        "trials": round(statistics.mean(mine[2] for mine in runs), 2),
                    }
                )
    return rows


def draw_figure(rows: list[dict[str, object]], path: Path) -> None:
    """Time saved against the share of campaigns with the grid's winner; the wanted corner is shaded."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).add_subplot()
    for name in STRATEGIES:
        mine = [row for row in rows if row["strategy"] == name]
        axes.scatter([row["saved_share"] for row in mine], [row["same_winner"] for row in mine], label=name)
    axes.axhspan(95, 101, xmin=0.5 / 0.8, alpha=0.1, color="tab:green")
    axes.set(xlim=(0, 0.8), ylim=(0, 104), xlabel="measuring time saved (share)", ylabel="same winner as grid (%)")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.03, help="relative standard deviation of one repeat")
    parser.add_argument("--results", default="results.csv", help="file beside this one; the figure has its name")
    options = parser.parse_args()
    rows = table(options.noise, range(options.first_seed, options.first_seed + options.seeds))
    path = HERE / options.results
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw_figure([_in_percent(row, options.seeds) for row in rows], path.with_suffix(".png"))
    print(markdown(rows))
    return 0


def markdown(rows: list[dict[str, object]]) -> str:
    """The table of README.md."""
    lines = [
        "| curve | repeats | strategy | same winner of 100 | measuring time saved | trials |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        saved = f"{float(str(row['saved_share'])):.1%}"
        cells = (row["curve"], row["repeats"], row["strategy"], row["same_winner"], saved, row["trials"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _in_percent(row: dict[str, object], seeds: int) -> dict[str, object]:
    return {**row, "same_winner": 100 * int(str(row["same_winner"])) / seeds}


def _rows(name: str) -> list[dict[str, str]]:
    with (REFERENCE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _rate(text: str) -> float | None:
    return float(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
