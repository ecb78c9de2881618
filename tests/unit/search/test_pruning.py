"""What is not measured: hopeless points with their witness, and trials that can no longer win."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from orchestrator import search
from orchestrator.config import Objective
from orchestrator.measure.metrics import Measurement
from orchestrator.measure.verdict import Level
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from tests.support.builders import CONFIG, WORKLOAD, K, make_experiment, make_measurement, make_result, make_spec
from tests.support.paths import ROOT

STORY = "story-chat"
RATE = f"{WORKLOAD}/decode_tok_s"
OBJECTIVE = Objective(metric=RATE)
PREFER_SMALL = Objective(metric=RATE, prefer={K: "min"})
REPLAY = ROOT / "experiments" / "search-efficiency" / "replay.py"


def _unfit(name: str, cause: str, **args: Any) -> TrialResult:
    return make_result(name, status=TrialStatus.UNFIT, cause=cause, args=_dashed(args))


def _dashed(args: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in args.items()}


KV_SHORT = _unfit("witness", "kv_cache_too_small", gpu_memory_utilization=0.95, max_model_len=65536, block_size=256)


@pytest.mark.parametrize(
    ("args", "skipped"),
    [
        ({"gpu_memory_utilization": 0.95, "max_model_len": 131072}, True),
        ({"gpu_memory_utilization": 0.90, "max_model_len": 65536}, True),
        ({"gpu_memory_utilization": 0.90, "max_model_len": 131072}, True),
        ({"gpu_memory_utilization": 0.96, "max_model_len": 65536}, False),
        ({"gpu_memory_utilization": 0.95, "max_model_len": 32768}, False),
        ({"gpu_memory_utilization": 0.90, "max_model_len": 32768}, False),
        ({"gpu_memory_utilization": 0.90, "max_model_len": "1M"}, False),
        ({"max_model_len": 131072}, False),
        ({"gpu_memory_utilization": 0.95, "max_model_len": 65536, "enforce_eager": True}, False),
        ({"gpu_memory_utilization": 0.95, "max_model_len": 65536, "speculative_config": {"method": "dspark"}}, True),
    ],
)
def test_less_memory_or_more_need_than_what_did_not_fit_is_skipped(args: dict[str, Any], skipped: bool) -> None:
    why = search.hopeless(
        make_spec("point", args=_dashed({"block_size": 256, **args})), [make_result("fine", 100), KV_SHORT]
    )
    assert (why is not None) is skipped
    if why is not None:
        assert "witness" in why
        assert "kv_cache_too_small" in why


def test_what_ran_out_of_memory_is_not_cured_by_taking_more() -> None:
    out = _unfit("witness", "out_of_memory_load", gpu_memory_utilization=0.97, max_num_seqs=4)
    assert search.hopeless(make_spec("more", args=_dashed({"gpu_memory_utilization": 0.98, "max_num_seqs": 4})), [out])
    assert not search.hopeless(
        make_spec("less", args=_dashed({"gpu_memory_utilization": 0.96, "max_num_seqs": 4})), [out]
    )
    other_load = make_spec(
        "more", args=_dashed({"gpu_memory_utilization": 0.98, "max_num_seqs": 4}), workloads=(STORY,)
    )
    assert not search.hopeless(other_load, [out])


def test_a_ladder_of_utilisations_costs_two_starts() -> None:
    """Largest need first: what fits ends nothing, what does not fit takes everything larger along."""
    ladder = [(0.96, length) for length in (65536, 131072, 262144, 524288, 1048576)]
    finished: list[TrialResult] = []
    started = 0
    for utilization, length in ladder:
        args = {"gpu-memory-utilization": utilization, "max-model-len": length}
        if search.hopeless(make_spec(str(length), args=args), finished):
            continue
        started += 1
        fits = length <= 65536
        finished.append(
            make_result(str(length), 100, args=args)
            if fits
            else _unfit(str(length), "kv_cache_too_small", gpu_memory_utilization=utilization, max_model_len=length)
        )
    assert started == 2


@pytest.mark.parametrize("status", [TrialStatus.REFUSED, TrialStatus.FAILED, TrialStatus.INFRASTRUCTURE])
def test_only_what_did_not_fit_is_a_witness(status: TrialStatus) -> None:
    args = {"max-model-len": 65536}
    failed = make_result("failed", status=status, cause="kv_cache_too_small", args=args)
    assert search.hopeless(make_spec("point", args=args), [failed]) is None


def _worse(so_far: Measurement, best: TrialResult | None, objective: Objective = OBJECTIVE, **kind: Any) -> bool:
    return search.clearly_worse(objective, WORKLOAD, so_far, best, **kind)


BEST = make_result("best", 270, 276, 282, k=6)


def test_one_repeat_far_below_the_best_is_enough() -> None:
    assert _worse(make_measurement(decode_tok_s=(93.0,)), BEST)
    assert not _worse(make_measurement(decode_tok_s=(262.0,)), BEST)
    assert not _worse(make_measurement(decode_tok_s=(400.0,)), BEST)


def test_more_repeats_leave_less_to_come() -> None:
    assert not _worse(make_measurement(decode_tok_s=(240.0,)), BEST)
    assert _worse(make_measurement(decode_tok_s=(240.0, 241.0, 239.0)), BEST)


def test_a_minimum_is_the_other_way_round() -> None:
    slow, best = (
        make_measurement(ttft_s=(3.0,)),
        make_result("best", measurements={WORKLOAD: make_measurement(ttft_s=(0.3, 0.3, 0.31))}),
    )
    objective = Objective(metric=f"{WORKLOAD}/ttft_s", mode="min")
    assert _worse(slow, best, objective)
    assert not _worse(make_measurement(ttft_s=(0.1,)), best, objective)


def test_nothing_is_ended_without_a_valid_best_or_a_number() -> None:
    slow = make_measurement(decode_tok_s=(10.0,))
    assert not _worse(slow, None)
    assert not _worse(slow, make_result("suspect", 270, 276, 282, level=Level.SUSPECT))
    assert not _worse(make_measurement(ttft_s=(1.0,)), BEST)
    assert not search.clearly_worse(OBJECTIVE, STORY, slow, BEST), "a workload outside the objective decides nothing"


def test_who_loses_a_tie_ends_sooner_than_who_wins_it() -> None:
    close, near = make_measurement(decode_tok_s=(258.0,)), BEST
    deeper = make_spec("k=7", args={"speculative-config": {"num_speculative_tokens": 7}})
    shallower = make_spec("k=5", args={"speculative-config": {"num_speculative_tokens": 5}})
    assert _worse(close, near, PREFER_SMALL, spec=deeper)
    assert not _worse(close, near, PREFER_SMALL, spec=shallower)
    assert not _worse(make_measurement(decode_tok_s=(290.0,)), near, PREFER_SMALL, spec=deeper)


def test_of_a_mix_the_part_still_to_come_counts_as_no_time() -> None:
    objective = Objective(mix={WORKLOAD: 0.5, STORY: 0.5})
    parts = {
        WORKLOAD: make_measurement(decode_tok_s=(270, 276, 282)),
        STORY: make_measurement(decode_tok_s=(150, 156, 160)),
    }
    best = make_result("best", measurements=parts)
    assert _worse(make_measurement(decode_tok_s=(60.0,)), best, objective)
    assert not _worse(make_measurement(decode_tok_s=(150.0,)), best, objective), "a perfect story could still save it"
    earlier = {STORY: make_measurement(decode_tok_s=(60.0, 61.0, 62.0))}
    assert _worse(make_measurement(decode_tok_s=(150.0,)), best, objective, earlier=earlier)


def test_the_middle_of_the_grid_starts_first_and_the_baseline_last() -> None:
    sweep = {
        "variants": {"no-spec": {CONFIG: None}, "eager": {"engine.args.enforce-eager": True}},
        "baseline": "no-spec",
    }
    stopping = make_experiment(grid={K: [4, 5, 6, 7, 8, 10]}, stop_early=True, **sweep)
    names = [s.name for s in search.in_order(stopping, search.points(stopping)[0])]
    assert names == ["k=6", "k=7", "k=5", "k=8", "k=4", "k=10", "eager", "no-spec"]
    plain = make_experiment(grid={K: [4, 5]}, **sweep)
    assert [s.name for s in search.in_order(plain, search.points(plain)[0])] == ["no-spec", "eager", "k=4", "k=5"]


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    module_spec = importlib.util.spec_from_file_location("replay", REPLAY)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["replay"] = module
    module_spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("curve", "repeats"), [("dspark", 3), ("mtp canada-w4a16-fp8", 5), ("mtp official", 5)])
def test_half_of_the_measuring_is_saved_with_the_same_winner(replay: ModuleType, curve: str, repeats: int) -> None:
    """The published protocols: three runs for DSpark, five prompts for MTP; 3% noise, 100 seeds."""
    [published] = [c for c in replay.curves() if c.name == curve]
    swept = replay.experiment_of(published, repeats)
    specs, _ = search.points(swept)
    full, stopped = (
        [replay.campaign(published, swept, specs, 0.03, seed, strategy) for seed in range(100)]
        for strategy in ("grid", "stop_early")
    )
    assert sum(a[0] == b[0] for a, b in zip(full, stopped, strict=True)) >= 95
    assert sum(run[1] for run in stopped) <= 0.5 * sum(run[1] for run in full)
