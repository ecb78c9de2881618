"""Prompts -> RequestTraces over the streaming OpenAI API.

Bytes are stamped when they arrive, before any parsing. The client measures how late its own event loop wakes: where
the client is the bottleneck, the verdict reports `client_late`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from orchestrator.config import Workload
from orchestrator.errors import MachineError
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.stream import Reply, error_text, one_line
from orchestrator.measure.workload import Prompt, arrival_times, endpoint, request_body, sent_parameters

LAG_PERIOD_S = 0.01
CLOSE_GRACE_S = 2.0
ERROR_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: base_url without /v1, the model id it lists, and its key."""

    base_url: str
    model: str
    api_key: str | None = None


class RequestError(MachineError):
    """A request that is no part of a measurement failed; the message is one line with the body's own words."""


@dataclass(slots=True)
class _Flight:
    """One request between being sent and its end."""

    prompt: Prompt
    scheduled_s: float | None
    sent_s: float
    reply: Reply

    @property
    def quiet_since_s(self) -> float:
        times = self.reply.text_times_s
        return times[-1] if times else self.sent_s


class Client:
    """One session with one server. Use as an async context manager."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._root = _root(target.base_url)
        self._flights: dict[int, _Flight] = {}
        self._token_counts: dict[str, int | None] = {}

    async def __aenter__(self) -> Self:
        self._session = _session(self.target.api_key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def run(
        self,
        prompts: Sequence[Prompt],
        workload: Workload,
        repeat: int,
        *,
        check: Callable[[], None] = lambda: None,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> Window:
        """Send `prompts` and return their traces, in a closed loop or (with a request rate) on a schedule.

        check() is called about once a second and after a run with failures; what it raises ends the run. When a
        request has had no token for workload.stall_s, the run ends and the window's `stalled` names it.
        """
        bodies = [json.dumps(request_body(self.target.model, p, workload)).encode() for p in prompts]
        sent = sent_parameters(workload)
        traces: list[RequestTrace] = []

        async def send(position: int, scheduled_s: float | None) -> None:
            flight = _Flight(prompts[position], scheduled_s, time.perf_counter(), Reply())
            self._flights[position] = flight
            await self._stream(endpoint(workload), bodies[position], flight.reply)
            del self._flights[position]
            traces.append(_trace(flight, repeat, sent))
            on_done(len(traces))
            if flight.reply.error is not None:
                # A dying engine drops its connections a moment before its process is seen to end: `check` decides.
                await asyncio.sleep(ERROR_PAUSE_S)

        if workload.request_rate is not None:
            job = _on_schedule(send, arrival_times(workload, len(prompts), repeat))
        else:
            job = _closed_loop(send, len(prompts), workload.concurrency)
        watch = _LoopWatch()
        began_s = time.perf_counter()
        stalled = await self._guarded(job, watch, workload.stall_s, check)
        wall_s = time.perf_counter() - began_s
        if any(trace.error for trace in traces):
            check()
        for flight in self._flights.values():
            flight.reply.fail(f"no token for {workload.stall_s:g} s")
            traces.append(_trace(flight, repeat, sent))
        self._flights.clear()
        return Window(
            traces=tuple(sorted(traces, key=lambda t: t.sent_s)),
            wall_s=wall_s,
            concurrency=workload.concurrency if workload.request_rate is None else None,
            loop_lags_s=tuple(watch.lags_s),
            client_cpu_share=watch.cpu_share,
            stalled=stalled,
        )

    async def get(self, path: str) -> str | None:
        """The text at `path`, None when the server has no such page."""
        try:
            async with self._session.get(self._root + path, timeout=aiohttp.ClientTimeout(total=30)) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of `text` by the server's own tokenizer, without special tokens; None when it has no /tokenize."""
        if text not in self._token_counts:
            # One body for three servers: vLLM and SGLang read `prompt`, llama.cpp reads `content`.
            body = {"model": self.target.model, "prompt": text, "content": text, "add_special_tokens": False}
            try:
                document = await self._post("/tokenize", body, 60.0)
                tokens = document.get("count", document.get("tokens"))
            except RequestError:
                tokens = None
            self._token_counts[text] = len(tokens) if isinstance(tokens, list) else tokens
        return self._token_counts[text]

    async def _guarded(
        self, job: Coroutine[Any, Any, None], watch: _LoopWatch, stall_s: float, check: Callable[[], None]
    ) -> str | None:
        """Run `job` and watch its requests. Returns the sentence of a stall, None when it ran to its end."""
        task = asyncio.create_task(job)
        watch.start()
        try:
            while not task.done():
                await asyncio.wait([task], timeout=min(1.0, stall_s / 4))
                check()
                quiet_s = {i: time.perf_counter() - f.quiet_since_s for i, f in self._flights.items()}
                if not task.done() and quiet_s and max(quiet_s.values()) > stall_s:
                    worst = max(quiet_s, key=lambda i: quiet_s[i])
                    return f"request {worst} had no token for {stall_s:g} s"
            task.result()
            return None
        finally:
            watch.stop()
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_GRACE_S)

    async def _stream(self, path: str, body: bytes, reply: Reply) -> None:
        now = time.perf_counter
        try:
            async with self._session.post(self._root + path, data=body) as response:
                if response.status != 200:
                    reply.fail(f"HTTP {response.status}: {await _error_body(response)}")
                    return
                # One await a piece: `async for` over iter_any would make two.
                read = response.content.readany
                while piece := await read():
                    reply.take(now(), piece)
                if not reply.text_times_s and response.content_type == "application/json":
                    reply.fail("the server answered with one document instead of a stream")
        except (aiohttp.ClientError, OSError) as error:
            reply.fail(one_line(f"{type(error).__name__}: {error}"))
        reply.end()

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(self._root + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise RequestError(f"{path}: HTTP {response.status}: {await _error_body(response)}")
                document = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError(one_line(f"{path}: {type(error).__name__}: {error}")) from None
        if not isinstance(document, dict):
            raise RequestError(f"{path}: expected a JSON object")
        return document


class _LoopWatch:
    """How late the event loop runs what is due, and how much of a core its thread uses."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.cpu_share: float | None = None

    def start(self) -> None:
        self._began = (time.perf_counter(), time.thread_time())
        self._loop = asyncio.get_running_loop()
        self._wait()

    def _wait(self) -> None:
        self._due_s = self._loop.time() + LAG_PERIOD_S
        self._waiting = self._loop.call_at(self._due_s, self._woken)

    def _woken(self) -> None:
        self.lags_s.append(max(0.0, self._loop.time() - self._due_s))
        self._wait()

    def stop(self) -> None:
        self._waiting.cancel()
        wall_s = time.perf_counter() - self._began[0]
        self.cpu_share = (time.thread_time() - self._began[1]) / wall_s if wall_s > 0 else None


def list_models(base_url: str, api_key: str | None = None, timeout_s: float = 10.0) -> list[str]:
    """Model ids that the server lists; base_url with or without /v1. Raises RequestError."""

    async def ask() -> list[str]:
        url = f"{_root(base_url)}/v1/models"
        try:
            async with (
                _session(api_key) as session,
                session.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response,
            ):
                if response.status != 200:
                    raise RequestError(f"{url}: HTTP {response.status}: {await _error_body(response)}")
                document = await response.json(content_type=None)
                return [str(entry["id"]) for entry in document["data"]]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError(one_line(f"{url}: {type(error).__name__}: {error}")) from None
        except (KeyError, TypeError):
            raise RequestError(f"{url}: not a list of models") from None

    return asyncio.run(ask())


def one_completion(target: Target, timeout_s: float = 600.0) -> bool:
    """True once the server has generated one token. Raises RequestError with the answer to the first way of asking."""
    ways: list[tuple[str, dict[str, object]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say yes."}]}),
        ("/v1/completions", {"prompt": "Yes"}),
        ("/v1/completions", {"prompt": [9]}),
    ]
    sampling = {"model": target.model, "max_tokens": 1, "temperature": 0.0}

    async def ask() -> bool:
        errors = []
        async with Client(target) as client:
            for path, prompt in ways:
                try:
                    document = await client._post(path, {**sampling, **prompt}, timeout_s)
                except RequestError as error:
                    errors.append(str(error))
                    continue
                if document.get("choices") and (document.get("usage") or {}).get("completion_tokens") != 0:
                    return True
                errors.append(one_line(f"{path}: {error_text(document) or 'no token'}"))
        raise RequestError(errors[0])

    return asyncio.run(ask())


async def _closed_loop(send: Callable[[int, float | None], Awaitable[None]], count: int, concurrency: int) -> None:
    positions = iter(range(count))

    async def worker() -> None:
        for position in positions:
            await send(position, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())


async def _on_schedule(send: Callable[[int, float | None], Coroutine[Any, Any, None]], times_s: list[float]) -> None:
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for position, offset_s in enumerate(times_s):
            await asyncio.sleep(max(0.0, began_s + offset_s - time.perf_counter()))
            group.create_task(send(position, began_s + offset_s))


def _trace(flight: _Flight, repeat: int, sent: Mapping[str, object]) -> RequestTrace:
    reply = flight.reply
    return RequestTrace(
        index=flight.prompt.index,
        repeat=repeat,
        shape=flight.prompt.shape,
        sent_s=flight.sent_s,
        scheduled_s=flight.scheduled_s,
        chunk_times_s=tuple(reply.text_times_s),
        chunk_tokens=reply.chunk_tokens,
        first_content_s=reply.first_content_s,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        asked_tokens=flight.prompt.max_tokens,
        finish_reason=reply.finish_reason,
        error=reply.error,
        text=reply.text,
        sent={**sent, "max_tokens": flight.prompt.max_tokens},
    )


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return aiohttp.ClientSession(
        # One connection per request: llama.cpp closes a connection after a streamed answer without notice, the
        # others an idle one after 5 s, and a request sent at that moment would look like an engine error.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers=headers,
    )


async def _error_body(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(65536)).decode("utf-8", "replace")
    try:
        return one_line(error_text(json.loads(text)) or text)
    except ValueError:
        return one_line(text)
