"""The parts of a verdict that need no server: texts, log lines, and how reasons add up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.config import Workload
from orchestrator.metrics import RequestTrace, Window, measure_windows
from orchestrator.verdict import (
    LEVELS,
    Evidence,
    Level,
    Reason,
    Verdict,
    is_looping,
    judge,
    method_name,
    verdict_of,
    worst,
)

ROOT = Path(__file__).parent.parent
RECORDED = Path(__file__).parent / "recorded"
CHINESE = (
    "春天的早晨，老渔夫推开木门，看见海面上漂着一只没有人的小船。他想起三十年前失踪的兄弟，于是把网放下，慢慢走向码头。"
    "孩子们在沙滩上追逐海鸥，谁也没有注意到潮水正在悄悄退去。船舱里放着一盏还在燃烧的油灯，灯下压着一封信，信纸已经被海水打湿，"
    "字迹却仍然清楚。他读完以后沉默了很久，最后把信折好，放进贴身的口袋，转身回家点起了炉火。妻子问他看见了什么，他只说天气要变了。"
)
WRITTEN = [
    *sorted((ROOT / "conf" / "prompts").rglob("*.*")),
    *sorted((ROOT / "orchestrator").glob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_real_prose_and_code_do_not_loop(path):
    text = path.read_text(encoding="utf-8")
    assert not is_looping(text)
    # An answer is short and may begin anywhere.
    assert not any(is_looping(text[start : start + 1500]) for start in range(0, len(text), 1500))


def test_chinese_tables_and_lists_do_not_loop():
    assert not is_looping(CHINESE)
    assert not is_looping("".join(f"| item {i} | {i * 37 % 101} | {i * i} |\n" for i in range(60)))
    assert not is_looping("the " * 20)


PARAGRAPH = (ROOT / "conf" / "prompts" / "story-chat" / "1-lighthouse.txt").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "the " * 100,
        "I think that the answer is not quite what you expected. " * 10,
        "我觉得这个问题很好。" * 40,
        "".join(f"{i}. The quick brown fox jumps over the lazy dog and goes home.\n" for i in range(60)),
        PARAGRAPH * 6,
        PARAGRAPH + " and then" * 150,
        "�" * 300,
    ],
)
def test_text_that_says_it_again_and_again_loops(text):
    assert is_looping(text)


def answered(count: int = 3, **rest) -> list[Window]:
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


def judged(windows: list[Window], **evidence) -> set[str]:
    warm = [RequestTrace(index=0, repeat=-1, shape="a", sent_s=-5.0)]
    return {r.code for r in judge(Workload(), measure_windows(windows, warm), windows, Evidence(**evidence)).reasons}


def test_nothing_wrong_is_valid():
    assert judged(answered()) == set()


SERVING = [
    '(APIServer pid=1) INFO:     127.0.0.1:50000 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 11-29 14:03:36 [loggers.py:257] Engine 000: Avg prompt throughput: 1.0 tokens/s",
    "(EngineCore pid=2) INFO 11-29 14:03:36 [compilation.py:317] Enabled custom fusions: norm_quant, act_quant",
    "[2026-11-29 14:27:53] Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 200.1",
    "slot print_timing: id  0 | task 5 | draft acceptance = 0.57",
]


@pytest.mark.parametrize("line", SERVING)
def test_ordinary_lines_of_a_serving_engine_are_not_compiles(line):
    assert "compile_in_window" not in judged(answered(), log=line)


def test_the_compile_lines_of_a_real_engine_are_found():
    log = (RECORDED / "vllm026_h200_dsv4_dspark.log").read_text(encoding="utf-8")
    after_ready = log[log.index("Kernel JIT monitor activated") :]
    lines = [line for line in after_ready.splitlines() if re.search("JIT compilation during|begins to compile", line)]
    assert len(lines) > 2
    assert all("compile_in_window" in judged(answered(), log=line) for line in lines)
    assert "compile_in_window" not in judged(answered(), log=(RECORDED / "vllm_cpu_fail_bad_flag.log").read_text())


def test_cached_tokens_up_to_the_template_are_allowed():
    # 100 prompt tokens of which 80 are the text: 20 are template and nonce.
    template, text = answered(cached_tokens=16), answered(cached_tokens=64)
    assert "prefix_cache_hits" not in judged(template, text_tokens=(80,))
    assert "prefix_cache_hits" in judged(text, text_tokens=(80,))
    assert "prefix_cache_hits" not in judged(text)
    assert "prefix_cache_hits" in judged(answered(cached_tokens=96))


def test_an_answer_that_was_cut_without_a_reason_is_short():
    assert "short_output" in judged(answered(completion_tokens=5, chunk_tokens=(2, 3)))
    assert "short_output" in judged(answered(completion_tokens=5, chunk_tokens=(2, 3), finish_reason=None))
    assert "short_output" not in judged(answered(completion_tokens=5, chunk_tokens=(2, 3), finish_reason="stop"))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("DSPARK", "dspark"),
        ("draft-dspark", "dspark"),
        ("NEXTN", "mtp"),
        ("deepseek_mtp", "mtp"),
        ("mtp", "mtp"),
        ("STANDALONE", "draft_model"),
        ("draft_model", "draft_model"),
        ("draft-simple", "draft_model"),
        ("ngram", "ngram"),
        (None, ""),
    ],
)
def test_one_name_for_a_method(spelling, name):
    assert method_name(spelling) == name


def test_reasons_add_up_to_the_worst_level():
    late, few = Reason(code="client_late", detail="a"), Reason(code="few_repeats", detail="b")
    note = Reason(code="bunched_chunks", detail="c")
    assert verdict_of([]) == Verdict(level=Level.VALID)
    assert verdict_of([note]).level is Level.VALID
    assert verdict_of([few, note]).level is Level.SUSPECT
    assert verdict_of([few, late]) == Verdict(level=Level.INVALID, reasons=(few, late))
    assert worst([verdict_of([few]), verdict_of([few, late]), verdict_of([])]) == verdict_of([few, late])
    assert worst([]) == Verdict(level=Level.VALID)


def test_the_codes_of_the_design_are_here_with_their_levels():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = design.split("## 7. Verdicts", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section))
    assert {"prefix_cache_hits", "length_differs"} <= named
    assert named <= set(LEVELS)
    definitions = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
    for code, level in LEVELS.items():
        word = "note" if level is Level.VALID else level.value
        assert re.search(rf"^\| `{code}` \| {word} \|", definitions, re.MULTILINE), code
