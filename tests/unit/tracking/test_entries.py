"""What is recorded of a result: names, lengths and numbers that any store takes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import trial
from orchestrator.measure.metrics import Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import Fact
from orchestrator.tracking import entries
from tests.support.builders import WORKLOAD, make_spec, with_verdict
from tests.support.recorded_sweep import MEMORY_SERIES, sweep_experiment, sweep_measurement, sweep_result

SAFE = re.compile(r"[A-Za-z0-9_.\-/]{1,250}")


def test_names_that_stores_refuse_become_safe_and_stay_apart() -> None:
    wanted = ["a:b", "a_b", "a@1", "a(ms)", "a,b", "ü", "ö", "p99@conc=8", "[k=6]", "../up", "/lead", "x//y", "", "a b"]
    names = entries.safe_names(wanted)
    assert set(names) == set(wanted)
    assert len(set(names.values())) == len(wanted)
    assert all(SAFE.fullmatch(name) for name in names.values())
    assert names["a_b"] == "a_b"
    assert names["a@1"] == "a_1"


def test_names_that_are_safe_already_are_kept() -> None:
    assert entries.safe_names(["code-review-8k/decode_tok_s.low"]) == {
        "code-review-8k/decode_tok_s.low": "code-review-8k/decode_tok_s.low"
    }


@given(st.lists(st.text(max_size=300)))
def test_any_names_become_safe_unique_and_the_same_again(wanted: list[str]) -> None:
    names = entries.safe_names(wanted)
    assert set(names) == set(wanted)
    assert len(set(names.values())) == len(names)
    assert all(SAFE.fullmatch(name) for name in names.values())
    assert not any(part in ("", ".", "..") for name in names.values() for part in name.split("/"))
    assert entries.safe_names(wanted) == names


def test_a_long_value_is_kept_whole_beside_a_short_param(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    args = {f"flag-{i}": i for i in range(199)} | {"hf-overrides": "x" * 10_000}
    short, whole = entries.params(
        replace(make_spec(k=6, experiment=experiment), engine=replace(experiment.engine, args=args))
    )
    assert sum(key.startswith("engine.args.") for key in short) == 200
    assert max(map(len, short.values())) <= entries.MAX_PARAM_CHARS
    assert whole == {"engine.args.hf-overrides": "x" * 10_000}
    assert "10000 characters" in short["engine.args.hf-overrides"]


def test_params_leave_out_the_absent_and_mask_secrets(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    engine = replace(
        experiment.engine,
        args={"api-key": "s3cret", "speculative-config": {"num_speculative_tokens": 6}, "tokenizer-mode": "auto"},
        env={"HF_TOKEN": "s3cret", "NCCL_P2P_DISABLE": "1"},
    )
    short, whole = entries.params(replace(make_spec(k=6, experiment=experiment), engine=engine))
    assert "s3cret" not in str(short) + str(whole)
    assert short["engine.env.HF_TOKEN"] == short["engine.args.api-key"] == "****"
    assert short["engine.args.speculative-config.num_speculative_tokens"] == "6"
    assert short["engine.args.tokenizer-mode"] == "auto"
    assert short["engine.env.NCCL_P2P_DISABLE"] == "1"
    assert short[f"workloads.{WORKLOAD}.temperature"] == "0.0"
    assert "engine.environment" not in short
    assert "None" not in short.values()
    assert "null" not in short.values()


def test_metrics_have_intervals_and_no_entry_for_what_is_absent(tmp_path: Path) -> None:
    metrics = entries.metrics(sweep_result(sweep_experiment(tmp_path), 6, 275.9, tmp_path))
    assert metrics[f"{WORKLOAD}/decode_tok_s"] == 275.9
    assert metrics[f"{WORKLOAD}/decode_tok_s.low"] == pytest.approx(275.9 * 0.995)
    assert metrics[f"{WORKLOAD}/decode_tok_s.high"] == pytest.approx(275.9 * 1.005)
    assert metrics[f"{WORKLOAD}/cold/ttft_s"] == 2.5
    assert metrics["memory/gpu1_peak_gib"] == 93.16
    assert metrics["phases/starting_s"] == 190.0
    assert f"{WORKLOAD}/prefill_tok_s" not in metrics
    assert f"{WORKLOAD}/acceptance_rate.low" not in metrics


def test_numbers_that_are_not_finite_are_left_out_and_named(tmp_path: Path) -> None:
    result = sweep_result(sweep_experiment(tmp_path), 6, 275.9, tmp_path)
    odd = sweep_measurement(
        275.9,
        6,
        tpot_s=Quantity(value=math.nan),
        rate=Quantity(value=math.inf),
        huge=Quantity(value=1.0, low=-math.inf, high=math.inf),
    )
    odd = replace(odd, repeats={"tpot_s": (math.nan, 1.0, -math.inf)}, cold={"ttft_s": math.inf})
    odd = replace(odd, acceptance_by_position=(0.9, math.nan))
    result = replace(
        result,
        measurements={WORKLOAD: odd},
        memory={"gpu0_peak_gib": Fact(value=math.nan, source="NVML"), "model_gib": Fact(value=74.85, source="log")},
        facts={"kv_tokens": Fact(value=math.inf, source="log")},
        phases_s={"starting": math.nan},
        memory_series={"gpu0_gib": [(0.0, math.nan), (math.inf, 1.0), (1.0, 2.0)]},
    )
    entry = entries.entry(result, WORKLOAD)
    assert all(map(math.isfinite, entry.metrics.values()))
    assert entry.metrics[f"{WORKLOAD}/huge"] == 1.0
    assert f"{WORKLOAD}/huge.high" not in entry.metrics
    assert [s.value for s in entry.samples if s.name.endswith("tpot_s.by_repeat")] == [1.0]
    assert entry.tags["nonfinite"] == f"{WORKLOAD}/rate, {WORKLOAD}/tpot_s"
    assert set(entry.texts) == {"result.json", "memory.csv"}
    assert "Infinity" not in entry.texts["result.json"]
    assert "NaN" not in entry.texts["result.json"]
    back = trial.from_json(entry.texts["result.json"])
    assert back == replace(entries.finite(result), memory_series={})
    assert (list(back.memory), list(back.facts)) == (["model_gib"], [])
    assert entry.texts["memory.csv"] == "time_s,gpu0_gib\n1.0,2.0\n"


def test_series_step_over_repeats_positions_and_time(tmp_path: Path) -> None:
    result = sweep_result(sweep_experiment(tmp_path), 3, 275.9, tmp_path, memory_series=MEMORY_SERIES)
    samples = entries.series(result)
    repeats = [(s.step, s.value) for s in samples if s.name == f"{WORKLOAD}/ttft_s.by_repeat"]
    assert repeats == [(0, 0.94), (2, 0.95)]
    positions = [(s.step, s.value) for s in samples if s.name == f"{WORKLOAD}/acceptance_by_position"]
    assert positions == [(0, 0.9), (1, pytest.approx(0.81)), (2, pytest.approx(0.729))]
    memory = [s for s in samples if s.name == "memory/gpu0_gib.over_time"]
    assert [s.time_s for s in memory][:3] == [0.0, 0.5, 1.0]


def test_a_long_series_is_thinned_and_keeps_its_spike(tmp_path: Path) -> None:
    points = [(i / 10, 500.0 if i == 77_777 else 1.0) for i in range(100_000)]
    result = sweep_result(sweep_experiment(tmp_path), 3, 275.9, tmp_path, memory_series={"gpu0_gib": points})
    memory = [s for s in entries.series(result) if s.name.startswith("memory/")]
    assert len(memory) <= entries.MAX_SAMPLES
    assert [s.time_s for s in memory if s.value == 500.0] == [7777.7]


def test_the_note_of_a_failed_trial_says_why_what_helps_and_how_it_was_started(tmp_path: Path) -> None:
    tags = entries.result_tags(sweep_result(sweep_experiment(tmp_path), 4, None, tmp_path))
    assert (tags["status"], tags["cause"]) == ("refused", "k_below_block_size")
    for part in ("below the checkpoint's block size 5", "num_speculative_tokens of 5 or more", "vllm serve dsv4"):
        assert part in tags["mlflow.note.content"]
    assert "verdict" not in tags


def test_launches_of_one_point_are_told_apart(tmp_path: Path) -> None:
    experiment = sweep_experiment(tmp_path)
    first = sweep_result(experiment, 6, 275.9, tmp_path / "1")
    again = sweep_result(experiment, 6, 275.9, tmp_path / "2")
    assert entries.identity(first) != entries.identity(again)
    assert entries.identity(first) == entries.identity(with_verdict(first, Level.SUSPECT, "few_repeats"))
