"""Gate, deploy, verify, keep or roll back: the way of a recorded configuration into service.

Aliases and tags change only after a verification through the public URL.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from orchestrator import tracking
from orchestrator.config import EngineSpec, Experiment
from orchestrator.engines import find_engine
from orchestrator.errors import PromotionError
from orchestrator.masking import MASK
from orchestrator.measure.client import Target
from orchestrator.measure.quantity import quantity_document
from orchestrator.serving import gate, verification
from orchestrator.serving.deployment import Deployment
from orchestrator.serving.gate import Comparison
from orchestrator.serving.replica import EngineDeploymentSpec
from orchestrator.serving.verification import Verification
from orchestrator.tracking import Recorded
from orchestrator.trial import TrialResult

Say = Callable[[str], None]
Decision = Literal["promoted", "kept", "rolled_back", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionReport:
    """What `promote` and `promote --rollback` came to.

    decision: promoted; kept (the champion stays, because the challenger is not really better); rolled_back (the
    challenger failed, the champion serves again); failed (nothing verified is served). run_id, name: the candidate.
    serving_run_id: what is behind the URL now, None for nothing. downtime_s: from the pause to the opening.
    """

    decision: Decision
    reason: str
    run_id: str
    name: str
    application: str
    url: str
    serving_run_id: str | None
    forced: tuple[str, ...] = ()
    comparison: Comparison | None = None
    verification: Verification | None = None
    rollback: Verification | None = None
    version: str | None = None
    downtime_s: float | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.decision in ("promoted", "kept") else 1

    def document(self) -> dict[str, Any]:
        """The report as one JSON object."""
        comparison = self.comparison
        return {
            "decision": self.decision,
            "reason": self.reason,
            "run_id": self.run_id,
            "name": self.name,
            "application": self.application,
            "url": self.url,
            "serving_run_id": self.serving_run_id,
            "forced": list(self.forced),
            "comparison": None
            if comparison is None
            else {
                "metric": comparison.metric,
                "challenger": quantity_document(comparison.challenger),
                "champion": quantity_document(comparison.champion),
                "ratio": quantity_document(comparison.ratio),
                "better": comparison.better,
            },
            "verification": self.verification.document() if self.verification else None,
            "rollback": self.rollback.document() if self.rollback else None,
            "version": self.version,
            "downtime_s": None if self.downtime_s is None else round(self.downtime_s, 1),
        }


@dataclass(slots=True, kw_only=True)
class Promotion:
    """One promotion in a connected cluster. `challenge` and `roll_back` are its two ways through."""

    experiment: Experiment
    deployment: Deployment
    say: Say
    forced: list[str] = field(default_factory=list)

    def challenge(self, challenger: Recorded, champion: Recorded | None, *, force: bool) -> PromotionReport:
        """Serve the challenger if it passes the gate and the verification; else the champion stays or comes back."""
        gate.require_complete(challenger.result)
        verification.choose_check(self.experiment, challenger.result)
        objections = gate.find_objections(self.experiment, challenger.result)
        if objections and not force:
            raise PromotionError(f"{challenger.result.spec.name} may not be promoted: {'; '.join(objections)}")
        self.forced.extend(objections)
        comparison = None
        if champion is not None and champion.run_id != challenger.run_id:
            comparison = gate.compare_with_champion(self.experiment, challenger, champion)
            self.say(f"{challenger.result.spec.name}: {comparison.sentence()}")
            if not comparison.better and not force:
                return self._keep_champion(challenger, champion, comparison)
            if not comparison.better:
                self.forced.append(comparison.sentence())
        elif champion is not None and self._is_served(champion):
            return self._report(challenger, "kept", "it is the champion and is served already", challenger.run_id)
        return replace(self._serve(challenger, fallback=champion), comparison=comparison)

    def _keep_champion(self, challenger: Recorded, champion: Recorded, comparison: Comparison) -> PromotionReport:
        """The champion stays; when it is not up, it is started and verified."""
        reason = f"the champion {champion.result.spec.name} stays: {comparison.sentence()}"
        if self._is_served(champion):
            return self._report(challenger, "kept", reason, champion.run_id, comparison=comparison)
        served = self._serve(champion, fallback=None)
        if served.decision != "promoted":
            return replace(served, comparison=comparison)
        report = self._report(challenger, "kept", reason, champion.run_id, comparison=comparison)
        return replace(report, verification=served.verification, downtime_s=served.downtime_s)

    def roll_back(self, before: Recorded, champion: Recorded | None) -> PromotionReport:
        """Serve the previous champion again; the aliases change places once it is verified."""
        return self._serve(before, fallback=champion)

    def _is_served(self, recorded: Recorded) -> bool:
        state = self.deployment.state()
        return state is not None and state["open"] and state["run_id"] == recorded.run_id

    def _serve(self, wanted: Recorded, fallback: Recorded | None) -> PromotionReport:
        result = wanted.result
        self._announce(result)
        began_s = time.monotonic()
        with self.deployment.pause(f"{result.spec.name} is being started", _start_s(result) or 30.0):
            if self.deployment.exists() and (left := self.deployment.drain()):
                self.say(f"{left} requests did not end in time and are cut off")
            passed = self._start_and_verify(wanted)
            if passed.ok:
                self.say(f"verified: {passed.reason}")
                report = self._report(wanted, "promoted", passed.reason, wanted.run_id, verification=passed)
            else:
                self.say(f"verification failed: {passed.reason}")
                report = self._restore_champion(wanted, passed, fallback)
        downtime_s = time.monotonic() - began_s
        if report.decision == "promoted":
            report = replace(report, version=self._name_champion(wanted))
        return replace(report, downtime_s=downtime_s)

    def _restore_champion(self, wanted: Recorded, passed: Verification, fallback: Recorded | None) -> PromotionReport:
        """The champion back in service after a failed verification; nothing where there is no champion."""
        report = self._report(wanted, "failed", passed.reason, None, verification=passed)
        if fallback is None or fallback.run_id == wanted.run_id:
            self.deployment.delete()
            return report
        self.say(f"rolling back to {fallback.result.spec.name}")
        back = self._start_and_verify(fallback)
        if back.ok:
            self.say(f"rolled back, verified: {back.reason}")
            return replace(report, decision="rolled_back", rollback=back, serving_run_id=fallback.run_id)
        self.say(f"the champion failed its verification, too: {back.reason}")
        self.deployment.delete()
        return replace(report, rollback=back, reason=f"{report.reason}; then the champion: {back.reason}")

    def _start_and_verify(self, wanted: Recorded) -> Verification:
        """Replace what runs by `wanted`, verify it through the URL, and let everybody in when it passed."""
        result = wanted.result
        version = secrets.token_hex(4)
        spec = result.spec.engine
        deadline = time.monotonic() + self.experiment.serving.deadline_s
        name, _, metric = verification.choose_check(self.experiment, result)
        try:
            self.deployment.deploy(self._deployment_spec(wanted, version), result.spec.placement)
            self.deployment.wait_ready(version, deadline - time.monotonic())
        except PromotionError as error:
            return Verification(ok=False, reason=str(error), workload=name, metric=metric)
        model = find_engine(spec.kind).plan(spec, self.experiment.serving.port, Path(".")).model_name
        target = Target(base_url=self.deployment.url, model=model, api_key=self.deployment.pass_key)
        passed = verification.verify(self.experiment, result, target, self.say)
        if passed.ok:
            self.deployment.open(version)
        return passed

    def _deployment_spec(self, wanted: Recorded, version: str) -> EngineDeploymentSpec:
        result = wanted.result
        folder = Path(self.experiment.tracking.folder).absolute() / "serving" / self.experiment.name
        return EngineDeploymentSpec(
            run_id=wanted.run_id or "",
            version=version,
            engine=asdict(restore_secrets(result.spec.engine, self.experiment.engine)),
            gpus=result.spec.placement.gpus,
            ports=(result.spec.placement.ports[0], result.spec.placement.ports[1]),
            folder=str(folder),
            record=public_record(wanted, self.experiment),
        )

    def _announce(self, result: TrialResult) -> None:
        start_s = _start_s(result)
        name, _, _ = verification.choose_check(self.experiment, result)
        measuring_s = result.phases_s.get("measuring")
        repeats = result.spec.workloads[name].repeats
        about = None if start_s is None or measuring_s is None else start_s + measuring_s / max(repeats, 1)
        expected = "" if about is None else f", about {about:.0f} s from what the trial took"
        if self.deployment.exists():
            self.say(
                f"{result.spec.name} takes the place of the engine that runs: stop, start, verify{expected}; "
                "until then requests get 503 with Retry-After"
            )
        else:
            self.say(f"starting {result.spec.name} as {self.deployment.name} at {self.deployment.url}{expected}")

    def _name_champion(self, wanted: Recorded) -> str:
        assert wanted.run_id is not None
        tags = {
            "application": self.deployment.name,
            "url": self.deployment.url,
            "promoted_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "forced": "; ".join(self.forced) or "no",
        }
        return tracking.set_champion(self.experiment, wanted.run_id, tags)

    def _report(
        self, candidate: Recorded, decision: Decision, reason: str, serving: str | None, **details: Any
    ) -> PromotionReport:
        return PromotionReport(
            decision=decision,
            reason=reason,
            run_id=candidate.run_id or "",
            name=candidate.result.spec.name,
            application=self.deployment.name,
            url=self.deployment.url,
            serving_run_id=serving,
            forced=tuple(self.forced),
            **details,
        )


def restore_secrets(recorded: EngineSpec, configured: EngineSpec) -> EngineSpec:
    """The recorded spec, its masked secrets filled in from the configuration or this environment. PromotionError."""
    env = dict(recorded.env)
    for name in [name for name, value in env.items() if value == MASK]:
        env[name] = configured.env.get(name) or os.environ.get(name) or MASK
        if env[name] == MASK:
            raise PromotionError(f"engine.env.{name}: its value was not recorded; set {name} in the environment")
    return replace(recorded, env=env)


def public_record(recorded: Recorded, experiment: Experiment) -> dict[str, Any]:
    """What GET /orchestrator publishes of the run: plain data."""
    result = recorded.result
    return {
        "experiment": experiment.name,
        "trial": result.spec.name,
        "application": experiment.name,
        "engine": result.spec.engine.kind,
        "engine_version": result.provenance.get("engine_version"),
        "recorded": {
            name: {key: quantity_document(q) for key, q in measurement.metrics.items() if q is not None}
            for name, measurement in result.measurements.items()
        },
        "recorded_at": result.ended_at,
    }


def _start_s(result: TrialResult) -> float | None:
    return result.phases_s.get("starting")
