"""How an answer leaves: the server-sent events of one request, and every way in which a stream can be wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json

from aiohttp import web

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.generation import Job, Piece, State, run
from tests.support.fake.wire import Writer

DONE = b"data: [DONE]\n\n"
# llama.cpp closes the connection this long after a streamed answer, in whose headers it promised to keep it.
CLOSES_AFTER_S = 0.001
# A broken stream has carried this many text events before it breaks.
EVENTS_BEFORE_FAULT = 2


class Delivery:
    """Writes events to one client. After the first, straight to the transport: a tenth of the CPU per event."""

    def __init__(self, request: web.Request, behaviour: Behaviour) -> None:
        self.request, self.behaviour = request, behaviour
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self.response.enable_chunked_encoding()
        self.written = 0
        self.held: list[bytes] = []

    async def begin(self) -> None:
        await self.response.prepare(self.request)

    async def send(self, data: bytes) -> None:
        """One or several whole events. Raises ConnectionResetError when the client has gone."""
        b = self.behaviour
        if b.comments and self.written % 5 == 0:
            data = b": keepalive\n\n" + data
        if b.crlf:
            data = data.replace(b"\n", b"\r\n")
        self.held.append(data)
        if len(self.held) >= b.burst:
            await self.flush()

    async def flush(self) -> None:
        data, self.held = b"".join(self.held), []
        if not data:
            return
        for part in _split_in_character(data) if self.behaviour.utf8_split else [data]:
            if self.written and self.behaviour.utf8_split:
                await asyncio.sleep(0.001)
            await self._write(part)

    async def _write(self, data: bytes) -> None:
        transport = self.request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if self.written:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            await self.response.write(data)
        self.written += 1

    async def end(self) -> web.StreamResponse:
        await self.flush()
        await self.response.write_eof()
        return self.response

    def reset(self) -> web.StreamResponse:
        """Break the connection inside the body."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return self.response


def _split_in_character(data: bytes) -> list[bytes]:
    """Two parts with the border inside a multi-byte character, or in the middle where there is none."""
    border = next((i + 1 for i, byte in enumerate(data) if byte >= 0xC0), len(data) // 2)
    return [data[:border], data[border:]]


async def stream(state: State, request: web.Request, job: Job, writer: Writer) -> web.StreamResponse:
    """Serve one streamed request, with the fault that was planned for it."""
    out = Delivery(request, state.behaviour)
    await out.begin()
    try:
        if job.fault == "empty":
            return await out.end()
        if job.fault == "done_only":
            await out.send(DONE)
            return await out.end()
        broken = await _send_text(state, job, writer, out)
        if broken == "reset":
            return out.reset()
        if broken in ("error_object", "error_event"):
            await out.send(writer.error(as_event=broken == "error_event"))
        elif broken is None:
            await _send_usage(state.behaviour, job, writer, out)
        if broken != "cut":
            await out.send(DONE)
        if state.launch.dialect == "llamacpp" and request.transport is not None:
            asyncio.get_running_loop().call_later(CLOSES_AFTER_S, request.transport.close)
        return await out.end()
    except ConnectionResetError:
        return out.response


async def _send_text(state: State, job: Job, writer: Writer, out: Delivery) -> str | None:
    """All text events and the finish. Returns the fault that broke the stream, if one did."""
    b, sent = state.behaviour, 0
    role = writer.role()
    if role and b.early_role:
        await out.send(role)
        role = None
    texts: list[bytes] = []
    group = max(b.tokens_per_chunk, int(state.launch.args.get("--stream-interval", 1)))
    async with contextlib.aclosing(run(state, job)) as pieces:
        async for piece in pieces:
            texts += piece.texts
            if len(texts) < group and piece.total < job.num_tokens:
                continue
            data = _events(state, job, writer, Piece(texts, piece.total), group)
            await out.send(role + data if role else data)
            role, texts, sent = None, [], sent + 1
            if state.dying:
                return "error_object"
            if job.fault and sent >= EVENTS_BEFORE_FAULT:
                return job.fault
    return None


def _events(state: State, job: Job, writer: Writer, piece: Piece, group: int) -> bytes:
    """The events of one step: one per kind of text, or one per token where the engine writes them singly."""
    start = piece.total - len(piece.texts)
    single = state.launch.dialect == "llamacpp" and group == 1
    runs: list[tuple[str, int, list[bytes]]] = []
    for number, text in enumerate(piece.texts, start + 1):
        kind = _field(state.behaviour, number)
        if runs and runs[-1][0] == kind and not single:
            runs[-1] = (kind, number, [*runs[-1][2], text])
        else:
            runs.append((kind, number, [text]))
    last = piece.total >= job.num_tokens
    # vLLM puts the last text into the event that says "length"; otherwise the finish is an event of its own.
    joined = last and state.launch.dialect == "vllm" and job.reason == "length" and runs[-1][0] == "content"
    body = [writer.text(b"".join(t), number, kind) for kind, number, t in (runs[:-1] if joined else runs)]
    if last:
        final = json.loads(b'"' + b"".join(runs[-1][2]) + b'"') if joined else ""
        body.append(writer.finish("tool_calls" if state.behaviour.tool_call else job.reason, final, piece.total))
    return b"".join(body)


def _field(behaviour: Behaviour, number: int) -> str:
    if number <= behaviour.think_tokens:
        return behaviour.think_field
    return "tool_calls" if behaviour.tool_call else "content"


async def _send_usage(behaviour: Behaviour, job: Job, writer: Writer, out: Delivery) -> None:
    if not job.stream_options.get("include_usage") or behaviour.usage == "none":
        return
    if behaviour.usage == "late":
        await out.flush()
        await asyncio.sleep(behaviour.usage_delay_s)
    await out.send(writer.usage(job.num_tokens, job.timings()))
