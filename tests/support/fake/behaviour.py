"""What the stand-in does when asked to: one frozen record, read from the environment.

The meaning of every key stands in the table at the top of tests/support/fake_engine.py; a test keeps the two equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# Share of drafts whose token at position i is accepted. It falls off behind a block of six, so that with the default
# proposal_cost decode speed over k rises to a single maximum at k = 6.
DEFAULT_ACCEPTANCE = (0.90, 0.80, 0.70, 0.60, 0.50, 0.45, 0.15, 0.08, 0.05, 0.03)
# What a draft without its shared experts looks like: the first token still guessed now and then, the rest lost.
COLLAPSED_ACCEPTANCE = (0.18, 0.07, 0.04, 0.02, 0.01)

FAULTS = ("error_object", "error_event", "done_only", "empty", "cut", "reset", "http_400", "http_429", "http_500")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Defaults are a healthy, fast engine."""

    # speed
    seed: int = 0
    tokens_per_s: float = 200.0
    curve: Mapping[str, float] = field(default_factory=dict)
    proposal_cost: float = 0.12
    batch_cost: float = 0.0
    acceptance: list[float] | Mapping[str, list[float]] | None = None
    ttft_s: float = 0.02
    prefill_tok_s: float = 50_000.0
    remembers: bool = False
    no_drafts: bool = False
    noise: float = 0.0
    launch_noise: float = 0.0
    start_drift: float = 0.0
    first_touch_s: float = 0.0
    hang: Mapping[str, float] = field(default_factory=dict)
    # start
    load_s: float = 0.2
    start_log: str | None = None
    silent_load_s: float = 0.0
    log_mib: float = 0.0
    models_early: bool = False
    health_late_s: float = 0.0
    completion_500_s: float = 0.0
    fail: str | None = None
    fail_code: int = 1
    fail_after_s: float = 0.0
    fail_hangs_s: float = 0.0
    fail_starts: int = 0
    fail_when: Mapping[str, str] = field(default_factory=dict)
    refuse_k: list[int] = field(default_factory=list)
    refuse_flags: list[str] = field(default_factory=list)
    busy_ports: list[int] = field(default_factory=list)
    draft_warnings: bool = False
    # identity
    model_id: str | None = None
    stranger: bool = False
    version: str | None = None
    # streams
    faults: Mapping[str, int] = field(default_factory=dict)
    faults_after: int = 0
    usage: str = "normal"
    usage_delay_s: float = 0.5
    continuous_usage: bool = True
    early_role: bool = False
    think_tokens: int = 0
    think_field: str = "reasoning"
    think_content: str = "absent"
    tool_call: bool = False
    tokens_per_chunk: int = 1
    burst: int = 1
    utf8_split: bool = False
    crlf: bool = False
    comments: bool = False
    # text and tokens
    text: str = "mixed"
    loop_text: bool = False
    eos_tokens: int | None = None
    short_output: int | None = None
    prompt_tokens_factor: float = 1.0
    # counters
    collapse_after: int | None = None
    counter_reset_after: int | None = None
    rename_metrics: Mapping[str, str] = field(default_factory=dict)
    drop_metrics: list[str] = field(default_factory=list)
    engines: int = 1
    cache_reset: str = "works"
    # process
    max_life_s: float = 900.0
    oom_after: int | None = None
    die_after_s: float | None = None
    die_signal: str = "SIGKILL"
    ignore_sigterm: bool = False
    children: str | None = None
    lock_cache: bool = False
    shm_file: bool = False
    record: str | None = None
    record_env: list[str] = field(default_factory=list)
    record_requests: str | None = None


def load(environ: Mapping[str, str] = os.environ) -> Behaviour:
    """FAKE_ENGINE_FILE first, FAKE_ENGINE over it. Raises ValueError for an unknown key: no test asks in vain."""
    wishes: dict[str, Any] = {}
    if path := environ.get("FAKE_ENGINE_FILE"):
        wishes.update(json.loads(Path(path).read_text(encoding="utf-8")))
    wishes.update(json.loads(environ.get("FAKE_ENGINE") or "{}"))
    known = {f.name for f in fields(Behaviour)}
    if unknown := sorted(set(wishes) - known):
        raise ValueError(f"FAKE_ENGINE: unknown keys {unknown}; known are {sorted(known)}")
    if unknown := sorted(set(wishes.get("faults", {})) - set(FAULTS)):
        raise ValueError(f"FAKE_ENGINE: unknown faults {unknown}; known are {list(FAULTS)}")
    return Behaviour(**wishes)
