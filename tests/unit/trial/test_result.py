"""result.json and memory.csv: what is written is read back equal, strictly, whatever a string holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import trial
from orchestrator.engines.base import Speculation
from orchestrator.outcome import Fact
from tests.support.builders import make_result, make_spec
from tests.support.recorded_sweep import sweep_experiment, sweep_result

HOSTILE = 'ünïcode 猫 \x00 \x1b[31m \r\n \u2028 \u2029 \x85 \\u0041 \\ \'"[1, 2]", {"a": 1}'
SERIES = {"gpu0_used_gib": [(0.0, 1.5), (0.5, 92.9041), (1.503, 1e-9)], 'host, "rss"_gib': [(0.5, 0.1), (2.0, 0.2)]}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


@pytest.fixture
def result(tmp_path: Path) -> trial.TrialResult:
    return sweep_result(sweep_experiment(tmp_path), 6, 275.9, tmp_path)


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} in result.json")

    return json.loads(text, parse_constant=refuse)


def test_a_result_is_read_back_as_it_was_written(result: trial.TrialResult, tmp_path: Path) -> None:
    trial.write_result(replace(result, memory_series=SERIES), tmp_path)
    assert trial.read_result(tmp_path) == replace(result, memory_series=SERIES)
    assert trial.from_json((tmp_path / "result.json").read_bytes()) == result
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["memory.csv", "result.json"]


@given(DOCUMENTS)
def test_any_document_is_strict_json_and_the_same_again(document: Any) -> None:
    point = make_spec(k=6)
    written = make_result(point, launch={"document": document})
    read = strictly(trial.to_json(written))["launch"]["document"]
    assert json.dumps(read) == json.dumps(document)


def test_hostile_text_survives_in_values_and_keys(result: trial.TrialResult) -> None:
    odd = replace(
        result, reason=HOSTILE, facts={HOSTILE: Fact(value=1e300, source=HOSTILE)}, launch={HOSTILE: [HOSTILE]}
    )
    assert trial.from_json(trial.to_json(odd)) == odd


def test_a_lone_surrogate_does_not_cost_the_result(result: trial.TrialResult, tmp_path: Path) -> None:
    """An argument or a path that is not UTF-8 reaches Python as one."""
    odd = replace(result, launch={"argv": ["--model", "caf\udce9"]}, reason="\udc80")
    trial.write_result(odd, tmp_path)
    assert trial.read_result(tmp_path) == odd


def test_a_number_that_is_not_finite_is_refused(result: trial.TrialResult) -> None:
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            trial.to_json(replace(result, facts={"k_gib": Fact(value=number, source="")}))


def test_a_quantity_a_fact_and_a_series_of_repeats_are_one_line_each(result: trial.TrialResult) -> None:
    lines = trial.to_json(replace(result, memory_series=SERIES)).splitlines()
    assert '    "ttft_s": [0.94, null, 0.95]' in lines
    assert '    "prefill_tok_s": null,' in lines
    assert '    "acceptance_rate": {"value": 0.71, "low": null, "high": null, "n": 3, "over": null},' in lines
    assert '  "gpu0_peak_gib": {"value": 92.94, "source": "NVML"},' in lines
    assert ' "status": "complete",' in lines
    assert "memory_series" not in "".join(lines)


def test_a_number_says_what_its_interval_is_over_and_an_older_one_does_not(result: trial.TrialResult) -> None:
    text = trial.to_json(result)
    assert trial.from_json(text) == result
    older = trial.from_json(re.sub(r', "over": (null|"\w+")', "", text))
    quantities = [q for m in older.measurements.values() for q in m.metrics.values() if q is not None]
    assert quantities
    assert all(quantity.over is None for quantity in quantities)
    told = replace(
        result,
        measurements={
            name: replace(m, metrics={k: replace(q, over="repeats") if q else None for k, q in m.metrics.items()})
            for name, m in result.measurements.items()
        },
    )
    assert trial.from_json(trial.to_json(told)) == told


def test_another_version_and_a_torn_file_are_refused(result: trial.TrialResult) -> None:
    text = trial.to_json(result)
    with pytest.raises(ValueError, match="schema_version 3, this program reads 1 and 2"):
        trial.from_json(text.replace('"schema_version": 2', '"schema_version": 3', 1))
    with pytest.raises(ValueError, match=r"delimiter|value|Unterminated|Expecting"):
        trial.from_json(text[:-20])


@pytest.mark.parametrize(
    ("known", "speculation"),
    [
        ({"proposals": 4}, Speculation(proposals=4)),
        ({"proposals": 2, "synthetic_acceptance": True}, Speculation(proposals=2, is_synthetic=True)),
        ({"proposals": None, "synthetic_acceptance": False}, None),
    ],
)
def test_version_1_is_read_with_its_series(
    result: trial.TrialResult, tmp_path: Path, known: dict[str, Any], speculation: Speculation | None
) -> None:
    document = json.loads(trial.to_json(result))
    del document["speculation"]
    document |= {**known, "schema_version": 1, "memory_series": SERIES}
    (tmp_path / "result.json").write_text(json.dumps(document))
    read = trial.read_result(tmp_path)
    assert (read.speculation, read.memory_series) == (speculation, SERIES)
    # Written anew, as by a resumed campaign, it is version 2.
    trial.write_result(read, tmp_path)
    assert trial.read_result(tmp_path) == read
    assert json.loads((tmp_path / "result.json").read_text())["schema_version"] == 2


def test_one_row_a_time_and_an_empty_field_where_a_series_has_no_value() -> None:
    assert trial.memory_csv({"a_gib": [(0.0, 1.0), (0.5, 2.0)], "b_gib": [(0.5, 3.0), (1.0, 4.0)], "c_gib": []}) == (
        "time_s,a_gib,b_gib,c_gib\n0.0,1.0,,\n0.5,2.0,3.0,\n1.0,,4.0,\n"
    )


POINTS = st.dictionaries(st.floats(0, 1e6), st.floats(allow_nan=False, allow_infinity=False)).map(
    lambda points: sorted(points.items())
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs", "Cc"])), POINTS, max_size=3))
def test_any_series_are_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, series: dict[str, list[tuple[float, float]]]
) -> None:
    path = tmp_path_factory.mktemp("memory") / "memory.csv"
    path.write_text(trial.memory_csv(series), encoding="utf-8", newline="")
    assert trial.read_memory(path) == series


@pytest.mark.parametrize("content", [None, b"", b"time_s,a_gib\n0.0", b"time_s,a_gib\n0.0,x\n", b"time_s,a\xff\n"])
def test_a_result_counts_without_its_series(result: trial.TrialResult, tmp_path: Path, content: bytes | None) -> None:
    trial.write_result(replace(result, memory_series=SERIES), tmp_path)
    (tmp_path / "memory.csv").unlink()
    if content is not None:
        (tmp_path / "memory.csv").write_bytes(content)
    assert trial.read_result(tmp_path) == result
