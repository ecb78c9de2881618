"""One request from its plan to its last token, on an absolute schedule."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake import failures, logs
from tests.support.fake.behaviour import Behaviour
from tests.support.fake.counters import Counters
from tests.support.fake.flags import Launch
from tests.support.fake.model import CHAT_TEMPLATE, Pace, PrefixCache, count_tokens, escape, write_text


@dataclass(slots=True)
class State:
    """Everything one stand-in knows while it runs. `die(exit_code)` ends it at once."""

    launch: Launch
    behaviour: Behaviour
    die: Callable[[int], None]
    counters: Counters = field(init=False)
    pace: Pace = field(init=False)
    cache: PrefixCache = field(init=False)
    slots: asyncio.Semaphore = field(init=False)
    ready_s: float = float("inf")
    number: int = 0
    dying: bool = False
    touched: set[int] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.counters = Counters(proposals=self.launch.proposals)
        self.pace = Pace(self.launch, self.behaviour)
        self.cache = PrefixCache(self.launch.block_size)
        self.slots = asyncio.Semaphore(self.launch.max_running)

    @property
    def ready(self) -> bool:
        return time.monotonic() >= self.ready_s


@dataclass(slots=True, kw_only=True)
class Job:
    """One generation: what was asked, the plan for it, and what came of it."""

    number: int
    body: dict[str, Any]
    prompt: str | list[int]
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    reason: str
    fault: str | None
    tally: Counters
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def stream_options(self) -> dict[str, Any]:
        return self.body.get("stream_options") or {}

    def timings(self) -> dict[str, float]:
        """llama.cpp's per-request times and drafts."""
        new, predicted = self.prompt_tokens - self.cached_tokens, self.tally.generation_tokens
        prompt_ms, predicted_ms = self.prefill_s * 1e3, self.decode_s * 1e3
        times: dict[str, float] = {
            "cache_n": self.cached_tokens,
            "prompt_n": new,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, new),
            "prompt_per_second": new / prompt_ms * 1e3 if prompt_ms else 0.0,
            "predicted_n": predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, predicted),
            "predicted_per_second": predicted / predicted_ms * 1e3 if predicted_ms else 0.0,
        }
        if self.tally.drafts:
            times |= {"draft_n": self.tally.draft_tokens, "draft_n_accepted": self.tally.accepted_tokens}
        return times


@dataclass(slots=True)
class Piece:
    """What one step gave: JSON-escaped text per token, and the tokens so far."""

    texts: list[bytes]
    total: int


def chat_text(messages: list[dict[str, Any]]) -> str:
    """The messages as the chat template would write them."""
    contents = (message.get("content") or "" for message in messages)
    flat = (c if isinstance(c, str) else "".join(part.get("text", "") for part in c) for c in contents)
    return CHAT_TEMPLATE[0] + "\n".join(flat) + CHAT_TEMPLATE[1]


def prompt_of(body: dict[str, Any], *, chat: bool) -> str | list[int]:
    prompt = chat_text(body.get("messages", [])) if chat else body.get("prompt", "")
    return prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt


def asked_tokens(state: State, body: dict[str, Any], prompt_tokens: int) -> int:
    """max_tokens under any of its names; without one a chat may fill the context and a completion gets 16."""
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("n_predict")
    return int(asked or (state.launch.max_model_len - prompt_tokens if "messages" in body else 16))


def plan(state: State, body: dict[str, Any], prompt: str | list[int]) -> Job:
    """Number the request, look its prompt up in the prefix cache, and decide how long the answer is."""
    b, launch = state.behaviour, state.launch
    tokens = round(count_tokens(prompt) * b.prompt_tokens_factor)
    caching = launch.prefix_caching and body.get("cache_prompt", True)
    cached = state.cache.match_and_store(prompt) if caching else 0
    asked = asked_tokens(state, body, tokens)
    natural = b.eos_tokens if b.eos_tokens and not body.get("ignore_eos") else asked
    num_tokens = max(1, min(asked, natural, b.short_output or asked))
    state.number += 1
    return Job(
        number=state.number,
        body=body,
        prompt=prompt,
        prompt_tokens=tokens,
        cached_tokens=cached,
        num_tokens=num_tokens,
        reason="length" if num_tokens == asked else "stop",
        fault=_fault(state),
        tally=Counters(proposals=launch.proposals),
    )


def _fault(state: State) -> str | None:
    number = state.number - state.behaviour.faults_after
    for kind, every in state.behaviour.faults.items():
        if number > 0 and (number % every == 0 if every > 0 else number % -every != 0):
            return kind
    return None


async def run(state: State, job: Job) -> AsyncGenerator[Piece]:
    """Yield each step's piece when it is due. Waits for a free slot first, as the scheduler's queue does."""
    c = state.counters
    c.waiting += 1
    try:
        await state.slots.acquire()
    finally:
        c.waiting -= 1
    c.running += 1
    complete = False
    try:
        async for piece in _steps(state, job):
            yield piece
        complete = True
    finally:
        c.running -= 1
        state.slots.release()
        _finish(state, job, job.reason if complete else "abort")


def _answered_before(state: State, prompt: str | list[int]) -> bool:
    """Whatever its nonce: the answer is the same text."""
    text = re.sub(r"Case [0-9a-f]+\.", "", prompt) if isinstance(prompt, str) else repr(prompt)
    before = text in state.answered
    state.answered.add(text)
    return before


def _count_live(state: State) -> bool:
    """vLLM counts step by step; SGLang and llama.cpp add a request up when it ends."""
    return state.launch.dialect == "vllm"


async def _steps(state: State, job: Job) -> AsyncGenerator[Piece]:
    b, pace, loop = state.behaviour, state.pace, asyncio.get_running_loop()
    sinks = [job.tally, state.counters] if _count_live(state) else [job.tally]
    seed = zlib.crc32(repr(job.prompt).encode()) ^ b.seed
    words = itertools.cycle([b" the"]) if b.loop_text else (escape(word) for word in write_text(seed, b.text))
    begun = loop.time()
    stall_s = _first_touch_s(state, job)
    due = begun + stall_s + pace.prefill_s(job.prompt_tokens - job.cached_tokens)
    await asyncio.sleep(due - loop.time())
    for sink in sinks:
        sink.count_prompt(job.prompt_tokens, job.cached_tokens)
        sink.generation_tokens += 1
    job.prefill_s, first_s, total = due - begun, due, 1
    yield Piece([next(words)], 1)
    known = b.remembers and _answered_before(state, job.prompt)
    steps, step_s = pace.steps(job.number, job.num_tokens - 1, (seed % 1000) / 1000, known=known)
    step_s *= pace.request_factor(job.number)
    hangs = bool(b.hang) and job.number > b.hang.get("after", 0)
    for taken in steps:
        if hangs and job.tally.steps == 1:
            await asyncio.sleep(b.hang["seconds"])
            due = loop.time()
        tokens = min(1 + taken, job.num_tokens - total)
        # A last step that is cut takes its share of the time only.
        due += step_s * tokens / (1 + taken) * (1 + b.batch_cost * (state.counters.running - 1))
        if (delay := due - loop.time()) > 0:
            await asyncio.sleep(delay)
        total += tokens
        for sink in sinks:
            sink.count_step(tokens, taken, drafted=not b.no_drafts)
        job.decode_s = due - first_s
        yield Piece([next(words) for _ in range(tokens)], total)


def _first_touch_s(state: State, job: Job) -> float:
    """A kernel compiles when a prompt-length bucket (a power of two of tokens) is met for the first time."""
    bucket = max(1, job.prompt_tokens).bit_length()
    if not state.behaviour.first_touch_s or bucket in state.touched:
        return 0.0
    state.touched.add(bucket)
    logs.say(logs.jit_line(state.launch))
    return state.behaviour.first_touch_s


def _finish(state: State, job: Job, reason: str) -> None:
    c, b = state.counters, state.behaviour
    if not _count_live(state):
        c.add(job.tally)
    c.prefill_s += job.prefill_s
    c.decode_s += job.decode_s
    c.tokens_max = max(c.tokens_max, job.prompt_tokens + job.num_tokens)
    c.count_finish(reason, _observed(job) if reason != "abort" else {})
    for line in logs.request_lines(state.launch, job.number, job.timings(), c):
        logs.say(line)
    if b.counter_reset_after is not None and job.number == b.counter_reset_after:
        c.reset()
    if b.oom_after is not None and job.number >= b.oom_after and not state.dying:
        state.dying = True
        logs.say(failures.out_of_memory(state.launch.dialect))
        # Late enough for the running streams to carry the error that the real server sends them.
        asyncio.get_running_loop().call_later(0.3, state.die, 1)


def _observed(job: Job) -> dict[str, float]:
    values: dict[str, float] = {
        "request_prompt_tokens": job.prompt_tokens,
        "request_generation_tokens": job.num_tokens,
        "request_max_num_generation_tokens": job.num_tokens,
        "request_params_n": 1,
        "request_params_max_tokens": job.num_tokens,
        "time_to_first_token_seconds": job.prefill_s,
        "request_queue_time_seconds": 0.0,
        "request_prefill_time_seconds": job.prefill_s,
        "request_decode_time_seconds": job.decode_s,
        "request_inference_time_seconds": job.prefill_s + job.decode_s,
        "e2e_request_latency_seconds": job.prefill_s + job.decode_s,
        "request_prefill_kv_computed_tokens": job.prompt_tokens - job.cached_tokens,
    }
    if job.num_tokens > 1:
        values["request_time_per_output_token_seconds"] = job.decode_s / (job.num_tokens - 1)
    return {f"vllm:{name}": value for name, value in values.items()}
