"""TrialSpec -> TrialResult. This package gives the data (result.py); the experiment itself is in run.py."""

from orchestrator.trial.result import (
    SCHEMA_VERSION,
    TrialResult,
    from_json,
    to_json,
    write_result,
    write_text,
)

__all__ = [
    "SCHEMA_VERSION",
    "TrialResult",
    "from_json",
    "to_json",
    "write_result",
    "write_text",
]
