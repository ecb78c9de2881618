"""A campaign: the queue of its launches, its time budget, its MLflow record and its folder. Knows nothing of Ray."""
