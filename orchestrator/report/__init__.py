"""Results -> tables for people and JSON documents for programs, from the same objects."""

from orchestrator.report.documents import (
    document,
    measurements_document,
    same_trial,
    verdict_document,
    write_csv,
)
from orchestrator.report.pair import Pair, compare
from orchestrator.report.reference import Reference, find_reference, reference_document, reference_table
from orchestrator.report.tables import campaign_table, measurements_table, people_console, plain_table

__all__ = [
    "Pair",
    "Reference",
    "campaign_table",
    "compare",
    "document",
    "find_reference",
    "measurements_document",
    "measurements_table",
    "people_console",
    "plain_table",
    "reference_document",
    "reference_table",
    "same_trial",
    "verdict_document",
    "write_csv",
]
