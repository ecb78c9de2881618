"""The engines as a Serve deployment: each replica starts one engine exactly as its trial did, and watches it.

Serve places, starts, checks and replaces replicas. Each replica reports to the gateway where its engine listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from orchestrator.cluster import is_head_node  # isort: skip (it sets what Ray reads when it is imported)
import ray
from ray import serve
from ray.serve.config import AutoscalingContext

from orchestrator.config import EngineSpec, Placement, Ready, Serving, Stop
from orchestrator.engines import find_engine
from orchestrator.errors import ConfigError, EngineFailure
from orchestrator.masking import MASK
from orchestrator.node.launch import run_engine
from orchestrator.node.program import shell_line
from orchestrator.node.server import Server
from orchestrator.serving.forward import Backend
from orchestrator.serving.gateway import GATEWAY, REPORT_PERIOD_S, REPORT_TIMEOUT_S, gateway_name, health_options
from orchestrator.serving.relay import Relay, digest

ENGINE = "Engine"
# How long the running requests of an engine that is to go are waited for.
DRAIN_S = 30.0
# The replica's measure that Serve's autoscaling decides by.
IN_FLIGHT = "in_flight"
# The GPUs of an engine that was killed stay busy for some seconds; its successor waits for them.
BUSY_CAUSES, BUSY_PATIENCE_S = ("gpu_busy", "port_taken"), 90.0
# Between the end of an engine's own grace and the moment Serve kills the replica.
STOP_SLACK_S = 120.0
log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeploymentSpec:
    """What one engine replica starts, as plain data: it travels through Serve and into exported files.

    engine: the EngineSpec of the run. version: another one replaces the engines. folder: where their logs go.
    record: what GET /orchestrator publishes of the run.
    """

    run_id: str
    version: str
    engine: Mapping[str, Any]
    gpus: int
    ports: tuple[int, int]
    folder: str
    record: Mapping[str, Any] = field(default_factory=dict)

    def engine_spec(self) -> EngineSpec:
        """The EngineSpec, masked secrets filled in from this environment. Raises ConfigError when one is missing."""
        spec = read_engine_spec(self.engine)
        missing = [name for name, value in spec.env.items() if value == MASK and name not in os.environ]
        if missing:
            raise ConfigError(f"engine.env.{missing[0]}: its value was not recorded; set {missing[0]} where Ray runs")
        return replace(spec, env={n: os.environ[n] if v == MASK else v for n, v in spec.env.items()})


def read_engine_spec(document: Mapping[str, Any]) -> EngineSpec:
    """The EngineSpec of asdict()'s document."""
    known = {f.name for f in fields(EngineSpec)}
    plain = {key: value for key, value in document.items() if key in known and key not in ("ready", "stop")}
    return EngineSpec(**plain, ready=Ready(**document.get("ready", {})), stop=Stop(**document.get("stop", {})))


class EngineReplica:
    """One engine, started as its trial was: same spec, same keeper, same GPUs from Ray."""

    async def __init__(self, deployed: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Returns when the engine is ready. Async, as Serve allows, so that it can be given up while it starts."""
        self._spec = EngineDeploymentSpec(**deployed)
        self._replica = serve.get_replica_context().replica_tag
        self._gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        self._starting: Server | None = None
        self._server: Server | None = None
        self._ended: str | None = None
        self._in_flight = 0
        self._reporting: threading.Thread | None = None
        self._up, self._leaving, self._stop = threading.Event(), threading.Event(), threading.Event()
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
            except Exception as error:  # noqa: BLE001 (reported to Serve, which decides about this replica)
                self._ended = f"{type(error).__name__}: {error}"
            self._up.set()
            return

    def _running(self) -> Any:
        deployed = self._spec
        workdir = Path(deployed.folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        workdir.mkdir(parents=True, exist_ok=True)
        spec = deployed.engine_spec()
        return run_engine(
            find_engine(spec.kind),
            spec,
            workdir=workdir,
            ports=(deployed.ports[0], deployed.ports[1]),
            gpu_ids=self._gpu_ids,
            on_start=self._remember,
        )

    def _remember(self, starting: Server) -> None:
        self._starting = starting

    async def _report(self) -> None:
        """Report to the gateway twice a second where this engine is, and at once when it has ended or is to go.

        Returns when that is so and, for an engine that is to go, when it has no more requests.
        """
        assert self._server is not None
        gateway = serve.get_deployment_handle(GATEWAY, gateway_name(serve.get_replica_context().app_name))
        record = {
            **self._spec.record,
            "command_line": shell_line(self._server.plan),
            "gpus": list(self._gpu_ids),
        }
        async with self._reachable() as backend:
            state = {**asdict(backend), "run_id": self._spec.run_id, "version": self._spec.version, "record": record}
            while True:
                ended, leaving, in_flight = self._ended is not None, self._leaving.is_set(), 0
                # A gateway that is being replaced hears it in the next round.
                with contextlib.suppress(Exception):
                    call = gateway.report.remote(self._replica, {**state, "ready": not (ended or leaving)})
                    in_flight = await asyncio.wait_for(call, REPORT_TIMEOUT_S)
                self._in_flight = in_flight
                if ended or self._stop.is_set() or (leaving and not in_flight):
                    return
                for _ in range(int(REPORT_PERIOD_S / 0.05)):
                    if self._ended is None and self._leaving.is_set() == leaving:
                        await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def _reachable(self) -> AsyncIterator[Backend]:
        """Where the gateway finds this engine: on its loopback port, from another node through a relay of its own."""
        assert self._server is not None
        target = self._server.target
        speculation = self._server.plan.speculation
        local = Backend(
            name=self._replica,
            base_url=target.base_url,
            api_key=target.api_key,
            forget_path=speculation.forget_path if speculation else None,
        )
        if is_head_node():
            yield local
            return
        key, address = secrets.token_urlsafe(24), str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        relay = Relay(key_digest=digest(key), is_inner=True)
        relay.backends[local.name] = local
        port = await relay.start(address, 0)
        try:
            yield replace(local, base_url=f"http://{address}:{port}", api_key=key)
        finally:
            await relay.stop()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve: the requests at this engine, as the gateway last reported."""
        return {IN_FLIGHT: self._in_flight}

    def check_health(self) -> None:
        if self._ended is not None:
            raise RuntimeError(f"engine ended: {self._ended}")

    def __del__(self) -> None:
        if not hasattr(self, "_thread"):
            return
        self._leaving.set()
        if self._reporting is not None:
            self._reporting.join(DRAIN_S)
        self._stop.set()
        if self._server is None and self._starting is not None:
            # Its start is not waited for: the keeper ends it, and with that the start has failed.
            self._starting.keeper.terminate()
        self._thread.join()


def by_requests_in_flight(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's own rule, requests / target_ongoing_requests, on the gateway's count: Serve itself sees no request."""
    counted = (context.aggregated_metrics or {}).get(IN_FLIGHT, {})
    assert context.config is not None
    return sum(counted.values()) / context.config.target_ongoing_requests, {}


def application_args(deployed: EngineDeploymentSpec, placement: Placement, serving: Serving) -> dict[str, Any]:
    """The arguments of `engines`, as plain data. autoscaling: Serve's own options, or empty for a fixed number."""
    return {
        "engine": asdict(deployed),
        "cpus": placement.cpus,
        "node_label": placement.node_label,
        "replicas": serving.replicas,
        "autoscaling": dict(serving.autoscaling),
    }


def engines(args: Mapping[str, Any]) -> serve.Application:
    """The Serve application of one configuration's engines; also what an exported `serve deploy` file names.

    args: what application_args gives.
    """
    deployed = EngineDeploymentSpec(**args["engine"])
    bundle = {name: amount for name, amount in {"CPU": args["cpus"], "GPU": deployed.gpus}.items() if amount}
    label, _, wanted = str(args.get("node_label") or "").partition("=")
    if label and not wanted:
        bundle[label] = 0.001
    options: dict[str, Any] = {
        **health_options(),
        "name": ENGINE,
        # One bundle on one node: an engine never stretches over two, and its replica sits where its GPUs are.
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
        "ray_actor_options": {"num_cpus": args["cpus"], "num_gpus": deployed.gpus},
        "graceful_shutdown_timeout_s": read_engine_spec(deployed.engine).stop.grace_s + STOP_SLACK_S,
        # The same configuration fails again: the first failed start decides about a promotion.
        "max_constructor_retry_count": 1,
    }
    if wanted:
        options["placement_group_bundle_label_selector"] = [{label: wanted}]
    if args.get("autoscaling"):
        policy = {"policy_function": f"{__name__}:{by_requests_in_flight.__name__}"}
        options["autoscaling_config"] = {"policy": policy, **args["autoscaling"]}
    else:
        options["num_replicas"] = args["replicas"]
    return serve.deployment(**options)(EngineReplica).bind(asdict(deployed))
