"""What the figures show: their points, intervals and marks, read back from the axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orchestrator.config import Experiment, Workload
from orchestrator.measure.metrics import Quantity
from orchestrator.tracking import figures
from orchestrator.trial import TrialResult
from tests.support.builders import WORKLOAD, make_spec
from tests.support.recorded_sweep import sweep_experiment, sweep_measurement, sweep_result

METRIC = f"{WORKLOAD}/decode_tok_s"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return sweep_experiment(tmp_path)


def axes(figure: Figure) -> Axes:
    (found,) = figure.axes
    return found


def test_the_sweep_is_in_order_with_intervals_a_level_line_and_the_refused(
    experiment: Experiment, tmp_path: Path
) -> None:
    points = [(6, 275.9), (None, 92.9), (4, None), (10, 223.9), (5, 268.2)]
    figure = figures.sweep([sweep_result(experiment, k, decode, tmp_path) for k, decode in points], METRIC)
    (bars,) = axes(figure).containers
    line, _, (segments,) = bars.lines
    assert list(line.get_xdata()) == [5, 6, 10]
    assert list(line.get_ydata()) == [268.2, 275.9, 223.9]
    ends = [(y0, y1) for (_, y0), (_, y1) in segments.get_segments()]
    assert ends[1] == pytest.approx((275.9 * 0.995, 275.9 * 1.005))
    assert [text.get_text() for text in axes(figure).get_legend().get_texts()] == ["no-spec"]
    assert [note.get_text() for note in axes(figure).texts] == ["refused"]
    assert list(axes(figure).get_xticks()) == [4, 5, 6, 10]
    assert axes(figure).get_xlabel() == "num_speculative_tokens"
    assert axes(figure).get_ylim()[0] == 0


def test_trials_that_differ_in_more_than_a_number_stand_by_name(experiment: Experiment, tmp_path: Path) -> None:
    specs = [
        make_spec(
            k=5, experiment=experiment, name=name, params={"engine.args.kv-cache-dtype": dtype, "engine.args.x": x}
        )
        for name, dtype, x in [("fp8", "fp8", True), ("auto", "auto", False)]
    ]
    results = [sweep_result(experiment, 5, 200.0 + i, tmp_path, spec=spec) for i, spec in enumerate(specs)]
    assert figures.swept_parameter(results) is None
    figure = figures.sweep(results, METRIC)
    assert [label.get_text() for label in axes(figure).get_xticklabels()] == ["fp8", "auto"]


def test_a_number_without_an_interval_is_a_point(experiment: Experiment, tmp_path: Path) -> None:
    bare = sweep_measurement(200.0, 5, decode_tok_s=Quantity(value=200.0))
    result = sweep_result(experiment, 5, 200.0, tmp_path, measurements={WORKLOAD: bare})
    (bars,) = axes(figures.sweep([result], METRIC)).containers
    assert list(bars.lines[0].get_ydata()) == [200.0]


def test_acceptance_over_the_position_counted_from_one(experiment: Experiment, tmp_path: Path) -> None:
    figure = figures.acceptance_by_position([sweep_result(experiment, k, 200.0, tmp_path) for k in (2, 3)])
    assert [list(line.get_xdata()) for line in axes(figure).lines] == [[1, 2], [1, 2, 3]]
    assert list(axes(figure).lines[0].get_ydata()) == pytest.approx([0.9, 0.81])


def test_memory_over_time_has_a_line_for_each_source(experiment: Experiment, tmp_path: Path) -> None:
    series = {"gpu0_gib": [(0.0, 1.0), (1.0, 90.0)], "gpu1_gib": [(0.0, 1.0), (1.0, 91.0)]}
    figure = figures.memory_over_time(sweep_result(experiment, 5, 200.0, tmp_path, memory_series=series))
    assert [list(line.get_ydata()) for line in axes(figure).lines] == [[1.0, 90.0], [1.0, 91.0]]


def test_ttft_is_read_from_the_traces_without_failed_requests_and_torn_lines(
    experiment: Experiment, tmp_path: Path
) -> None:
    traces = Path(sweep_result(experiment, 5, 200.0, tmp_path).workdir) / "traces.jsonl"
    with traces.open("a") as lines:
        shape = '"workload": "other", "index": 9, "repeat": 0, "shape": "s", "sent_s": 1.0'
        lines.write(f'{{{shape}, "chunk_times_s": [9.0], "error": "connection reset"}}\n')
        lines.write(f'{{{shape}, "chunk_times_s": []}}\n')
        lines.write(f'{{{shape}, "chunk_ti')
    values = figures.ttft_values(traces)
    assert values == {WORKLOAD: pytest.approx([0.90, 0.91, 0.92, 0.93, 0.94])}
    assert figures.ttft_values(tmp_path / "nothing.jsonl") == {}


def test_the_pareto_front_joins_what_is_not_beaten(experiment: Experiment, tmp_path: Path) -> None:
    def point(k: int, decode: float, ttft: float) -> TrialResult:
        measurement = sweep_measurement(decode, k, ttft_s=Quantity(value=ttft, n=5))
        return sweep_result(experiment, k, decode, tmp_path, measurements={WORKLOAD: measurement})

    results = [
        point(5, 268.2, 0.5),
        point(6, 275.9, 0.9),
        point(7, 262.2, 0.8),
        sweep_result(experiment, 4, None, tmp_path),
    ]
    found = figures.campaign(results, WORKLOAD)
    assert set(found) == {
        METRIC.rpartition("/")[2] + f".{WORKLOAD}",
        "acceptance_by_position",
        f"pareto.{WORKLOAD}",
    }
    everything, front = axes(found[f"pareto.{WORKLOAD}"]).lines
    assert list(everything.get_ydata()) == [268.2, 275.9, 262.2]
    assert list(front.get_xdata()) == [0.5, 0.9]
    assert list(front.get_ydata()) == [268.2, 275.9]


def test_every_workload_has_its_figure_where_no_objective_names_one(experiment: Experiment, tmp_path: Path) -> None:
    experiment = replace(experiment, workloads={"a": Workload(), "b": Workload()})
    both = {name: sweep_measurement(200.0, None) for name in ("a", "b")}
    result = sweep_result(experiment, None, 200.0, tmp_path, measurements=both)
    assert set(figures.campaign([result], None)) == {"decode_tok_s.a", "decode_tok_s.b"}


def test_a_trial_without_numbers_has_no_figures(experiment: Experiment, tmp_path: Path) -> None:
    nothing = sweep_result(experiment, 4, None, tmp_path, memory_series={}, workdir="")
    assert figures.trial(nothing) == {}
    assert figures.campaign([nothing], WORKLOAD) == {}
