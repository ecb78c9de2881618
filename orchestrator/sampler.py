"""Ray Tune's Optuna search as the campaign's sampler: conditional keys, a seed, infeasible points fed back.

A choice is drawn by its place in the list, so that values of any kind (also mappings) may be chosen from; where all
choices are numbers their order is kept, and the sampler can learn a direction.
"""

from __future__ import annotations

import json
from typing import Any

import optuna
from ray.tune.search.optuna import OptunaSearch

from orchestrator.config import Experiment
from orchestrator.ledger import Ledger
from orchestrator.space import Dimension, dimensions, draw

METRIC = "objective"
# A space without a new point is not asked for ever.
MAX_REPEATS = 50

optuna.logging.set_verbosity(optuna.logging.ERROR)


def for_experiment(experiment: Experiment, ledger: Ledger) -> Tpe | None:
    """The sampler of search.sampler: tpe. Random draws are planned before the start (space.plan), and need none."""
    return Tpe(experiment, ledger) if experiment.search.sampler == "tpe" else None


class Tpe:
    """num_samples different points, each drawn with all that was told before; continues what the ledger holds."""

    def __init__(self, experiment: Experiment, ledger: Ledger) -> None:
        self._experiment, self._ledger = experiment, ledger
        self._wanted = experiment.search.num_samples
        known = {dimension.key for dimension in dimensions(experiment)}
        # Places in a list mean nothing once the keys of the space have changed.
        self._replayed = [sample for sample in ledger.samples() if known.issuperset(sample)]
        self._search = OptunaSearch(
            space=self._space,
            metric=METRIC,
            mode=experiment.objective.mode,
            points_to_evaluate=self._replayed,
            sampler=optuna.samplers.TPESampler(
                seed=experiment.search.seed,
                # Few starts are affordable, so learning begins early.
                n_startup_trials=max(4, self._wanted // 4),
            ),
        )
        self._points: dict[str, str] = {}
        self._values: dict[str, float | None] = {}
        self._params: dict[str, Any] = {}
        self._places: dict[str, Any] = {}
        self._asked = 0
        self._exhausted = False

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """(id, params) of a point that was not drawn before; None when there are enough, or no more."""
        for _ in range(MAX_REPEATS if len(self._points) < self._wanted and not self._exhausted else 0):
            sample_id = f"sample-{self._asked}"
            self._search.suggest(sample_id)
            self._asked += 1
            point = json.dumps(self._params, sort_keys=True, default=str)
            if point not in self._points:
                self._points[point] = sample_id
                if self._asked > len(self._replayed):
                    self._ledger.remember_sample(self._places)
                return sample_id, self._params
            twin = self._points[point]
            if twin in self._values:
                self._told(sample_id, self._values[twin])
        self._exhausted = True
        return None

    def tell(self, sample_id: str, value: float | None) -> None:
        """value: the objective; None for an infeasible point, which ranks behind every other."""
        self._values[sample_id] = value
        self._told(sample_id, value)

    def _told(self, sample_id: str, value: float | None) -> None:
        self._search.on_trial_complete(sample_id, None if value is None else {METRIC: value})

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
            value = self._places[dimension.key] = _suggest(trial, dimension)
            return value if dimension.choices is None else dimension.choices[value]

        self._params = draw(self._experiment, suggest)


def _suggest(trial: Any, dimension: Dimension) -> Any:
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
