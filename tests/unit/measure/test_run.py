"""measure() against the stand-in engines: honest numbers, and every verdict code both earned and not earned."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Workload
from orchestrator.engines import ENGINES
from orchestrator.engines.base import Speculation
from orchestrator.errors import ConfigError, EngineFailure
from orchestrator.measure.checks import LEVELS
from orchestrator.measure.client import Target
from orchestrator.measure.run import Stalled, Surroundings, WorkloadRun, appended, measure
from orchestrator.measure.verdict import Level
from orchestrator.outcome import Diagnosis, TrialStatus
from tests.support.fake.talk import FakeEngine

DIALECTS = ("vllm", "sglang", "llamacpp")
DSPARK = ("--speculative-config", json.dumps({"method": "dspark", "num_speculative_tokens": 6}))
DRAFTED_BY_DSPARK = Speculation(proposals=6, method="dspark", family="dspark")
SPECULATING = Surroundings(speculation=DRAFTED_BY_DSPARK)
OVERRIDDEN = "WARNING Default vLLM sampling parameters have been overridden by the model's generation_config.json\n"
METRICS_FLAGS = {"vllm": (), "sglang": ("--enable-metrics",), "llamacpp": ("--metrics",)}


def measured(
    engine: FakeEngine,
    dialect: str = "vllm",
    surroundings: Surroundings | None = None,
    how: dict[str, Any] | None = None,
    **changes: Any,
) -> WorkloadRun:
    workload = Workload(**{"num_prompts": 2, "output_tokens": 24, "repeats": 3, "stall_s": 20.0, **changes})
    target = Target(base_url=engine.base_url, model=engine.model)
    return measure(target, ENGINES[dialect], "w", workload, surroundings=surroundings, **(how or {}))


def value(run: WorkloadRun, name: str) -> float:
    quantity = run.measurement.metrics[name]
    assert quantity is not None, name
    return quantity.value


def codes(run: WorkloadRun) -> set[str]:
    return {reason.code for reason in run.verdict.reasons}


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
    engine = fake_engine("vllm", *DSPARK, curve={"6": 500.0})
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
    engine = fake_engine("vllm", *DSPARK, acceptance={"6": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]}, collapse_after=20)
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


@pytest.mark.parametrize("dialect", ["sglang", "llamacpp"])
def test_cached_prompts_are_seen_on_every_engine(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect, *METRICS_FLAGS[dialect])
    assert "prefix_cache_hits" not in codes(measured(engine, dialect, prompt_tokens=400))
    assert "prefix_cache_hits" in codes(measured(engine, dialect, prompt_tokens=400, nonce=False))


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


def test_a_shape_that_warm_up_missed_is_flagged(fake_engine: Callable[..., FakeEngine], tmp_path: Path) -> None:
    # Both texts fall into one bucket of ours, and on two sides of a power of two for the engine.
    for index, tokens in enumerate((1000, 1022)):
        (tmp_path / f"{index}.txt").write_text("abc " * tokens)
    engine = fake_engine("vllm", first_touch_s=0.8, tokens_per_s=2000.0)
    around = Surroundings(log_text=lambda: engine.log)
    run = measured(engine, surroundings=around, prompts=str(tmp_path))
    assert len(run.measurement.cold) == 1
    assert {"first_touch_outlier", "compile_in_window"} <= codes(run)
    assert run.verdict.level is Level.SUSPECT


def test_without_warm_up_the_first_request_is_still_cold(fake_engine: Callable[..., FakeEngine]) -> None:
    run = measured(fake_engine("vllm", first_touch_s=0.6, tokens_per_s=2000.0), warmup=0, num_prompts=1)
    assert max(run.measurement.cold.values()) > 0.6
    assert value(run, "ttft_max_s") < 0.4
    assert run.measurement.metrics["ttft_s"].n == 2


@contextmanager
def _busy_interpreter() -> Iterator[None]:
    """Threads of the same process that keep the interpreter from the client."""
    over = threading.Event()

    def burn() -> None:
        while not over.is_set():
            sum(range(5000))

    threads = [threading.Thread(target=burn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_client_that_is_late_says_so(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=200.0)
    with _busy_interpreter():
        run = measured(engine, output_tokens=30, num_prompts=2)
    assert "client_late" in codes(run)
    assert run.verdict.level is Level.INVALID
    assert "client_late" not in codes(measured(engine, output_tokens=30, num_prompts=2))


def _fast(**behaviour: Any) -> dict:
    return {"tokens_per_s": 2000.0, **behaviour}


@pytest.mark.parametrize(
    ("code", "flags", "behaviour", "changes", "surroundings"),
    [
        ("stream_errors", (), _fast(faults={"error_object": 5}), {}, {}),
        ("stream_errors", (), _fast(faults={"cut": 4}), {"max_error_rate": 0.1}, {}),
        ("short_output", (), _fast(short_output=10), {"ignore_eos": True}, {}),
        ("counter_reset", (), _fast(counter_reset_after=4), {}, {}),
        ("gpu_shared", (), _fast(), {}, {"foreign_gpu_users": lambda: ("pid 7 (python) on GPU 0",)}),
        ("degenerate_output", (), _fast(loop_text=True), {"output_tokens": 128}, {}),
        (
            "acceptance_collapse",
            DSPARK,
            {"collapse_after": 0},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        (
            "acceptance_collapse",
            DSPARK,
            {"acceptance": [0.8, 0.05, 0.04]},
            {},
            {"speculation": Speculation(proposals=6, method="unheard_of")},
        ),
        (
            "drafter_remembers",
            DSPARK,
            {"acceptance": [0.6, 0.4, 0.3, 0.2, 0.1, 0.1], "remembers": True},
            {"num_prompts": 4},
            {"speculation": Speculation(proposals=6, family="suffix")},
        ),
        (
            "nothing_drafted",
            DSPARK,
            {"no_drafts": True},
            {},
            {"speculation": Speculation(proposals=6, family="ngram")},
        ),
        (
            "acceptance_collapse",
            DSPARK,
            {"no_drafts": True},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        ("few_repeats", (), _fast(), {"repeats": 2}, {}),
        (
            "synthetic_acceptance",
            DSPARK,
            {},
            {},
            {"speculation": Speculation(proposals=6, method="dspark", is_synthetic=True)},
        ),
        (
            "random_prompts",
            DSPARK,
            {},
            {"kind": "tokens", "prompt_tokens": 50},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        ("ramp_and_drain", (), _fast(tokens_per_s=100.0), {"concurrency": 8, "num_prompts": 9}, {}),
        ("bunched_chunks", (), {"tokens_per_s": 200.0, "burst": 8}, {}, {}),
        ("first_chunk_assumed", (), _fast(continuous_usage=False), {}, {}),
        ("sampling_overridden", (), _fast(), {}, {"log_text": lambda: OVERRIDDEN}),
    ],
)
def test_a_code_is_earned(
    fake_engine: Callable[..., FakeEngine],
    code: str,
    flags: tuple[str, ...],
    behaviour: dict[str, Any],
    changes: dict[str, Any],
    surroundings: dict[str, Any],
) -> None:
    engine = fake_engine("vllm", *flags, **behaviour)
    run = measured(engine, surroundings=Surroundings(**surroundings), **changes)
    assert code in codes(run), run.verdict
    reason = next(reason for reason in run.verdict.reasons if reason.code == code)
    assert reason.detail
    assert "\n" not in reason.detail
    order = list(Level)
    assert order.index(run.verdict.level) >= order.index(LEVELS[code])


@pytest.mark.parametrize(
    ("code", "flags", "behaviour", "changes", "surroundings"),
    [
        ("stream_errors", (), _fast(faults={"error_object": 5}), {"max_error_rate": 0.5}, {}),
        ("short_output", (), _fast(eos_tokens=10), {}, {}),
        ("gpu_shared", (), _fast(), {}, {"foreign_gpu_users": tuple}),
        ("degenerate_output", (), _fast(text="prose"), {"output_tokens": 400}, {}),
        ("degenerate_output", (), _fast(text="code"), {"output_tokens": 400}, {}),
        (
            "acceptance_collapse",
            DSPARK,
            {"collapse_after": 0},
            {},
            {"speculation": Speculation(proposals=6, is_synthetic=True)},
        ),
        (
            "acceptance_collapse",
            DSPARK,
            {},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        (
            "drafter_remembers",
            DSPARK,
            {"acceptance": [0.6, 0.4, 0.3, 0.2, 0.1, 0.1]},
            {},
            {"speculation": Speculation(proposals=6)},
        ),
        ("nothing_drafted", DSPARK, {}, {}, {"speculation": Speculation(proposals=6, family="ngram")}),
        (
            "nothing_drafted",
            DSPARK,
            {"no_drafts": True},
            {"output_tokens": 8},
            {"speculation": Speculation(proposals=6, family="ngram")},
        ),
        ("nothing_drafted", (), _fast(), {}, {}),
        (
            "synthetic_acceptance",
            DSPARK,
            {},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        ("random_prompts", (), _fast(), {"kind": "tokens", "prompt_tokens": 50}, {}),
        ("sampling_overridden", (), _fast(), {}, {"log_text": lambda: "INFO started\n"}),
        ("ramp_and_drain", (), _fast(tokens_per_s=200.0), {"concurrency": 3, "num_prompts": 9}, {}),
    ],
)
def test_a_code_is_not_earned(
    fake_engine: Callable[..., FakeEngine],
    code: str,
    flags: tuple[str, ...],
    behaviour: dict[str, Any],
    changes: dict[str, Any],
    surroundings: dict[str, Any],
) -> None:
    engine = fake_engine("vllm", *flags, **behaviour)
    run = measured(engine, surroundings=Surroundings(**surroundings), **changes)
    assert code not in codes(run), run.verdict


def test_a_drafter_that_learns_from_answers_forgets_them_between_repeats(
    fake_engine: Callable[..., FakeEngine],
) -> None:
    flags = ("--enable-metrics", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5")
    learning = {"acceptance": [0.5, 0.3, 0.2, 0.1], "remembers": True}
    around = Surroundings(speculation=Speculation(proposals=4, method="NGRAM"))
    kept = measured(fake_engine("sglang", *flags, **learning), "sglang", around, num_prompts=4)
    assert "drafter_remembers" in codes(kept)
    around = Surroundings(speculation=Speculation(proposals=4, method="NGRAM", forget_path="/flush_cache?timeout=5"))
    fresh = measured(fake_engine("sglang", *flags, **learning), "sglang", around, num_prompts=4)
    assert fresh.verdict.level is Level.VALID, fresh.verdict
    assert value(fresh, "acceptance_rate") == pytest.approx(0.275, abs=0.1)
    assert value(kept, "acceptance_rate") > 0.8


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
    engine = fake_engine("vllm", *DSPARK, drop_metrics=["vllm:spec_decode_num_accepted_tokens_total"])
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
