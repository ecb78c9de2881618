"""measure() against the stand-in engines: honest numbers, and runs that end early."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Workload
from orchestrator.errors import ConfigError, EngineFailure
from orchestrator.measure.client import Target
from orchestrator.measure.run import Stalled, Surroundings, appended, measure
from orchestrator.measure.verdict import Level
from orchestrator.outcome import Diagnosis, TrialStatus
from tests.support.dialects import DIALECTS, METRICS_FLAGS
from tests.support.fake.talk import DSPARK_6, FakeEngine
from tests.support.measured import DRAFTED_BY_DSPARK, codes, measured, value

pytestmark = pytest.mark.slow

SPECULATING = Surroundings(speculation=DRAFTED_BY_DSPARK)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_healthy_engine_is_valid_and_its_rates_are_true(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect, *METRICS_FLAGS[dialect], tokens_per_s=200.0, ttft_s=0.1)
    run = measured(engine, dialect, output_tokens=60, num_prompts=3)
    assert run.verdict.level is Level.VALID, run.verdict
    assert value(run, "decode_tok_s") == pytest.approx(200, rel=0.03)
    assert value(run, "ttft_s") == pytest.approx(0.1, abs=0.03)
    # Prefill is in it, and on a busy machine some time between requests.
    assert 0.7 < value(run, "output_tok_s") / (60 / (0.1 + 59 / 200)) < 1.02
    assert value(run, "completion_tokens") == 60
    assert value(run, "error_rate") == 0
    assert run.measurement.metrics["decode_tok_s"].n == 9
    assert len(run.traces) == run.measurement.num_requests == 9
    assert run.measurement.metrics["acceptance_rate"] is None


def test_speculation_is_read_as_deltas_per_workload(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", *DSPARK_6, curve={"6": 500.0})
    run = measured(engine, surroundings=SPECULATING, output_tokens=120)
    assert run.verdict.level is Level.VALID, run.verdict
    assert value(run, "decode_tok_s") == pytest.approx(500, rel=0.06)
    assert value(run, "tokens_per_chunk") > 3
    by_position = run.measurement.acceptance_by_position
    assert by_position is not None
    assert by_position[0] == pytest.approx(0.9, abs=0.1)
    assert list(by_position) == sorted(by_position, reverse=True)
    assert value(run, "acceptance_length") == pytest.approx(1 + sum(by_position), abs=0.3)
    assert value(run, "acceptance_rate") == pytest.approx(sum(by_position) / 6, abs=0.05)


def test_counters_of_the_past_do_not_matter(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", *DSPARK_6, acceptance={"6": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]}, collapse_after=20)
    first = measured(engine, surroundings=SPECULATING, output_tokens=60, num_prompts=5, warmup=1)
    second = measured(engine, surroundings=SPECULATING, output_tokens=60, num_prompts=5, warmup=1)
    assert value(first, "acceptance_length") > 3
    assert value(second, "acceptance_length") < 2
    assert "acceptance_collapse" in codes(second) - codes(first)


def test_repeats_do_not_measure_the_prefix_cache(fake_engine: Callable[..., FakeEngine]) -> None:
    slow_prefill = {"prefill_tok_s": 2000.0, "tokens_per_s": 2000.0}
    run = measured(fake_engine("vllm", **slow_prefill), prompt_tokens=600)
    first, _, last = run.measurement.repeats["ttft_s"]
    assert first == pytest.approx(last, rel=0.15)
    assert "prefix_cache_hits" not in codes(run)
    cheating = measured(fake_engine("vllm", **slow_prefill), prompt_tokens=600, nonce=False)
    assert value(cheating, "ttft_s") < 0.5 * value(run, "ttft_s")
    assert "prefix_cache_hits" in codes(cheating)
    assert cheating.verdict.level is Level.INVALID


def test_prompts_have_the_asked_length_and_the_real_one_is_told(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm")
    tokens = value(measured(engine, prompt_tokens=1000), "prompt_tokens")
    assert 1000 <= tokens <= 1040
    longer = fake_engine("vllm", prompt_tokens_factor=1.03)
    assert value(measured(longer, prompt_tokens=1000), "prompt_tokens") == pytest.approx(1.03 * tokens, rel=0.01)


def test_a_prompt_file_that_is_too_short_is_a_configuration_error(
    fake_engine: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    (tmp_path / "few.txt").write_text("A few words only.")
    with pytest.raises(ConfigError, match="holds only"):
        measured(fake_engine("vllm"), prompts=str(tmp_path / "few.txt"), prompt_tokens=500)


def test_first_touch_is_the_cold_sample_and_not_in_the_tail(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", first_touch_s=0.6, tokens_per_s=2000.0)
    around = Surroundings(log_text=lambda: engine.log)
    run = measured(engine, surroundings=around, prompt_tokens=900, prompt_tokens_spread=0.6, num_prompts=12)
    assert value(run, "ttft_max_s") < 0.4
    assert len(run.measurement.cold) > 4
    assert max(cold for cold in run.measurement.cold.values() if cold is not None) > 0.6
    assert not codes(run) & {"first_touch_outlier", "compile_in_window"}


def test_without_warm_up_the_first_request_is_still_cold(fake_engine: Callable[..., FakeEngine]) -> None:
    run = measured(fake_engine("vllm", first_touch_s=0.6, tokens_per_s=2000.0), warmup=0, num_prompts=1)
    assert max(run.measurement.cold.values()) > 0.6
    assert value(run, "ttft_max_s") < 0.4
    assert run.measurement.metrics["ttft_s"].n == 2


def test_failing_requests_do_not_make_an_engine_fast(fake_engine: Callable[..., FakeEngine]) -> None:
    healthy = measured(fake_engine("vllm", tokens_per_s=200.0), num_prompts=5)
    failing = measured(fake_engine("vllm", tokens_per_s=200.0, faults={"error_object": 5}), num_prompts=5)
    assert value(failing, "error_rate") == pytest.approx(0.2)
    assert value(failing, "output_tok_s") < value(healthy, "output_tok_s")
    assert value(failing, "ttft_s") == pytest.approx(value(healthy, "ttft_s"), rel=0.5)


def test_when_every_request_is_refused_there_is_no_number(fake_engine: Callable[..., FakeEngine]) -> None:
    run = measured(fake_engine("vllm", faults={"http_400": 1}))
    assert run.measurement.num_failed == run.measurement.num_requests == 6
    assert run.measurement.first_error
    assert run.measurement.first_error.startswith("HTTP 400")
    assert run.measurement.metrics["decode_tok_s"] is None
    assert run.measurement.metrics["ttft_s"] is None
    assert run.verdict.level is Level.INVALID


def test_missing_counters_are_unknown_and_not_zero(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", *DSPARK_6, drop_metrics=["vllm:spec_decode_num_accepted_tokens_total"])
    run = measured(engine, surroundings=SPECULATING)
    assert run.measurement.metrics["acceptance_rate"] is None
    target = Target(base_url=engine.base_url, model=engine.model)
    blind = measure(target, None, "w", Workload(num_prompts=1, output_tokens=8, repeats=3))
    assert blind.measurement.metrics["prefix_hit_tokens"] is None
    assert value(blind, "decode_tok_s") > 0


def test_a_stall_keeps_what_was_measured(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=2000.0, hang={"after": 5, "seconds": 60})
    began = time.monotonic()
    with pytest.raises(Stalled, match=r"^w: request 0 had no token for 1 s$") as caught:
        measured(engine, stall_s=1.0)
    assert time.monotonic() - began < 10
    assert caught.value.workload == "w"
    assert caught.value.run.measurement.num_failed == 1
    assert value(caught.value.run, "decode_tok_s") > 0
    assert len(caught.value.run.traces) == 5


def test_a_stall_in_warm_up_is_one_too(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", hang={"after": 0, "seconds": 60})
    with pytest.raises(Stalled, match="warm-up") as caught:
        measured(engine, stall_s=1.0)
    assert caught.value.run.measurement.num_requests == 0
    assert caught.value.run.traces == ()


def test_an_engine_that_dies_is_the_callers_word(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=50.0, oom_after=4)

    def alive() -> None:
        if engine.process.poll() is not None:
            raise EngineFailure(Diagnosis(status=TrialStatus.UNFIT, cause="out_of_memory", summary="gone"))

    with pytest.raises(EngineFailure, match="gone"):
        measured(engine, surroundings=Surroundings(check_alive=alive), num_prompts=4)


def test_progress_counts_requests_and_a_repeat_can_be_the_last(fake_engine: Callable[..., FakeEngine]) -> None:
    steps: list[tuple[str, int, int]] = []
    seen: list[int] = []
    how: dict[str, Callable] = {
        "on_progress": lambda phase, done, total: steps.append((phase, done, total)),
        "on_repeat": lambda measurement: bool(seen.append(measurement.num_requests)) or len(seen) < 2,
    }
    run = measured(fake_engine("vllm", tokens_per_s=2000.0), how=how, repeats=5, concurrency=2)
    assert seen == [2, 4]
    assert len(run.measurement.repeats["ttft_s"]) == 2
    assert [step for step in steps if step[0] == "measuring"] == [("measuring", n, 10) for n in (1, 2, 3, 4)]
    warming = [step for step in steps if step[0] == "warming"]
    assert [done for _, done, _ in warming] == list(range(1, warming[-1][2] + 1))


@pytest.mark.parametrize(
    ("changes", "warm"),
    [
        ({"warmup": 0, "concurrency": 2}, 0),
        ({"warmup": 1}, 1),
        ({"warmup": 3}, 3),
        ({"warmup": 1, "concurrency": 2}, 3),
        ({"warmup": 1, "request_rate": 50.0}, 3),
    ],
)
def test_warm_up_sends_what_it_should(
    fake_engine: Callable[..., FakeEngine], tmp_path: Path, changes: dict[str, Any], warm: int
) -> None:
    record = tmp_path / "requests"
    engine = fake_engine("vllm", tokens_per_s=2000.0, record_requests=str(record))
    (tmp_path / "texts").mkdir()
    for index in range(2):
        (tmp_path / "texts" / f"{index}.txt").write_text("abc " * 100)
    run = measured(engine, prompts=str(tmp_path / "texts"), repeats=1, output_tokens=100, **changes)
    received = [json.loads(line) for line in record.read_text().splitlines()]
    assert [request["max_tokens"] for request in received] == [64] * warm + [100] * 2
    assert len({request["prompt"] for request in received}) == len(received)
    assert len(run.traces) == 2


def test_a_seeded_nonce_repeats_the_prompts_and_only_then(
    fake_engine: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    def fronts(name: str, **how: Any) -> list[str]:
        record = tmp_path / name
        engine = fake_engine("vllm", tokens_per_s=2000.0, record_requests=str(record))
        measured(engine, how=how)
        return [json.dumps(json.loads(line)) for line in record.read_text().splitlines()]

    first, second, third = fronts("a", nonce_seed="s"), fronts("b", nonce_seed="s"), fronts("c")
    assert [json.loads(x)["prompt"] for x in first] == [json.loads(x)["prompt"] for x in second]
    assert [json.loads(x)["prompt"] for x in first] != [json.loads(x)["prompt"] for x in third]


def test_a_log_is_read_from_where_it_was() -> None:
    assert appended("a\nb\n", "a\nb\nc\n") == "c\n"
    assert appended("a\nb\n", "b\nc\n") == "c\n"
    assert appended("", "x") == "x"
    assert appended("gone\n", "other\n") == "other\n"
