"""The relay against scripted servers: bytes, limits, keys, and which engine is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from yarl import URL

from orchestrator.serving.forward import Backend, Limits
from orchestrator.serving.relay import Closed, digest
from tests.support.scripted_server import SSE, Script, chunk, content_length, relaying, scripted, until


def test_every_byte_of_a_stream_passes_unchanged_and_unbuffered() -> None:
    pieces = [b'data: {"a":"\xc3', b'\xa4"}\r\n\r\n', b": comment\n\n", bytes(range(256)), b"data: [DONE]\n\n"]

    async def run() -> None:
        gate = asyncio.Event()

        async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(SSE + chunk(pieces[0]))
            await gate.wait()
            for piece in pieces[1:]:
                writer.write(chunk(piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")

        async with (
            scripted(script) as url,
            relaying(url) as (_, base),
            aiohttp.ClientSession() as session,
            session.post(f"{base}/v1/completions", data=b"{}") as answer,
        ):
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            # The rest is not even written before the first piece has arrived here.
            first = await asyncio.wait_for(answer.content.readany(), 5)
            gate.set()
            assert first + await answer.content.read() == b"".join(pieces)

    asyncio.run(run())


def test_the_engine_gets_what_was_sent_with_its_own_key_and_nobody_elses() -> None:
    seen: list[bytes] = []
    body = json.dumps({"prompt": "ä" * 1000}).encode()

    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(head)
        seen.append(await reader.readexactly(await content_length(head)))
        writer.write(b"HTTP/1.1 200 Fine\r\ncontent-length: 2\r\nx-engine: 7\r\nserver: secret/1.0\r\n\r\n{}")
        await writer.drain()

    async def run() -> None:
        options = {"key_digest": digest("client-key"), "route": "/llm/"}
        async with scripted(script) as url, relaying(url, **options) as (_, base), aiohttp.ClientSession() as session:
            headers = {"Authorization": "Bearer client-key", "X-Mine": "1", "Content-Type": "application/json"}
            path = "/v1/chat/completions?a=%2Fb&c=d%20e"
            async with session.post(URL(f"{base}/llm{path}", encoded=True), data=body, headers=headers) as answer:
                assert (answer.status, answer.reason, await answer.read()) == (200, "Fine", b"{}")
                assert answer.headers["X-Engine"] == "7"
                assert "secret" not in str(answer.headers)

    asyncio.run(run())
    head, received = seen
    assert received == body
    assert head.startswith(b"POST /v1/chat/completions?a=%2Fb&c=d%20e HTTP/1.1\r\n")
    assert b"Authorization: Bearer engine-key\r\n" in head
    assert b"client-key" not in head
    assert b"X-Mine: 1\r\n" in head


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Basic right"}, 401),
     ({"Authorization": "Bearer right"}, 200), ({"Authorization": "bearer  right "}, 200)],
)  # fmt: skip
def test_a_key_is_asked_for(headers: dict[str, str], status: int) -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async def run() -> None:
        async with (
            scripted(script) as url,
            relaying(url, key_digest=digest("right")) as (_, base),
            aiohttp.ClientSession(headers=headers) as session,
        ):
            for path in ("/v1/models", "/orchestrator"):
                async with session.get(base + path) as answer:
                    assert answer.status == status
                    if status == 401:
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
                        assert (await answer.json())["error"]["type"] == "invalid_api_key"
            async with session.get(f"{base}/health") as answer:
                assert answer.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/v1", "/v1/../reset_prefix_cache", "/v1/%2e%2e/shutdown", "/", "/v1/%252e%252e/x"]
)
def test_nothing_but_the_api_is_passed_on(path: str) -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(f"reached the engine: {head!r}")

    async def run() -> None:
        async with scripted(script) as url, relaying(url) as (_, base):
            host, port = base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            # By hand, because clients tidy such paths up.
            writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
            assert b" 404 " in await asyncio.wait_for(reader.readline(), 5)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_is_too_large_is_refused(chunked: bool) -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass

    async def body() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 100_000

    async def run() -> None:
        limits = Limits(request_bytes=1_000_000)
        async with scripted(script) as url, relaying(url, limits=limits) as (relay, base):
            async with aiohttp.ClientSession() as session:
                data: Any = body() if chunked else b"x" * 4_000_000
                async with session.post(f"{base}/v1/completions", data=data) as answer:
                    assert answer.status == 413
                    assert (await answer.json())["error"]["type"] == "request_too_large"
            await until(lambda: relay.total_in_flight() == 0)

    asyncio.run(run())


def test_a_large_upload_arrives_whole_and_an_endless_answer_is_cut() -> None:
    received: list[int] = []

    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(len(await reader.readexactly(await content_length(head))))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(chunk(b"y" * 50_000))
            await writer.drain()

    async def run() -> None:
        limits = Limits(response_bytes=1_000_000)
        async with (
            scripted(script) as url,
            relaying(url, limits=limits) as (_, base),
            aiohttp.ClientSession() as session,
            session.post(f"{base}/v1/completions", data=b"x" * 3_000_000) as answer,
        ):
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    asyncio.run(run())
    assert received == [3_000_000]


def test_no_detail_of_an_engine_error_is_told_but_the_engines_advice_to_the_client_is() -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, text = (
            (b"400 Bad Request", b"max_tokens is too large") if b"/bad" in head else (b"500 Oh", b"/root/x.py")
        )
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))
        await writer.drain()

    async def run() -> None:
        async with scripted(script) as url, relaying(url) as (_, base), aiohttp.ClientSession() as session:
            async with session.post(f"{base}/v1/bad", data=b"{}") as answer:
                assert (answer.status, await answer.text()) == (400, "max_tokens is too large")
            async with session.post(f"{base}/v1/broken", data=b"{}") as answer:
                assert answer.status == 500
                assert "/root" not in await answer.text()

    asyncio.run(run())


def test_while_closed_only_the_pass_gets_in_and_an_old_pause_ends_by_itself() -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async def run() -> None:
        async with scripted(script) as url, relaying(url) as (relay, base), aiohttp.ClientSession() as session:

            async def status(path: str, **headers: str) -> tuple[int, str | None]:
                async with session.get(base + path, headers=headers) as answer:
                    return answer.status, answer.headers.get("Retry-After")

            now = asyncio.get_running_loop().time()
            relay.closed = Closed(reason="moving", retry_after_s=6.2, pass_digest=digest("pass"), until_s=now + 60)
            assert await status("/v1/models") == (503, "7")
            assert await status("/health") == (503, "7")
            assert await status("/v1/models", Authorization="Bearer pass") == (200, None)
            relay.closed = Closed(reason="moving", retry_after_s=6.2, pass_digest=digest("pass"), until_s=now - 1)
            assert await status("/v1/models") == (200, None)
            assert await status("/health") == (200, None)
            relay.backends.clear()
            assert (await status("/v1/models"))[0] == 503
            assert (await status("/health"))[0] == 503

    asyncio.run(run())


def test_the_least_busy_engine_is_asked() -> None:
    asked: list[int] = []

    def named(number: int) -> Script:
        async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(number)
            await asyncio.sleep(0.3)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()

        return script

    async def run() -> None:
        async with scripted(named(0)) as one, scripted(named(1)) as two, relaying(one) as (relay, base):
            relay.backends["b"] = Backend(name="b", base_url=two)

            async def get(session: aiohttp.ClientSession) -> int:
                async with session.get(f"{base}/v1/models") as answer:
                    return answer.status

            async with aiohttp.ClientSession() as session:
                assert await asyncio.gather(*(get(session) for _ in range(8))) == [200] * 8

    asyncio.run(run())
    assert sorted(asked) == [0] * 4 + [1] * 4


def test_curls_expectation_is_answered() -> None:
    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(await content_length(head))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async def run() -> None:
        async with (
            scripted(script) as url,
            relaying(url) as (_, base),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        ):
            for size in (10, 2_000_000):
                async with session.post(f"{base}/v1/completions", data=b"x" * size, expect100=True) as answer:
                    assert answer.status == 200

    asyncio.run(run())


def test_only_whoever_verifies_makes_every_drafter_forget() -> None:
    asked: list[bytes] = []

    async def script(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(head.split(b" ")[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async def run() -> None:
        forget = "/flush_cache?timeout=5"
        async with scripted(script) as one, scripted(script) as two, relaying(one) as (relay, base):
            relay.backends = {
                name: Backend(name=name, base_url=url, forget_path=forget) for name, url in (("a", one), ("b", two))
            }
            relay.closed = Closed(
                reason="being verified",
                retry_after_s=1.0,
                pass_digest=digest("pass"),
                until_s=asyncio.get_running_loop().time() + 60,
            )
            async with aiohttp.ClientSession() as session:
                for key, path, status in (
                    (None, forget, 404),
                    ("other", forget, 404),
                    ("pass", "/flush_cache", 404),
                    ("pass", forget, 200),
                ):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    async with session.get(base + path, headers=headers) as answer:
                        assert answer.status == status, (key, path)

    asyncio.run(run())
    assert asked == [b"/flush_cache?timeout=5"] * 2
