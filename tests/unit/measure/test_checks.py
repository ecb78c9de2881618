"""The table of checks, and what needs no server to be judged: log lines, counters, how reasons add up."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config import Workload
from orchestrator.engines import ENGINES
from orchestrator.measure import checks
from orchestrator.measure.checks import CHECKS, LEVELS, Check, judge, judge_among_peers
from orchestrator.measure.evidence import Case, Evidence
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.metrics import measure_windows
from orchestrator.measure.verdict import Level, Reason, Verdict, worst
from tests.support.definitions import check_row, rows_under, undocumented
from tests.support.paths import RECORDED, ROOT


def answered(count: int = 3, **rest: Any) -> list[Window]:
    known = {"prompt_tokens": 100, "completion_tokens": 8, "asked_tokens": 8, "finish_reason": "length"}
    return [
        Window(
            traces=(
                RequestTrace(
                    **{
                        "index": 0,
                        "repeat": repeat,
                        "shape": "a",
                        "sent_s": 10.0 * repeat,
                        "chunk_times_s": (10.0 * repeat + 1, 10.0 * repeat + 2),
                        "chunk_tokens": (4, 4),
                        **known,
                        **rest,
                    }
                ),
            ),
            wall_s=2.0,
        )
        for repeat in range(count)
    ]


def judged(windows: list[Window], **evidence: Any) -> set[str]:
    warm = [RequestTrace(index=0, repeat=-1, shape="a", sent_s=-5.0)]
    return {r.code for r in judge(Workload(), measure_windows(windows, warm), windows, Evidence(**evidence)).reasons}


def test_nothing_wrong_is_valid() -> None:
    assert judged(answered()) == set()


SERVING = [
    '(APIServer pid=1) INFO:     127.0.0.1:50000 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 11-29 14:03:36 [loggers.py:257] Engine 000: Avg prompt throughput: 1.0 tokens/s",
    "(EngineCore pid=2) INFO 11-29 14:03:36 [compilation.py:317] Enabled custom fusions: norm_quant, act_quant",
    "[2026-11-29 14:27:53] Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 200.1",
    "slot print_timing: id  0 | task 5 | draft acceptance = 0.57",
]


@pytest.mark.parametrize("line", SERVING)
@pytest.mark.parametrize("kind", ENGINES)
def test_ordinary_lines_of_a_serving_engine_are_not_compiles(line: str, kind: str) -> None:
    assert "compile_in_window" not in judged(answered(), log=line, dialect=ENGINES[kind].log)


def test_the_compile_lines_of_a_real_engine_are_found() -> None:
    log = (RECORDED / "vllm026_h200_dsv4_dspark.log").read_text(encoding="utf-8")
    after_ready = log[log.index("Kernel JIT monitor activated") :]
    lines = [line for line in after_ready.splitlines() if re.search("JIT compilation during|begins to compile", line)]
    assert len(lines) > 2
    dialect = ENGINES["vllm"].log
    assert all("compile_in_window" in judged(answered(), log=line, dialect=dialect) for line in lines)
    usage = (RECORDED / "vllm_cpu_fail_bad_flag.log").read_text()
    assert "compile_in_window" not in judged(answered(), log=usage, dialect=dialect)


OVERRIDE = (
    "(APIServer pid=8267) WARNING 11-29 14:17:18 [model.py:1546] Default vLLM sampling parameters have been "
    "overridden by the model's `generation_config.json`: `{'top_k': 20, 'repetition_penalty': 1.05}`."
)


def test_sampling_that_the_engine_changes_is_noted_wherever_its_log_says_so() -> None:
    windows = answered()
    for place in ("log_before", "log"):
        evidence = Evidence(**{place: f"INFO up\n{OVERRIDE}\n"}, dialect=ENGINES["vllm"].log)
        verdict = judge(Workload(), measure_windows(windows), windows, evidence)
        note = next(reason for reason in verdict.reasons if reason.code == "sampling_overridden")
        assert verdict.level is Level.VALID
        assert "'repetition_penalty': 1.05" in note.detail
    assert "sampling_overridden" not in judged(answered(), log_before="\n".join(SERVING))


def test_cached_tokens_up_to_the_template_are_allowed() -> None:
    # 100 prompt tokens of which 80 are the text: 20 are template and nonce.
    template, text = answered(cached_tokens=16), answered(cached_tokens=64)
    assert "prefix_cache_hits" not in judged(template, text_tokens=(80,))
    assert "prefix_cache_hits" in judged(text, text_tokens=(80,))
    assert "prefix_cache_hits" not in judged(text)
    assert "prefix_cache_hits" in judged(answered(cached_tokens=96))


@pytest.mark.parametrize("samples", [20, 43, 44, 500])
def test_a_late_client_is_found_in_few_samples(samples: int) -> None:
    """The metric client_lag_p90_s needs 44 samples. The check, which makes a measurement invalid, needs 20."""
    late, calm = ([replace(w, loop_lags_s=(lag_s,) * samples) for w in answered(1)] for lag_s in (0.2, 0.001))
    assert "client_late" in judged(late)
    assert not {"client_late", "client_jitter"} & judged(calm)
    assert (measure_windows(late).metrics["client_lag_p90_s"] is None) is (samples < 44)


def test_jitter_of_a_client_is_found_where_there_is_no_p99() -> None:
    windows = [replace(w, loop_lags_s=(0.001,) * 97 + (0.2,) * 3) for w in answered(1)]
    assert measure_windows(windows).metrics["client_lag_p99_s"] is None
    assert "client_jitter" in judged(windows)
    assert "client_late" not in judged(windows)


def test_an_answer_that_was_cut_without_a_reason_is_short() -> None:
    assert "short_output" in judged(answered(completion_tokens=5, chunk_tokens=(2, 3)))
    assert "short_output" in judged(answered(completion_tokens=5, chunk_tokens=(2, 3), finish_reason=None))
    assert "short_output" not in judged(answered(completion_tokens=5, chunk_tokens=(2, 3), finish_reason="stop"))


@pytest.mark.parametrize(
    ("rates", "remembers"),
    [
        # SGLang's n-gram corpus, and the same emptied before each repeat (experiments/drafter-memory).
        ((0.19, 0.85, 0.91, 0.98, 0.98), True),
        ((0.12, 0.62, 0.84, 0.93, 0.97), True),
        ((0.07, 0.07, 0.07, 0.09, 0.07), False),
        # Good at it from the first: what is left to learn shows in the last tenth.
        ((0.66, 0.97, 0.98), True),
        # Recorded runs of drafters without a memory.
        ((0.79, 0.79, 0.81, 0.8, 0.78), False),
        ((0.37, 0.56, 0.49), False),
        ((0.54, 0.69, 0.71), False),
        ((0.61, 0.61, 0.61), False),
        # Hardly any drafts are right: the rate of a few varies.
        ((0.05, 0.12, 0.11), False),
        ((0.5,), False),
        ((None, 0.9, 0.9), False),
        ((), False),
    ],
)
def test_a_drafter_that_knows_the_answers_is_told_from_one_that_is_good(
    rates: tuple[float | None, ...], remembers: bool
) -> None:
    windows = answered()
    measurement = replace(measure_windows(windows, []), repeats={"acceptance_rate": rates})
    found = judge(Workload(), measurement, windows, Evidence())
    assert ("drafter_remembers" in {reason.code for reason in found.reasons}) is remembers


def test_reasons_add_up_to_the_worst_level(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict_with(*codes: str) -> Verdict:
        found = [replace(check, find=lambda case: "seen") for check in CHECKS if check.code in codes]
        monkeypatch.setattr(checks, "CHECKS", tuple(found))
        return judge(Workload(), measure_windows([]), [], Evidence())

    assert verdict_with() == Verdict(level=Level.VALID)
    assert verdict_with("bunched_chunks").level is Level.VALID
    few = verdict_with("few_repeats", "bunched_chunks")
    assert few.level is Level.SUSPECT
    late = verdict_with("client_late", "few_repeats")
    assert late.level is Level.INVALID
    assert [reason.code for reason in late.reasons] == ["client_late", "few_repeats"]
    every = (*few.reasons, Reason(code="client_late", detail="seen"))
    assert worst([few, late, verdict_with()]) == Verdict(level=Level.INVALID, reasons=every)
    assert worst([]) == Verdict(level=Level.VALID)


def test_a_check_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contributor does: a function of the case, and a row with it. Nothing else knows the code."""

    def slow_minute(case: Case) -> str | None:
        slow = [window for window in case.windows if window.wall_s > 60]
        return f"{len(slow)} of {len(case.windows)} repeats took more than a minute" if slow else None

    row = Check(code="slow_minute", level=Level.SUSPECT, find=slow_minute, doc="a repeat took more than 60 s: noise")
    assert undocumented([check_row(row)], "## Verdicts") == [
        "| `slow_minute` | suspect | a repeat took more than 60 s: noise |"
    ]
    slow = [replace(answered(1)[0], wall_s=61.0), *answered()[1:]]
    assert judged(slow) == set()
    monkeypatch.setattr(checks, "CHECKS", (*CHECKS, row))
    assert judged(answered()) == set()
    verdict = judge(Workload(), measure_windows(slow), slow, Evidence())
    assert Reason(code="slow_minute", detail="1 of 3 repeats took more than a minute") in verdict.reasons
    assert verdict.level is Level.SUSPECT


def test_a_check_among_peers_is_asked_when_they_are_known_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measure_windows(answered())
    row = Check(
        code="alone",
        level=Level.INVALID,
        find=lambda case: None if len(case.peers) > 1 else "there is no other trial",
        doc="",
        among_peers=True,
    )
    monkeypatch.setattr(checks, "CHECKS", (*CHECKS, row))
    assert judged(answered()) == set()
    case = Case(workload=Workload(), measurement=measurement, peers=(measurement,))
    before = Verdict(level=Level.SUSPECT, reasons=(Reason(code="few_repeats", detail="2 of at least 3"),))
    after = judge_among_peers(before, case)
    assert after.level is Level.INVALID
    assert [reason.code for reason in after.reasons] == ["few_repeats", "alone"]
    assert judge_among_peers(after, case) == after
    assert judge_among_peers(before, replace(case, peers=(measurement, measurement))) == before


def test_a_code_stands_once_and_the_page_has_exactly_the_table() -> None:
    assert len(LEVELS) == len(CHECKS)
    assert sorted(rows_under("## Verdicts")) == sorted(map(check_row, CHECKS))


def test_the_codes_of_the_design_are_those_of_the_table() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = design.split("## 7. Verdicts", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section)) <= set(LEVELS)


def test_the_verdict_is_data_that_needs_neither_engines_nor_numpy() -> None:
    loaded = "import sys, orchestrator.measure.verdict; print([m for m in sys.modules if m.startswith(%r)])"
    for module in ("numpy", "orchestrator.engines"):
        run = subprocess.run(
            [sys.executable, "-c", loaded % module], cwd=ROOT, capture_output=True, check=True, text=True
        )
        assert run.stdout.strip() == "[]"
