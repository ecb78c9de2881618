"""How often a campaign crowns the right arm, and what it says when there is none: seeded, on the program's functions.

    python experiments/decision-quality/simulate.py                  # decisions.csv and sweep.csv, about ten minutes
    python experiments/decision-quality/simulate.py --campaigns 50   # a look

No engine runs. A launch measures its arm's true rate times noise; search.pass_order, next_pass, clearly_worse and
select do the rest, as they do in `tune`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from machines import ARMS, KEY, MACHINES, METRIC, WORKLOAD, proposals

from orchestrator import search
from orchestrator.config import EngineSpec, Experiment, Objective, Search, TrialSpec, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.quantity import over_repeats
from orchestrator.measure.verdict import Level, Verdict
from orchestrator.outcome import TrialStatus
from orchestrator.search.order import conclude
from orchestrator.trial import TrialResult

HERE = Path(__file__).parent
REPEATS = 3
SWEEP = HERE.parent / "reference" / "dspark_k_sweep.csv"


@dataclass(slots=True, kw_only=True)
class Machine:
    """What multiplies the true rate of a launch: its own noise, that of its repeats, and time.

    repeat_sd, launch_sd: of the logarithm. autocorrelation: of one repeat with the next, over the whole campaign.
    drift: change of the logarithm over `starts` launches. slow_first: how much slower every first repeat is.
    """

    rng: np.random.Generator
    repeat_sd: float = 0.0
    launch_sd: float = 0.0
    autocorrelation: float = 0.0
    drift: float = 0.0
    starts: int = 21
    slow_first: float = 0.0
    launches: int = 0
    levels: dict[int, list[float]] = field(default_factory=dict)
    _last: float = 0.0

    def launch(self, pass_number: int) -> list[float]:
        """The factors of the repeats of the next launch."""
        level = self.drift * self.launches / self.starts
        self.launches += 1
        self.levels.setdefault(pass_number, []).append(level)
        own = self.rng.normal(0.0, self.launch_sd) if self.launch_sd else 0.0
        factors = []
        for repeat in range(REPEATS):
            fresh = self.rng.normal(0.0, self.repeat_sd)
            rest = math.sqrt(1 - self.autocorrelation**2)
            self._last = self.autocorrelation * self._last + rest * fresh
            slow = math.log1p(-self.slow_first) if repeat == 0 else 0.0
            factors.append(math.exp(level + own + self._last + slow))
        return factors

    def level(self, passes: Sequence[int]) -> float:
        """What the machine's drift made of the true rate in these passes, on average."""
        return math.exp(float(np.mean([np.mean(self.levels[number]) for number in passes])))


def make_experiment(arms: Sequence[int], launches: int, *, stop_early: bool = False) -> Experiment:
    """A sweep of k that prefers the smaller k."""
    return Experiment(
        name="simulated",
        engine=EngineSpec(kind="vllm", model="simulated", args={"speculative-config": {"method": "ngram"}}),
        workloads={WORKLOAD: Workload(repeats=REPEATS)},
        search=Search(grid={KEY: list(arms)}, launches=launches, stop_early=stop_early),
        objective=Objective(metric=f"{WORKLOAD}/{METRIC}", prefer={KEY: "min"}),
    )


def measure(rates: Sequence[float]) -> Measurement:
    return Measurement(metrics={METRIC: over_repeats(rates)}, repeats={METRIC: tuple(rates)})


def run_campaign(experiment: Experiment, truth: Mapping[int, float], machine: Machine) -> tuple[list[TrialResult], int]:
    """(every result, repeats measured) of one campaign on a machine."""
    results: list[TrialResult] = []
    measured, pass_number = 0, 1
    specs = search.pass_order(experiment, search.points(experiment)[0], 1)
    while specs:
        for spec in specs:
            factors = machine.launch(pass_number)
            result = _launch(experiment, spec, [truth[proposals(spec)] * x for x in factors], results, pass_number)
            measured += len(result.measurements[WORKLOAD].repeats[METRIC])
            results.append(result)
        pass_number += 1
        specs = search.next_pass(experiment, results, pass_number)
    return results, measured


def _launch(
    experiment: Experiment, spec: TrialSpec, rates: list[float], results: list[TrialResult], pass_number: int
) -> TrialResult:
    best = search.select(experiment, results).best if experiment.search.stop_early and pass_number == 1 else None
    for done in range(1, REPEATS):
        if search.clearly_worse(experiment.objective, WORKLOAD, measure(rates[:done]), best):
            return _result(spec, TrialStatus.PRUNED, rates[:done], pass_number)
    return _result(spec, TrialStatus.COMPLETE, rates, pass_number)


def _result(spec: TrialSpec, status: TrialStatus, rates: list[float], pass_number: int) -> TrialResult:
    verdict = Verdict(level=Level.VALID)
    return TrialResult(
        spec=spec,
        status=status,
        measurements={WORKLOAD: measure(rates)},
        verdicts={WORKLOAD: verdict},
        verdict=verdict,
        speculation=Speculation(proposals=proposals(spec)),
        pass_number=pass_number,
    )


@dataclass(slots=True)
class Tally:
    """What a number of campaigns said. Shares are of the campaigns."""

    ahead: list[bool] = field(default_factory=list)
    lost: list[bool] = field(default_factory=list)
    crowned: list[bool] = field(default_factory=list)
    decided: list[bool] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)

    def add(self, experiment: Experiment, truth: Mapping[int, float], machine: Machine, run: list[TrialResult]) -> None:
        selection, known = search.select(experiment, run), conclude(experiment, run)
        assert selection.best is not None
        assert selection.number is not None
        assert known.decision is not None
        chosen, best = proposals(selection.best), max(truth.values())
        preferred = min(k for k, rate in truth.items() if rate == best)
        gone = known.decision.lost | known.decision.dropped
        worse = {proposals(known.decision.arms[i].spec) for i in gone}
        value = truth[chosen] * machine.level(known.fresh_passes)
        # "Ahead" of an arm that is as good is false; where one arm is the best, it is right.
        self.ahead.append(known.decision.ahead and sum(rate == truth[chosen] for rate in truth.values()) > 1)
        self.lost.append(preferred in worse or (selection.decided and truth[chosen] == best and chosen != preferred))
        self.crowned.append(truth[chosen] == best)
        self.decided.append(selection.decided)
        self.bias.append(selection.number.value / value - 1)
        self.starts.append(len(run))
        if selection.number.low is not None and selection.number.high is not None:
            self.covered.append(selection.number.low <= value <= selection.number.high)

    def row(self) -> dict[str, object]:
        def share(values: Sequence[bool]) -> str:
            return f"{np.mean(values):.3f}" if values else ""

        return {
            "false_ahead": share(self.ahead),
            "preferred_lost": share(self.lost),
            "best_marked": share(self.crowned),
            "decided": share(self.decided),
            "bias_of_number": f"{np.mean(self.bias):+.4f}",
            "coverage_of_number": share(self.covered),
            "starts": f"{np.mean(self.starts):.1f}",
        }


def decisions(campaigns: int) -> Iterator[dict[str, object]]:
    """Seven identical arms on each machine, and one that is 5% better."""
    flat = dict.fromkeys(ARMS, 100.0)
    cases: list[tuple[str, dict[str, float], dict[int, float]]] = [(name, MACHINES[name], flat) for name in MACHINES]
    cases.append(("launches 2%, k=4 is 5% better", MACHINES["launches 2%"], {**flat, 4: 105.0}))
    for launches in (3, 5):
        experiment = make_experiment(ARMS, launches)
        for name, noise, truth in cases:
            tally = Tally()
            for seed in range(campaigns):
                machine = Machine(rng=np.random.default_rng([12, seed]), starts=7 * launches, **noise)
                run, _ = run_campaign(experiment, truth, machine)
                tally.add(experiment, truth, machine, run)
            yield {"machine": name, "launches": launches, "campaigns": campaigns, **tally.row()}


def sweep(campaigns: int) -> Iterator[dict[str, object]]:
    """The published seven-point sweep: what more launches buy, and what stop_early saves. k=0 is no speculation."""
    with SWEEP.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(line for line in file if not line.startswith("#")) if row["decode_tok_s"]]
    truth = {int(row["num_speculative_tokens"]): float(row["decode_tok_s"]) for row in rows}
    quiet = {"launch_sd": 0.005, "repeat_sd": 0.005}
    machines = {
        "launches 0.5%": quiet,
        "launches 0.5%, first repeat 3% slow": {**quiet, "slow_first": 0.03},
        "launches 2%": MACHINES["launches 2%"],
    }
    for name, launches, stop_early in itertools.product(machines, (1, 2, 3, 5), (False, True)):
        experiment = make_experiment(sorted(truth), launches, stop_early=stop_early)
        tally = Tally()
        for seed in range(campaigns):
            machine = Machine(rng=np.random.default_rng([34, seed]), **machines[name])
            run, measured = run_campaign(experiment, truth, machine)
            tally.add(experiment, truth, machine, run)
            tally.repeats.append(measured)
        row = tally.row()
        yield {
            "machine": name,
            "launches": launches,
            "stop_early": stop_early,
            "campaigns": campaigns,
            **{key: row[key] for key in ("best_marked", "decided", "bias_of_number", "starts")},
            "repeats_measured": f"{np.mean(tally.repeats):.1f}",
        }


def write(path: Path, rows: Iterator[dict[str, object]], say: Callable[[str], None]) -> None:
    found: list[dict[str, object]] = []
    for row in rows:
        found.append(row)
        say("  ".join(f"{key}={value}" for key, value in row.items()))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=500)
    parser.add_argument("--only", choices=("decisions", "sweep"))
    asked = parser.parse_args()
    say = lambda text: print(text, flush=True)  # noqa: E731
    if asked.only != "sweep":
        write(HERE / "decisions.csv", decisions(asked.campaigns), say)
    if asked.only != "decisions":
        write(HERE / "sweep.csv", sweep(max(1, asked.campaigns // 5)), say)


if __name__ == "__main__":
    main()
