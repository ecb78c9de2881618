"""Ray Tune's Optuna search as the campaign's sampler: conditional keys, a seed, infeasible points fed back.

A choice is drawn by its place in the list, so that values of any kind (also mappings) may be chosen from; where all
choices are numbers their order is kept, and the sampler can learn a direction.
"""

from __future__ import annotations

import json
from typing import Any

import optuna
from ray.tune.search.optuna import OptunaSearch

from orchestrator.campaign.ledger import Ledger
from orchestrator.config import Experiment
from orchestrator.search.space import Dimension, dimensions, draw

METRIC = "objective"
# How often a known point may be drawn in a row before chance draws instead, and before there is taken to be no other.
REPEATS_OF_TPE, REPEATS_OF_CHANCE = 20, 200

optuna.logging.set_verbosity(optuna.logging.ERROR)


def make_sampler(experiment: Experiment, ledger: Ledger) -> Tpe | None:
    """The sampler of `search.sampler: tpe`, else None: space.plan draws random points before the start."""
    return Tpe(experiment, ledger) if experiment.search.sampler == "tpe" else None


class Tpe:
    """num_samples different points, each drawn with the results of all before; continues what the ledger holds."""

    def __init__(self, experiment: Experiment, ledger: Ledger) -> None:
        self._experiment, self._ledger = experiment, ledger
        self._wanted = experiment.search.num_samples
        known = {dimension.key for dimension in dimensions(experiment)}
        # Places in a list mean nothing once the keys of the space have changed.
        self._replayed = [sample for sample in ledger.read_samples() if known.issuperset(sample)]
        seed, mode = experiment.search.seed, experiment.objective.mode
        self._search = OptunaSearch(
            space=self._space,
            metric=METRIC,
            mode=mode,
            points_to_evaluate=self._replayed,
            sampler=optuna.samplers.TPESampler(
                seed=seed,
                # Few starts are affordable, so learning begins early.
                n_startup_trials=max(4, self._wanted // 4),
                # A point that is running, or was drawn twice, is not drawn once more.
                constant_liar=True,
            ),
        )
        chance = optuna.samplers.RandomSampler(seed=seed)
        self._chance = OptunaSearch(space=self._space, metric=METRIC, mode=mode, sampler=chance)
        self._points: set[str] = set()
        self._drawn_by: dict[str, OptunaSearch] = {}
        self._params: dict[str, Any] = {}
        self._places: dict[str, Any] = {}
        self._asked = 0
        self._exhausted = False

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """(id, params) of a point that was not drawn before; None when there are enough, or no more."""
        if len(self._points) >= self._wanted or self._exhausted:
            return None
        for repeat in range(REPEATS_OF_TPE + REPEATS_OF_CHANCE):
            drawing = self._search if repeat < REPEATS_OF_TPE else self._chance
            sample_id = f"sample-{self._asked}"
            drawing.suggest(sample_id)
            self._asked += 1
            point = json.dumps(self._params, sort_keys=True, default=str)
            if point not in self._points:
                self._points.add(point)
                self._drawn_by[sample_id] = drawing
                if len(self._points) > len(self._replayed):
                    self._ledger.append_sample(self._places)
                return sample_id, self._params
        self._exhausted = True
        return None

    def tell(self, sample_id: str, value: float | None) -> None:
        """value: the objective; None for an infeasible point, which ranks behind every other."""
        self._drawn_by[sample_id].on_trial_complete(sample_id, None if value is None else {METRIC: value})

    def shortfall(self) -> tuple[str, str] | None:
        found = len(self._points)
        if not self._exhausted or found >= self._wanted:
            return None
        return (
            f"{self._wanted - found} samples",
            f"{self._wanted} samples asked for, no more than {found} different points were found",
        )

    def _space(self, trial: Any) -> None:
        """Define-by-run: Optuna is asked only for the keys whose condition holds."""
        self._places = {}

        def suggest(dimension: Dimension) -> Any:
            value = self._places[dimension.key] = suggest_value(trial, dimension)
            return value if dimension.choices is None else dimension.choices[value]

        self._params = draw(self._experiment, suggest)


def suggest_value(trial: Any, dimension: Dimension) -> Any:
    """What Optuna's trial draws for a dimension: a number, or the place of a choice in its list."""
    key, choices = dimension.key, dimension.choices
    if choices is not None:
        if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices):
            return trial.suggest_int(key, 0, len(choices) - 1)
        return trial.suggest_categorical(key, tuple(range(len(choices))))
    if dimension.integer:
        return trial.suggest_int(
            key, dimension.low, dimension.high, step=int(dimension.step or 1), log=dimension.log and not dimension.step
        )
    return trial.suggest_float(
        key, dimension.low, dimension.high, step=dimension.step, log=dimension.log and not dimension.step
    )
