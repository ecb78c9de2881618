"""Tables and documents: the same numbers for people and programs, nothing cut, nothing that is not JSON."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from orchestrator import report
from orchestrator.config import Experiment, Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.metrics import MEMORY_METRICS, METRICS, Quantity
from orchestrator.measure.verdict import Level
from orchestrator.outcome import Fact, TrialStatus
from orchestrator.tracking import Recorded
from tests.support.builders import WORKLOAD, K, make_spec, with_verdict
from tests.support.paths import ROOT
from tests.support.recorded_sweep import sweep_experiment, sweep_measurement, sweep_result

REFERENCES = ROOT / "experiments" / "reference"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return sweep_experiment(tmp_path)


@pytest.fixture
def sweep(experiment: Experiment, tmp_path: Path) -> list[Recorded]:
    """The published sweep as results of ours: no speculation, k=4 refused, k=5 and k=6."""
    base = 92.9
    found = []
    for k, decode in [(None, base), (4, None), (5, 268.2), (6, 275.9)]:
        result = sweep_result(experiment, k, decode, tmp_path)
        if decode:
            gain = Quantity(value=decode / base, low=decode / base - 0.05, high=decode / base + 0.05, n=3)
            result = replace(result, measurements={WORKLOAD: sweep_measurement(decode, k, speedup=gain)})
        found.append(Recorded(result=result, run_id=f"run{k}"))
    return found


class Pipe(io.StringIO):
    def isatty(self) -> bool:
        return False


def printed(table: RenderableType, width: int | None = None) -> str:
    stream = Pipe()
    console = Console(file=stream, width=width, highlight=False) if width else report.people_console(stream)
    console.print(table)
    return stream.getvalue()


def row(text: str, name: str) -> list[str]:
    """The cells of one trial's row."""
    found = [line for line in text.splitlines() if re.match(rf"[*+ ] {re.escape(name)} ", line)]
    assert len(found) == 1, text
    return found[0].split()


def test_the_document_has_exactly_the_contract_s_keys(experiment: Experiment, sweep: list[Recorded]) -> None:
    document = report.document(experiment, sweep, sweep[3].result)
    assert set(document) == {"experiment", "trials", "best"}
    assert document["best"] == {"name": "k=6", "run_id": "run6"}
    wanted = {"name", "key", "run_id", "status", "cause", "reason", "params", "measurements", "verdict"}
    assert all(set(found) == wanted for found in document["trials"])
    refused, measured = document["trials"][1], document["trials"][3]
    assert (refused["status"], refused["cause"], refused["measurements"]) == ("refused", "k_below_block_size", {})
    assert refused["verdict"] is None
    numbers = measured["measurements"][WORKLOAD]
    assert numbers["ttft_s"] == {"value": 0.941, "low": 0.93, "high": 0.95, "n": 15, "over": None}
    assert numbers["prefill_tok_s"] is None
    assert numbers["verdict"] == {"level": "valid", "reasons": []}
    assert measured["params"] == {K: 6}
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_a_document_without_a_best_and_without_a_store(experiment: Experiment, sweep: list[Recorded]) -> None:
    unrecorded = [replace(sweep[1], run_id=None)]
    document = report.document(experiment, unrecorded, None)
    assert document["best"] is None
    assert document["trials"][0]["run_id"] is None


def test_a_document_is_strict_json_whatever_the_numbers(experiment: Experiment, sweep: list[Recorded]) -> None:
    odd = sweep_measurement(
        100.0, 6, ttft_s=Quantity(value=math.nan), e2e_s=Quantity(value=1.0, low=-math.inf, high=math.nan)
    )
    odd = replace(odd, acceptance_by_position=(0.9, math.nan))
    result = replace(sweep[3].result, measurements={WORKLOAD: odd})
    document = report.document(experiment, [Recorded(result=result)], result)
    numbers = json.loads(json.dumps(document, allow_nan=False))["trials"][0]["measurements"][WORKLOAD]
    assert numbers["ttft_s"] is None
    assert numbers["e2e_s"] == {"value": 1.0, "low": None, "high": None, "n": 1, "over": None}
    assert numbers["acceptance_by_position"] is None


def test_the_best_is_found_though_it_got_campaign_metrics(experiment: Experiment, sweep: list[Recorded]) -> None:
    best = with_verdict(sweep[3].result, Level.VALID, "synthetic_acceptance")
    assert report.document(experiment, sweep, best)["best"] == {"name": "k=6", "run_id": "run6"}
    again = replace(sweep[3].result, workdir="elsewhere")
    assert report.document(experiment, sweep, again)["best"] is None


@pytest.mark.parametrize("width", [100, None])
def test_the_table_tells_everything_in_a_hundred_columns_and_in_a_pipe(
    experiment: Experiment, sweep: list[Recorded], width: int | None
) -> None:
    text = printed(report.campaign_table(experiment, sweep, sweep[3].result), width)
    assert " ".join(row(text, "k=6")) == "* k=6 complete 275.9 (274.5-277.3) 0.941 0.71 3.20 93.2 2.97x valid 15"
    assert " ".join(row(text, "k=5")) == "k=5 complete 268.2 (266.9-269.5) 0.941 0.71 3.20 93.2 2.89x valid 15"
    assert " ".join(row(text, "no-spec")) == "no-spec complete 92.9 (92.4-93.4) 0.941 - - 93.2 1.00x valid 15"
    assert row(text, "k=4")[1:3] == ["refused", "-"]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= (width or 160)
    said = " ".join(text.split())
    assert "k=4: refused (k_below_block_size): the engine refuses k=4: below the checkpoint's block size 5" in said
    assert "what helps: num_speculative_tokens of 5 or more" in said
    texts = {metric.name: metric.doc for metric in (*METRICS, *MEMORY_METRICS)}
    for column, name in [("decode tok/s", "decode_tok_s"), ("acc. len", "acceptance_length"), ("speed-up", "speedup")]:
        assert f"{column}: {texts[name]}." in said
    assert f"GPU GiB: {texts['gpu_peak_gib']}." in said
    assert "RSS GiB" not in said


def test_a_narrow_terminal_folds_and_cuts_nothing(experiment: Experiment, sweep: list[Recorded]) -> None:
    text = printed(report.campaign_table(experiment, sweep, sweep[3].result), 50)
    assert "…" not in text
    assert "275" in text
    assert max(map(len, text.splitlines())) <= 50


def test_the_numbers_of_the_table_are_those_of_the_document(experiment: Experiment, sweep: list[Recorded]) -> None:
    text = printed(report.campaign_table(experiment, sweep, sweep[3].result))
    for trial in report.document(experiment, sweep, sweep[3].result)["trials"]:
        if numbers := trial["measurements"].get(WORKLOAD):
            decode = numbers["decode_tok_s"]
            shown = f"{decode['value']:.1f} ({decode['low']:.1f}-{decode['high']:.1f})"
            assert shown in " ".join(row(text, trial["name"]))


def test_without_a_best_nothing_is_marked(experiment: Experiment, sweep: list[Recorded]) -> None:
    text = printed(report.campaign_table(experiment, sweep[1:2], None))
    assert not any(line.startswith("* k=") for line in text.splitlines())
    assert "k=4" in text


def test_trials_that_none_beats_in_rate_and_latency_are_marked(experiment: Experiment, tmp_path: Path) -> None:
    found = []
    for k, decode, ttft in [(5, 268.2, 0.5), (6, 275.9, 0.9), (7, 262.2, 0.8)]:
        measurement = sweep_measurement(decode, k, ttft_s=Quantity(value=ttft, n=5))
        result = sweep_result(experiment, k, decode, tmp_path, measurements={WORKLOAD: measurement})
        found.append(Recorded(result=result))
    text = printed(report.campaign_table(experiment, found, found[1].result))
    assert [row(text, name)[0] for name in ("k=5", "k=6", "k=7")] == ["+", "*", "k=7"]


def test_only_params_that_differ_and_that_no_name_says_are_columns(
    experiment: Experiment, sweep: list[Recorded], tmp_path: Path
) -> None:
    text = printed(report.campaign_table(experiment, sweep, None))
    assert "num_speculative_tokens " not in text.splitlines()[1]
    named = []
    for name, rate, length in [("short", 210.0, 8192), ("long", 200.0, 65536)]:
        params = {K: 5, "engine.args.max-model-len": length}
        spec = make_spec(k=5, experiment=experiment, name=name, params=params)
        named.append(Recorded(result=sweep_result(experiment, 5, rate, tmp_path, spec=spec)))
    text = printed(report.campaign_table(experiment, named, None))
    assert "max-model-len" in text.splitlines()[1]
    assert "num_speculative_tokens" not in text
    assert row(text, "long")[:2] == ["long", "65536"]


def test_params_that_end_alike_are_told_apart(experiment: Experiment, tmp_path: Path) -> None:
    named = []
    for name, a, b in [("x", 1, 2), ("y", 3, 4)]:
        params = {"engine.args.draft.max-len": a, "engine.args.target.max-len": b}
        spec = make_spec(k=5, experiment=experiment, name=name, params=params)
        named.append(Recorded(result=sweep_result(experiment, 5, 200.0, tmp_path, spec=spec)))
    header = printed(report.campaign_table(experiment, named, None), 140).splitlines()[1]
    assert "draft.max-len" in header
    assert "target.max-len" in header


def test_every_workload_has_its_table_the_objective_s_first(experiment: Experiment, tmp_path: Path) -> None:
    workloads = {"story-chat": Workload(), WORKLOAD: Workload()}
    experiment = replace(experiment, workloads=workloads)
    both = {"story-chat": sweep_measurement(156.2, 6), WORKLOAD: sweep_measurement(275.9, 6)}
    fast = sweep_result(experiment, 6, 275.9, tmp_path, measurements=both)
    refused = sweep_result(experiment, 4, None, tmp_path)
    text = printed(report.campaign_table(experiment, [Recorded(result=refused), Recorded(result=fast)], fast))
    assert text.index(WORKLOAD) < text.index("275.9") < text.index("story-chat") < text.index("156.2")
    assert len(re.findall(r"^  k=4 ", text, re.MULTILINE)) == 1


def test_doubts_about_a_number_are_told_below_the_table(experiment: Experiment, sweep: list[Recorded]) -> None:
    suspect = with_verdict(sweep[3].result, Level.SUSPECT, "first_touch_outlier")
    text = printed(report.campaign_table(experiment, [Recorded(result=suspect)], None))
    assert "suspect" in row(text, "k=6")
    assert f"k=6: {WORKLOAD}: suspect: first_touch_outlier: first_touch_outlier was seen" in text


def test_host_memory_where_there_is_no_gpu(experiment: Experiment, tmp_path: Path) -> None:
    memory = {"host_rss_peak_gib": Fact(value=3.61, source="process tree")}
    result = sweep_result(experiment, 6, 185.0, tmp_path, memory=memory)
    text = printed(report.campaign_table(experiment, [Recorded(result=result)], result))
    assert "RSS GiB" in text
    assert "GPU GiB" not in text
    assert "3.61" in row(text, "k=6")


def test_unknown_memory_is_not_zero(experiment: Experiment, tmp_path: Path) -> None:
    result = sweep_result(experiment, 6, 185.0, tmp_path, memory={})
    text = printed(report.campaign_table(experiment, [Recorded(result=result)], result))
    assert row(text, "k=6")[-2:] == ["valid", "15"]
    assert "GiB" not in text.splitlines()[1], "a column in which nobody has a value is left out"


def test_markup_in_names_and_logs_is_text(experiment: Experiment, tmp_path: Path) -> None:
    spec = make_spec(k=6, experiment=experiment, name="[bold]k=6[/x]")
    result = sweep_result(experiment, 6, None, tmp_path, spec=spec, reason="[red] at [/usr/lib]")
    text = printed(report.campaign_table(experiment, [Recorded(result=result)], None))
    assert "[bold]k=6[/x]" in text
    assert "[red] at [/usr/lib]" in text


def test_an_ascii_terminal_is_enough(experiment: Experiment, sweep: list[Recorded]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    report.people_console(stream).print(report.campaign_table(experiment, sweep, sweep[3].result))
    report.people_console(stream).print(report.compare(sweep[2], sweep[3]).table())
    stream.flush()
    assert b"275.9" in stream.buffer.getvalue()


def test_a_comparison_tells_a_real_difference_from_noise(experiment: Experiment, tmp_path: Path) -> None:
    def run(name: str, decode: float, noise: float) -> Recorded:
        measurement = sweep_measurement(decode, 6, noise=noise)
        spec = make_spec(k=6, experiment=experiment, name=name)
        result = sweep_result(experiment, 6, decode, tmp_path, spec=spec, measurements={WORKLOAD: measurement})
        return Recorded(result=result, run_id=name)

    clear = report.compare(run("a", 200.0, 0.005), run("b", 220.0, 0.005))
    found = clear.document()["measurements"][WORKLOAD]["decode_tok_s"]
    assert found["ratio"]["value"] == pytest.approx(1.1)
    assert found["ratio"]["low"] > 1
    assert found["differs"] is True
    # Slow and fast in turn, as noise is: repeat by repeat b is no better.
    noisy = report.compare(run("a", 200.0, 0.1), run("b", 206.0, -0.1)).document()
    assert noisy["measurements"][WORKLOAD]["decode_tok_s"]["differs"] is False
    assert noisy["measurements"][WORKLOAD]["acceptance_rate"]["differs"] is None
    text = printed(clear.table())
    line = next(line for line in text.splitlines() if "decode_tok_s" in line)
    assert "1.100" in line
    assert line.split()[-1] == "yes"


def test_a_comparison_names_what_differs_and_only_that(experiment: Experiment, sweep: list[Recorded]) -> None:
    other = dict(sweep[3].result.provenance) | {"engine_version": "0.27.0", "hostname": "node2", "driver": "580.1"}
    changed = replace(sweep[3], result=replace(sweep[3].result, provenance=other))
    document = report.compare(sweep[2], changed).document()
    assert document["params"] == {K: {"a": "5", "b": "6"}}
    assert document["versions"] == {
        "engine_version": {"a": "0.26.0", "b": "0.27.0"},
        "driver": {"a": None, "b": "580.1"},
    }
    assert document["environment"] == {"hostname": {"a": "node", "b": "node2"}}
    assert document["memory"]["gpu1_peak_gib"] == {"a": 93.16, "b": 93.16}
    assert document["a"]["name"] == "k=5"
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    text = printed(report.compare(sweep[2], changed).table())
    for part in (K, "0.27.0", "node2", "1,371,214", "A: k=5", "B: k=6"):
        assert part in text


def test_a_comparison_warns_of_what_cannot_be_compared(
    experiment: Experiment, sweep: list[Recorded], tmp_path: Path
) -> None:
    synthetic = with_verdict(
        replace(sweep[3].result, speculation=Speculation(proposals=6, is_synthetic=True)),
        Level.SUSPECT,
        "synthetic_acceptance",
    )
    longer = replace(synthetic.spec, workloads={WORKLOAD: Workload(output_tokens=2048)})
    document = report.compare(sweep[2], Recorded(result=replace(synthetic, spec=longer))).document()
    notes = " ".join(document["notes"])
    for part in ("k=6 is suspect: synthetic_acceptance", "comparable only with its like", "was not the same work"):
        assert part in notes


def test_a_failed_run_can_be_compared(experiment: Experiment, sweep: list[Recorded]) -> None:
    document = report.compare(sweep[1], sweep[3]).document()
    found = document["measurements"][WORKLOAD]["decode_tok_s"]
    assert (found["a"], found["ratio"], found["differs"]) == (None, None, None)
    assert "275.9" in printed(report.compare(sweep[1], sweep[3]).table())


def with_references(experiment: Experiment, tmp_path: Path) -> Experiment:
    folder = tmp_path / "experiments" / "reference"
    folder.mkdir(parents=True)
    for path in REFERENCES.glob("*.csv"):
        (folder / path.name).write_bytes(path.read_bytes())
    return replace(experiment, engine=replace(experiment.engine, root=str(tmp_path)))


def test_published_numbers_stand_beside_ours(experiment: Experiment, sweep: list[Recorded], tmp_path: Path) -> None:
    experiment = with_references(experiment, tmp_path)
    document = report.reference_document(experiment, sweep)
    rows = {(r["num_speculative_tokens"], r["metric"]): r for r in document["rows"]}
    assert rows["6", "decode_tok_s"]["published"] == 275.9
    assert rows["6", "decode_tok_s"]["trial"] == "k=6"
    assert rows["6", "decode_tok_s"]["ratio"] == pytest.approx(1.0)
    assert rows["0", "decode_tok_s"]["trial"] == "no-spec"
    assert rows["5", "tpot_s"]["published"] == pytest.approx(0.00373)
    assert rows["5", "tpot_s"]["ratio"] == pytest.approx(1 / 268.2 / 0.00373)
    assert (rows["4", "status"]["published"], rows["4", "status"]["ours"]) == ("refused", "refused")
    assert rows["7", "decode_tok_s"]["trial"] is None
    assert document["source"][0].startswith("source: ")
    json.dumps(document, allow_nan=False)
    text = printed(report.reference_table(experiment, sweep))
    line = next(line for line in text.splitlines() if line.startswith("6 ") and "decode_tok_s" in line)
    assert " ".join(line.split()) == "6 decode_tok_s 275.9 275.9 (274.5-277.3) 1.00x"
    assert any("7 " in line and "not run" in line for line in text.splitlines())


def test_a_published_table_with_several_checkpoints(experiment: Experiment, tmp_path: Path) -> None:
    experiment = replace(with_references(experiment, tmp_path), name="mtp-depth")
    measurement = sweep_measurement(220.0, 3, output_tok_s=Quantity(value=193.0, n=3))
    result = sweep_result(experiment, 3, 220.0, tmp_path, measurements={WORKLOAD: measurement})
    rows = report.reference_document(experiment, [Recorded(result=result)])["rows"]
    ours = [r for r in rows if r["trial"] and r["metric"] == "output_tok_s"]
    assert {(r["checkpoint"], r["published"]) for r in ours} == {("canada-w4a16-fp8", 193.0), ("official", 149.5)}
    rate = next(r for r in rows if r["metric"] == "acceptance_rate" and r["trial"])
    assert rate["ratio"] == pytest.approx(0.71 / 0.711)


def test_columns_of_the_other_engine_are_not_ours(experiment: Experiment, tmp_path: Path) -> None:
    experiment = replace(with_references(experiment, tmp_path), name="vllm-vs-sglang")
    engine = replace(experiment.engine, kind="sglang")
    result = sweep_result(experiment, 5, 317.0, tmp_path)
    rows = report.reference_document(replace(experiment, engine=engine), [Recorded(result=result)])["rows"]
    assert [(r["workload"], r["published"]) for r in rows] == [(WORKLOAD, 317.0), ("story-chat", 178.5)]
    assert [r["trial"] for r in rows] == ["k=5", None]


def test_a_published_p99_of_few_requests_has_our_maximum_beside_it(experiment: Experiment, tmp_path: Path) -> None:
    experiment = replace(with_references(experiment, tmp_path), name="tail-of-few")
    (tmp_path / "experiments" / "reference" / "tail_of_few.csv").write_text(
        "# source: by hand\nnum_speculative_tokens,ttft_p50_s,ttft_p99_s\n5,0.2,0.5\n"
    )
    most = {"ttft_p50_s": Quantity(value=0.2, n=300), "ttft_max_s": Quantity(value=0.6, n=300)}
    measurement = sweep_measurement(220.0, 5, **most)
    result = sweep_result(experiment, 5, 220.0, tmp_path, measurements={WORKLOAD: measurement})
    rows = {r["metric"]: r for r in report.reference_document(experiment, [Recorded(result=result)])["rows"]}
    sentence = f"{WORKLOAD}/ttft_p99_s stands for the maximum of 300: a p99 needs 459 requests"
    assert (rows["ttft_p99_s"]["ours"]["value"], rows["ttft_p99_s"]["remark"]) == (0.6, sentence)
    assert rows["ttft_p50_s"]["remark"] is None
    table = printed(report.reference_table(experiment, [Recorded(result=result)]))
    assert f"k=5: {sentence}" in " ".join(table.split())


def test_an_experiment_that_nobody_published(experiment: Experiment, sweep: list[Recorded]) -> None:
    unknown = replace(experiment, name="mine")
    assert report.reference_document(unknown, sweep) is None
    assert "no published numbers named mine" in printed(report.reference_table(unknown, sweep))


def test_a_plain_table_and_the_metrics_of_a_bench(experiment: Experiment, sweep: list[Recorded]) -> None:
    text = printed(report.plain_table(["check", "", "detail"], [["gpus", "FAILS", "[none] found"]]))
    assert text.splitlines()[1].split() == ["gpus", "FAILS", "[none]", "found"]
    text = printed(report.measurements_table(sweep[3].result.measurements))
    assert "0.941 (0.93-0.95)" in text
    assert "prefill_tok_s" not in text


def test_a_pruned_trial_keeps_its_numbers(experiment: Experiment, sweep: list[Recorded]) -> None:
    pruned = replace(sweep[2].result, status=TrialStatus.PRUNED, cause="clearly_worse")
    text = printed(report.campaign_table(experiment, [Recorded(result=pruned)], None))
    assert row(text, "k=5")[1:3] == ["pruned", "268.2"]
