"""The command line. A verb's file declares its options and prints its results; it imports what it runs when it runs.

`--help` and `--version` therefore answer without Ray, MLflow, matplotlib, OmegaConf, aiohttp or numpy.
"""
