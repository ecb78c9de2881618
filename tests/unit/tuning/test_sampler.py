"""How the adaptive sampler is asked for a value of each dimension."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.search.space import draw
from orchestrator.tuning.sampler import suggest_value
from tests.support.builders import CONFIG, K, make_experiment

METHOD = f"{CONFIG}.method"


class _Recording:
    """Stands in for Optuna's trial: answers with the upper end and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[object, ...]] = {}

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> str:
        self.asked[name] = tuple(choices)
        return choices[-1]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self.asked[name] = (low, high, step, log)
        return high

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self.asked[name] = (low, high, step, log)
        return high


def test_a_sampler_is_asked_in_its_own_terms() -> None:
    space = {
        CONFIG: [None, {"method": "ngram"}],
        K: {"low": 1, "high": 8, "when": {METHOD: ["ngram", "suffix"]}},
        "engine.args.max-num-seqs": [1, 2, 4],
        "engine.args.gpu-memory-utilization": {"low": 0.5, "high": 0.9, "step": 0.1},
        "engine.args.max-num-batched-tokens": {"low": 512, "high": 8192, "log": True},
    }
    sampler = _Recording()
    drawn = draw(make_experiment(sampler="tpe", space=space), lambda dimension: suggest_value(sampler, dimension))
    # A choice is drawn by its place; numbers keep their order, so that a direction can be learnt.
    assert drawn == {
        CONFIG: 1,
        "engine.args.max-num-seqs": 2,
        "engine.args.gpu-memory-utilization": 0.9,
        "engine.args.max-num-batched-tokens": 8192,
    }
    assert sampler.asked[CONFIG] == (0, 1)
    assert sampler.asked["engine.args.max-num-seqs"] == (0, 2, 1, False)
    assert sampler.asked["engine.args.gpu-memory-utilization"] == (0.5, 0.9, 0.1, False)
    assert sampler.asked["engine.args.max-num-batched-tokens"] == (512, 8192, 1, True)
