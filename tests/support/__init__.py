"""What tests share: the stand-in engine, drivers, builders of results. Replaces programs, never our own classes."""
