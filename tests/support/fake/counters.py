"""What the stand-in has really served, and the three engines' pages that tell it."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import dataclass, field

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.flags import Launch
from tests.support.paths import RECORDED

# Capacity of the KV cache in tokens, as the recorded starts tell it.
KV_TOKENS = {"vllm": 1_320_868, "sglang": 3_226_426}


@dataclass(slots=True)
class Counters:
    """Sums since the start (or since `reset`). accepted_by_position has one entry per proposal."""

    proposals: int
    started_s: float = field(default_factory=time.time)
    created_s: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    accepted_by_position: list[int] = field(init=False)
    steps: int = 0
    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens_max: int = 0
    observed: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_by_position = [0] * self.proposals

    @property
    def draft_tokens(self) -> int:
        return self.drafts * self.proposals

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    def count_prompt(self, tokens: int, cached: int) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def count_step(self, tokens: int, accepted: int, *, drafted: bool = True) -> None:
        """One step of one request: `accepted` of the proposals, `tokens` of them (and the bonus) sent on."""
        self.steps += 1
        self.generation_tokens += tokens
        if self.proposals and drafted:
            self.drafts += 1
            for position in range(accepted):
                self.accepted_by_position[position] += 1

    def count_finish(self, reason: str, observed: dict[str, float]) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        for name, value in observed.items():
            self.observed.setdefault(name, []).append(value)

    def snapshot(self) -> Counters:
        """A copy that later steps leave alone, without the observations."""
        copied = copy.copy(self)
        copied.accepted_by_position, copied.observed = list(self.accepted_by_position), {}
        return copied

    def add(self, other: Counters) -> None:
        """Take over the tokens and steps of one finished request."""
        for name in ("prompt_tokens", "cached_tokens", "generation_tokens", "drafts", "steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for position, number in enumerate(other.accepted_by_position):
            self.accepted_by_position[position] += number

    def reset(self) -> None:
        """As after a restart: every sum is zero, the running requests stay."""
        fresh = Counters(proposals=self.proposals)
        for name in self.__slots__:
            if name not in ("running", "waiting", "proposals"):
                setattr(self, name, getattr(fresh, name))


def page(launch: Launch, counters: Counters, behaviour: Behaviour) -> str:
    """The metrics page of the dialect, with the renamed and dropped names that were asked for."""
    text = {"vllm": vllm_page, "sglang": sglang_page, "llamacpp": llama_page}[launch.dialect](launch, counters)
    if behaviour.engines > 1:
        text = _split_engines(text, behaviour.engines)
    for old, new in behaviour.rename_metrics.items():
        text = text.replace(old, new)
    for name in behaviour.drop_metrics:
        text = "\n".join(line for line in text.split("\n") if name not in line)
    return text


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """As prometheus_client writes it: a float, in scientific form from a million on."""
    text = repr(float(value))
    whole, _, fraction = text.partition(".")
    if "e" in text or len(whole) <= 6:
        return text
    digits = (whole[1:] + fraction).rstrip("0") or "0"
    return f"{whole[0]}.{digits}e+{len(whole) - 1:02d}"


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")


def vllm_page(launch: Launch, counters: Counters) -> str:
    """The recorded page with our own values in it: names, labels, order and number format stay the real ones."""
    c, known = counters, _vllm_values(launch, counters)
    lines: list[str] = []
    recorded = (RECORDED / "vllm026_h200_dsv4_metrics.txt").read_text(encoding="utf-8")
    for line in recorded.replace('"dsv4"', f'"{_escape_label(launch.model_id)}"').splitlines():
        if "spec_decode" in line and not launch.proposals:
            continue
        if 'position="' in line:
            if 'position="0"' in line:
                lines.extend(_per_position(line, c))
            continue
        match = _SAMPLE.match(line)
        if match is None:
            lines.append(line)
            continue
        name, labels, value = match.groups(default="")
        lines.append(_vllm_sample(name, labels, value, known, c, launch))
    return "\n".join(lines) + "\n"


def _vllm_values(launch: Launch, c: Counters) -> dict[str, float]:
    return {
        "process_start_time_seconds": c.started_s,
        "vllm:spec_decode_num_drafts_total": c.drafts,
        "vllm:spec_decode_num_draft_tokens_total": c.draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": c.accepted_tokens,
        "vllm:num_requests_running": c.running,
        "vllm:num_requests_waiting": c.waiting,
        "vllm:prefix_cache_queries_total": c.prompt_tokens if launch.prefix_caching else 0,
        "vllm:prefix_cache_hits_total": c.cached_tokens,
        "vllm:prompt_tokens_total": c.prompt_tokens,
        "vllm:prompt_tokens_cached_total": c.cached_tokens,
        "vllm:generation_tokens_total": c.generation_tokens,
    }


def _vllm_sample(name: str, labels: str, value: str, known: dict[str, float], c: Counters, launch: Launch) -> str:
    if name.endswith("_created"):
        return f"{name}{labels} {c.created_s!r}"
    if name in known:
        return f"{name}{labels} {_number(known[name])}"
    if name == "vllm:prompt_tokens_by_source_total":
        sources = {"local_compute": c.prompt_tokens - c.cached_tokens, "local_cache_hit": c.cached_tokens}
        return f"{name}{labels} {_number(next((v for k, v in sources.items() if k in labels), 0))}"
    if name == "vllm:request_success_total":
        done = next((number for reason, number in c.finished.items() if f'reason="{reason}"' in labels), 0)
        return f"{name}{labels} {_number(done)}"
    if name == "vllm:cache_config_info":
        labels = re.sub(r'kv_cache_size_tokens="\d+"', f'kv_cache_size_tokens="{KV_TOKENS["vllm"]}"', labels)
        labels = re.sub(r'prefix_caching="\w+"', f'prefix_caching="{launch.prefix_caching}"', labels)
        return f"{name}{labels} 1.0"
    if histogram := re.fullmatch(r"(vllm:\w+)_(bucket|sum|count)", name):
        return f"{name}{labels} {_number(_histogram(histogram[1], histogram[2], labels, c))}"
    return f"{name}{labels} {value}" if name.startswith(("python_", "process_")) else f"{name}{labels} 0.0"


def _histogram(name: str, part: str, labels: str, c: Counters) -> float:
    values = c.observed.get(name, [])
    if part == "sum":
        return sum(values)
    bound = re.search(r'le="([^"]+)"', labels)
    return len(values) if bound is None else sum(1 for v in values if v <= float(bound.group(1)))


def _per_position(line: str, c: Counters) -> list[str]:
    head = line.rsplit(" ", 1)[0]
    values = [c.created_s] * c.proposals if "_created{" in head else c.accepted_by_position
    return [
        "{} {}".format(
            head.replace('position="0"', f'position="{i}"'), value if "_created{" in head else _number(value)
        )
        for i, value in enumerate(values)
    ]


def _split_engines(text: str, engines: int) -> str:
    """Counters of several engine cores: each line once per engine, the first holds half, positions not in order."""
    lines: list[str] = []
    for line in text.split("\n"):
        if 'engine="0"' not in line:
            lines.append(line)
            continue
        head, value = line.rsplit(" ", 1)
        total = float(value)
        for i in reversed(range(engines)):
            shared = head.partition("{")[0].endswith(("_total", "_sum", "_count", "_bucket"))
            part = (
                value if not shared else str(total - (total // engines) * (engines - 1) if i == 0 else total // engines)
            )
            lines.append(head.replace('engine="0"', f'engine="{i}"') + f" {part}")
    return "\n".join(lines)


def _family(name: str, kind: str, help_text: str, samples: list[tuple[str, float | str]]) -> str:
    body = "".join(f"{name}{labels} {value}\n" for labels, value in samples)
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n{body}"


def sglang_page(launch: Launch, c: Counters) -> str:
    """Prometheus' multiprocess form: no _created lines, no process_* family."""
    model = f'model_name="{_escape_label(launch.model_id)}"'
    api, rank = (
        f'{{is_streaming="True",{model}}}',
        f'{{engine_type="unified",{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"}}',
    )
    cached = f'{{cache_source="device",{model}}}'
    done = sum(c.finished.values())
    length = (c.drafts + c.accepted_tokens) / c.drafts if c.drafts else 0.0
    rate = c.accepted_tokens / c.draft_tokens if c.draft_tokens else 0.0
    counters = [
        ("prompt_tokens_total", "Number of prefill tokens processed.", api, c.prompt_tokens),
        ("generation_tokens_total", "Number of generation tokens processed.", api, c.generation_tokens),
        ("cached_tokens_total", "Number of cached prompt tokens.", cached, c.cached_tokens),
        ("num_requests_total", "Number of requests processed.", api, done),
        ("num_retracted_requests_total", "Total number of retracted requests.", rank, 0),
    ]
    gauges = [
        ("num_running_reqs", "The number of running requests.", c.running),
        ("num_queue_reqs", "The number of requests in the waiting queue.", c.waiting),
        ("token_usage", "The token usage.", 0.0),
        (
            "gen_throughput",
            "The generation throughput (token/s).",
            c.generation_tokens / c.decode_s if c.decode_s else 0.0,
        ),
        ("cache_hit_rate", "The prefix cache hit rate.", c.cached_tokens / c.prompt_tokens if c.prompt_tokens else 0.0),
        ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", KV_TOKENS["sglang"]),
        ("weight_memory_usage_gb", "Weight memory usage in GB.", 0.27),
        ("kv_cache_memory_usage_gb", "KV cache memory usage in GB.", 69.24),
        ("graph_memory_usage_gb", "Graph memory usage in GB.", 0.35),
    ]
    if launch.proposals:
        counters.append(("spec_verify_calls_total", "Total number of verify calls.", rank, c.drafts))
        gauges.append(("spec_accept_length", "The average acceptance length of speculative decoding.", length))
        gauges.append(("spec_accept_rate", "The average acceptance rate of speculative decoding.", rate))
    text = "".join(_family(f"sglang:{n}", "counter", h, [(labels, _number(v))]) for n, h, labels, v in counters)
    return text + "".join(_family(f"sglang:{n}", "gauge", h, [(rank, _number(v))]) for n, h, v in gauges)


def llama_page(launch: Launch, c: Counters) -> str:
    """The recorded page with our own values: bare integers, no labels but the position."""
    values: dict[str, float] = {
        "prompt_tokens_total": c.prompt_tokens - c.cached_tokens,
        "prompt_tokens_cached_total": c.cached_tokens,
        "prompt_seconds_total": c.prefill_s,
        "tokens_predicted_total": c.generation_tokens,
        "tokens_predicted_seconds_total": c.decode_s,
        "n_decode_total": c.steps,
        "n_tokens_max": c.tokens_max,
        "spec_decode_num_draft_tokens_total": c.draft_tokens,
        "spec_decode_num_accepted_tokens_total": c.accepted_tokens,
        "spec_decode_num_drafts_total": c.drafts,
        "prompt_tokens_seconds": (c.prompt_tokens - c.cached_tokens) / c.prefill_s if c.prefill_s else 0,
        "predicted_tokens_seconds": c.generation_tokens / c.decode_s if c.decode_s else 0,
        "requests_processing": c.running,
        "requests_deferred": c.waiting,
        "n_busy_slots_per_decode": 1,
    }
    lines: list[str] = []
    for line in (RECORDED / "llama_ngmod_metrics.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif 'position="0"' in line:
            name = line.partition("{")[0]
            lines.extend(f'{name}{{position="{i}"}} {n}' for i, n in enumerate(c.accepted_by_position))
        elif "position=" not in line:
            name = line.split(" ")[0]
            lines.append(f"{name} {values[name.removeprefix('llamacpp:')]:.6g}")
    return "\n".join(lines) + "\n"
