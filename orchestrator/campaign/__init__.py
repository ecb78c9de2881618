"""One campaign: what is planned, started, skipped and finished, on disk and in MLflow. Knows nothing of Ray."""
