"""Prompts: the same for every trial, never the same for the server, of the length that was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from orchestrator.config import Workload, load
from orchestrator.errors import ConfigError
from orchestrator.measure.workload import (
    WARM_UP,
    Prompt,
    SizedText,
    arrival_times,
    build_prompts,
    cut_text,
    endpoint,
    load_texts,
    one_per_shape,
    prompt_lengths,
    request_body,
)
from tests.support.paths import ROOT

GROUP_FILES = sorted((ROOT / "conf" / "workload").glob("*.yaml"))


def texts(count: int, tokens: int | None = 100) -> list[SizedText]:
    return [SizedText(text=f"text {i}", tokens=tokens) for i in range(count)]


def built(workload: Workload, repeat: int = 0, name: str = "w", seed: str = "s") -> list[Prompt]:
    return build_prompts(workload, name, texts(workload.num_prompts), repeat, seed)


async def four_bytes(text: str) -> int | None:
    return len(text.encode()) // 4


async def unknown(text: str) -> int | None:
    return None


def test_the_nonce_leads_every_prompt_and_never_returns() -> None:
    workload = Workload(num_prompts=4)
    fronts = [
        prompt.text.split("\n")[0]
        for name in ("a", "b")
        for seed in ("s", "t")
        for repeat in (WARM_UP - 1, WARM_UP, 0, 1, 2)
        for prompt in built(workload, repeat, name, seed)
    ]
    assert len(set(fronts)) == len(fronts) == 80
    assert all(front.startswith("Case ") and len(front) < 20 for front in fronts)
    assert built(workload) == built(workload)


def test_without_a_nonce_the_repeats_are_the_same() -> None:
    workload = Workload(num_prompts=2, nonce=False)
    assert built(workload, 0, seed="s") == built(workload, 1, seed="t")
    assert [p.text for p in built(workload)] == ["text 0", "text 1"]


def test_token_prompts_are_random_and_repeatable() -> None:
    workload = Workload(kind="tokens", num_prompts=2, prompt_tokens=300)
    first, second = build_prompts(workload, "w", [], 0, "s"), build_prompts(workload, "w", [], 1, "s")
    assert first == build_prompts(workload, "w", [], 0, "s")
    ids = [prompt.token_ids for prompt in (*first, *second)]
    assert len(set(ids)) == 4
    assert all(len(each) == 300 and min(each) >= 300 and max(each) < 20000 for each in ids if each)
    fixed = Workload(kind="tokens", num_prompts=1, nonce=False)
    assert build_prompts(fixed, "w", [], 0, "s") == build_prompts(fixed, "w", [], 1, "t")
    assert len(build_prompts(fixed, "w", [], 0, "s")[0].token_ids or ()) == 1024


def test_lengths_vary_within_the_spread_and_repeat() -> None:
    workload = Workload(prompt_tokens=1569, prompt_tokens_spread=0.5, num_prompts=100)
    lengths = prompt_lengths(workload)
    assert lengths == prompt_lengths(workload)
    assert min(lengths) >= 784
    assert max(lengths) <= 2354
    assert len(set(lengths)) > 80
    assert prompt_lengths(Workload(num_prompts=2)) == [None, None]
    assert prompt_lengths(Workload(num_prompts=2, prompt_tokens=9)) == [9, 9]


def test_one_prompt_of_each_shape() -> None:
    workload = Workload(prompt_tokens=1569, prompt_tokens_spread=0.5, num_prompts=100)
    sized = [SizedText(text="x", tokens=length) for length in prompt_lengths(workload)]
    prompts = build_prompts(workload, "w", sized, 0, "s")
    few = one_per_shape(prompts)
    assert {p.shape for p in few} == {p.shape for p in prompts}
    assert 4 <= len(few) <= 12
    for prompt, length in zip(prompts, prompt_lengths(workload), strict=True):
        edge = int(prompt.shape.split("x")[0])
        assert length <= edge < 1.4 * length + 64


def test_the_code_review_holds_8k_tokens_of_any_usual_tokenizer() -> None:
    # SmolLM2's counts 12,262 (3.5 characters a token); vocabularies of 150,000 words reach 4.5 on code.
    for text in load_texts(Workload(prompts="conf/prompts/code-review", prompt_tokens=8192)):
        assert len(text) > 8192 * 5


@pytest.mark.parametrize("tokens", [1, 7, 200, 999, 1000])
def test_a_text_is_cut_to_its_tokens(tokens: int) -> None:
    text = "abcd" * 1000
    sized = asyncio.run(cut_text(text, tokens, four_bytes))
    assert sized.tokens is not None
    assert tokens - 2 <= sized.tokens <= tokens
    assert text.startswith(sized.text)


def test_a_text_of_uneven_density_is_cut_too() -> None:
    text = "é" * 2000 + "a" * 4000
    sized = asyncio.run(cut_text(text, 1500, four_bytes))
    assert sized.tokens in (1498, 1499, 1500)


def test_a_text_that_is_too_short_is_told() -> None:
    with pytest.raises(ConfigError, match="asked for 5000, but the prompt text holds only 1000"):
        asyncio.run(cut_text("abcd" * 1000, 5000, four_bytes))


def test_without_a_tokenizer_length_is_a_guess_and_says_so() -> None:
    sized = asyncio.run(cut_text("abcd" * 1000, 100, unknown))
    assert (len(sized.text), sized.tokens) == (400, None)
    whole = asyncio.run(cut_text("abcd", None, unknown))
    assert (whole.text, whole.tokens) == ("abcd", None)


def test_arrivals_follow_the_rate() -> None:
    constant = arrival_times(Workload(request_rate=4.0, arrival="constant"), 5, 0)
    assert constant == [0, 0.25, 0.5, 0.75, 1.0]
    poisson = Workload(request_rate=4.0)
    times = arrival_times(poisson, 2000, 0)
    assert times == arrival_times(poisson, 2000, 0)
    assert times != arrival_times(poisson, 2000, 1)
    assert times == sorted(times)
    assert times[-1] / 2000 == pytest.approx(0.25, rel=0.1)


def test_what_is_sent_is_always_stated() -> None:
    prompt = built(Workload(num_prompts=1, output_tokens=7))[0]
    body = request_body("m", prompt, Workload(temperature=0.5, top_p=0.9, seed=3, ignore_eos=True))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert "ignore_eos" not in request_body("m", prompt, Workload())
    assert request_body("m", prompt, Workload(kind="completion"))["prompt"] == prompt.text
    ids = build_prompts(Workload(kind="tokens", num_prompts=1, prompt_tokens=3), "w", [], 0, "s")[0]
    assert request_body("m", ids, Workload(kind="tokens"))["prompt"] == list(ids.token_ids or ())
    assert endpoint(Workload(kind="prefill")) == "/v1/chat/completions"
    assert endpoint(Workload(kind="tokens")) == "/v1/completions"


def test_built_in_texts_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stories = load_texts(Workload())
    assert len(stories) == 5
    assert (
        stories == load_texts(Workload(prompts="conf/prompts/story-chat")) == load_texts(Workload(prompts="story-chat"))
    )
    code = load_texts(Workload(prompt_tokens=8192))
    # Three characters a token is more than any tokenizer needs for code.
    assert all(len(text) > 4 * 8192 * 1.2 for text in code)
    assert len({text[:2000] for text in code}) == len(code) > 5
    assert load_texts(Workload(kind="completion")) == code
    assert load_texts(Workload(kind="tokens")) == []
    assert len(load_texts(Workload(kind="prefill", prompt_tokens=32768))[0]) > 32768 * 5


def test_own_texts_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("  one\n")
    (tmp_path / "many.jsonl").write_text('"a"\n\n{"prompt": "b\\u2028c"}\n')
    assert load_texts(Workload(prompts=str(tmp_path / "one.txt"))) == ["one"]
    assert load_texts(Workload(prompts=str(tmp_path / "many.jsonl"))) == ["a", "b\u2028c"]
    assert load_texts(Workload(prompts=str(tmp_path))) == ["a", "b\u2028c", "one"]
    monkeypatch.chdir(tmp_path)
    assert load_texts(Workload(prompts="one.txt")) == ["one"]


def test_a_code_base_begins_with_another_file_each_time(tmp_path: Path) -> None:
    for name, body in (("instruction.md", "Review."), ("a.py", "A"), ("b.py", "B")):
        (tmp_path / name).write_text(body)
    first, second = load_texts(Workload(prompts=str(tmp_path)))
    assert first.startswith("Review.\n\n### a.py\n\nA\n")
    assert second.startswith("Review.\n\n### b.py\n\nB\n")
    assert "### b.py" in first


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("none.txt", None, "neither a file nor a folder"),
        ("empty.txt", b" \n", "holds no text"),
        ("torn.jsonl", b'"a"\n{"pro', "line 2: not valid JSON"),
        ("odd.jsonl", b"[1]\n", "line 1: expected a string"),
        ("binary.txt", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_bad_prompt_file_is_named(tmp_path: Path, name: str, body: bytes | None, message: str) -> None:
    if body is not None:
        (tmp_path / name).write_bytes(body)
    with pytest.raises(ConfigError, match=message) as caught:
        load_texts(Workload(prompts=str(tmp_path / name)))
    assert name in str(caught.value)


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda p: p.stem)
def test_every_workload_file_loads_under_its_own_name(path: Path, tmp_path: Path) -> None:
    names = list(yaml.safe_load(path.read_text())["workloads"])
    assert names == [path.stem]
    experiment = tmp_path / "conf.yaml"
    experiment.write_text(f"defaults: {{workloads: [{path.stem}]}}\nengine: {{kind: vllm, model: org/model}}\n")
    (tmp_path / "workload").symlink_to(path.parent)
    workloads = load(experiment).workloads
    assert all(name.startswith(path.stem) for name in workloads)
    for workload in workloads.values():
        assert workload.repeats >= 3
        load_texts(workload)
    rungs = {"prefill-ladder": 3, "concurrency-ladder": 4}
    assert len(workloads) == rungs.get(path.stem, 1)


def test_the_issue_workloads_are_all_there() -> None:
    wanted = {"code-review-8k", "story-chat", "prefill-ladder", "tail-100", "concurrency-ladder", "tokens"}
    assert wanted <= {path.stem for path in GROUP_FILES}
