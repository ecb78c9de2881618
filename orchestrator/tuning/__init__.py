"""Trials on a Ray cluster: the only room with Ray Tune."""
