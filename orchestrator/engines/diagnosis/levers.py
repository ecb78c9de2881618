"""What a person can change, in numbers: shortfalls, steps of memory utilisation, tokens in flight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from orchestrator.engines.diagnosis.facts import NUMBER, number
from orchestrator.engines.diagnosis.logs import Line
from orchestrator.engines.flags import known_flags, nearest_flag
from orchestrator.outcome import Fact


def shortfall(told: Mapping[str, Fact]) -> dict[str, Fact]:
    needed, available = told.get("kv_needed_gib"), told.get("kv_available_gib")
    if needed is None or available is None:
        return {}
    return {"kv_shortfall_gib": Fact(value=round(needed.value - available.value, 3), source=needed.source)}


def with_numbers(code: str, summary: str, told: Mapping[str, Fact]) -> str:
    if code == "kv_cache_too_small" and "kv_shortfall_gib" in told:
        needed, available = told["kv_needed_gib"].value, told["kv_available_gib"].value
        return f"{summary}: {needed:g} GiB needed, {available:g} GiB available, {needed - available:.2f} GiB short"
    if code == "kv_cache_too_small" and "kv_available_gib" in told:
        return f"{summary} ({told['kv_available_gib'].value:g} GiB available)"
    if code == "gpu_memory_busy" and "gpu_wanted_gib" in told:
        free, total = told["gpu_free_gib"].value, told["gpu_total_gib"].value
        return f"{summary}: {free:g} of {total:g} GiB free, {told['gpu_wanted_gib'].value:g} GiB wanted"
    if code == "out_of_memory_load":
        return f"{summary}, after {told['requests_served'].value:.0f} answered requests"
    return summary


def computed_lever(code: str, words: Mapping[str, str], told: Mapping[str, Fact], lines: Sequence[Line]) -> str | None:
    """What to change, in numbers, where the log tells enough."""
    if code == "unknown_flag" and "hint" not in words:
        return _nearest_flag(words["flag"], lines)
    if code == "gpu_memory_busy" and "gpu_total_gib" in told:
        free, total = told["gpu_free_gib"].value, told["gpu_total_gib"].value
        fits = math.floor(100 * free / total) / 100
        return f"end what holds the other {total - free:.1f} GiB, or set gpu-memory-utilization to {fits:g} or less"
    if code == "kv_cache_too_small" and "mem_fraction_static" in told:
        now = told["mem_fraction_static"].value
        return f"raise mem-fraction-static from {now:g} to {now + 0.01:.2f}, or fewer max-running-requests"
    if code == "kv_cache_too_small" and "max_len_tokens" in told:
        return _kv_lever(told, lines)
    return None


def _nearest_flag(flag: str, lines: Sequence[Line]) -> str | None:
    """argparse prints its whole usage before it complains, so that the log itself knows the valid flags."""
    near = nearest_flag(flag, known_flags("\n".join(line.text for line in lines)))
    return f"did you mean {near}? Otherwise remove {flag} from engine.args" if near else None


def _kv_lever(told: Mapping[str, Fact], lines: Sequence[Line]) -> str:
    text = "\n".join(line.text for line in lines)
    budget = _setting(text, "max_num_batched_tokens")
    # The scheduler's own line counts: the option may be absent and still be on.
    switched = re.findall(r"Asynchronous scheduling is (enabled|disabled)", text)
    steps = []
    if budget:
        batches = {"enabled": 2, "disabled": 1}.get(switched[-1] if switched else "")
        doubled = " (no-async-scheduling halves it)" if batches == 2 else ""
        count = f"{batches} concurrent batches x " if batches else "concurrent batches (2 with async scheduling) x "
        total = f" = {batches * budget:,.0f}" if batches else ""
        steps.append(f"fewer tokens in flight: {count}max-num-batched-tokens {budget:,.0f}{total}{doubled}")
    else:
        steps.append("fewer tokens in flight: concurrent batches (2 with async scheduling) x max-num-batched-tokens")
    if re.search(r"Explicitly set \(\S+ GiB for KV cache", text):
        steps.append("more memory for it: kv-cache-memory-bytes, on a CPU also VLLM_CPU_KVCACHE_SPACE")
    else:
        steps.append(_utilisation_step(told, _setting(text, "gpu_memory_utilization")))
    estimate = told.get("max_len_estimate_tokens")
    steps.append(f"only then a context of {estimate.value:.0f} tokens" if estimate else "only then a shorter context")
    return "; ".join(f"{place}. {step}" for place, step in enumerate(steps, start=1))


def _utilisation_step(told: Mapping[str, Fact], utilisation: float | None) -> str:
    start = f"from {utilisation:g} " if utilisation else ""
    total, short = told.get("gpu_total_gib"), told.get("kv_shortfall_gib")
    if total and short and utilisation:
        wanted = utilisation + math.ceil(100 * short.value / total.value) / 100
        if wanted <= 1:
            return f"gpu-memory-utilization {start}to {wanted:.2f} ({total.value / 100:.1f} GiB per 0.01)"
    return f"gpu-memory-utilization {start}up by 0.01 at a time"


def _setting(text: str, name: str) -> float | None:
    """A number that the log repeats from the command line or the resolved configuration."""
    match = re.search(rf"\b{name}['\"]?[:=]\s*({NUMBER})", text)
    return number(match[1]) if match else None
