"""An experiment scheduler for LLM inference engines: tune, measure, record, promote."""

__version__ = "0.1.0"
