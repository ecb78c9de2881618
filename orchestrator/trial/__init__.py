"""TrialSpec -> TrialResult. Importing this package gives the data; the experiment itself is in run."""
