"""An engine's log and exit code -> Diagnosis. The phrases and sentences are data, reading them is one procedure."""
