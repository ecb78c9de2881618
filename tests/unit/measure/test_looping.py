"""Loops are found, and real prose, code, tables and Chinese are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.measure.looping import is_looping
from tests.support.paths import ROOT

CHINESE = (
    "春天的早晨，老渔夫推开木门，看见海面上漂着一只没有人的小船。他想起三十年前失踪的兄弟，于是把网放下，慢慢走向码头。"
    "孩子们在沙滩上追逐海鸥，谁也没有注意到潮水正在悄悄退去。船舱里放着一盏还在燃烧的油灯，灯下压着一封信，信纸已经被海水打湿，"
    "字迹却仍然清楚。他读完以后沉默了很久，最后把信折好，放进贴身的口袋，转身回家点起了炉火。妻子问他看见了什么，他只说天气要变了。"
)
WRITTEN = [
    *sorted((ROOT / "conf" / "prompts").rglob("*.*")),
    *sorted((ROOT / "orchestrator").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda p: p.name)
def test_real_prose_and_code_do_not_loop(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not is_looping(text)
    # An answer is short and may begin anywhere.
    assert not any(is_looping(text[start : start + 1500]) for start in range(0, len(text), 1500))


def test_chinese_tables_and_lists_do_not_loop() -> None:
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
def test_text_that_says_it_again_and_again_loops(text: str) -> None:
    assert is_looping(text)
