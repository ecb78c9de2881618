"""The best configuration in service: the only room with Ray Serve."""
