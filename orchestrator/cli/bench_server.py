"""Measure a server that somebody else runs, workload by workload, as a trial measures its own engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator import report
from orchestrator.config import Experiment
from orchestrator.engines import find_engine
from orchestrator.errors import ConfigError
from orchestrator.measure import client
from orchestrator.measure.client import Target
from orchestrator.measure.run import Stalled, WorkloadRun, measure
from orchestrator.measure.verdict import Level, Verdict, worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The measurement and the verdict of each workload that was reached."""

    base_url: str
    model: str
    runs: dict[str, WorkloadRun]

    @property
    def verdict(self) -> Verdict:
        return worst(run.verdict for run in self.runs.values())

    @property
    def is_valid(self) -> bool:
        return self.verdict.level is not Level.INVALID and all(
            run.measurement.num_failed < run.measurement.num_requests for run in self.runs.values()
        )

    def document(self) -> dict[str, Any]:
        """The JSON document of `bench`."""
        measurements = {name: run.measurement for name, run in self.runs.items()}
        verdicts = {name: run.verdict for name, run in self.runs.items()}
        return {
            "base_url": self.base_url,
            "model": self.model,
            "measurements": report.measurements_document(measurements, verdicts),
            "verdict": report.verdict_document(self.verdict),
        }


def bench_server(
    experiment: Experiment,
    base_url: str,
    api_key: str | None,
    on_progress: Callable[[str, str, int, int], None] = lambda _workload, _phase, _done, _total: None,
) -> Bench:
    """Measure every workload of the experiment at `base_url`.

    on_progress(workload, phase, done, total) counts requests. A server that stalls ends the measuring; what was
    measured until then is returned. Raises ConfigError when there is no workload, no such engine, or the server does
    not list the model, MachineError when the server does not answer.
    """
    if not experiment.workloads:
        raise ConfigError("workloads: there is none, so that nothing would be measured")
    engine = find_engine(experiment.engine.kind)
    model = _listed_model(experiment, base_url, api_key)
    target = Target(base_url=base_url.rstrip("/").removesuffix("/v1"), model=model, api_key=api_key)
    runs: dict[str, WorkloadRun] = {}
    for name, workload in experiment.workloads.items():
        try:
            runs[name] = measure(
                target,
                engine,
                name,
                workload,
                on_progress=lambda phase, done, total, name=name: on_progress(name, phase, done, total),  # type: ignore[misc]
            )
        except Stalled as stalled:
            runs[name] = stalled.run
            break
    return Bench(base_url=base_url, model=model, runs=runs)


def _listed_model(experiment: Experiment, base_url: str, api_key: str | None) -> str:
    """The id under which the server lists the model. Raises ConfigError instead of guessing one."""
    listed = client.list_models(base_url, api_key)
    wanted = (experiment.engine.served_model_name, experiment.engine.model)
    for name in wanted:
        if name in listed:
            return name
    if len(listed) == 1 and experiment.engine.served_model_name is None:
        return listed[0]
    raise ConfigError(
        f"engine.served_model_name: {base_url} lists {', '.join(listed) or 'no model'}, not {wanted[0]!r}"
    )
