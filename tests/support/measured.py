"""measure() on a stand-in, and what its tests read from the run."""

from __future__ import annotations

from typing import Any

from orchestrator.config import Workload
from orchestrator.engines import ENGINES
from orchestrator.engines.base import Speculation
from orchestrator.measure.client import Target
from orchestrator.measure.run import Surroundings, WorkloadRun, measure
from tests.support.fake.talk import FakeEngine

DRAFTED_BY_DSPARK = Speculation(proposals=6, method="dspark", family="dspark")


def measured(
    engine: FakeEngine,
    dialect: str = "vllm",
    surroundings: Surroundings | None = None,
    how: dict[str, Any] | None = None,
    **changes: Any,
) -> WorkloadRun:
    workload = Workload(**{"num_prompts": 2, "output_tokens": 24, "repeats": 3, "stall_s": 20.0, **changes})
    target = Target(base_url=engine.base_url, model=engine.model)
    return measure(target, ENGINES[dialect], "w", workload, surroundings=surroundings, **(how or {}))


def value(run: WorkloadRun, name: str) -> float:
    quantity = run.measurement.metrics[name]
    assert quantity is not None, name
    return quantity.value


def codes(run: WorkloadRun) -> set[str]:
    return {reason.code for reason in run.verdict.reasons}
