"""Programs for people: the orchestrator imports none of them."""
