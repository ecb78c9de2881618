"""Golden streams with hand-computed numbers: every formula of docs/definitions.md, once."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.engines.base import EngineStats
from orchestrator.measure import formulas
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.metrics import METRICS, measure_windows
from tests.support.paths import ROOT

REFERENCE = ROOT / "experiments" / "reference"


def trace(times_s: tuple[float, ...] = (10.5, 10.6, 10.7), sent_s: float = 10.0, **rest: Any) -> RequestTrace:
    known = {"prompt_tokens": 1000, "completion_tokens": 5, "finish_reason": "stop", "asked_tokens": 5}
    return RequestTrace(
        **{"index": 0, "repeat": 0, "shape": "a", "chunk_times_s": times_s, "sent_s": sent_s, **known, **rest}
    )


def window(*traces: RequestTrace, wall_s: float = 1.0, **rest: Any) -> Window:
    return Window(traces=traces, wall_s=wall_s, **rest)


def reference(name: str) -> list[dict[str, str]]:
    lines = [line for line in (REFERENCE / name).read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def test_a_stream_of_five_tokens_by_hand() -> None:
    one = trace(times_s=(10.5, 10.75, 11.25), chunk_tokens=(2, 1, 2))
    assert formulas.ttft_s(one) == pytest.approx(0.5)
    assert formulas.e2e_s(one) == pytest.approx(1.25)
    assert formulas.tpot_s(one) == pytest.approx(0.75 / 3)
    assert formulas.decode_tok_s(one) == pytest.approx(4.0)
    assert formulas.prefill_tok_s(one) == pytest.approx(2000.0)
    assert formulas.tokens_per_chunk(one) == pytest.approx(5 / 3)
    assert formulas.chunk_gaps_s([one, one]) == pytest.approx([0.25, 0.5, 0.25, 0.5])
    assert formulas.output_tok_s(window(one, one, wall_s=4.0)) == pytest.approx(2.5)


def test_the_same_numbers_in_every_place_that_prints_one() -> None:
    one = trace(chunk_tokens=(1, 2, 2))
    measured = measure_windows([window(trace(), replace(one, index=1)) for _ in range(3)], [trace(sent_s=0.0)])
    per_request = {metric.name: metric.per_request for metric in METRICS if metric.per_request}
    assert len(per_request) > 8
    for name, formula in per_request.items():
        quantity = measured.metrics[name]
        assert (quantity.value if quantity else None) == formula(one)
        assert measured.repeats[name] == (formula(one),) * 3


def test_several_tokens_in_a_chunk() -> None:
    """60 tokens in 20 events, 30 ms apart: 100 tok/s, where counting events says 33."""
    times = tuple(1.0 + 0.03 * i for i in range(20))
    told = trace(times_s=times, sent_s=0.5, completion_tokens=60, chunk_tokens=(3,) * 20)
    assert formulas.decode_tok_s(told) == pytest.approx(100.0)
    untold = replace(told, chunk_tokens=None)
    assert formulas.tpot_s(untold) == pytest.approx(19 * 0.03 / 59)


def test_a_token_that_ends_the_text_has_no_time_of_its_own() -> None:
    """Four tokens of text 0.1 s apart, then an end-of-text mark: the rate is 10 tok/s, not 13."""
    told = trace(times_s=(1.0, 1.1, 1.2, 1.3), completion_tokens=5, chunk_tokens=(1, 1, 1, 1))
    assert formulas.decode_tok_s(told) == pytest.approx(10.0)
    assert formulas.decode_tok_s(replace(told, chunk_tokens=None)) == pytest.approx(4 / 0.3)


@pytest.mark.parametrize(
    "left_out",
    [
        {"completion_tokens": None},
        {"completion_tokens": 1},
        {"chunk_times_s": (10.5,)},
        {"chunk_times_s": ()},
        {"chunk_tokens": (5, 0, 0)},
    ],
)
def test_a_rate_that_nothing_is_left_for_is_absent(left_out: dict[str, Any]) -> None:
    assert formulas.decode_tok_s(replace(trace(), **left_out)) is None
    assert formulas.tpot_s(replace(trace(), **left_out)) is None


def test_part_4_decode_rate_from_tpot() -> None:
    for row in reference("dspark_k_sweep.csv"):
        if row["status"] != "complete":
            continue
        tpot_s = float(row["tpot_ms"]) / 1000
        one = trace(times_s=(1.0, 1.0 + 2047 * tpot_s), sent_s=0.0, completion_tokens=2048)
        assert formulas.decode_tok_s(one) == pytest.approx(float(row["decode_tok_s"]), rel=0.0015)


def test_part_2_output_throughput_holds_the_prefill() -> None:
    """One TTFT for 8,192 tokens, 0.37 s, explains the whole column: it is output throughput, not the decode rate."""
    for row in reference("mtp_depth.csv"):
        if not row["tpot_ms"]:
            continue
        wall_s = 0.37 + 1023 * float(row["tpot_ms"]) / 1000
        one = trace(times_s=(0.37, wall_s), sent_s=0.0, completion_tokens=1024)
        assert formulas.output_tok_s(window(one, wall_s=wall_s)) == pytest.approx(float(row["output_tok_s"]), rel=0.01)
        assert formulas.decode_tok_s(one) > 1.02 * float(row["output_tok_s"])


def test_part_4_prefill_rate() -> None:
    for row in reference("prefill.csv"):
        one = trace(times_s=(float(row["vllm_ttft_s"]),), sent_s=0.0, prompt_tokens=int(row["prompt_tokens"]))
        assert formulas.prefill_tok_s(one) == pytest.approx(float(row["vllm_prefill_tok_s"]), rel=0.002)


def test_a_tail_and_its_interval_have_the_repeats_as_their_unit() -> None:
    """Two repeats whose requests are all alike: 88 values, and two independent ones."""
    warm = [trace(sent_s=0.0)]
    windows = [
        window(*(trace(times_s=(10.0 + ttft_s, 12.0), index=i) for i in range(44)), wall_s=2.0) for ttft_s in (0.5, 1.0)
    ]
    metrics = measure_windows(windows, warm).metrics
    for name in ("ttft_s", "ttft_p50_s", "ttft_p90_s"):
        quantity = metrics[name]
        assert quantity is not None
        assert (quantity.n, quantity.over) == (88, "repeats")
        assert quantity.low is not None
        assert quantity.low < 0.1
    assert metrics["ttft_p95_s"] is None
    assert metrics["ttft_p99_s"] is None
    assert metrics["ttft_max_s"].over is None
    alone = measure_windows(windows[:1], warm).metrics["ttft_p90_s"]
    assert (alone.low, alone.high, alone.over) == (0.5, 0.5, "requests")


def test_failed_requests_enter_the_error_rate_and_nothing_else() -> None:
    bad = trace(times_s=(10.001,), error="engine died", completion_tokens=1)
    measured = measure_windows([window(trace(), trace(), bad, bad, wall_s=2.0)], [trace(sent_s=0.0)])
    ttft, errors, output = (measured.metrics[n] for n in ("ttft_s", "error_rate", "output_tok_s"))
    assert ttft is not None
    assert (ttft.value, ttft.n) == (pytest.approx(0.5), 2)
    assert errors is not None
    assert errors.value == 0.5
    assert output is not None
    assert output.value == pytest.approx(5.0)
    assert (measured.num_requests, measured.num_failed, measured.first_error) == (4, 2, "engine died")


def test_nothing_answered_is_absent_everywhere_but_the_error_rate() -> None:
    measured = measure_windows([window(trace(times_s=(), error="HTTP 400: no", completion_tokens=None))])
    known = {name: q.value for name, q in measured.metrics.items() if q is not None}
    assert known == {"error_rate": 1.0}
    assert measure_windows([]).metrics["ttft_s"] is None


def test_the_first_request_of_each_shape_is_the_cold_sample() -> None:
    slow = trace(times_s=(15.0, 15.1), sent_s=5.0, shape="a")
    rest = [trace(sent_s=10.0), trace(sent_s=10.0, shape="b", times_s=(12.0, 12.1))]
    without_warm_up = measure_windows([window(slow, *rest, trace())])
    assert without_warm_up.cold == {"a": 10.0, "b": 2.0}
    assert without_warm_up.metrics["ttft_s"].n == 2
    assert without_warm_up.metrics["ttft_max_s"].value == pytest.approx(0.5)
    warmed = measure_windows([window(trace(), trace(shape="b"))], [slow, replace(slow, shape="b")])
    assert warmed.cold == {"a": 10.0, "b": 10.0}
    assert warmed.metrics["ttft_s"].n == 2


def spec(
    drafts: float, drafted: float, accepted: float, by_position: tuple[float, ...] | None = None, **rest: Any
) -> EngineStats:
    return EngineStats(
        drafts=drafts, draft_tokens=drafted, accepted_tokens=accepted, accepted_by_position=by_position, **rest
    )


def test_acceptance_is_the_delta_of_the_window_not_the_life_of_the_server() -> None:
    before, after = spec(100, 300, 300, (100.0, 100.0, 100.0)), spec(200, 600, 400, (180.0, 115.0, 105.0))
    speculated = window(trace(), before=before, after=after)
    assert formulas.acceptance_rate(speculated) == pytest.approx(100 / 300)
    assert formulas.acceptance_length(speculated) == pytest.approx(2.0)
    assert formulas.acceptance_by_position([speculated, speculated]) == pytest.approx((0.8, 0.15, 0.05))
    plain = window(trace())
    assert formulas.acceptance_rate(plain) is None
    assert formulas.acceptance_length(plain) is None
    assert formulas.acceptance_by_position([plain]) is None
    assert formulas.acceptance_by_position([]) is None


def test_positions_that_appear_with_the_first_draft_count_from_zero() -> None:
    started = window(before=spec(0, 0, 0, ()), after=spec(10, 20, 12, (8.0, 4.0)))
    assert formulas.acceptance_by_position([started]) == pytest.approx((0.8, 0.4))
    idle = window(before=spec(10, 20, 12, (8.0, 4.0)), after=spec(10, 20, 12, (8.0, 4.0)))
    assert formulas.acceptance_by_position([idle]) is None
    assert formulas.acceptance_rate(idle) is None


def test_the_gauge_stands_in_only_where_there_are_no_counters() -> None:
    gauge = EngineStats(acceptance_length_gauge=2.7)
    assert formulas.acceptance_length(window(before=gauge, after=gauge)) == 2.7


def test_a_restart_in_the_window_leaves_no_delta() -> None:
    back = window(before=spec(100, 300, 200), after=spec(10, 30, 20))
    assert formulas.counters_reset(back)
    assert formulas.acceptance_rate(back) is None
    restarted = window(before=spec(10, 30, 20, start_time_s=5.0), after=spec(100, 300, 200, start_time_s=9.0))
    assert formulas.counters_reset(restarted)
    assert formulas.counter_delta(restarted, "drafts") is None
    assert not formulas.counters_reset(window(before=spec(1, 3, 2), after=spec(2, 6, 4)))


def test_prefix_hits_come_from_the_counter_or_from_usage() -> None:
    counted = window(trace(), before=EngineStats(prefix_hit_tokens=16), after=EngineStats(prefix_hit_tokens=48))
    assert formulas.prefix_hit_tokens(counted) == 32
    assert formulas.prefix_hit_tokens(window(trace(cached_tokens=100), trace(cached_tokens=0))) == 100
    assert formulas.prefix_hit_tokens(window(trace())) is None


def test_full_concurrency_share_sees_ramp_and_drain() -> None:
    traces = [trace(sent_s=0.0, times_s=(1.0, 4.0)), trace(sent_s=0.0, times_s=(1.0, 10.0))]
    assert formulas.full_concurrency_share(window(*traces, wall_s=10.0, concurrency=2)) == pytest.approx(0.4)
    assert formulas.full_concurrency_share(window(traces[0], wall_s=4.0, concurrency=2)) == 0.0
    assert formulas.full_concurrency_share(window(*traces, wall_s=10.0)) is None


def test_lateness_is_against_the_schedule() -> None:
    late = trace(sent_s=10.25, scheduled_s=10.0)
    assert formulas.lateness_s(late) == pytest.approx(0.25)
    assert formulas.lateness_s(trace()) is None


def test_no_number_that_is_not_finite_leaves() -> None:
    odd = trace(times_s=(math.inf, math.inf), completion_tokens=0, prompt_tokens=0)
    never = trace(times_s=(10.0, 10.0), completion_tokens=2)
    measured = measure_windows([window(odd, never, wall_s=0.0, client_cpu_share=math.nan)] * 3, [trace(sent_s=0.0)])
    values = [x for q in measured.metrics.values() if q for x in (q.value, q.low, q.high)]
    values += [x for series in measured.repeats.values() for x in series]
    json.dumps([x for x in values if x is not None], allow_nan=False)
