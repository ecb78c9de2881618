"""Results -> tables for people and JSON documents for programs, from the same objects."""

from orchestrator.report.documents import (
    choice_document,
    document,
    measurements_document,
    verdict_document,
    write_csv,
)
from orchestrator.report.pair import compare
from orchestrator.report.reference import reference_document, reference_table
from orchestrator.report.tables import campaign_table, measurements_table, people_console, plain_table

__all__ = [
    "campaign_table",
    "choice_document",
    "compare",
    "document",
    "measurements_document",
    "measurements_table",
    "people_console",
    "plain_table",
    "reference_document",
    "reference_table",
    "verdict_document",
    "write_csv",
]
