"""The two Serve deployments of a promoted configuration: the gateway that listens, the engines behind it.

Requests do not pass through Serve's own proxy: the gateway holds the listener and talks to the engines directly
(experiments/relay-overhead says why). Serve places, starts, watches and replaces; engines report to the gateway once
a second, and an engine that stops reporting is taken out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import uvloop
from ray import serve

from orchestrator import server
from orchestrator.cluster import HEAD_RESOURCE, is_head_node
from orchestrator.config import EngineSpec, Ready, Stop
from orchestrator.engines import ENGINES
from orchestrator.errors import ConfigError, EngineFailure
from orchestrator.relay import Backend, Closed, Limits, Relay, digest
from orchestrator.server import Server

GATEWAY, ENGINE = "Gateway", "Engine"
# Stands for a secret whose value is written nowhere: it is taken from the environment where the engine starts.
MASKED = "****"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
REPORT_PERIOD_S = 0.5
REPORT_TIMEOUT_S = 5.0
# Three failed checks in a row replace an engine: with Serve's own period of 10 s that takes half a minute.
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0
# The GPUs of an engine that was killed stay busy for some seconds; its successor waits for them.
BUSY_CAUSES, BUSY_PATIENCE_S = ("gpu_busy", "port_taken"), 90.0
# Between the end of an engine's own grace and the moment Serve kills the replica.
STOP_SLACK_S = 120.0
log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one engine replica starts, as plain data: it travels through Serve and into exported files.

    engine: the EngineSpec of the run. version: another one replaces the engines. folder: where their logs go.
    record: what GET /orchestrator tells of the run.
    """

    run_id: str
    version: str
    engine: Mapping[str, Any]
    gpus: int
    ports: tuple[int, int]
    folder: str
    record: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> EngineSpec:
        """The EngineSpec, masked secrets filled in from this environment. Raises ConfigError when one is missing."""
        spec = engine_spec(self.engine)
        missing = [name for name, value in spec.env.items() if value == MASKED and name not in os.environ]
        if missing:
            raise ConfigError(f"engine.env.{missing[0]}: its value was not recorded; set {missing[0]} where Ray runs")
        return replace(spec, env={n: os.environ[n] if v == MASKED else v for n, v in spec.env.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How the gateway listens. key_digest: digest of the key that clients must show.

    api_key_env: where the gateway reads that key itself, in its own environment; used by exported files.
    """

    host: str
    port: int
    route: str = "/"
    key_digest: str | None = None
    api_key_env: str | None = None
    max_request_mib: float = 64.0


def engine_spec(document: Mapping[str, Any]) -> EngineSpec:
    """The EngineSpec of asdict()'s document."""
    known = {f.name for f in fields(EngineSpec)}
    plain = {key: value for key, value in document.items() if key in known and key not in ("ready", "stop")}
    return EngineSpec(**plain, ready=Ready(**document.get("ready", {})), stop=Stop(**document.get("stop", {})))


def _digest_from(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"serving.api_key_env: {variable} is not set in the gateway's environment")
    return digest(os.environ[variable])


class Gateway:
    """The listener. One per service, on the head node, so that the address is known; it outlives the engines."""

    def __init__(self, door: Mapping[str, Any]) -> None:
        self._door = Door(**door)
        key_digest = self._door.key_digest or _digest_from(self._door.api_key_env)
        if self._door.host not in LOOPBACK and key_digest is None:
            raise ValueError(f"serving.host {self._door.host} can be reached by others: an API key is needed")
        self._reports: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._relay = Relay(
            route=self._door.route,
            key_digest=key_digest,
            limits=Limits(request_bytes=int(self._door.max_request_mib * 2**20)),
            describe=self.document,
        )
        self._verified: str | None = None
        # A loop and a thread of its own: nothing that Serve does in this process makes a token wait.
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._on_loop(self._relay.start(self._door.host, self._door.port))
        # Everything that is loaded by now stays for good; walking through it would make tokens wait for 50 ms and more.
        gc.collect()
        gc.freeze()
        self._sweeping = asyncio.run_coroutine_threadsafe(self._sweep(), self._loop)

    def _on_loop(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(timeout=30)

    async def report(self, replica: str, state: Mapping[str, Any]) -> None:
        """An engine tells where it is; ready False takes it out at once."""
        self._loop.call_soon_threadsafe(self._take_report, replica, dict(state))

    def _take_report(self, replica: str, state: Mapping[str, Any]) -> None:
        if state["ready"]:
            self._reports[replica] = (time.monotonic(), state)
            self._relay.backends[replica] = Backend(name=replica, base_url=state["base_url"], api_key=state["api_key"])
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

        return cast("int", await self._called(close))

    async def open(self, verified: str | None) -> None:
        """Let everybody in. verified: the version whose engine has just passed its verification."""

        def open_() -> None:
            self._relay.closed = None
            self._verified = verified or self._verified

        await self._called(open_)

    async def _called(self, function: Any) -> Any:
        async def call() -> Any:
            return function()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._loop))

    async def state(self) -> dict[str, Any]:
        """What `promote --status` shows: the document of GET /orchestrator, and who is let in."""
        return cast("dict[str, Any]", await self._called(self.document))

    def document(self) -> dict[str, Any]:
        reports = [state for _, state in self._reports.values()]
        run_ids = sorted({state["run_id"] for state in reports})
        versions = sorted({state["version"] for state in reports})
        closed = self._relay.closed
        return {
            "door": digest(f"{self._door}"),
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


class EngineReplica:
    """One engine, started as its trial was: same spec, same keeper, same GPUs from Ray."""

    async def __init__(self, order: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Returns when the engine is ready. Async, as Serve allows, so that it can be given up while it starts."""
        self._order = Order(**order)
        self._replica = serve.get_replica_context().replica_tag
        self._gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        self._starting: Server | None = None
        self._server: Server | None = None
        self._ended: str | None = None
        self._up, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._up.wait)
        if self._server is None:
            raise RuntimeError(f"engine did not start: {self._ended}")
        self._reporting = threading.Thread(target=lambda: asyncio.run(self._report()), name="report", daemon=True)
        self._reporting.start()

    def _run(self) -> None:
        """The engine's whole life, in a thread of its own: starting, stopping and waiting all block."""
        deadline = time.monotonic() + BUSY_PATIENCE_S
        while True:
            try:
                with self._running() as running:
                    self._server = running
                    self._up.set()
                    while not self._stop.wait(0.2):
                        running.check_alive()
            except EngineFailure as failure:
                busy = failure.diagnosis.cause in BUSY_CAUSES and self._server is None
                if busy and time.monotonic() < deadline and not self._stop.wait(2.0):
                    continue
                self._ended = f"{failure.diagnosis.cause or 'ended'}: {failure.diagnosis.summary}"
            except Exception as error:  # noqa: BLE001 (told to Serve, which decides about this replica)
                self._ended = f"{type(error).__name__}: {error}"
            self._up.set()
            return

    def _running(self) -> Any:
        order = self._order
        workdir = Path(order.folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        workdir.mkdir(parents=True, exist_ok=True)
        spec = order.spec()
        return server.running(
            ENGINES[spec.kind],
            spec,
            workdir=workdir,
            ports=(order.ports[0], order.ports[1]),
            gpu_ids=self._gpu_ids,
            on_start=self._remember,
        )

    def _remember(self, starting: Server) -> None:
        self._starting = starting

    async def _report(self) -> None:
        """Tell the gateway twice a second where this engine is, and at once when it has ended."""
        assert self._server is not None
        gateway = serve.get_deployment_handle(GATEWAY, gateway_name(serve.get_replica_context().app_name))
        record = {
            **self._order.record,
            "command_line": server.shell_line(self._server.plan),
            "gpus": list(self._gpu_ids),
        }
        async with self._reachable() as backend:
            state = {**asdict(backend), "run_id": self._order.run_id, "version": self._order.version, "record": record}
            while True:
                ready = self._ended is None and not self._stop.is_set()
                # A gateway that is being replaced hears it in the next round.
                with contextlib.suppress(Exception):
                    call = gateway.report.remote(self._replica, {**state, "ready": ready})
                    await asyncio.wait_for(call, REPORT_TIMEOUT_S)
                if not ready:
                    return
                for _ in range(int(REPORT_PERIOD_S / 0.05)):
                    if self._ended is None and not self._stop.is_set():
                        await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _reachable(self) -> AsyncIterator[Backend]:
        """Where the gateway finds this engine: on its loopback port, from another node through a relay of its own."""
        assert self._server is not None
        target = self._server.target
        local = Backend(name=self._replica, base_url=target.base_url, api_key=target.api_key)
        if is_head_node():
            yield local
            return
        key, address = secrets.token_urlsafe(24), str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        relay = Relay(key_digest=digest(key), own_metrics=False)
        relay.backends[local.name] = local
        port = await relay.start(address, 0)
        try:
            yield replace(local, base_url=f"http://{address}:{port}", api_key=key)
        finally:
            await relay.stop()

    def check_health(self) -> None:
        if self._ended is not None:
            raise RuntimeError(f"engine ended: {self._ended}")

    def __del__(self) -> None:
        if not hasattr(self, "_thread"):
            return
        self._stop.set()
        if self._server is None and self._starting is not None:
            # Its start is not waited for: the keeper ends it, and with that the start has failed.
            self._starting.keeper.terminate()
        self._thread.join()


def engines(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application of one configuration's engines; also what an exported `serve deploy` file names.

    args: {order: Order as a dict, cpus: per engine, replicas, autoscaling: Serve's own options or empty, node_label}.
    """
    order = Order(**args["order"])
    bundle = {name: amount for name, amount in {"CPU": args["cpus"], "GPU": order.gpus}.items() if amount}
    label, _, wanted = str(args.get("node_label") or "").partition("=")
    if label and not wanted:
        bundle[label] = 0.001
    options: dict[str, Any] = {
        **_watched(),
        "name": ENGINE,
        # One bundle on one node: an engine never stretches over two, and its replica sits where its GPUs are.
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
        "ray_actor_options": {"num_cpus": args["cpus"], "num_gpus": order.gpus},
        "graceful_shutdown_timeout_s": engine_spec(order.engine).stop.grace_s + STOP_SLACK_S,
        # The same configuration fails again: the first failed start decides about a promotion.
        "max_constructor_retry_count": 1,
    }
    if wanted:
        options["placement_group_bundle_label_selector"] = [{label: wanted}]
    if args.get("autoscaling"):
        options["autoscaling_config"] = dict(args["autoscaling"])
    else:
        options["num_replicas"] = args["replicas"]
    return serve.deployment(**options)(EngineReplica).bind(asdict(order))


def gateway(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application of the listener; args is a Door as a dict. Apart from the engines', so that it stays."""
    options: dict[str, Any] = {
        **_watched(),
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


def _watched() -> dict[str, float]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
