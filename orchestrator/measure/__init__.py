"""One workload on one running server, as numbers that carry their verdict."""
