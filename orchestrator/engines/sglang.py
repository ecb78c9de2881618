"""SGLang: its command line, its metrics page, its log. Written for 0.5.12 to 0.5.23."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.config import EngineSpec
from orchestrator.engines.base import (
    FAMILIES,
    Engine,
    EngineStats,
    LaunchPlan,
    Speculation,
    resolve_command,
    resolve_model,
)
from orchestrator.engines.diagnosis.dialect import LinePrefix, log_dialect
from orchestrator.engines.diagnosis.facts import fact_pattern
from orchestrator.engines.exposition import Page, read_page
from orchestrator.engines.flags import argument, flag_name, refuse_owned, render_args, scalar, whole_number
from orchestrator.outcome import Diagnosis, Fact

_OWNED = {
    "--host": "an engine listens on 127.0.0.1 only",
    "--port": "use placement.ports",
    "--model-path": "use engine.model",
    "--model": "use engine.model",
    "--served-model-name": "use engine.served_model_name",
    "--api-key": "a random key is made for every start",
    "--enable-metrics": "it is always on",
}
# Flags with a --no- form (0.5.17 and 0.5.23); any other false leaves the flag out.
_TWO_SIDED = {
    "--dcp-replicate-q-proj",
    "--dllm-fdfo",
    "--enable-decoder-swa-bounded-replay",
    "--enable-dsa-fused-indexer",
    "--enable-fused-qk-norm-rope",
    "--enable-tf32-matmul",
    "--enable-tp-lm-head-all-to-all",
    "--experts-shared-outer-loras",
    "--lora-strict-loading",
    "--mm-enable-dp-encoder",
    "--ple-offload-embedding",
    "--speculative-enable-w4a4-mxfp4-megamoe",
}
# Where these are left out, the engine decides by itself and may switch them on.
_ENGINE_DECIDES = {"--enable-lean-attention", "--enable-lora", "--enable-multimodal"}


# Families that SGLang names otherwise.
_FAMILY_OF = {"nextn": "mtp", "standalone": "draft_model"}

_LOG = log_dialect(
    prefixes=(
        # `[2026-11-29 14:27:05 DP0 TP1] text`: without a level, and once per message however many lines it has.
        LinePrefix(
            pattern=re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<process>(?: [A-Z]+\d+)*)\] ?"),
            level="INFO",
            errors=re.compile(
                r"hit an exception|Traceback \(most recent|(?:Prefill|Decode) out of memory|already in use"
                r"|crashed with exit code|terminated with -|Watchdog timeout"
            ),
            opens_message=True,
        ),
    ),
    loading=r"Load weight begin",
    loaded=r"Load weight end",
    capturing=r"Capturing |Capture \S+ .*CUDA graph begin|Capture cuda graph",
    captured=r"CUDA graph end",
    ready=r"fired up and ready",
    compiling=r"Captur(?:ing|e) .*CUDA graph|Capturing num tokens",
    dead_inside=r"hit an exception",
)
# SGLang's GB are 1 << 30 bytes. A draft model's lines follow the target's in the same process.
_FACTS = (
    fact_pattern(r"Load weight end\. elapsed=<model_load_s> s, .*?mem usage=<model_gib> GB", within="sum"),
    fact_pattern(r"Memory pool end\. avail mem=<after_pool_free_gib> GB", across="min"),
    fact_pattern(r"KV Cache is allocated\. .*?\bK size: <k_cache_gib> GB, V size: <v_cache_gib> GB", within="sum"),
    fact_pattern(r"KV Cache is allocated\. .*?\bKV size: <kv_available_gib> GB", within="sum"),
    fact_pattern(
        r"(?:CUDA|cuda) graph end\. (?:elapsed=|Time elapsed: )<graph_capture_s> s[,.] mem usage=<graph_gib> GB",
        within="sum",
    ),
    fact_pattern(r"max_total_num_tokens=<kv_tokens>, chunked_prefill_size=", across="min"),
    fact_pattern(r"max_running_requests=<max_running_requests>, context_len=<max_len_tokens>", across="min"),
    fact_pattern(r"available_(?:gpu|cpu)_mem=<after_start_free_gib> GB", across="min"),
    fact_pattern(r"Initialized DSpark draft runner\. .*?gamma=<proposals>,"),
    fact_pattern(r"KV Cache is allocated\. .*?#tokens: <kv_tokens>,", across="min"),
)


class SGLang(Engine):
    """`python -m sglang.launch_server --model-path MODEL ...`."""

    kind = "sglang"
    distributions = ("sglang",)
    server_info_path = "/server_info"
    log = _LOG
    facts = _FACTS
    setting_prefixes = ("SGLANG_",)
    cache_folders: Mapping[str, str] = MappingProxyType({"SGLANG_DG_CACHE_DIR": "deep_gemm"})
    memory_arguments = frozenset(
        {
            "context-length",
            "max-total-tokens",
            "max-running-requests",
            "chunked-prefill-size",
            "max-prefill-tokens",
            "speculative-num-draft-tokens",
            "speculative-dspark-block-size",
            "cuda-graph-max-bs",
            "cuda-graph-max-bs-decode",
        }
    )
    kv_memory_arguments = frozenset({"mem-fraction-static"})
    speculation_prefix = "speculative"

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("SGLang", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["python", "-m", "sglang.launch_server"])
        if command[-1] not in ("--model-path", "--model"):
            command.append("--model-path")
        model = resolve_model(spec)
        argv = [*command, model, "--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
        if spec.served_model_name:
            argv += ["--served-model-name", spec.served_model_name]
        speculation, warnings = _speculation(spec)
        warnings += tuple(
            f"{flag_name(key)}: false cannot be said to SGLang and is left out; it may switch it on by itself"
            for key, value in spec.args.items()
            if value is False and flag_name(key) in _ENGINE_DECIDES
        )
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, _render)),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=spec.served_model_name or model,
            path_prefix=path_prefix,
            parallel_size=_parallel_size(spec.args),
            speculation=speculation,
            api_key_flag="--api-key",
            rendezvous_flag=None if argument(spec.args, "nccl-port", "dist-init-addr") else "--nccl-port",
            warnings=warnings,
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        command, _ = resolve_command(spec, ["python", "-m", "sglang.launch_server"])
        return (*(word for word in command if word not in ("--model-path", "--model")), "--help")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from the metrics page, and the acceptance length of /server_info, else that of the page.

        Both lengths are gauges that change with the engine's log lines, every 40 steps.
        """
        page = read_page(metrics_text)
        prompt_tokens = page.total("sglang:prompt_tokens_total")
        cached = page.total("sglang:cached_tokens_total")
        drafts, accepted = _verified(page)
        proposed = _draft_tokens(server_info)
        return EngineStats(
            prompt_tokens=prompt_tokens,
            generation_tokens=page.total("sglang:generation_tokens_total"),
            # The page of several processes lacks a counter that is still 0. That of the prompts shows that it counts.
            prefix_hit_tokens=0.0 if cached is None and prompt_tokens is not None else cached,
            drafts=drafts,
            draft_tokens=None if drafts is None or proposed is None else drafts * proposed,
            accepted_tokens=accepted,
            preemptions=page.total("sglang:num_retracted_requests_total"),
            requests_running=_per_replica(page, "sglang:num_running_reqs"),
            requests_waiting=_per_replica(page, "sglang:num_queue_reqs"),
            kv_tokens=_per_replica(page, "sglang:max_total_num_tokens"),
            acceptance_length_gauge=_acceptance_length(page, server_info),
            start_time_s=page.largest("process_start_time_seconds"),
        )

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        """Explain a log. exit_code is None while the engine runs, negative for a signal."""
        found = super().diagnose(log_text, exit_code)
        return replace(found, facts=_add_kv_memory(found.facts))


def _add_kv_memory(facts: Mapping[str, Fact]) -> Mapping[str, Fact]:
    """For models without a joint KV pool the log reports keys and values apart: their sum is the KV memory."""
    keys, values = facts.get("k_cache_gib"), facts.get("v_cache_gib")
    if keys is None or values is None or "kv_available_gib" in facts:
        return facts
    both = Fact(value=round(keys.value + values.value, 3), source=f"K size + V size: {keys.source}")
    return {**facts, "kv_available_gib": both}


def _render(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) and not value:
        return [f"--no-{flag.removeprefix('--')}"] if flag in _TWO_SIDED else []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *(scalar(item) for item in value)]
    return [flag, scalar(value)]


def _parallel_size(args: Mapping[str, Any]) -> int:
    tensor = whole_number("SGLang", args, "tp-size", "tensor-parallel-size", "tp", default=1) or 1
    pipeline = whole_number("SGLang", args, "pp-size", "pipeline-parallel-size", "pp", default=1) or 1
    data = whole_number("SGLang", args, "dp-size", "data-parallel-size", "dp", default=1) or 1
    # With attention data parallelism the replicas share the tensor-parallel GPUs.
    return tensor * pipeline * (1 if argument(args, "enable-dp-attention") else data)


def _method(args: Mapping[str, Any]) -> str | None:
    algorithm = str(argument(args, "speculative-algorithm") or "NONE").upper()
    return None if algorithm == "NONE" else algorithm


def _speculation(spec: EngineSpec) -> tuple[Speculation | None, tuple[str, ...]]:
    """(the speculation of a spec, warnings)."""
    method = _method(spec.args)
    if method is None:
        return None, ()
    proposals, warnings = _proposals(spec.args, method)
    speculation = Speculation(
        method=method,
        family=_family(method),
        proposals=proposals,
        # Its n-gram corpus grows with every answer and is emptied with the cache, once the engine is idle.
        forget_path="/flush_cache?timeout=5" if method == "NGRAM" else None,
        is_synthetic=_simulates_acceptance(spec.env),
    )
    return speculation, warnings


def _family(method: str) -> str | None:
    name = _FAMILY_OF.get(method.lower(), method.lower())
    return name if name in FAMILIES else None


def _proposals(args: Mapping[str, Any], name: str) -> tuple[int | None, tuple[str, ...]]:
    """Draft tokens proposed per step: one less than speculative-num-draft-tokens, which counts the bonus token."""
    draft_tokens = whole_number("SGLang", args, "speculative-num-draft-tokens")
    block = whole_number("SGLang", args, "speculative-dspark-block-size")
    steps = whole_number("SGLang", args, "speculative-num-steps")
    if draft_tokens is not None:
        return draft_tokens - 1, ()
    if name == "DSPARK" and block is not None:
        return block, ()
    if name not in ("DSPARK", "NGRAM") and steps is not None:
        return steps, ()
    if name == "NGRAM":
        return 11, ()
    return None, (f"{name}: how many tokens are proposed is left to the engine; set speculative-num-draft-tokens",)


def _simulates_acceptance(env: Mapping[str, str]) -> bool:
    try:
        return float(env.get("SGLANG_SIMULATE_ACC_LEN", "-1")) > 0
    except ValueError:
        return True


def _verified(page: Page) -> tuple[float | None, float | None]:
    """(verification steps, accepted draft tokens) since the start.

    A request's first token comes from its prefill, and every step adds one token beside the accepted ones. All three
    counters change together when a request ends. Accepted tokens beyond max_tokens are not counted.
    """
    steps = page.total("sglang:spec_verify_calls_total")
    generated = page.total("sglang:generation_tokens_total")
    requests = page.total("sglang:num_requests_total")
    if not steps or generated is None or requests is None:
        return None, None
    return steps, max(0.0, generated - requests - steps)


def _draft_tokens(server_info: Mapping[str, Any] | None) -> int | None:
    """Tokens proposed per step, when that number is fixed for the life of the server."""
    info = server_info or {}
    tokens = info.get("speculative_num_draft_tokens")
    if not isinstance(tokens, int) or info.get("speculative_adaptive") or info.get("speculative_algorithm") is None:
        return None
    return tokens - 1


def _acceptance_length(page: Page, server_info: Mapping[str, Any] | None) -> float | None:
    states = (server_info or {}).get("internal_states") or [{}]
    reported = states[0].get("avg_spec_accept_length")
    length = reported if isinstance(reported, int | float) else page.largest("sglang:spec_accept_length")
    # With its bonus token a length is 1 or more; 0 means that nothing was verified yet.
    return float(length) if length and math.isfinite(length) else None


def _per_replica(page: Page, name: str) -> float | None:
    """Every rank of a data-parallel replica repeats its gauge: the largest per replica, summed over replicas."""
    replicas: dict[str, float] = {}
    for labels, value in page.samples.get(name, []):
        replica = labels.get("dp_rank", "")
        replicas[replica] = max(value, replicas.get(replica, value))
    return sum(replicas.values()) if replicas else None
