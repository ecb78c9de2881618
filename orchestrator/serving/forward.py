"""One request to one engine and its answer back, byte for byte, in both directions as the bytes come.

Nothing is held back: neither a chunk for its successor nor a client that leaves from the engine that works for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

# Of one connection only, never of the message (RFC 9110 section 7.6.1), and what each side must state for itself.
NOT_PASSED = frozenset(
    (
        "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "authorization", "expect", "server", "date",
    )
)  # fmt: skip
SMALL_BODY_BYTES = 1 << 18
Headers = list[tuple[str, str]]
Body = bytes | AsyncIterator[bytes] | None
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may take. silence: no byte from the engine; stall: a client that neither sends nor reads."""

    request_bytes: int = 64 << 20
    response_bytes: int = 1 << 30
    connect_s: float = 5.0
    silence_s: float = 3600.0
    stall_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One ready engine. base_url has no /v1. forget_path: a GET of it makes the engine's drafter forget."""

    name: str
    base_url: str
    api_key: str | None = None
    forget_path: str | None = None


@dataclass(slots=True, kw_only=True)
class Counts:
    """What `/metrics` publishes of this listener."""

    requests: Counter[int] = field(default_factory=Counter)
    bytes_out: int = 0
    disconnects: int = 0
    engine_losses: int = 0


class EngineLost(Exception):
    """The engine did not answer anything. refused: nothing listens where it was."""

    def __init__(self, *, refused: bool) -> None:
        super().__init__("the connection was refused" if refused else "the connection ended")
        self.refused = refused


class _TooLarge(Exception):
    """The body of a request passed the limit while it was read."""


class Forwarder:
    """Passes requests on. All methods belong to the event loop that `open` ran on."""

    def __init__(self, limits: Limits, counts: Counts) -> None:
        self._limits = limits
        self._counts = counts
        self._writing_since: dict[asyncio.Task[Any], float] = {}

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            # One connection per request: llama.cpp closes a connection after a streamed answer without saying so, the
            # others an idle one after 5 s, and a request sent at that moment would look like an engine error.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._limits.connect_s, sock_read=self._limits.silence_s
            ),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watch = asyncio.create_task(self._end_stalled())

    async def close(self) -> None:
        self._watch.cancel()
        await self._session.close()

    async def page(self, backend: Backend, path: str) -> str | None:
        """The text of one of an engine's pages; None when it has none or does not answer."""
        headers = {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
        try:
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._session.get(backend.base_url + path, headers=headers, timeout=timeout) as answer:
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def forward(self, request: web.BaseRequest, raw_path: str, backend: Backend) -> web.StreamResponse:
        """The answer to one request, sent. The engine's connection is reused only when its answer was read whole.

        raw_path: path and query as they came, without our own prefix. Raises EngineLost.
        """
        length = request.content_length
        if length is not None and length > self._limits.request_bytes:
            return _too_large()
        try:
            body = await self._body(request)
        except TimeoutError:
            return refusal(408, "timeout", "the request did not arrive in time")
        headers = self._headers_up(request, backend, body)
        answer = await self._request_engine(request.method, backend, raw_path, headers, body)
        if isinstance(answer, web.Response):
            return answer
        try:
            if answer.status >= 500:
                return await self._engine_error(answer)
            # What this raises is a client that left, never the engine.
            return await self._stream_answer(request, answer)
        finally:
            answer.close()

    async def _request_engine(
        self, method: str, backend: Backend, raw_path: str, headers: Headers, body: Body
    ) -> aiohttp.ClientResponse | web.Response:
        """The head of the engine's answer, or our refusal. Raises EngineLost."""
        url = URL(backend.base_url + raw_path, encoded=True)
        try:
            return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)
        except TimeoutError:
            return refusal(504, "timeout", "the engine or the client was silent for too long")
        except aiohttp.ClientError as error:
            # An upload that ends early reaches us as the cause of a failed request.
            if isinstance(error.__cause__, _TooLarge):
                return _too_large()
            if isinstance(error.__cause__, TimeoutError):
                return refusal(408, "timeout", "the request did not arrive in time")
            self._counts.engine_losses += 1
            log.warning("request lost: %s: %s", type(error).__name__, error)
            raise EngineLost(refused=isinstance(error, aiohttp.ClientConnectorError)) from error

    async def _body(self, request: web.BaseRequest) -> Body:
        """The request's body: whole when it is small, as it comes when it is large."""
        if not request.can_read_body:
            return None
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.content_length is None or request.content_length > SMALL_BODY_BYTES:
            return self._upload(request)
        async with asyncio.timeout(self._limits.stall_s):
            return await request.content.read(-1)

    async def _upload(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        taken = 0
        while True:
            async with asyncio.timeout(self._limits.stall_s):
                piece = await request.content.readany()
            if not piece:
                return
            taken += len(piece)
            if taken > self._limits.request_bytes:
                raise _TooLarge
            yield piece

    def _headers_up(self, request: web.BaseRequest, backend: Backend, body: Body) -> Headers:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_PASSED]
        if backend.api_key is not None:
            headers.append(("Authorization", f"Bearer {backend.api_key}"))
        if body is None:
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        return headers

    async def _stream_answer(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in NOT_PASSED:
                response.headers.add(name, value)
        response.headers["Server"] = "orchestrator"
        if "Content-Length" not in answer.headers and request.version >= aiohttp.HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        sent, read, write = 0, answer.content.readany, response.write
        clock, writing_since = self._loop.time, self._writing_since
        try:
            while piece := await read():
                writing_since[task] = clock()
                await write(piece)
                del writing_since[task]
                sent += len(piece)
                if sent > self._limits.response_bytes:
                    raise aiohttp.ClientPayloadError("the answer is larger than allowed")
            await response.write_eof()
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, ConnectionResetError):
                raise
            await self._end_broken_answer(request, response, answer, error)
        finally:
            writing_since.pop(task, None)
            self._counts.bytes_out += sent
        return response

    async def _end_broken_answer(
        self, request: web.BaseRequest, response: web.StreamResponse, answer: aiohttp.ClientResponse, error: Exception
    ) -> None:
        """The engine went away in the middle: a stream gets an error event, anything else ends visibly incomplete."""
        self._counts.engine_losses += 1
        log.warning("answer broken off: %s: %s", type(error).__name__, error)
        if answer.content_type == "text/event-stream":
            event = _error_document(503, "engine_lost", "the answer was broken off: the engine has ended")
            with contextlib.suppress(ConnectionResetError):
                # The first blank line ends an event that was cut in the middle.
                await response.write(b"\n\ndata: " + event + b"\n\n")
                await response.write_eof()
            return
        if request.transport is not None:
            request.transport.abort()

    async def _engine_error(self, answer: aiohttp.ClientResponse) -> web.Response:
        """An engine's 5xx keeps its status; its text may hold what is nobody's business."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            text = await answer.content.read(2000)
            log.warning("engine answered %d: %s", answer.status, text.decode(errors="replace"))
        response = refusal(answer.status, "engine_error", "the engine could not answer this request")
        if retry_after := answer.headers.get("Retry-After"):
            response.headers["Retry-After"] = retry_after
        return response

    async def _end_stalled(self) -> None:
        """End requests whose client does not read: one look at all of them is cheaper than a timer for each write."""
        while True:
            await asyncio.sleep(min(5.0, self._limits.stall_s / 4))
            late = self._loop.time() - self._limits.stall_s
            for task, since in list(self._writing_since.items()):
                if since < late:
                    task.cancel()


def _too_large() -> web.Response:
    return refusal(413, "request_too_large", "the request is larger than this service takes")


def _error_document(status: int, kind: str, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def refusal(status: int, kind: str, message: str) -> web.Response:
    """An error as OpenAI's clients read it."""
    response = web.Response(status=status, body=_error_document(status, kind, message), content_type="application/json")
    response.headers["Server"] = "orchestrator"
    return response
