"""TrialSpec -> TrialResult. This package gives the data (result.py); the experiment itself is in run.py."""

from orchestrator.trial.result import (
    MEMORY_FILE,
    RESULT_FILE,
    SCHEMA_VERSION,
    TrialResult,
    from_json,
    memory_csv,
    read_memory,
    read_result,
    to_json,
    with_memory,
    write_result,
    write_text,
)

__all__ = [
    "MEMORY_FILE",
    "RESULT_FILE",
    "SCHEMA_VERSION",
    "TrialResult",
    "from_json",
    "memory_csv",
    "read_memory",
    "read_result",
    "to_json",
    "with_memory",
    "write_result",
    "write_text",
]
