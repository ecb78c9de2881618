"""What a person can change, in numbers: shortfalls, steps of memory utilisation, tokens in flight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from orchestrator.engines.diagnosis.facts import NUMBER, number
from orchestrator.engines.diagnosis.logs import Line
from orchestrator.engines.flags import known_flags, nearest_flag
from orchestrator.outcome import Fact


def compute_shortfall(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """The memory that the KV cache needs beyond what is available; empty where the log does not report both."""
    needed, available = facts.get("kv_needed_gib"), facts.get("kv_available_gib")
    if needed is None or available is None:
        return {}
    return {"kv_shortfall_gib": Fact(value=round(needed.value - available.value, 3), source=needed.source)}


def add_numbers(code: str, summary: str, facts: Mapping[str, Fact]) -> str:
    """The summary of a cause with the numbers that the log reports for it."""
    if code == "kv_cache_too_small" and "kv_shortfall_gib" in facts:
        needed, available = facts["kv_needed_gib"].value, facts["kv_available_gib"].value
        return f"{summary}: {needed:g} GiB needed, {available:g} GiB available, {needed - available:.2f} GiB short"
    if code == "kv_cache_too_small" and "kv_available_gib" in facts:
        return f"{summary} ({facts['kv_available_gib'].value:g} GiB available)"
    if code == "gpu_memory_busy" and "gpu_wanted_gib" in facts:
        free, total = facts["gpu_free_gib"].value, facts["gpu_total_gib"].value
        return f"{summary}: {free:g} of {total:g} GiB free, {facts['gpu_wanted_gib'].value:g} GiB wanted"
    if code == "out_of_memory_load":
        return f"{summary}, after {facts['requests_served'].value:.0f} answered requests"
    return summary


def compute_lever(code: str, words: Mapping[str, str], facts: Mapping[str, Fact], lines: Sequence[Line]) -> str | None:
    """What to change, in numbers. None where the log does not report the numbers for it."""
    if code == "unknown_flag" and "hint" not in words:
        return _suggest_flag(words["flag"], lines)
    if code == "gpu_memory_busy" and "gpu_total_gib" in facts:
        free, total = facts["gpu_free_gib"].value, facts["gpu_total_gib"].value
        fits = math.floor(100 * free / total) / 100
        return f"end what holds the other {total - free:.1f} GiB, or set gpu-memory-utilization to {fits:g} or less"
    if code == "kv_cache_too_small" and "mem_fraction_static" in facts:
        now = facts["mem_fraction_static"].value
        return f"raise mem-fraction-static from {now:g} to {now + 0.01:.2f}, or fewer max-running-requests"
    if code == "kv_cache_too_small" and "max_len_tokens" in facts:
        return _list_kv_levers(facts, lines)
    return None


def _suggest_flag(flag: str, lines: Sequence[Line]) -> str | None:
    """argparse prints its usage before the error, so that the log itself lists the valid flags."""
    near = nearest_flag(flag, known_flags("\n".join(line.text for line in lines)))
    return f"did you mean {near}? Otherwise remove {flag} from engine.args" if near else None


def _list_kv_levers(facts: Mapping[str, Fact], lines: Sequence[Line]) -> str:
    text = "\n".join(line.text for line in lines)
    budget = _read_setting(text, "max_num_batched_tokens")
    # Read from the scheduler's own line: the option may be absent from the command line and still be on.
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
        steps.append(_describe_utilisation(facts, _read_setting(text, "gpu_memory_utilization")))
    estimate = facts.get("max_len_estimate_tokens")
    steps.append(f"only then a context of {estimate.value:.0f} tokens" if estimate else "only then a shorter context")
    return "; ".join(f"{place}. {step}" for place, step in enumerate(steps, start=1))


def _describe_utilisation(facts: Mapping[str, Fact], utilisation: float | None) -> str:
    start = f"from {utilisation:g} " if utilisation else ""
    total, short = facts.get("gpu_total_gib"), facts.get("kv_shortfall_gib")
    if total and short and utilisation:
        wanted = utilisation + math.ceil(100 * short.value / total.value) / 100
        if wanted <= 1:
            return f"gpu-memory-utilization {start}to {wanted:.2f} ({total.value / 100:.1f} GiB per 0.01)"
    return f"gpu-memory-utilization {start}up by 0.01 at a time"


def _read_setting(text: str, name: str) -> float | None:
    """A number of the command line or of the resolved configuration, as the log prints it."""
    match = re.search(rf"\b{name}['\"]?[:=]\s*({NUMBER})", text)
    return number(match[1]) if match else None
