"""The gateway: the Serve deployment that holds the listener and lives longer than the engines behind it.

Requests do not pass through Serve's own proxy: the gateway talks to the engines directly, which report twice a second
where they are (experiments/relay-overhead has the reason). An engine that stops reporting is taken out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from orchestrator.cluster import HEAD_RESOURCE  # isort: skip (it sets what Ray reads when it is imported)
import uvloop
from ray import serve

from orchestrator.errors import ConfigError
from orchestrator.serving.forward import Backend, Limits
from orchestrator.serving.relay import Closed, Relay, digest

GATEWAY = "Gateway"
REPORT_PERIOD_S, REPORT_TIMEOUT_S = 0.5, 5.0
# Three failed checks in a row replace a replica: with Serve's own period of 10 s that takes half a minute.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """How the gateway listens. key_digest: digest of the key that clients must show.

    api_key_env: where the gateway reads that key itself, in its own environment; used by exported files.
    """

    host: str
    port: int
    route: str = "/"
    key_digest: str | None = None
    api_key_env: str | None = None
    max_request_mib: float = 64.0


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return host in ("::1", "localhost") or host.startswith("127.")


def _digest_from(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"serving.api_key_env: {variable} is not set in the gateway's environment")
    return digest(os.environ[variable])


class Gateway:
    """The listener. One per service, on the head node, so that the address is known; it outlives the engines."""

    def __init__(self, listener: Mapping[str, Any]) -> None:
        self._config = ListenerConfig(**listener)
        key_digest = self._config.key_digest or _digest_from(self._config.api_key_env)
        if not is_loopback(self._config.host) and key_digest is None:
            raise ValueError(f"serving.host {self._config.host} can be reached by others: an API key is needed")
        self._reports: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._relay = Relay(
            route=self._config.route,
            key_digest=key_digest,
            limits=Limits(request_bytes=int(self._config.max_request_mib * 2**20)),
            describe=self.document,
        )
        self._verified: str | None = None
        # A loop and a thread of its own: nothing that Serve does in this process makes a token wait.
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._on_loop(self._relay.start(self._config.host, self._config.port))
        # Everything that is loaded by now stays for good; walking through it would make tokens wait for 50 ms and more.
        gc.collect()
        gc.freeze()
        self._sweeping = asyncio.run_coroutine_threadsafe(self._sweep(), self._loop)

    def _on_loop(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(timeout=30)

    async def report(self, replica: str, state: Mapping[str, Any]) -> int:
        """Take an engine's report of where it is; ready False takes it out at once. Returns the requests at it now."""

        def take() -> int:
            self._take_report(replica, state)
            return self._relay.in_flight[replica]

        return cast("int", await self._call_on_loop(take))

    def _take_report(self, replica: str, state: Mapping[str, Any]) -> None:
        if state["ready"]:
            self._reports[replica] = (time.monotonic(), state)
            self._relay.backends[replica] = Backend(
                name=replica,
                base_url=state["base_url"],
                api_key=state["api_key"],
                forget_path=state["forget_path"],
            )
        else:
            self._reports.pop(replica, None)
            self._relay.backends.pop(replica, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            late = time.monotonic() - REPORT_TIMEOUT_S
            for replica, (at, _) in list(self._reports.items()):
                if at < late:
                    self._reports.pop(replica)
                    self._relay.backends.pop(replica, None)

    async def close(self, reason: str, retry_after_s: float, pass_digest: str, ttl_s: float) -> int:
        """Let in only the holder of the pass, for ttl_s or until `open`. Returns the requests still at the engines."""

        def close() -> int:
            self._relay.closed = Closed(
                reason=reason,
                retry_after_s=retry_after_s,
                pass_digest=pass_digest,
                until_s=self._loop.time() + ttl_s,
            )
            return self._relay.total_in_flight()

        return cast("int", await self._call_on_loop(close))

    async def open(self, verified: str | None) -> None:
        """Let everybody in. verified: the version whose engine has just passed its verification."""

        def open_() -> None:
            self._relay.closed = None
            self._verified = verified or self._verified

        await self._call_on_loop(open_)

    async def _call_on_loop(self, function: Any) -> Any:
        async def call() -> Any:
            return function()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    async def state(self) -> dict[str, Any]:
        """What `promote --status` shows: the document of GET /orchestrator, and who is let in."""
        return cast("dict[str, Any]", await self._call_on_loop(self.document))

    def document(self) -> dict[str, Any]:
        reports = [state for _, state in self._reports.values()]
        run_ids = sorted({state["run_id"] for state in reports})
        versions = sorted({state["version"] for state in reports})
        closed = self._relay.closed
        return {
            "listener": digest(f"{self._config}"),
            "run_id": run_ids[0] if len(run_ids) == 1 else None,
            "versions": versions,
            "verified": bool(versions) and versions == [self._verified],
            "open": self._relay.ready(),
            "closed_because": closed.reason if closed and not self._relay.ready() else None,
            "engines": len(reports),
            "in_flight": self._relay.total_in_flight(),
            **(reports[0]["record"] if reports else {}),
        }

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the relay's thread has ended")

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._on_loop(self._relay.stop())
            loop.call_soon_threadsafe(loop.stop)


def gateway(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application of the listener, apart from the engines', so that it stays. args: a ListenerConfig's."""
    options: dict[str, Any] = {
        **health_options(),
        "name": GATEWAY,
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}},
        "graceful_shutdown_timeout_s": 10.0,
        "max_ongoing_requests": 1000,
    }
    return serve.deployment(**options)(Gateway).bind(dict(args))


def gateway_name(application: str) -> str:
    """The gateway's application beside the engines'."""
    return f"{application}-gateway"


def health_options() -> dict[str, float]:
    """How closely Serve looks after a deployment of ours."""
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
