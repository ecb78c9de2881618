"""experiments/README.md as a test: records are readable by this program, and hold results, not series."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator import trial
from tests.support.paths import ROOT

EXPERIMENTS = ROOT / "experiments"
MAX_FILE_BYTES, MAX_FILE_LINES, MAX_TOTAL_LINES = 200_000, 1_500, 10_000

RESULTS = sorted(EXPERIMENTS.glob("*/results/*.json"))
SERIES = sorted(EXPERIMENTS.glob(f"*/results/*.{trial.MEMORY_FILE}"))


def tracked_files() -> list[Path]:
    """The files of experiments/ that git tracks. A run of an experiment may leave others beside them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", EXPERIMENTS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert found
    return [path for path in found if path.exists()]


def num_lines(path: Path) -> int:
    """Lines of text; a picture has none."""
    return 0 if path.suffix == ".png" else path.read_bytes().count(b"\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_a_result_is_readable_and_holds_no_series(path: Path) -> None:
    result = trial.from_json(path.read_bytes())
    assert result.measurements
    assert result.memory_series == {}


@pytest.mark.parametrize("path", SERIES, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_a_series_belongs_to_a_result_and_holds_its_peaks(path: Path) -> None:
    result = trial.from_json(path.with_name(path.name.replace(f".{trial.MEMORY_FILE}", ".json")).read_bytes())
    series = trial.read_memory(path)
    assert series
    peaks = {name.replace("_used_gib", "_peak_gib").replace("rss_gib", "rss_peak_gib"): p for name, p in series.items()}
    for name, points in peaks.items():
        assert max(gib for _, gib in points) == result.memory[name].value


def test_no_record_is_large() -> None:
    files = tracked_files()
    for path in files:
        assert path.stat().st_size <= MAX_FILE_BYTES, path
        assert num_lines(path) <= MAX_FILE_LINES, path
    assert sum(map(num_lines, files)) < MAX_TOTAL_LINES
