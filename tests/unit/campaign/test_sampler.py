"""A campaign with Optuna as its sampler: different points, what it learns, and a search that is continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.campaign.campaign import Campaign
from orchestrator.campaign.launches import Launch
from orchestrator.config import Experiment
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from orchestrator.tuning.sampler import make_sampler
from tests.support.builders import K
from tests.support.campaigns import answer, drive, fault, k_sweep, open_checked

pytestmark = pytest.mark.slow

SPACE = {
    "engine.args.speculative-config.method": ["ngram", "suffix"],
    K: {"low": 1, "high": 12, "when": {"engine.args.speculative-config.method": "ngram"}},
    "engine.args.max-num-seqs": [1, 2, 4],
}


def sampled(folder: Path, **changes: Any) -> Experiment:
    return k_sweep(folder, **{"grid": {}, "space": SPACE, "sampler": "tpe", "num_samples": 24, "seed": 3, **changes})


def landscape(launch: Launch) -> TrialResult:
    """Best at ngram, k = 8, one sequence; k above 10 is refused."""
    params = launch.spec.params
    k = params.get(K, 0)
    if k > 10:
        return fault(launch, TrialStatus.REFUSED, "value_refused", f"k={k}")
    return answer(launch, 100 - 2 * abs(k - 8) - 5 * params["engine.args.max-num-seqs"])


def points(running: Campaign) -> list[dict[str, Any]]:
    return [launch.spec.params for launch in running.launches]


def test_tpe_draws_different_points_learns_and_keeps_conditions(tmp_path: Path) -> None:
    with open_checked(sampled(tmp_path), make_sampler=make_sampler) as running:
        assert len(drive(running, landscape)) == 24
        drawn = points(running)
        assert len({json.dumps(p, sort_keys=True) for p in drawn}) == 24
        assert all((K in p) == (p["engine.args.speculative-config.method"] == "ngram") for p in drawn)
        refused = [p.get(K, 0) > 10 for p in drawn]
        _, selection = running.finish()
    assert selection.best is not None
    assert abs(selection.best.spec.params[K] - 8) <= 1
    # A sixth of the k in the space is refused; what was learnt shows in the second half.
    assert sum(refused[12:]) <= 2


def test_tpe_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        with open_checked(
            sampled(tmp_path / str(number), num_samples=8, seed=seed), make_sampler=make_sampler
        ) as running:
            drive(running, landscape)
            drawn.append(points(running))
    assert drawn[0] == drawn[1] != drawn[2]


def test_tpe_resumes_where_it_was(tmp_path: Path) -> None:
    parts, started = sampled(tmp_path, num_samples=12), list[str]()
    earlier: list[dict[str, Any]] = []
    for _ in range(4):
        with open_checked(parts, resume=bool(started), make_sampler=make_sampler) as running:
            started += drive(running, landscape, most=3)
            assert points(running)[: len(earlier)] == earlier
            earlier, ledger = points(running), running.folder / "samples.jsonl"
        with ledger.open("a") as torn:
            torn.write('{"engine.args.max')
    assert len(started) == len(set(started)) == len(earlier) == 12


def test_tpe_says_when_the_space_is_exhausted(tmp_path: Path) -> None:
    small = sampled(tmp_path, space={"engine.args.max-num-seqs": [1, 2, 4]}, num_samples=5)
    with open_checked(small, make_sampler=make_sampler) as running:
        assert len(drive(running, answer)) == 3
        assert running.skipped == [("2 samples", "5 samples asked for, no more than 3 different points were found")]


def test_tpe_does_not_start_a_variant_again(tmp_path: Path) -> None:
    variants = {"one": {"engine.args.max-num-seqs": 1}}
    small = sampled(tmp_path, variants=variants, space={"engine.args.max-num-seqs": [1, 2, 4]}, num_samples=3)
    with open_checked(small, make_sampler=make_sampler) as running:
        started = drive(running, answer)
        assert started[0] == "one"
        assert len(started) == 3
        assert len({launch.spec.key for launch in running.launches}) == 3
