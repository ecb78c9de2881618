"""One experiment's Serve application, seen from the command line: deploy, wait, pause, open, delete.

Every command finds the application by its name in the cluster; nothing here needs the process that deployed it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from orchestrator.config import Experiment, Placement
from orchestrator.errors import MachineError, PromotionError
from orchestrator.serving.gateway import GATEWAY, ListenerConfig, gateway, gateway_name, is_loopback
from orchestrator.serving.relay import digest
from orchestrator.serving.replica import DRAIN_S, ENGINE, EngineDeploymentSpec, application_args, engines

POLL_S = 0.25
CALL_TIMEOUT_S = 15.0
# A pause ends by itself when the command that holds it is gone.
PAUSE_TTL_S, PAUSE_RENEW_S = 20.0, 5.0
DELETE_TIMEOUT_S = 240.0
_START_FAILURE = re.compile(r"engine did not start: (.*)")


@dataclass(slots=True, kw_only=True)
class Deployment:
    """The application of one experiment in the connected cluster."""

    experiment: Experiment
    key: str | None = None
    pass_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _end_pause: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def url(self) -> str:
        """Base URL without /v1, as this machine reaches it."""
        serving = self.experiment.serving
        host = "127.0.0.1" if serving.host in ("0.0.0.0", "::") else serving.host
        return f"http://{f'[{host}]' if ':' in host else host}:{serving.port}{'/' + serving.route.strip('/')}".rstrip(
            "/"
        )

    def listener_config(self) -> ListenerConfig:
        serving = self.experiment.serving
        return ListenerConfig(
            host=serving.host,
            port=serving.port,
            route=serving.route,
            key_digest=digest(self.key) if self.key else None,
            max_request_mib=serving.max_request_mib,
        )

    @property
    def gateway_name(self) -> str:
        return gateway_name(self.name)

    def exists(self) -> bool:
        """Whether anything of this service is in the cluster."""
        return not {self.name, self.gateway_name}.isdisjoint(_applications())

    def status(self) -> str | None:
        """Serve's word for the application: RUNNING, DEPLOYING, UNHEALTHY, ...; None when there is none."""
        found = _applications().get(self.name)
        return str(found.status.value) if found else None

    def state(self) -> dict[str, Any] | None:
        """The gateway's own document; None while none answers."""
        if self.gateway_name not in _applications():
            return None
        with contextlib.suppress(RayServeException, TimeoutError, RuntimeError):
            state: dict[str, Any] = self._gateway("state")
            return state
        return None

    def deploy(self, deployed: EngineDeploymentSpec, placement: Placement) -> None:
        """Hand the configuration to Serve, which stops the engines that run and then starts the new ones."""
        serve.start(proxy_location="Disabled")
        state = self.state()
        if state is None:
            self._require_port()
        if state is None or state["listener"] != digest(f"{self.listener_config()}"):
            _run(self.gateway_name, gateway(asdict(self.listener_config())))
        _run(self.name, engines(application_args(deployed, placement, self.experiment.serving)))

    def _require_port(self) -> None:
        """Raises MachineError when somebody else listens where the gateway is to be, on this machine."""
        serving = self.experiment.serving
        if is_loopback(serving.host) and self.gateway_name not in _applications():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((serving.host, serving.port))
                except OSError as error:
                    raise MachineError(
                        f"serving.port: {serving.port} on {serving.host} cannot be listened on: {error.strerror}"
                    ) from None

    def wait_ready(self, version: str, deadline_s: float) -> None:
        """Return when only engines of `version` answer behind the gateway. Raises PromotionError when they will not."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            found = _applications().get(self.name)
            for each in (found, _applications().get(self.gateway_name)):
                if each is not None and each.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise PromotionError(_failure_reason(each))
            if found is not None and found.status.value == "RUNNING":
                state = self.state()
                if state is not None and state["versions"] == [version]:
                    return
            time.sleep(POLL_S)
        raise PromotionError(f"not ready within serving.deadline_s ({deadline_s:.0f} s); Serve says {self.status()}")

    @contextlib.contextmanager
    def pause(self, reason: str, retry_after_s: float) -> Iterator[None]:
        """While entered only the holder of pass_key is let in; everybody else gets 503 with Retry-After."""
        done = threading.Event()

        def renew() -> None:
            while True:
                with contextlib.suppress(RayServeException, TimeoutError, RuntimeError):
                    if self.gateway_name in _applications():
                        self._gateway("close", reason, retry_after_s, digest(self.pass_key), PAUSE_TTL_S)
                if done.wait(PAUSE_RENEW_S if self.exists() else POLL_S):
                    return

        renewing = threading.Thread(target=renew, name="pause", daemon=True)
        renewing.start()

        def end() -> None:
            done.set()
            renewing.join()

        self._end_pause = end
        try:
            yield
        finally:
            end()

    def drain(self, timeout_s: float = DRAIN_S) -> int:
        """Wait until the running requests have ended. Returns how many have not."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state()
            left = int(state["in_flight"]) if state else 0
            if left == 0 or time.monotonic() > deadline:
                return left
            time.sleep(POLL_S)

    def open(self, verified: str | None) -> None:
        """Let everybody in; `verified` is the version that passed."""
        # A renewal that is under way would arrive behind us and close the gateway again.
        self._end_pause()
        self._gateway("open", verified)

    def delete(self) -> None:
        """End the service: engines stopped, GPUs free, listener closed. Raises MachineError when it does not end."""
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        for name in (self.name, self.gateway_name):
            while name in _applications():
                # It gives up after a minute of its own, which an engine with much memory to free can take.
                with contextlib.suppress(TimeoutError):
                    serve.delete(name)
                if time.monotonic() > deadline:
                    raise MachineError(f"the application {name!r} did not end within {DELETE_TIMEOUT_S:.0f} s")

    def _gateway(self, method: str, *arguments: object) -> Any:
        handle = serve.get_deployment_handle(GATEWAY, self.gateway_name)
        return getattr(handle, method).remote(*arguments).result(timeout_s=CALL_TIMEOUT_S)


def other_applications(name: str) -> list[str]:
    """The names of the applications in this cluster besides `name`."""
    return sorted(set(_applications()) - {name, gateway_name(name)})


def _run(name: str, target: serve.Application) -> None:
    serve.run_many(
        [serve.RunTarget(target, name=name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _applications() -> Mapping[str, Any]:
    return serve.status().applications


def _failure_reason(found: Any) -> str:
    engine = found.deployments.get(ENGINE) or found.deployments.get(GATEWAY)
    text = "\n".join(filter(None, [engine.message if engine else "", found.message]))
    if matched := _START_FAILURE.search(text):
        return f"the engine did not start: {matched[1].strip()}"
    return f"Serve could not deploy it: {' '.join(text.split())[-500:]}"
