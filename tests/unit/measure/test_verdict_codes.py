"""Every verdict code that a stand-in can earn, both earned and not earned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engines.base import Speculation
from orchestrator.measure.checks import LEVELS
from orchestrator.measure.run import Surroundings
from orchestrator.measure.verdict import Level
from tests.support.dialects import METRICS_FLAGS
from tests.support.fake.talk import DSPARK_6, FakeEngine
from tests.support.measured import DRAFTED_BY_DSPARK, codes, measured, value

pytestmark = pytest.mark.slow

OVERRIDDEN = "WARNING Default vLLM sampling parameters have been overridden by the model's generation_config.json\n"


@pytest.mark.parametrize("dialect", ["sglang", "llamacpp"])
def test_cached_prompts_are_seen_on_every_engine(fake_engine: Callable[..., FakeEngine], dialect: str) -> None:
    engine = fake_engine(dialect, *METRICS_FLAGS[dialect])
    assert "prefix_cache_hits" not in codes(measured(engine, dialect, prompt_tokens=400))
    assert "prefix_cache_hits" in codes(measured(engine, dialect, prompt_tokens=400, nonce=False))


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
            DSPARK_6,
            {"collapse_after": 0},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        (
            "acceptance_collapse",
            DSPARK_6,
            {"acceptance": [0.8, 0.05, 0.04]},
            {},
            {"speculation": Speculation(proposals=6, method="unheard_of")},
        ),
        (
            "drafter_remembers",
            DSPARK_6,
            {"acceptance": [0.6, 0.4, 0.3, 0.2, 0.1, 0.1], "remembers": True},
            {"num_prompts": 4},
            {"speculation": Speculation(proposals=6, family="suffix")},
        ),
        (
            "nothing_drafted",
            DSPARK_6,
            {"no_drafts": True},
            {},
            {"speculation": Speculation(proposals=6, family="ngram")},
        ),
        (
            "acceptance_collapse",
            DSPARK_6,
            {"no_drafts": True},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        ("few_repeats", (), _fast(), {"repeats": 2}, {}),
        (
            "synthetic_acceptance",
            DSPARK_6,
            {},
            {},
            {"speculation": Speculation(proposals=6, method="dspark", is_synthetic=True)},
        ),
        (
            "random_prompts",
            DSPARK_6,
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
            DSPARK_6,
            {"collapse_after": 0},
            {},
            {"speculation": Speculation(proposals=6, is_synthetic=True)},
        ),
        (
            "acceptance_collapse",
            DSPARK_6,
            {},
            {},
            {"speculation": DRAFTED_BY_DSPARK},
        ),
        (
            "drafter_remembers",
            DSPARK_6,
            {"acceptance": [0.6, 0.4, 0.3, 0.2, 0.1, 0.1]},
            {},
            {"speculation": Speculation(proposals=6)},
        ),
        ("nothing_drafted", DSPARK_6, {}, {}, {"speculation": Speculation(proposals=6, family="ngram")}),
        (
            "nothing_drafted",
            DSPARK_6,
            {"no_drafts": True},
            {"output_tokens": 8},
            {"speculation": Speculation(proposals=6, family="ngram")},
        ),
        ("nothing_drafted", (), _fast(), {}, {}),
        (
            "synthetic_acceptance",
            DSPARK_6,
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
