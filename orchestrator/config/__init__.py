"""YAML -> Experiment -> TrialSpec. The only room that knows OmegaConf; everything that leaves it is frozen data."""

from orchestrator.config.loading import flatten, load, parse_value, point_builder, to_yaml, trial_spec
from orchestrator.config.schema import (
    EngineSpec,
    Experiment,
    Mode,
    Objective,
    Placement,
    Ready,
    Search,
    Serving,
    Stop,
    Tracking,
    TrialSpec,
    Verify,
    Workload,
    WorkloadKind,
)

__all__ = [
    "EngineSpec",
    "Experiment",
    "Mode",
    "Objective",
    "Placement",
    "Ready",
    "Search",
    "Serving",
    "Stop",
    "Tracking",
    "TrialSpec",
    "Verify",
    "Workload",
    "WorkloadKind",
    "flatten",
    "load",
    "parse_value",
    "point_builder",
    "to_yaml",
    "trial_spec",
]
