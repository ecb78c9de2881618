"""Clients -> engine, byte for byte: the HTTP listener in front of the engines. Knows neither Ray nor MLflow.

It takes requests in, asks for the key, keeps the limits, picks an engine and passes bytes on as they come, in both
directions. It lives longer than any engine: while none is ready it says so with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from orchestrator.metrics_page import labelled, merged

RELAYED = ("/v1/", "/tokenize")
# Of one connection only, never of the message (RFC 9110 section 7.6.1), and what each side must state for itself.
NOT_PASSED = frozenset(
    (
        "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "authorization", "expect", "server", "date",
    )
)  # fmt: skip
# Engines drop idle connections after 5 s; reusing one at that moment would look like an engine that is gone.
KEEPALIVE_S = 2.0
SMALL_BODY_BYTES = 1 << 18
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
    """One ready engine. base_url has no /v1."""

    name: str
    base_url: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Nobody but the holder of the pass is let in until `until_s` (the loop's clock): the engine is being replaced."""

    reason: str
    retry_after_s: float
    pass_digest: str
    until_s: float


@dataclass(slots=True, kw_only=True)
class Counts:
    """What `/metrics` tells of this listener."""

    requests: Counter[int] = field(default_factory=Counter)
    bytes_out: int = 0
    disconnects: int = 0
    engine_losses: int = 0


def digest(key: str) -> str:
    """What is kept and sent around of a key, so that the key itself is written nowhere."""
    return hashlib.sha256(key.encode()).hexdigest()


class Relay:
    """One listener. All methods belong to the event loop it was started on."""

    def __init__(
        self,
        *,
        route: str = "/",
        key_digest: str | None = None,
        limits: Limits | None = None,
        describe: Callable[[], Mapping[str, Any]] = dict,
        own_metrics: bool = True,
    ) -> None:
        """route: path in front of /v1. key_digest: digest() of the key that clients must show; None: no key.

        describe() is the document of GET /orchestrator. own_metrics: append ours to the engines' metrics page.
        """
        self.limits = limits or Limits()
        self.backends: dict[str, Backend] = {}
        self.counts = Counts()
        self.closed: Closed | None = None
        self.in_flight: Counter[str] = Counter()
        self._prefix = "/" + route.strip("/") if route.strip("/") else ""
        self._key_digest = key_digest
        self._describe = describe
        self._tells_own_metrics = own_metrics
        self._writing_since: dict[asyncio.Task[Any], float] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port (of 0: the one that was free). Raises OSError when it is taken."""
        self._loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_s, sock_read=self.limits.silence_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # A handler is cancelled when its client goes away: that is how a disconnect reaches the engine.
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self._session.close()
            raise
        self._watch = asyncio.create_task(self._end_stalled())
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the listener and every connection."""
        self._watch.cancel()
        await self._runner.cleanup()
        await self._session.close()

    def ready(self) -> bool:
        """Whether an ordinary request would reach an engine now."""
        return bool(self.backends) and self._closed_to(None) is None

    def total_in_flight(self) -> int:
        return self.in_flight.total()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._answer(request)
        except (ConnectionResetError, asyncio.CancelledError):
            self.counts.disconnects += 1
            raise
        self.counts.requests[response.status] += 1
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, _ = request.raw_path.partition("?")
        if not path.startswith(self._prefix + "/"):
            return _refusal(404, "not_found", f"there is no {path} here")
        path = path[len(self._prefix) :]
        if path == "/health":
            return web.Response(text="ok\n") if self.ready() else self._unavailable(self._closed_to(None))
        token = _bearer(request)
        if self._key_digest is not None and not self._shows(token, self._key_digest) and not self._has_pass(token):
            refusal = _refusal(401, "invalid_api_key", "a valid key is needed: Authorization: Bearer KEY")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if path == "/orchestrator":
            return web.json_response(dict(self._describe()), dumps=_strict_json)
        if path == "/metrics":
            return await self._metrics()
        if not path.startswith(RELAYED) or ".." in unquote(unquote(path)).split("/"):
            return _refusal(404, "not_found", f"there is no {path} here")
        closed = self._closed_to(token)
        backend = self._least_busy() if closed is None else None
        if backend is None:
            return self._unavailable(closed)
        return await self._relayed(request, backend)

    def _least_busy(self) -> Backend | None:
        return min(self.backends.values(), key=lambda b: self.in_flight[b.name], default=None)

    def _closed_to(self, token: str | None) -> Closed | None:
        """Why this client is not let in now. A pass that nobody renewed has ended: the service opens again."""
        if self.closed is not None and self._loop.time() > self.closed.until_s:
            self.closed = None
        return None if self.closed is None or self._has_pass(token) else self.closed

    def _has_pass(self, token: str | None) -> bool:
        return self.closed is not None and self._shows(token, self.closed.pass_digest)

    @staticmethod
    def _shows(token: str | None, wanted: str) -> bool:
        return token is not None and hmac.compare_digest(digest(token), wanted)

    def _unavailable(self, closed: Closed | None) -> web.Response:
        reason = closed.reason if closed else "the engine is being started again"
        response = _refusal(503, "unavailable", f"not ready: {reason}")
        response.headers["Retry-After"] = str(max(1, math.ceil(closed.retry_after_s if closed else 5.0)))
        return response

    async def _relayed(self, request: web.BaseRequest, backend: Backend) -> web.StreamResponse:
        """Pass one request on. The engine's connection is closed, not reused, unless its answer was read whole."""
        length = request.content_length
        if length is not None and length > self.limits.request_bytes:
            return self._too_large()
        self.in_flight[backend.name] += 1
        answer: aiohttp.ClientResponse | None = None
        try:
            body = await self._body(request)
            raw_path = request.raw_path[len(self._prefix) :]
            answer = await self._session.request(
                request.method,
                URL(backend.base_url + raw_path, encoded=True),
                headers=self._headers_up(request, backend, body),
                data=body,
                allow_redirects=False,
            )
            if answer.status >= 500:
                return await self._engine_error(answer)
            return await self._passed_down(request, answer)
        except TimeoutError:
            return _refusal(504, "timeout", "the engine or the client was silent for too long")
        except aiohttp.ClientError as error:
            # An upload that ends early reaches us as the cause of a failed request.
            if isinstance(error.__cause__, _TooLarge):
                return self._too_large()
            if isinstance(error.__cause__, TimeoutError):
                return _refusal(408, "timeout", "the request did not arrive in time")
            return self._lost(backend, error)
        finally:
            self.in_flight[backend.name] -= 1
            if answer is not None:
                answer.close()

    def _lost(self, backend: Backend, error: Exception) -> web.Response:
        """The engine is gone before it answered; its next report brings it back when it is not."""
        self.counts.engine_losses += 1
        self.backends.pop(backend.name, None)
        log.warning("request lost: %s: %s", type(error).__name__, error)
        response = _refusal(503, "engine_lost", "the engine ended before it answered; send the request again")
        response.headers["Retry-After"] = "5"
        return response

    async def _body(self, request: web.BaseRequest) -> bytes | AsyncIterator[bytes] | None:
        """The request's body: whole when it is small, as it comes when it is large."""
        if not request.can_read_body:
            return None
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.content_length is None or request.content_length > SMALL_BODY_BYTES:
            return self._upload(request)
        async with asyncio.timeout(self.limits.stall_s):
            return await request.content.read(-1)

    async def _upload(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        taken = 0
        while True:
            async with asyncio.timeout(self.limits.stall_s):
                piece = await request.content.readany()
            if not piece:
                return
            taken += len(piece)
            if taken > self.limits.request_bytes:
                raise _TooLarge
            yield piece

    def _headers_up(
        self, request: web.BaseRequest, backend: Backend, body: bytes | AsyncIterator[bytes] | None
    ) -> list[tuple[str, str]]:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_PASSED]
        if backend.api_key is not None:
            headers.append(("Authorization", f"Bearer {backend.api_key}"))
        if body is None:
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        return headers

    async def _passed_down(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
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
                if sent > self.limits.response_bytes:
                    raise aiohttp.ClientPayloadError("the answer is larger than allowed")
            await response.write_eof()
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, ConnectionResetError):
                raise
            await self._broken_off(request, response, answer, error)
        finally:
            writing_since.pop(task, None)
            self.counts.bytes_out += sent
        return response

    async def _broken_off(
        self, request: web.BaseRequest, response: web.StreamResponse, answer: aiohttp.ClientResponse, error: Exception
    ) -> None:
        """The engine went away in the middle: a stream is told so, anything else ends visibly incomplete."""
        self.counts.engine_losses += 1
        log.warning("answer broken off: %s: %s", type(error).__name__, error)
        if answer.content_type == "text/event-stream":
            event = _error_document(503, "engine_lost", "the engine ended before the answer was complete")
            with contextlib.suppress(ConnectionResetError):
                # The first blank line ends an event that was cut in the middle.
                await response.write(b"\n\ndata: " + event + b"\n\n")
                await response.write_eof()
            return
        if request.transport is not None:
            request.transport.abort()

    async def _engine_error(self, answer: aiohttp.ClientResponse) -> web.Response:
        """An engine's 5xx keeps its status; its text may tell what is nobody's business."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            text = await answer.content.read(2000)
            log.warning("engine answered %d: %s", answer.status, text.decode(errors="replace"))
        response = _refusal(answer.status, "engine_error", "the engine could not answer this request")
        if retry_after := answer.headers.get("Retry-After"):
            response.headers["Retry-After"] = retry_after
        return response

    async def _metrics(self) -> web.Response:
        pages = [page for b in list(self.backends.values()) if (page := await self._page(b)) is not None]
        text = merged(pages) if len(pages) > 1 else "".join(text for _, text in pages)
        return web.Response(
            text=text + (self._own_metrics() if self._tells_own_metrics else ""),
            content_type="text/plain",
            charset="utf-8",
        )

    async def _page(self, backend: Backend) -> tuple[str, str] | None:
        headers = {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
        try:
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._session.get(f"{backend.base_url}/metrics", headers=headers, timeout=timeout) as answer:
                return (backend.name, await answer.text()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _own_metrics(self) -> str:
        counts = self.counts
        return labelled(
            ("orchestrator_requests_total", "counter", "Answered requests by status.", counts.requests, "status"),
            ("orchestrator_requests_in_flight", "gauge", "Requests at the engines now.", self.total_in_flight(), ""),
            ("orchestrator_engines_ready", "gauge", "Engines that take requests.", len(self.backends), ""),
            ("orchestrator_open", "gauge", "1 when ordinary requests are let in.", int(self.ready()), ""),
            ("orchestrator_sent_bytes_total", "counter", "Bytes of answers passed on.", counts.bytes_out, ""),
            ("orchestrator_client_disconnects_total", "counter", "Clients that left.", counts.disconnects, ""),
            ("orchestrator_engine_losses_total", "counter", "Requests an engine lost.", counts.engine_losses, ""),
        )

    async def _end_stalled(self) -> None:
        """End requests whose client does not read: one look at all of them is cheaper than a timer for each write."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.stall_s / 4))
            late = self._loop.time() - self.limits.stall_s
            for task, since in list(self._writing_since.items()):
                if since < late:
                    task.cancel()

    @staticmethod
    def _too_large() -> web.Response:
        return _refusal(413, "request_too_large", "the request is larger than this service takes")


class _TooLarge(Exception):
    """The body of a request passed the limit while it was read."""


def _bearer(request: web.BaseRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _error_document(status: int, kind: str, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def _refusal(status: int, kind: str, message: str) -> web.Response:
    """An error as OpenAI's clients read it."""
    response = web.Response(status=status, body=_error_document(status, kind, message), content_type="application/json")
    response.headers["Server"] = "orchestrator"
    return response


def _strict_json(document: object) -> str:
    return json.dumps(document, allow_nan=False, ensure_ascii=False)
