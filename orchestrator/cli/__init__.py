"""The verbs of python -m orchestrator."""
