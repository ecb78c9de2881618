"""Clients -> engine, byte for byte: the HTTP listener in front of the engines. Knows neither Ray nor MLflow.

It takes requests in, asks for the key, keeps the limits, picks an engine and passes bytes on as they come, in both
directions. It lives longer than any engine: while none is ready it answers 503 with Retry-After.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from orchestrator.serving.forward import Backend, Counts, EngineLost, Forwarder, Limits, refusal
from orchestrator.serving.metrics_page import format_families, merge_pages

RELAYED = ("/v1/", "/tokenize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Nobody but the holder of the pass is let in until `until_s` (the loop's clock): the engine is being replaced."""

    reason: str
    retry_after_s: float
    pass_digest: str
    until_s: float


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
        is_inner: bool = False,
    ) -> None:
        """route: path in front of /v1. key_digest: digest() of the key that clients must show; None: no key.

        describe() is the document of GET /orchestrator. is_inner: behind a gateway of ours, whose
        key it asks for: no metrics of its own, and its client may make drafters forget.
        """
        self.backends: dict[str, Backend] = {}
        self.counts = Counts()
        self._forwarder = Forwarder(limits or Limits(), self.counts)
        self.closed: Closed | None = None
        self.in_flight: Counter[str] = Counter()
        self._prefix = "/" + route.strip("/") if route.strip("/") else ""
        self._key_digest = key_digest
        self._describe = describe
        self._is_inner = is_inner

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port (of 0: the one that was free). Raises OSError when it is taken."""
        self._loop = asyncio.get_running_loop()
        # A handler is cancelled when its client goes away: that is how a disconnect reaches the engine.
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        await self._runner.setup()
        self._forwarder.open()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self._forwarder.close()
            raise
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the listener and every connection."""
        await self._runner.cleanup()
        await self._forwarder.close()

    def ready(self) -> bool:
        """Whether an ordinary request would reach an engine now."""
        return bool(self.backends) and self._closing_for(None) is None

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
            return refusal(404, "not_found", f"there is no {path} here")
        path = path[len(self._prefix) :]
        if path == "/health":
            return web.Response(text="ok\n") if self.ready() else self._unavailable(self._closing_for(None))
        token = _bearer(request)
        if self._key_digest is not None and not self._shows(token, self._key_digest) and not self._has_pass(token):
            locked = refusal(401, "invalid_api_key", "a valid key is needed: Authorization: Bearer KEY")
            locked.headers["WWW-Authenticate"] = "Bearer"
            return locked
        if path == "/orchestrator":
            return web.json_response(dict(self._describe()), dumps=_strict_json)
        if path == "/metrics":
            return await self._metrics()
        forgetting = [b for b in self.backends.values() if b.forget_path == request.raw_path[len(self._prefix) :]]
        if forgetting and (self._is_inner or self._has_pass(token)):
            return await self._forget(forgetting)
        if not path.startswith(RELAYED) or ".." in unquote(unquote(path)).split("/"):
            return refusal(404, "not_found", f"there is no {path} here")
        closed = self._closing_for(token)
        backend = self._least_busy() if closed is None else None
        if backend is None:
            return self._unavailable(closed)
        self.in_flight[backend.name] += 1
        try:
            return await self._forwarder.forward(request, request.raw_path[len(self._prefix) :], backend)
        except EngineLost as error:
            if error.refused:
                # Its next report brings it back, if it lives.
                self.backends.pop(backend.name, None)
            lost = refusal(503, "engine_lost", "the engine ended before it answered; send the request again")
            lost.headers["Retry-After"] = "5"
            return lost
        finally:
            self.in_flight[backend.name] -= 1

    async def _forget(self, backends: Sequence[Backend]) -> web.Response:
        """Make every drafter forget the answers it learnt from. Only whoever verifies a deployment may ask for it."""
        pages = [await self._forwarder.page(b, b.forget_path) for b in backends if b.forget_path]
        if None in pages:
            return refusal(503, "engine_error", "an engine did not forget")
        return web.Response(text="forgotten\n")

    def _least_busy(self) -> Backend | None:
        return min(self.backends.values(), key=lambda b: self.in_flight[b.name], default=None)

    def _closing_for(self, token: str | None) -> Closed | None:
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
        response = refusal(503, "unavailable", f"not ready: {reason}")
        response.headers["Retry-After"] = str(max(1, math.ceil(closed.retry_after_s if closed else 5.0)))
        return response

    async def _metrics(self) -> web.Response:
        pages = [
            (b.name, page) for b in list(self.backends.values()) if (page := await self._forwarder.page(b, "/metrics"))
        ]
        text = merge_pages(pages) if len(pages) > 1 else "".join(text for _, text in pages)
        own = "" if self._is_inner else self._own_metrics()
        return web.Response(text=text + own, content_type="text/plain", charset="utf-8")

    def _own_metrics(self) -> str:
        counts = self.counts
        return format_families(
            ("orchestrator_requests_total", "counter", "Answered requests by status.", counts.requests, "status"),
            ("orchestrator_requests_in_flight", "gauge", "Requests at the engines now.", self.total_in_flight(), ""),
            ("orchestrator_engines_ready", "gauge", "Engines that take requests.", len(self.backends), ""),
            ("orchestrator_open", "gauge", "1 when ordinary requests are let in.", int(self.ready()), ""),
            ("orchestrator_sent_bytes_total", "counter", "Bytes of answers passed on.", counts.bytes_out, ""),
            ("orchestrator_client_disconnects_total", "counter", "Clients that left.", counts.disconnects, ""),
            ("orchestrator_engine_losses_total", "counter", "Requests an engine lost.", counts.engine_losses, ""),
        )


def _bearer(request: web.BaseRequest) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _strict_json(document: object) -> str:
    return json.dumps(document, allow_nan=False, ensure_ascii=False)
