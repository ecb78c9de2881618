"""A deployment is measured as its trial was: its speculation, a drafter that forgets, other texts each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Workload
from orchestrator.engines.base import Speculation
from orchestrator.measure.client import Target
from orchestrator.measure.run import WorkloadRun, measure
from orchestrator.serving import verification
from tests.support.stand_in_service import service_experiment, stand_in_result

NGRAM = Speculation(method="NGRAM", proposals=4, forget_path="/flush_cache?timeout=5")
FLAGS = ("--enable-metrics", "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5")


@pytest.mark.slow
def test_every_attempt_forgets_and_asks_other_texts(
    fake_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"Text {number}: {'words and more words. ' * 20}" for number in range(6)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'"{text}"\n' for text in texts), encoding="utf-8")
    workload = Workload(prompts=str(prompts), num_prompts=2, output_tokens=32)
    made = service_experiment(tmp_path, "learning", 8000)
    recorded = stand_in_result(made, "ngram")
    spec = replace(recorded.spec, engine=replace(recorded.spec.engine, kind="sglang"), workloads={"talk": workload})
    result = replace(recorded, spec=spec, speculation=NGRAM)
    runs: list[WorkloadRun] = []
    first_texts: list[int] = []

    def watched(*arguments: Any, **options: Any) -> WorkloadRun:
        first_texts.append(options["first_text"])
        runs.append(measure(*arguments, **options))
        return runs[-1]

    monkeypatch.setattr(verification, "measure", watched)
    # One repeat always earns this: as if each attempt had been spoilt by our own client.
    monkeypatch.setattr(verification, "OURS", frozenset({"few_repeats"}))
    learning = {"acceptance": [0.5, 0.3, 0.2, 0.1], "remembers": True, "tokens_per_s": 100.0}
    engine = fake_engine("sglang", *FLAGS, **learning)
    target = Target(base_url=engine.base_url, model=engine.model)
    found = verification.verify(made, result, target, lambda _: None)
    assert not found.ok
    assert first_texts == [0, 2, 4]
    rates = [run.measurement.metrics["acceptance_rate"] for run in runs]
    # A drafter that remembered would accept nearly everything from the second attempt on.
    assert all(rate is not None and rate.value < 0.6 for rate in rates), rates


def test_prompts_begin_with_the_text_that_is_asked_for(fake_engine: Callable[..., Any], tmp_path: Path) -> None:
    """Texts of different lengths, so that the tokens of the prompts say which were sent."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'"{"word " * 10 * number}"\n' for number in range(1, 5)), encoding="utf-8")
    workload = Workload(prompts=str(prompts), num_prompts=2, repeats=1, output_tokens=4, warmup=0)
    engine = fake_engine("vllm", tokens_per_s=2000.0)
    target = Target(base_url=engine.base_url, model=engine.model)

    def prompt_tokens(first_text: int) -> list[int]:
        run = measure(target, None, "talk", workload, first_text=first_text)
        return [trace.prompt_tokens or 0 for trace in sorted(run.traces, key=lambda trace: trace.index)]

    first, second, again = prompt_tokens(0), prompt_tokens(2), prompt_tokens(4)
    assert first[0] < first[1] < second[0] < second[1]
    assert again == first
