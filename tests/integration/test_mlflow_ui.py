"""What a person sees: MLflow's own UI over our store, rendered by a headless Chromium."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import tracking
from orchestrator.config import Experiment, to_yaml
from orchestrator.tracking import Tracker
from tests.support import mlflow_server
from tests.support.builders import WORKLOAD, K
from tests.support.recorded_sweep import sweep_experiment, sweep_result

# A server starts in 7 s on an idle machine and in a minute on a busy one.
pytestmark = pytest.mark.timeout(600)
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1600,2400",
    "--virtual-time-budget=30000",
)


@dataclass(frozen=True)
class Site:
    """A running UI: its address, the experiment it shows, and the run ids by trial name."""

    url: str
    experiment: Experiment
    runs: dict[str, str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is missing; install it with: apt-get install chromium")
    folder = tmp_path_factory.mktemp("ui")
    experiment = sweep_experiment(folder)
    results = [
        sweep_result(experiment, k, rate, folder) for k, rate in [(None, 92.9), (4, None), (5, 268.2), (6, 275.9)]
    ]
    tracker = Tracker(experiment)
    tracker.start_campaign(to_yaml(experiment))
    for result in results:
        tracker.record(result)
    tracker.end_campaign("FINISHED", results, results[3])
    runs = {r.result.spec.name: str(r.run_id) for r in tracking.last_campaign(experiment)}
    port = mlflow_server.free_port()
    with mlflow_server.running(tracking.ui_command(experiment, port), port, folder / "ui.log") as url:
        yield Site(url=url, experiment=experiment, runs=runs)
    # The UI keeps to the store that it was given and makes none of its own.
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"mlruns", *runs}


def rendered(page: str, folder: Path, name: str) -> tuple[str, bytes]:
    """The page's DOM after its scripts ran, and the page as PNG (kept as `name`.png in the test's folder)."""
    picture = folder / f"{name}.png"
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / name}", f"--screenshot={picture}", "--dump-dom", page]
    took = subprocess.run(command, capture_output=True, timeout=150, check=True)
    assert picture.exists(), took.stderr.decode()[-2000:]
    return took.stdout.decode(), picture.read_bytes()


def test_the_runs_table_lists_every_trial_fastest_first(site: Site, tmp_path: Path) -> None:
    dom, picture = rendered(tracking.runs_page(site.experiment, site.url), tmp_path, "runs")
    places = [dom.index(f">{name}<") for name in ("k=6", "k=5", "no-spec", "k=4")]
    assert places == sorted(places)
    assert picture.startswith(b"\x89PNG")


def test_the_compare_page_shows_both_runs_their_params_and_metrics(site: Site, tmp_path: Path) -> None:
    chosen = {"runs": json.dumps([site.runs["k=5"], site.runs["k=6"]]), "experiments": '["1"]'}
    query = urllib.parse.urlencode(chosen, quote_via=urllib.parse.quote)
    dom, picture = rendered(f"{site.url}/#/compare-runs?{query}", tmp_path, "compare")
    for text in ("Comparing 2 Runs", "k=5", "k=6", f"{WORKLOAD}/decode_tok_s", K, "268.2", "275.9"):
        assert text in dom
    assert picture.startswith(b"\x89PNG")


def test_the_page_of_a_failed_trial_says_why(site: Site, tmp_path: Path) -> None:
    dom, _ = rendered(f"{site.url}/#/experiments/1/runs/{site.runs['k=4']}", tmp_path, "failed")
    for text in ("k_below_block_size", "below the checkpoint's block size 5", "num_speculative_tokens of 5 or more"):
        assert text in dom
