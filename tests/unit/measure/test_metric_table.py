"""One row is one metric: everything that knows a metric has it from the table."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from orchestrator import report
from orchestrator.errors import ConfigError
from orchestrator.measure import metrics
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.metrics import MEMORY_METRICS, METRICS, Metric, find_metric, measure_windows, metric_names
from orchestrator.search.objective import check_metric, direction
from orchestrator.tracking import Recorded
from tests.support.builders import WORKLOAD, make_experiment, make_result
from tests.support.definitions import metric_row, rows_under, undocumented


def window(repeat: int) -> Window:
    """One answer of 8 tokens in two chunks, `repeat` + 1 seconds after it was sent and one second later."""
    sent_s = 10.0 * repeat
    trace = RequestTrace(
        index=0,
        repeat=repeat,
        shape="a",
        sent_s=sent_s,
        chunk_times_s=(sent_s + repeat + 1, sent_s + repeat + 2),
        completion_tokens=8,
    )
    return Window(traces=(trace,), wall_s=4.0)


WARM_UP = [RequestTrace(index=0, repeat=-1, shape="a", sent_s=-5.0)]
NEW_METRICS = {
    "per request": (
        Metric(
            name="answer_tok_s",
            unit="tok/s",
            better="max",
            doc="completion_tokens / e2e_s",
            per_request=lambda trace: (trace.completion_tokens or 0) / (trace.chunk_times_s[-1] - trace.sent_s),
            tails=("p50", "max"),
        ),
        {"answer_tok_s": 8 / 3, "answer_p50_tok_s": 8 / 3, "answer_max_tok_s": 4.0},
    ),
    "per window": (
        Metric(
            name="idle_share",
            unit="",
            better="min",
            doc="share of the wall time after the last chunk",
            per_window=lambda each: 1 - (each.traces[-1].chunk_times_s[-1] - each.traces[0].sent_s) / each.wall_s,
        ),
        {"idle_share": 0.25},
    ),
    "pooled": (
        Metric(
            name="stamp_s",
            unit="s",
            better="max",
            doc="arrival of a chunk",
            pooled=lambda each: [time_s for trace in each.traces for time_s in trace.chunk_times_s],
            tails=("max",),
            tails_only=True,
        ),
        {"stamp_max_s": 24.0},
    ),
}


@pytest.mark.parametrize(("row", "values"), NEW_METRICS.values(), ids=list(NEW_METRICS))
def test_a_metric_is_one_row(monkeypatch: pytest.MonkeyPatch, row: Metric, values: dict[str, float]) -> None:
    """What a contributor does: a formula, and a row with it. Nothing else knows the name."""
    experiment = make_experiment()
    name = next(iter(values))
    for known in values:
        with pytest.raises(ConfigError):
            direction(f"{WORKLOAD}/{known}")
    assert undocumented([metric_row(row)], "## Metrics") == [metric_row(row)]

    monkeypatch.setattr(metrics, "METRICS", (*METRICS, row))
    measured = measure_windows([window(repeat) for repeat in range(3)], WARM_UP)
    assert {known: measured.metrics[known].value for known in values} == pytest.approx(values)
    assert direction(f"{WORKLOAD}/{name}") == row.better
    check_metric(experiment, f"{WORKLOAD}/{name}", "objective.metric")
    recorded = [Recorded(result=make_result("a", measurements={WORKLOAD: measured}))]
    stream = io.StringIO()
    report.write_csv(stream, recorded)
    cells = {line["metric"]: line["value"] for line in csv.DictReader(io.StringIO(stream.getvalue()))}
    assert float(cells[name]) == pytest.approx(values[name])
    document = json.loads(json.dumps(report.document(experiment, recorded, None), allow_nan=False))
    assert document["trials"][0]["measurements"][WORKLOAD][name]["value"] == pytest.approx(values[name])


def test_a_memory_value_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Metric(name="draft_gib", unit="GiB", better="min", doc="memory of the draft's weights, from the engine's log")
    with pytest.raises(ConfigError):
        check_metric(make_experiment(), "memory/draft_gib", "objective.constraints")
    monkeypatch.setattr(metrics, "MEMORY_METRICS", (*MEMORY_METRICS, row))
    check_metric(make_experiment(), "memory/draft_gib", "objective.constraints")
    assert direction("memory/draft_gib") == "min"
    assert undocumented([metric_row(row)], "### Memory") == [metric_row(row)]


def test_a_metric_without_a_direction_is_no_metric() -> None:
    with pytest.raises(TypeError, match="better"):
        Metric(name="x_s", unit="s", doc="x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "odd",
    [
        {"per_request": lambda trace: 1.0, "per_window": lambda each: 1.0},
        {"per_window": lambda each: 1.0, "tails": ("p99",)},
        {"pooled": lambda each: [1.0], "tails_only": True},
    ],
)
def test_a_row_that_cannot_be_measured_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="x_s"):
        Metric(name="x_s", unit="s", better="min", doc="x", **odd)


def test_a_name_belongs_to_one_row() -> None:
    for table in (METRICS, MEMORY_METRICS):
        names = metric_names(table)
        assert len(set(names)) == len(names)
        assert all(name in find_metric(table, name).names for name in names)
    assert find_metric(METRICS, "ttft_p99_s").name == "ttft_s"
    assert find_metric(METRICS, "client_lag_s") is None
    assert find_metric(MEMORY_METRICS, "gpu11_peak_gib").name == "gpu_peak_gib"


def test_what_is_measured_is_what_the_table_names() -> None:
    assert set(measure_windows([window(0)]).metrics) | {"speedup"} == set(metric_names(METRICS))


def test_directions_that_campaigns_rely_on() -> None:
    """Written down once more on purpose: a changed direction turns every recorded choice around."""
    higher = {name for name in metric_names(METRICS) if direction(f"w/{name}") == "max"}
    assert higher == {
        *("decode_tok_s", "output_tok_s", "prefill_tok_s", "acceptance_rate", "acceptance_length", "speedup"),
        *("tokens_per_chunk", "prompt_tokens", "completion_tokens", "full_concurrency_share"),
    }
    roomier = {name for name in metric_names(MEMORY_METRICS) if direction(f"memory/{name}") == "max"}
    assert roomier == {"kv_available_gib", "kv_tokens", "max_concurrency"}
    assert direction("memory/gpu0_peak_gib") == "min"


def test_the_page_has_exactly_the_tables() -> None:
    assert sorted(rows_under("## Metrics")) == sorted(map(metric_row, (*METRICS, *MEMORY_METRICS)))
    assert rows_under("### Memory") == [*map(metric_row, MEMORY_METRICS)]
