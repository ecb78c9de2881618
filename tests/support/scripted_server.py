"""A server that does what a script says, and a relay in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from orchestrator.serving.forward import Backend
from orchestrator.serving.relay import Relay

Script = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that reads one request's head and body by content-length, then does what the script says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            await script(head, reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def relaying(base_url: str | None, **options: Any) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(**options)
    if base_url is not None:
        relay.backends["a"] = Backend(name="a", base_url=base_url, api_key="engine-key")
    port = await relay.start("127.0.0.1", 0)
    try:
        yield relay, f"http://127.0.0.1:{port}"
    finally:
        await relay.stop()


async def content_length(head: bytes) -> int:
    line = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    return int(line.split(b":")[1])


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)
