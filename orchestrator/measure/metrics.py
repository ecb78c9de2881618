"""The one table of metrics, and Windows -> Measurement.

A new metric is one row of METRICS and its formula in formulas.py. Measuring, optimising, constraints, reports and the
tables of docs/definitions.md (a test holds them equal) have what they know about a metric from its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.config import Mode
from orchestrator.measure import formulas
from orchestrator.measure.formulas import RequestTrace, Window
from orchestrator.measure.quantity import TAILS, Quantity, Tail, finite, median, over_repeats, tail

__all__ = [
    "MEMORY_METRICS",
    "METRICS",
    "RATE_UNIT",
    "Measurement",
    "Metric",
    "Quantity",
    "find_metric",
    "measure_windows",
    "metric_names",
]

RATE_UNIT = "tok/s"
_GPU_INDEX = re.compile(r"^gpu\d+_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of a table of metrics.

    unit: `s`, `tok/s`, `tokens`, `GiB`, or empty for a plain ratio. better: whether a larger (`max`) or a smaller
    (`min`) value is better. doc: one sentence with the formula. At most one of the three formulas is given:
    per_request: the value of one request; that of a repeat is the median over its requests.
    per_window: the value of one repeat.
    pooled: the samples of one repeat, whose value is their median; its window holds answered, warm requests only.
    Without a formula the value comes from elsewhere: from the campaign (`speedup`) or from the trial (memory).
    tails: which of TAILS over the samples of all repeats are metrics, too; tails_only: the median is none.
    """

    name: str
    unit: str
    better: Mode
    doc: str
    per_request: Callable[[RequestTrace], float | None] | None = None
    per_window: Callable[[Window], float | None] | None = None
    pooled: Callable[[Window], Iterable[float]] | None = None
    tails: tuple[Tail, ...] = ()
    tails_only: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError on a row that cannot be measured as it stands."""
        given = [formula for formula in (self.per_request, self.per_window, self.pooled) if formula is not None]
        if len(given) > 1:
            raise ValueError(f"{self.name}: more than one formula")
        if self.tails and self.per_request is None and self.pooled is None:
            raise ValueError(f"{self.name}: tails need samples, so per_request or pooled")
        if self.tails_only and not self.tails:
            raise ValueError(f"{self.name}: neither a median nor tails")

    @property
    def tail_names(self) -> dict[Tail, str]:
        """Tail -> name, with the unit at the end where the metric's name has it: p90 of ttft_s is ttft_p90_s."""
        stem = self.name.removesuffix(f"_{self.unit.lower().replace('/', '_')}")
        return {which: f"{stem}_{which}{self.name[len(stem) :]}" for which in self.tails}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which a value of this row is recorded."""
        return (*(() if self.tails_only else (self.name,)), *self.tail_names.values())


METRICS: tuple[Metric, ...] = (
    Metric(
        name="ttft_s",
        unit="s",
        better="min",
        doc="first chunk that carries text - request sent",
        per_request=formulas.ttft_s,
        tails=TAILS,
    ),
    Metric(
        name="tpot_s",
        unit="s",
        better="min",
        doc="(last text chunk - first text chunk) / (completion_tokens - tokens in the first text chunk - tokens "
        "after the last)",
        per_request=formulas.tpot_s,
    ),
    Metric(
        name="decode_tok_s",
        unit=RATE_UNIT,
        better="max",
        doc="1 / tpot_s: the rate of one stream after its first chunk, prefill not in it",
        per_request=formulas.decode_tok_s,
    ),
    Metric(
        name="prefill_tok_s",
        unit=RATE_UNIT,
        better="max",
        doc="prompt_tokens / ttft_s; means prompt processing only with a fresh nonce in front of every prompt",
        per_request=formulas.prefill_tok_s,
    ),
    Metric(
        name="e2e_s",
        unit="s",
        better="min",
        doc="last text chunk - request sent; a late usage event does not count",
        per_request=formulas.e2e_s,
        tails=TAILS,
    ),
    Metric(
        name="first_content_s",
        unit="s",
        better="min",
        doc="first chunk of content proper, after any reasoning - request sent",
        per_request=formulas.first_content_s,
    ),
    Metric(
        name="tokens_per_chunk",
        unit="tokens",
        better="max",
        doc="completion_tokens / text chunks; above 1 when a chunk holds several tokens, as with speculation",
        per_request=formulas.tokens_per_chunk,
    ),
    Metric(
        name="prompt_tokens",
        unit="tokens",
        better="max",
        doc="tokens of the prompt by the server's own usage; never counted from chunks",
        per_request=formulas.prompt_tokens,
    ),
    Metric(
        name="completion_tokens",
        unit="tokens",
        better="max",
        doc="tokens of the answer by the server's own usage; never counted from chunks",
        per_request=formulas.completion_tokens,
    ),
    Metric(
        name="lateness_s",
        unit="s",
        better="min",
        doc="open loop: request sent - when the schedule wanted it sent",
        per_request=formulas.lateness_s,
        tails=TAILS,
    ),
    Metric(
        name="chunk_gap_s",
        unit="s",
        better="min",
        doc="gap between two text chunks of an answer; a chunk may hold several tokens, so no rate follows from it",
        pooled=lambda window: formulas.chunk_gaps_s(window.traces),
        tails=("p99",),
    ),
    Metric(
        name="client_lag_s",
        unit="s",
        better="min",
        doc="how late the client's event loop woke up, sampled every 10 ms",
        pooled=lambda window: window.loop_lags_s,
        tails=("p90", "p99"),
        tails_only=True,
    ),
    Metric(
        name="output_tok_s",
        unit=RATE_UNIT,
        better="max",
        doc="sum of completion_tokens of answered requests / wall time of the repeat; prefill, queueing and ramp are "
        "in it",
        per_window=formulas.output_tok_s,
    ),
    Metric(
        name="acceptance_rate",
        unit="",
        better="max",
        doc="accepted / drafted tokens, from the deltas of the engine's counters",
        per_window=formulas.acceptance_rate,
    ),
    Metric(
        name="acceptance_length",
        unit="tokens",
        better="max",
        doc="tokens per step: 1 + accepted tokens / drafts; the engine's own gauge where it has no counters",
        per_window=formulas.acceptance_length,
    ),
    Metric(
        name="error_rate",
        unit="",
        better="min",
        doc="failed / all requests",
        per_window=formulas.error_rate,
    ),
    Metric(
        name="prefix_hit_tokens",
        unit="tokens",
        better="min",
        doc="prompt tokens answered from the prefix cache: delta of the engine's counter, or the sum of usage where "
        "that is larger",
        per_window=formulas.prefix_hit_tokens,
    ),
    Metric(
        name="preemptions",
        unit="",
        better="min",
        doc="requests that the engine put back for want of KV cache: delta of its counter",
        per_window=formulas.preemptions,
    ),
    Metric(
        name="full_concurrency_share",
        unit="",
        better="max",
        doc="closed loop: share of the wall time in which all streams were busy; the rest is ramp and drain",
        per_window=formulas.full_concurrency_share,
    ),
    Metric(
        name="client_cpu_share",
        unit="",
        better="min",
        doc="CPU time of the client's thread / wall time",
        per_window=lambda window: finite(window.client_cpu_share),
    ),
    Metric(
        name="speedup",
        unit="",
        better="max",
        doc="decode_tok_s over the baseline trial's, same campaign and workload",
    ),
)

# Values of a trial, not of a workload. With N for one GPU, gpuN_peak_gib is gpu_peak_gib of that GPU alone.
MEMORY_METRICS: tuple[Metric, ...] = (
    Metric(
        name="kv_available_gib",
        unit="GiB",
        better="max",
        doc="memory that the engine left for the KV cache, from its log",
    ),
    Metric(
        name="kv_tokens",
        unit="tokens",
        better="max",
        doc="tokens that fit in the KV cache, from the engine's log",
    ),
    Metric(
        name="max_concurrency",
        unit="",
        better="max",
        doc="requests of the greatest length that fit in the KV cache at once, from the engine's log",
    ),
    Metric(
        name="gpu_peak_gib",
        unit="GiB",
        better="min",
        doc="highest use of one GPU during the trial, from NVML",
    ),
    Metric(
        name="host_rss_peak_gib",
        unit="GiB",
        better="min",
        doc="highest resident host memory of the engine's process tree",
    ),
    Metric(name="model_gib", unit="GiB", better="min", doc="memory of the weights, from the engine's log"),
    Metric(name="graph_gib", unit="GiB", better="min", doc="memory of the captured graphs, from the engine's log"),
    Metric(
        name="peak_activation_gib",
        unit="GiB",
        better="min",
        doc="highest memory of activations or compute buffers, from the engine's log",
    ),
)


def metric_names(table: Iterable[Metric]) -> tuple[str, ...]:
    """Every name under which a value of the table is recorded, tails included."""
    return tuple(name for metric in table for name in metric.names)


def find_metric(table: Iterable[Metric], name: str) -> Metric | None:
    """The row that a recorded name belongs to: ttft_p90_s to ttft_s, gpu1_peak_gib to gpu_peak_gib."""
    plain = _GPU_INDEX.sub("gpu_", name)
    return next((metric for metric in table if plain in metric.names), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload on one trial. `metrics` has the names of METRICS; absent is None.

    repeats[name][r] is the value of metric `name` in repeat r. acceptance_by_position[i]: share of the drafts whose
    token at position i was accepted. cold: shape -> ttft_s of its first request, never in `metrics`.
    """

    metrics: Mapping[str, Quantity | None]
    repeats: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    acceptance_by_position: tuple[float, ...] | None = None
    cold: Mapping[str, float | None] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    first_error: str | None = None


def measure_windows(windows: Sequence[Window], warm_up: Sequence[RequestTrace] = ()) -> Measurement:
    """The metrics of one workload from its repeats and, for the cold samples, its warm-up.

    Requests with an error enter the error rate and nothing else. The first request of each shape is its cold sample
    and enters no latency; with a warm-up that request is not in the windows at all.
    """
    everything = [trace for window in windows for trace in window.traces]
    cold = _first_touches([*warm_up, *everything])
    first = {id(trace) for trace in cold.values()}
    steady = [
        replace(window, traces=tuple(t for t in window.traces if t.error is None and id(t) not in first))
        for window in windows
    ]
    quantities: dict[str, Quantity | None] = {}
    repeats: dict[str, tuple[float | None, ...]] = {}
    for metric in METRICS:
        if metric.per_window is not None:
            repeats[metric.name] = tuple(map(metric.per_window, windows))
            quantities[metric.name] = over_repeats(repeats[metric.name])
        elif metric.per_request is not None or metric.pooled is not None:
            samples = [_samples(metric, window) for window in steady]
            pooled = [sample for each in samples for sample in each]
            if not metric.tails_only:
                repeats[metric.name] = tuple(map(median, samples))
                quantities[metric.name] = over_repeats(repeats[metric.name], pooled)
            quantities.update({name: tail(samples, which) for which, name in metric.tail_names.items()})
    failed = [trace for trace in everything if trace.error is not None]
    return Measurement(
        metrics=quantities,
        repeats=repeats,
        acceptance_by_position=formulas.acceptance_by_position(windows),
        cold={shape: formulas.ttft_s(trace) for shape, trace in sorted(cold.items())},
        num_requests=len(everything),
        num_failed=len(failed),
        first_error=failed[0].error if failed else None,
    )


def _samples(metric: Metric, window: Window) -> list[float | None]:
    if metric.per_request is not None:
        return [metric.per_request(trace) for trace in window.traces]
    return list(metric.pooled(window)) if metric.pooled is not None else []


def _first_touches(traces: Iterable[RequestTrace]) -> dict[str, RequestTrace]:
    """Shape -> the first request of that shape that was sent and answered."""
    cold: dict[str, RequestTrace] = {}
    for trace in sorted(traces, key=lambda t: t.sent_s):
        if trace.error is None:
            cold.setdefault(trace.shape, trace)
    return cold
