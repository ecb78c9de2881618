"""A fourth engine as a contributor would write it: this module, one line of registry and `toy.yaml` are all it takes.

Its program is toy_program.py. Its flags, variables and counters are its own; its log has the prefixes of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.config import EngineSpec
from orchestrator.engines.base import Engine, EngineStats, LaunchPlan, Speculation, resolve_command, resolve_model
from orchestrator.engines.diagnosis.dialect import log_dialect
from orchestrator.engines.diagnosis.facts import fact_pattern
from orchestrator.engines.exposition import read_page
from orchestrator.engines.flags import refuse_owned, render_args, scalar, whole_number

_OWNED = {"--listen": "use placement.ports", "--name": "use engine.served_model_name"}


class Toy(Engine):
    """`toy-serve --checkpoint MODEL ...`."""

    kind = "toy"
    distributions = ("toy-serve",)
    log = log_dialect(process=r"^\((?P<process>[^()]{1,60} pid=\d+)\) ?", compiling=r"Warming the toy")
    facts = (fact_pattern(r"KV cache size: <kv_tokens> tokens", across="min"),)
    setting_prefixes = ("TOY_",)
    not_inherited = ("TOY_ADDRESS",)
    cache_folders: Mapping[str, str] = MappingProxyType({"TOY_CACHE": "toy"})
    memory_arguments = frozenset({"context"})
    kv_memory_arguments = frozenset({"memory-share"})
    speculation_prefix = "draft"
    proposals_argument = "draft"

    def plan(self, spec: EngineSpec, port: int, workdir: Path) -> LaunchPlan:
        """The command line that starts `spec` on 127.0.0.1:`port`. Raises ConfigError."""
        refuse_owned("the toy", spec.args, _OWNED)
        command, path_prefix = resolve_command(spec, ["toy-serve"])
        model = resolve_model(spec)
        name = spec.served_model_name or model
        argv = [*command, "--checkpoint", model, "--listen", str(port), "--name", name]
        draft = whole_number("the toy", spec.args, "draft")
        return LaunchPlan(
            argv=(*argv, *render_args(spec.args, lambda flag, value: [flag, scalar(value)])),
            env=dict(spec.env),
            base_url=f"http://127.0.0.1:{port}",
            log_path=workdir / "engine.log",
            model_name=name,
            path_prefix=path_prefix,
            speculation=Speculation(method="lookup", family="ngram", proposals=draft) if draft else None,
            api_key_flag="--secret",
        )

    def help_command(self, spec: EngineSpec) -> tuple[str, ...]:
        """The command whose output names every flag of the installed engine."""
        return (*resolve_command(spec, ["toy-serve"])[0], "--help")

    def stats(self, metrics_text: str | None, server_info: Mapping[str, Any] | None) -> EngineStats:
        """Counters from the metrics page."""
        del server_info
        page = read_page(metrics_text)
        return EngineStats(
            prompt_tokens=page.total("toy:prompt_tokens_total"),
            generation_tokens=page.total("toy:generation_tokens_total"),
            prefix_hit_tokens=page.total("toy:prefix_cache_hits_total"),
            drafts=page.total("toy:spec_decode_num_drafts_total"),
            draft_tokens=page.total("toy:spec_decode_num_draft_tokens_total"),
            accepted_tokens=page.total("toy:spec_decode_num_accepted_tokens_total"),
            requests_running=page.total("toy:num_requests_running"),
        )
