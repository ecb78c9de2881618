"""Checks of the conditions of a measurement: the client, the GPUs, the engine's process and log, the load.

Each function is `find` of the row of its name in checks.CHECKS: the detail sentence of what it found, or None.
"""

from __future__ import annotations

from orchestrator.engines.diagnosis.explain import compile_lines, override_lines
from orchestrator.measure.evidence import Case
from orchestrator.measure.formulas import counters_reset
from orchestrator.measure.quantity import quantile

MAX_LOOP_LAG_S = 0.005
MIN_LAG_SAMPLES = 20
MIN_LAG_SAMPLES_OF_JITTER = 100
MAX_CLIENT_CPU = 0.9
MIN_REPEATS = 3
MIN_FULL_CONCURRENCY = 0.6


def counter_reset(case: Case) -> str | None:
    if not any(counters_reset(window) for window in case.windows):
        return None
    return "the engine's counters went back while measuring: it restarted, and is cold or not the same"


def gpu_shared(case: Case) -> str | None:
    if not case.evidence.foreign_gpu_users:
        return None
    return f"others used the GPUs meanwhile: {', '.join(case.evidence.foreign_gpu_users)}"


def client_late(case: Case) -> str | None:
    """The p90 decides, not the p99: on a busy machine one late wake-up in a hundred moves no median.

    It is that of the samples and not the metric client_lag_p90_s, which a short measurement does not have.
    """
    lag_s = _lag_s(case, 0.9, MIN_LAG_SAMPLES) or 0.0
    cpu = max((x for x in case.measurement.repeats.get("client_cpu_share", ()) if x is not None), default=0.0)
    if lag_s <= MAX_LOOP_LAG_S and cpu <= MAX_CLIENT_CPU:
        return None
    found = (
        f"one wake-up in ten came {lag_s * 1e3:.1f} ms late or more, so the machine is too busy to measure on"
        if lag_s > MAX_LOOP_LAG_S
        else f"it used {cpu:.0%} of its core, so there are more streams than it can read"
    )
    return f"the client could not keep up and every time is in doubt: {found}"


def client_jitter(case: Case) -> str | None:
    lag_s = _lag_s(case, 0.99, MIN_LAG_SAMPLES_OF_JITTER)
    if lag_s is None or lag_s <= MAX_LOOP_LAG_S:
        return None
    return (
        f"one time in a hundred was taken {lag_s * 1e3:.1f} ms late or more, as on a busy machine: "
        "medians hold, p99 and maximum may not"
    )


def _lag_s(case: Case, q: float, least: int) -> float | None:
    """A quantile of how late the client's event loop woke in all windows; None of fewer than `least` samples."""
    lags_s = [lag_s for window in case.windows for lag_s in window.loop_lags_s]
    return quantile(lags_s, q) if len(lags_s) >= least else None


def compile_in_window(case: Case) -> str | None:
    lines = compile_lines(case.evidence.log, case.evidence.dialect)
    if not lines:
        return None
    return (
        f"the engine compiled while it was measured ({len(lines)} log lines; more `warmup` may help): {lines[0][:200]}"
    )


def sampling_overridden(case: Case) -> str | None:
    lines = override_lines(f"{case.evidence.log_before}\n{case.evidence.log}", case.evidence.dialect)
    if not lines:
        return None
    return (
        "temperature, top_p and seed are sent with every request; for what is not sent the engine has its own "
        f"defaults: {lines[0][:300]}"
    )


def few_repeats(case: Case) -> str | None:
    if len(case.windows) >= MIN_REPEATS:
        return None
    return f"{len(case.windows)} of at least {MIN_REPEATS} repeats: a difference cannot be told from noise"


def ramp_and_drain(case: Case) -> str | None:
    share = case.measurement.metrics.get("full_concurrency_share")
    if case.workload.concurrency == 1 or share is None or share.value >= MIN_FULL_CONCURRENCY:
        return None
    return (
        f"all {case.workload.concurrency} streams were busy only {share.value:.0%} of the time, the rest is "
        "start and end: raise `num_prompts`"
    )
