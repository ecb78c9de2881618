"""An engine's log and exit code -> Diagnosis: what each says is data, how it is read is one procedure."""
