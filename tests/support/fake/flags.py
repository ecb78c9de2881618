"""The command lines of the three engines -> one record of what a stand-in must know."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake.behaviour import DEFAULT_ACCEPTANCE, Behaviour

# Flags that the real programs do not know (removed ones, and the usual typing mistakes of a test).
UNKNOWN_FLAGS = {
    "vllm": {"--no-such-flag", "--speculative-model", "--num-speculative-tokens", "--swap-space-size"},
    "sglang": {"--no-such-flag", "--max-model-len", "--gpu-memory-utilization"},
    "llamacpp": {"--no-such-flag", "--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min"},
}
SHORT = {
    "vllm": {"-tp": "--tensor-parallel-size", "-sc": "--speculative-config"},
    "sglang": {"--model": "--model-path", "--tp": "--tp-size", "--tensor-parallel-size": "--tp-size"},
    "llamacpp": {"-m": "--model", "-a": "--alias", "-c": "--ctx-size", "-np": "--parallel"},
}
LLAMA_SPEC_TYPES = {
    *("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"),
    *("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
}
# The flag that bounds the proposals of a type, and its default.
LLAMA_DRAFT_LIMITS = {
    "ngram-simple": ("--spec-ngram-simple-size-m", 48),
    "ngram-map-k": ("--spec-ngram-map-k-size-m", 48),
    "ngram-map-k4v": ("--spec-ngram-map-k4v-size-m", 48),
    "ngram-mod": ("--spec-ngram-mod-n-max", 64),
}
KEY_VARIABLE = {"vllm": "VLLM_API_KEY", "sglang": None, "llamacpp": "LLAMA_API_KEY"}


class Refused(Exception):
    """The real program would not start: what it prints, and its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start. `acceptance[i]` is the share of drafts whose token i is accepted; empty without speculation."""

    dialect: str
    model: str
    model_id: str
    host: str
    port: int
    api_key: str | None
    args: Mapping[str, Any]
    method: str | None = None
    acceptance: tuple[float, ...] = ()
    synthetic: bool = False
    prefix_caching: bool = True
    block_size: int = 16
    max_model_len: int = 131072
    max_running: int = 256
    metrics: bool = True
    argv: tuple[str, ...] = field(default=())

    @property
    def proposals(self) -> int:
        return len(self.acceptance)


def parse(argv: list[str], behaviour: Behaviour, environ: Mapping[str, str] = os.environ) -> Launch:
    """Raises Refused as the real program would."""
    dialect, *rest = argv
    if dialect not in UNKNOWN_FLAGS:
        raise Refused(f"fake_engine.py: first word must be one of {', '.join(UNKNOWN_FLAGS)}, found {dialect!r}\n", 2)
    args = _read(dialect, rest, behaviour)
    model = str(args.get("--model-path") or args.get("--model") or args.get("model_tag") or "model")
    served = args.get("--served-model-name") or args.get("--alias")
    served = served[0] if isinstance(served, list) else served
    variable = KEY_VARIABLE[dialect]
    method, acceptance, synthetic = _speculation(dialect, args, behaviour)
    return Launch(
        dialect=dialect,
        model=model,
        model_id=behaviour.model_id or ("stranger-7b" if behaviour.stranger else str(served or model)),
        host=str(args.get("--host", "127.0.0.1")),
        port=int(args.get("--port", {"vllm": 8000, "sglang": 30000, "llamacpp": 8080}[dialect])),
        api_key=args.get("--api-key") or (environ.get(variable) if variable else None),
        args=args,
        method=method,
        acceptance=acceptance,
        synthetic=synthetic,
        argv=tuple(argv),
        **_limits(dialect, args),
    )


def _read(dialect: str, words: list[str], behaviour: Behaviour) -> dict[str, Any]:
    """--flag value, --flag=value, bare --flag (True), repeated or several values (list)."""
    args: dict[str, Any] = {}
    flag: str | None = None
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            flag = SHORT[dialect].get(name, name)
            if name in UNKNOWN_FLAGS[dialect] or flag in behaviour.refuse_flags:
                raise Refused(_unknown_flag(dialect, name), 1 if dialect == "llamacpp" else 2)
            args[flag] = value if equals else True
        elif flag is None:
            if word not in ("serve", "server"):
                args["model_tag"] = word
        elif args[flag] is True:
            args[flag] = word
        else:
            args[flag] = [*(args[flag] if isinstance(args[flag], list) else [args[flag]]), word]
    return args


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."


def _unknown_flag(dialect: str, name: str) -> str:
    if dialect == "llamacpp":
        return f"error: invalid argument: {name}\n"
    program = "api_server.py" if dialect == "vllm" else "launch_server.py"
    usage = f"usage: {program} [-h] [--model MODEL] [--host HOST] [--port PORT] ..."
    return f"{usage}\n{program}: error: unrecognized arguments: {name}\n"


def _limits(dialect: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix cache, sequence length, concurrency and metrics, each by the dialect's own flags."""
    if dialect == "vllm":
        return {
            "prefix_caching": "--no-enable-prefix-caching" not in args,
            "block_size": int(args.get("--block-size", 16)),
            "max_model_len": int(args.get("--max-model-len", 131072)),
            "max_running": int(args.get("--max-num-seqs", 256)),
        }
    if dialect == "sglang":
        return {
            "prefix_caching": "--disable-radix-cache" not in args,
            # A radix cache matches single tokens; four at a time is near enough and still finds a chat template.
            "block_size": max(4, int(args.get("--page-size", 1))),
            "max_model_len": int(args.get("--context-length", 131072)),
            "max_running": int(args.get("--max-running-requests", 48)),
            "metrics": "--enable-metrics" in args,
        }
    return {
        "prefix_caching": "--no-cache-prompt" not in args,
        "block_size": 4,
        "max_model_len": int(args.get("--ctx-size", 131072)),
        "max_running": int(args.get("--parallel", 4)),
        "metrics": "--metrics" in args,
    }


def _speculation(
    dialect: str, args: Mapping[str, Any], behaviour: Behaviour
) -> tuple[str | None, tuple[float, ...], bool]:
    reader = {"vllm": _vllm_speculation, "sglang": _sglang_speculation, "llamacpp": _llama_speculation}[dialect]
    method, k, length, rates = reader(args)
    if method is None:
        return None, (), False
    if rates is not None:
        return method, tuple(rates[:k]), True
    if length is not None:
        return method, tuple(min(1.0, max(0.0, length - 1 - i)) for i in range(k)), True
    wished = behaviour.acceptance
    if isinstance(wished, Mapping):
        wished = wished.get(str(k))
    curve = tuple(wished) if wished else DEFAULT_ACCEPTANCE
    return method, (curve + (0.0,) * k)[:k], False


Speculation = tuple[str | None, int, float | None, list[float] | None]


def _vllm_speculation(args: Mapping[str, Any]) -> Speculation:
    text = args.get("--speculative-config")
    config = json.loads(text) if isinstance(text, str) else {}
    if "--spec-tokens" in args:
        config = {"method": args.get("--spec-method", "ngram"), "num_speculative_tokens": int(args["--spec-tokens"])}
    if not config:
        return None, 0, None, None
    k = config.get("num_speculative_tokens")
    if k is None:
        raise Refused("ValueError: num_speculative_tokens must be provided with speculative model\n", 1)
    if k <= 0:
        raise Refused("vllm_cpu_fail_spec_zero.log", 1)
    return (
        config.get("method", "draft_model"),
        k,
        config.get("synthetic_acceptance_length"),
        config.get("synthetic_acceptance_rates"),
    )


def _sglang_speculation(args: Mapping[str, Any]) -> Speculation:
    method = args.get("--speculative-algorithm")
    if method in (None, "NONE"):
        return None, 0, None, None
    if method not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "FROZEN_KV_MTP"):
        raise Refused(f"ValueError: Unknown speculative algorithm name: {method}\n", 1)
    gamma = int(args.get("--speculative-dspark-block-size", 5))
    tokens = {"NGRAM": 12, "DSPARK": gamma + 1}.get(method, int(args.get("--speculative-num-steps", 3)) + 1)
    tokens = int(args.get("--speculative-num-draft-tokens", tokens))
    if method == "DSPARK" and tokens != gamma + 1:
        raise Refused(
            f"ValueError: DSpark speculative_num_draft_tokens must equal gamma + 1 ({gamma + 1}); got {tokens}.\n", 1
        )
    length = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1"))
    return method, tokens - 1, length if length > 0 else None, None


def _llama_speculation(args: Mapping[str, Any]) -> Speculation:
    method = args.get("--spec-type")
    if method in (None, "none"):
        return None, 0, None, None
    if set(method.split(",")) - LLAMA_SPEC_TYPES:
        raise Refused("llama_fail_bad_spec.log", 1)
    limits = [LLAMA_DRAFT_LIMITS.get(name, ("--spec-draft-n-max", 3)) for name in method.split(",")]
    k = max(int(args.get(flag, default)) for flag, default in limits)
    length, rates = args.get("--spec-synth-len"), args.get("--spec-synth-rates")
    return method, k, float(length) if length else None, [float(r) for r in rates.split(",")] if rates else None
