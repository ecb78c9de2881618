"""The errors a person can meet, drawn as a tree; the exit code of each stands beside it.

OrchestratorError
├── ConfigError        2  the configuration is wrong
├── MachineError       3  this machine or cluster cannot do it (GPUs, environment, ports, disk)
│   └── TrackingError  3  the MLflow store cannot be reached or is not ours
├── PromotionError     1  nothing valid to promote, or the verification failed
└── EngineFailure      -  an engine did not start or died; becomes a TrialResult, never an exit
"""

from __future__ import annotations

from typing import ClassVar

from orchestrator.outcome import Diagnosis


class OrchestratorError(Exception):
    """Base of every error that is told to a person in one or two lines."""

    exit_code: ClassVar[int] = 1


class ConfigError(OrchestratorError):
    """The configuration is wrong: names the file, the key, what was found and what is allowed."""

    exit_code = 2


class MachineError(OrchestratorError):
    """This machine or cluster cannot do what the configuration asks."""

    exit_code = 3


class TrackingError(MachineError):
    """The MLflow store cannot be reached, or refuses what is written to it."""


class PromotionError(OrchestratorError):
    """There is no valid result to promote, or the promoted service failed its verification."""


class EngineFailure(Exception):
    """An engine did not become ready, or died. Carries the Diagnosis that the trial records."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.summary)
        self.diagnosis = diagnosis
