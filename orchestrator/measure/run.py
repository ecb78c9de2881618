"""One workload on one running server -> Measurement and Verdict; used by trials, bench and promotion."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from orchestrator.config import Workload
from orchestrator.engines.base import Engine, EngineStats, Speculation
from orchestrator.engines.diagnosis.dialect import LIBRARIES_ONLY
from orchestrator.measure.checks import judge
from orchestrator.measure.client import Client, Target
from orchestrator.measure.evidence import Evidence
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.metrics import Measurement, measure_windows
from orchestrator.measure.verdict import Verdict
from orchestrator.measure.workload import (
    WARM_UP,
    WARM_UP_TOKENS,
    Prompt,
    SizedText,
    build_prompts,
    cut_text,
    load_texts,
    nonce,
    one_per_shape,
    prompt_lengths,
)

Progress = Callable[[str, int, int], None]
GPU_POLL_S = 2.0
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the caller knows about the server and the client cannot see; the defaults mean unknown.

    log_text: the engine's log so far. foreign_gpu_users: who else is on the GPUs, one text each; called from another
    thread. check_alive: raises EngineFailure when the engine is gone. speculation: None where nothing is drafted. A
    drafter that learns from answers has a forget_path, which is requested before every repeat.
    """

    log_text: Callable[[], str] = lambda: ""
    foreign_gpu_users: Callable[[], tuple[str, ...]] = lambda: ()
    check_alive: Callable[[], None] = lambda: None
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRun:
    """The result of one workload. traces: the measured requests, in the order they were sent."""

    measurement: Measurement
    verdict: Verdict
    traces: tuple[RequestTrace, ...]


class Stalled(Exception):
    """A request had no token for stall_s. `run` holds what was measured of `workload` until then."""

    def __init__(self, workload: str, reason: str, run: WorkloadRun) -> None:
        super().__init__(f"{workload}: {reason}")
        self.workload = workload
        self.run = run


def measure(
    target: Target,
    engine: Engine | None,
    name: str,
    workload: Workload,
    *,
    surroundings: Surroundings | None = None,
    on_progress: Progress = lambda phase, done, total: None,
    on_repeat: Callable[[Measurement], bool] = lambda measurement: True,
    nonce_seed: str | None = None,
    first_text: int = 0,
) -> WorkloadRun:
    """Warm up, then measure every repeat of `workload` on the server at `target`.

    engine: reads the counters of that kind of server; None measures without them. on_progress(phase, done, total)
    counts requests, phase is "warming" or "measuring"; it runs inside the event loop, so it must not take long.
    on_repeat gets the measurement so far after each repeat and returns False to stop early. nonce_seed makes the
    nonces repeatable; only for servers that start afresh. first_text: which of the workload's texts the first prompt
    has, so that a server that was asked before is asked something else where there are more texts than prompts.
    Raises Stalled, ConfigError (prompts missing or too short), and what surroundings.check_alive raises.
    """
    job = _Job(
        target, engine, name, workload, surroundings or Surroundings(), nonce_seed or secrets.token_hex(8), first_text
    )
    return asyncio.run(job.run(on_progress, on_repeat))


@dataclass(slots=True)
class _Job:
    """One call of `measure`: what stays the same over its repeats."""

    target: Target
    engine: Engine | None
    name: str
    workload: Workload
    surroundings: Surroundings
    nonce_seed: str
    first_text: int

    async def run(self, on_progress: Progress, on_repeat: Callable[[Measurement], bool]) -> WorkloadRun:
        workload, windows, foreign = self.workload, list[Window](), set[str]()
        total = workload.num_prompts * workload.repeats
        async with Client(self.target) as client:
            texts = await self._texts(client)
            warm_up, stalled = await self._warm_up(client, texts, on_progress)
            log_before = self.surroundings.log_text()
            with _garbage_frozen():
                for repeat in range(0 if stalled else workload.repeats):
                    prompts = build_prompts(workload, self.name, texts, repeat, self.nonce_seed)
                    on_done = _counting(on_progress, "measuring", len(prompts) * repeat, total)
                    async with _watched(self.surroundings.foreign_gpu_users, foreign):
                        windows.append(await self._repeat(client, prompts, repeat, on_done))
                    stalled = windows[-1].stalled
                    if stalled or not on_repeat(measure_windows(windows, warm_up)):
                        break
        logs = log_before, appended(log_before, self.surroundings.log_text())
        run = self._judged(windows, warm_up, logs, tuple(sorted(foreign)), [text.tokens for text in texts])
        if stalled:
            raise Stalled(self.name, stalled, run)
        return run

    async def _texts(self, client: Client) -> list[SizedText]:
        """The text of each prompt, cut to its length by the server's own tokenizer."""
        bases = load_texts(self.workload)
        if not bases:
            return []
        exact = self.workload.prompt_tokens_spread == 0
        front = (await client.count_tokens(nonce("4f3a91c2")) or 0) if self.workload.nonce else 0
        return [
            await cut_text(bases[i % len(bases)], length and max(1, length - front), client.count_tokens, exact=exact)
            for i, length in enumerate(prompt_lengths(self.workload), start=self.first_text)
        ]

    async def _warm_up(
        self, client: Client, texts: Sequence[SizedText], on_progress: Progress
    ) -> tuple[tuple[RequestTrace, ...], str | None]:
        """Send every shape alone (the cold sample), then at the measured concurrency; (traces, why it stalled)."""
        traces: list[RequestTrace] = []
        waves = self._waves(texts)
        total = sum(len(prompts) for prompts, _ in waves)
        for prompts, workload in waves:
            window = await client.run(
                [replace(p, max_tokens=min(p.max_tokens, WARM_UP_TOKENS)) for p in prompts],
                workload,
                WARM_UP,
                check=self.surroundings.check_alive,
                on_done=_counting(on_progress, "warming", len(traces), total),
            )
            traces.extend(window.traces)
            if window.stalled:
                return tuple(traces), f"warm-up: {window.stalled}"
        return tuple(traces), None

    def _waves(self, texts: Sequence[SizedText]) -> list[tuple[list[Prompt], Workload]]:
        """(prompts, how to send them) per wave of the warm-up; every wave has nonces of its own."""
        workload = self.workload
        if not workload.warmup:
            return []
        alone = replace(workload, concurrency=1, request_rate=None)
        together = workload.concurrency > 1 or workload.request_rate is not None
        waves = [(one_per_shape(build_prompts(workload, self.name, texts, WARM_UP, self.nonce_seed)), alone)]
        for turn in range(1, workload.warmup + together):
            prompts = build_prompts(workload, self.name, texts, WARM_UP - turn, self.nonce_seed)
            waves.append((prompts if workload.request_rate else prompts[: workload.concurrency], workload))
        return waves

    async def _repeat(
        self, client: Client, prompts: Sequence[Prompt], repeat: int, on_done: Callable[[int], None]
    ) -> Window:
        speculation = self.surroundings.speculation
        if speculation is not None and speculation.forget_path:
            # Where the engine refuses, the acceptance of the later repeats shows it: `drafter_remembers`.
            await client.get(speculation.forget_path)
        before = await self._stats(client)
        window = await client.run(prompts, self.workload, repeat, check=self.surroundings.check_alive, on_done=on_done)
        return replace(window, before=before, after=await self._stats(client))

    async def _stats(self, client: Client) -> EngineStats:
        """The engine's counters once it is idle: some engines count a request only when it has ended."""
        if self.engine is None:
            return EngineStats()
        deadline_s = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            page = await client.get("/metrics")
            path = self.engine.server_info_path
            info = await client.get(path) if path else None
            stats = self.engine.stats(page, _json_object(info))
            if not stats.requests_running or asyncio.get_running_loop().time() > deadline_s:
                return stats
            await asyncio.sleep(0.1)

    def _judged(
        self,
        windows: Sequence[Window],
        warm_up: Sequence[RequestTrace],
        logs: tuple[str, str],
        foreign: tuple[str, ...],
        text_tokens: Sequence[int | None],
    ) -> WorkloadRun:
        around = self.surroundings
        evidence = Evidence(
            log_before=logs[0],
            log=logs[1],
            foreign_gpu_users=foreign,
            text_tokens=tuple(text_tokens),
            speculation=around.speculation,
            dialect=self.engine.log if self.engine else LIBRARIES_ONLY,
        )
        measurement = measure_windows(windows, warm_up)
        verdict = judge(self.workload, measurement, windows, evidence)
        return WorkloadRun(measurement=measurement, verdict=verdict, traces=tuple(t for w in windows for t in w.traces))


def _counting(on_progress: Progress, phase: str, before: int, total: int) -> Callable[[int], None]:
    return lambda done: on_progress(phase, before + done, total)


def appended(before: str, after: str) -> str:
    """What a log gained, also when `after` is only its last part."""
    if after.startswith(before):
        return after[len(before) :]
    last = before.rstrip("\n").rpartition("\n")[2]
    return after.rpartition(last + "\n")[2] if last else after


def _json_object(text: str | None) -> dict[str, object] | None:
    try:
        document = json.loads(text) if text else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Keep the collector off the objects that exist now: a full collection would stop the client for longer."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _watched(users: Callable[[], tuple[str, ...]], seen: set[str]) -> AsyncIterator[None]:
    """Gather who else uses the GPUs, from before the body until after it."""

    async def poll() -> None:
        while True:
            seen.update(await asyncio.to_thread(users))
            await asyncio.sleep(GPU_POLL_S)

    seen.update(await asyncio.to_thread(users))
    watching = asyncio.create_task(poll())
    try:
        yield
        seen.update(await asyncio.to_thread(users))
    finally:
        watching.cancel()
