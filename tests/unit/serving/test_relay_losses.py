"""The relay when somebody goes: engines that die, fall silent or break off, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable

import aiohttp
import psutil
import pytest

from orchestrator.engines.exposition import read_page
from orchestrator.serving.forward import Backend, Limits
from tests.support.fake.talk import FakeEngine
from tests.support.scripted_server import SSE, chunk, relaying, scripted, until


def test_an_engine_that_closes_after_each_stream_loses_no_request(fake_engine: Callable[..., FakeEngine]) -> None:
    """llama.cpp promises to keep the connection and closes it: what follows at once must not meet that."""
    engine = fake_engine("llamacpp", "--alias", "m", tokens_per_s=2000.0, ttft_s=0.0)
    body = {"model": "m", "prompt": "a", "max_tokens": 4, "stream": True, "ignore_eos": True}

    async def run() -> None:
        async with relaying(engine.base_url) as (_, base), aiohttp.ClientSession() as session:
            for _ in range(30):
                async with session.post(f"{base}/v1/completions", json=body) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n"), answer.status

    asyncio.run(run())


@pytest.mark.parametrize("moment", ["refuses", "before", "inside"])
def test_an_engine_that_is_lost_ends_requests_with_a_clear_error(moment: str) -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if moment == "inside":
            writer.write(SSE + chunk(b'data: {"half'))
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.transport.abort()

    async def run() -> None:
        async with scripted(script) as url, relaying(url) as (relay, base), aiohttp.ClientSession() as session:
            if moment == "refuses":
                relay.backends["a"] = Backend(name="a", base_url="http://127.0.0.1:9")
            async with session.post(f"{base}/v1/completions", data=b"{}") as answer:
                text = await answer.text()
            if moment == "inside":
                last = [line for line in text.split("\n\n") if line][-1]
                assert text.startswith('data: {"half\n\n')
                assert json.loads(last.removeprefix("data: "))["error"]["type"] == "engine_lost"
                assert "[DONE]" not in text
            else:
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) >= 1
                assert url not in text
            assert relay.counts.engine_losses == 1

    asyncio.run(run())


def test_a_document_that_breaks_off_ends_visibly_incomplete() -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()

    async def run() -> None:
        async with scripted(script) as url, relaying(url) as (_, base), aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientPayloadError):
                async with session.post(f"{base}/v1/completions", data=b"{}") as answer:
                    await answer.read()

    asyncio.run(run())


@pytest.mark.slow
def test_a_slow_reader_holds_the_engine_back_instead_of_filling_memory() -> None:
    sent = 0

    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(2000):
            writer.write(chunk(b"z" * 65_536))
            await writer.drain()
            sent += 65_536

    async def run() -> None:
        before = psutil.Process().memory_info().rss
        async with scripted(script) as url, relaying(url) as (_, base):
            host, port = base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await reader.readexactly(100)
            seen, held = -1, 0
            while seen != sent:
                seen, held = sent, held + 1
                await asyncio.sleep(0.5)
            # 131 MB wait to be sent; what is under way is a few socket buffers.
            assert sent < 30e6
            assert psutil.Process().memory_info().rss - before < 60e6
            writer.transport.abort()

    asyncio.run(run())


def test_a_client_that_never_reads_is_ended() -> None:
    gone = asyncio.Event()

    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(chunk(b"z" * 65_536))
                await writer.drain()
        except ConnectionError:
            gone.set()

    async def run() -> None:
        async with scripted(script) as url, relaying(url, limits=Limits(stall_s=1.0)) as (relay, base):
            host, port = base.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await asyncio.wait_for(gone.wait(), 15)
            await until(lambda: relay.total_in_flight() == 0)
            writer.close()

    asyncio.run(run())


def test_a_silent_engine_is_a_timeout() -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def run() -> None:
        async with (
            scripted(script) as url,
            relaying(url, limits=Limits(silence_s=0.3)) as (_, base),
            aiohttp.ClientSession() as session,
            session.post(f"{base}/v1/completions", data=b"{}") as answer,
        ):
            assert answer.status == 504

    asyncio.run(run())


@pytest.mark.slow
def test_clients_that_leave_are_noticed_by_the_engine_at_every_moment(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=20.0, ttft_s=0.3)
    body = json.dumps({"model": engine.model, "prompt": "once", "max_tokens": 500, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def leave(port: int, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        if number % 2:
            await asyncio.wait_for(reader.readuntil(b"data:"), 30)
        writer.transport.abort()

    async def run() -> None:
        async with relaying(engine.base_url) as (relay, base):
            port = int(base.rsplit(":", 1)[1])
            for batch in range(10):
                await asyncio.gather(*(leave(port, batch * 100 + i) for i in range(100)))
            await until(lambda: relay.total_in_flight() == 0, 30)
            async with aiohttp.ClientSession() as session:

                async def open_requests() -> float:
                    async with session.get(f"{base}/metrics") as answer:
                        page = read_page(await answer.text())
                    return page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")

                deadline = time.monotonic() + 20
                while await open_requests() > 0:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)
            assert relay.counts.disconnects >= 900
            # A client that leaves says nothing about the engine.
            assert relay.counts.engine_losses == 0
            assert list(relay.backends) == ["a"]

    asyncio.run(run())


def test_a_killed_engine_in_the_middle_of_a_stream(fake_engine: Callable[..., FakeEngine]) -> None:
    engine = fake_engine("vllm", tokens_per_s=20.0)
    body = {"model": engine.model, "prompt": "once", "max_tokens": 500, "stream": True}

    async def run() -> None:
        async with relaying(engine.base_url) as (_, base), aiohttp.ClientSession() as session:
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                got = await answer.content.readuntil(b"\n\n")
                os.kill(engine.pid, signal.SIGKILL)
                got += await answer.content.read()
                assert json.loads(got.split(b"data: ")[-1])["error"]["code"] == 503
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                assert answer.status == 503
                assert "Retry-After" in answer.headers

    asyncio.run(run())
