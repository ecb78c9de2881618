"""What a process of the command line imports: help and the version answer at once, a dry run without Ray and MLflow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import __version__
from tests.support.paths import ROOT

HEAVY = {"ray", "mlflow", "matplotlib", "omegaconf", "aiohttp", "numpy", "scipy"}
VERBS = ("tune", "results", "compare", "bench", "doctor", "ui", "promote", "engine", "engine install", "engine list")
# `-X importtime` writes a line per import to stderr: "import time: self | cumulative | module".
IMPORT = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s*([\w]+)", re.MULTILINE)


def run(*words: str) -> tuple[str, set[str]]:
    """(stdout, names of the packages imported) of a process that ends well."""
    command = [sys.executable, "-X", "importtime", "-m", "orchestrator", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(IMPORT.findall(done.stderr))
    assert {"orchestrator", "typer"} <= imported
    return done.stdout, imported


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb: str) -> None:
    out, imported = run(*verb.split(), "--help")
    assert "Usage" in out
    assert not imported & HEAVY


def test_the_version_imports_nothing_heavy() -> None:
    out, imported = run("--version")
    assert out == f"orchestrator {__version__}\n"
    assert not imported & HEAVY


def test_a_dry_run_imports_neither_ray_nor_mlflow(tmp_path: Path) -> None:
    out, imported = run("tune", "conf/dspark.yaml", "--dry-run", f"tracking.folder={tmp_path}/mlruns")
    assert "--speculative-config" in out
    assert {"omegaconf"} == imported & {"ray", "mlflow", "matplotlib", "optuna", "omegaconf"}


def test_every_verb_is_among_those_tested() -> None:
    out, _ = run("--help")
    listed = re.findall(r"^│ ([a-z]+)  ", out.split("Commands", 1)[1], re.MULTILINE)
    assert set(listed) == {verb.split()[0] for verb in VERBS}
