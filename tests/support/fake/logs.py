"""What an engine prints: the recorded start replayed with this launch's own values, and the lines of a life."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.counters import KV_TOKENS, RECORDED, Counters
from tests.support.fake.flags import Launch

START_LOGS = {
    "vllm": "vllm026_h200_dsv4_dspark.log",
    "sglang": "sglang0517_h200_smollm2_ngram_start.log",
    "llamacpp": "llama_ngmod.log",
}
_LAST_START_LINE = {
    "vllm": "Application startup complete.",
    "sglang": "Capture target prefill",
    "llamacpp": "listening on",
}


def say(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


_BEGUN_S = time.monotonic()


def stamp(
    dialect: str, text: str, *, process: str = "APIServer", level: str = "INFO", where: str = "loggers.py:310"
) -> str:
    """One log line as the dialect writes it."""
    if dialect == "vllm":
        return f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{where}] {text}"
    if dialect == "sglang":
        return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}"
    micros = round((time.monotonic() - _BEGUN_S) * 1e6)
    minutes, rest = divmod(micros, 60_000_000)
    return f"{minutes}.{rest // 1_000_000:02d}.{rest // 1000 % 1000:03d}.{rest % 1000:03d} {level[0]} {text}"


def jit_line(launch: Launch) -> str:
    """What a kernel that compiles inside a request prints."""
    text = (
        "TileLang JIT compilation during inference: mhc_pre_big_fuse_broadcast_with_norm_tilelang. "
        "This causes a latency spike; consider extending warmup to cover this shape/config."
    )
    return stamp(launch.dialect, text, process="EngineCore", level="WARNING", where="jit_monitor.py:135")


def request_lines(launch: Launch, number: int, timings: Mapping[str, float], c: Counters) -> Iterator[str]:
    """What SGLang and llama.cpp print when a request ends; vLLM prints sums every ten seconds instead."""
    if launch.dialect == "sglang":
        spec = f"accept len: {mean_length(c):.2f}, accept rate: {acceptance_rate(c):.2f}, " if c.drafts else ""
        yield stamp(
            "sglang",
            f"Decode batch, #running-req: {c.running + 1}, #token: {c.tokens_max}, token usage: 0.00, {spec}"
            f"cuda graph: True, gen throughput (token/s): {timings['predicted_per_second']:.2f}, "
            f"#queue-req: {c.waiting}",
        )
    elif launch.dialect == "llamacpp":
        head = f"slot print_timing: id  0 | task {number} |"
        rows = (("prompt eval time", "prompt"), ("       eval time", "predicted"))
        for name, key in rows:
            ms, n, per = timings[f"{key}_ms"], timings[f"{key}_n"], timings[f"{key}_per_second"]
            each = timings[f"{key}_per_token_ms"]
            text = f"{name} = {ms:10.2f} ms / {n:5.0f} tokens ({each:8.2f} ms per token, {per:8.2f} tokens per second)"
            yield stamp("llamacpp", f"{head} {text}")
        if drafted := timings.get("draft_n"):
            hit = timings["draft_n_accepted"]
            mean = 1 + hit / (drafted / launch.proposals)
            text = f"draft acceptance = {hit / drafted:.5f} ({hit:5.0f} accepted / {drafted:5.0f} generated)"
            yield stamp("llamacpp", f"{head} {text}, mean len = {mean:5.2f}")


def mean_length(c: Counters) -> float:
    return 1 + c.accepted_tokens / c.drafts if c.drafts else 0.0


def acceptance_rate(c: Counters) -> float:
    return c.accepted_tokens / c.draft_tokens if c.draft_tokens else 0.0


def ten_second_lines(now: Counters, before: Counters, seconds: float) -> Iterator[str]:
    """vLLM's periodic sums over the last interval."""
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
    hits = 100 * now.cached_tokens / now.prompt_tokens if now.prompt_tokens else 0.0
    yield stamp(
        "vllm",
        f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, Avg generation throughput: "
        f"{generated / seconds:.1f} tokens/s, Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"GPU KV cache usage: 0.1%, Prefix cache hit rate: {hits:.1f}%",
    )
    drafts = now.drafts - before.drafts
    if drafts <= 0:
        return
    pairs = zip(now.accepted_by_position, before.accepted_by_position, strict=True)
    by_position = [(new - old) / drafts for new, old in pairs]
    accepted, drafted = round(sum(by_position) * drafts), drafts * now.proposals
    rates = ", ".join(f"{rate:.3f}" for rate in by_position)
    yield stamp(
        "vllm",
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, Drafted throughput: {drafted / seconds:.2f} "
        f"tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%",
        where="metrics.py:120",
    )


def start_lines(launch: Launch, behaviour: Behaviour) -> Iterator[str]:
    """The recorded lines up to readiness, one by one."""
    text = (RECORDED / (behaviour.start_log or START_LOGS[launch.dialect])).read_text(encoding="utf-8")
    pids = {pid: str(os.getpid() + i) for i, pid in enumerate(dict.fromkeys(re.findall(r"pid=(\d+)", text)))}
    for line in text.splitlines():
        if not launch.proposals and re.search(r"(?i)dspark|spec|draft|ngram|eagle", line):
            continue
        yield _own(line, launch, pids)
        if behaviour.draft_warnings and ("Model loading took" in line or "Load weight end" in line):
            yield from _draft_warnings(launch)
        if _LAST_START_LINE[launch.dialect] in line:
            break
    if launch.dialect == "sglang":
        yield from _sglang_end(launch)


def _own(line: str, launch: Launch, pids: dict[str, str]) -> str:
    """Put this launch's pid, clock, model, address and arguments into a recorded line."""
    line = re.sub(r"pid=(\d+)", lambda m: f"pid={pids[m[1]]}", line)
    line = re.sub(r"server process \[\d+\]", f"server process [{os.getpid()}]", line)
    line = re.sub(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b", time.strftime("%m-%d %H:%M:%S"), line)
    line = re.sub(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", time.strftime("[%Y-%m-%d %H:%M:%S]"), line)
    line = re.sub(r"/models/[\w./-]+", lambda _: launch.model, line)
    line = re.sub(r"http://[\d.]+:\d+", f"http://{launch.host}:{launch.port}", line)
    if "non-default args:" in line:
        line = line[: line.index("non-default args:")] + f"non-default args: {_shown(launch)}"
    if launch.dialect == "vllm":
        line = _vllm_length(line, launch)
    return line


def _shown(launch: Launch) -> dict[str, object]:
    """The arguments as vLLM prints them: Python names, JSON taken apart, the key left out."""
    args = {k.lstrip("-").replace("-", "_"): v for k, v in launch.args.items() if "key" not in k}
    return {k: json.loads(v) if isinstance(v, str) and v.startswith("{") else v for k, v in args.items()}


def _vllm_length(line: str, launch: Launch) -> str:
    line = line.replace("Using max model len 65536", f"Using max model len {launch.max_model_len}")
    if "Maximum concurrency for 65,536" in line:
        share = KV_TOKENS["vllm"] / launch.max_model_len
        head = line[: line.index("Maximum concurrency")]
        return f"{head}Maximum concurrency for {launch.max_model_len:,} tokens per request: {share:.2f}x"
    return line.replace("num_spec_tokens=6", f"num_spec_tokens={launch.proposals}")


def _draft_warnings(launch: Launch) -> Iterator[str]:
    for stage in range(3):
        for part in ("gate_up_proj", "down_proj"):
            yield stamp(
                launch.dialect,
                f"DSpark V4 draft: unexpected weight 'mtp.{stage}.ffn.shared_experts.{part}.weight'",
                process="EngineCore",
                level="WARNING",
                where="dspark.py:412",
            )


def _sglang_end(launch: Launch) -> Iterator[str]:
    lines = [
        "Capture target prefill CUDA graph end. elapsed=3.11 s, mem usage=0.35 GB, avail mem=68.9 GB.",
        "Capture target decode CUDA graph begin. backend=full, bs=[1, 2, 4, 8]",
        "Capture target decode CUDA graph end. elapsed=1.02 s, mem usage=0.12 GB, avail mem=68.8 GB.",
        f"max_total_num_tokens={KV_TOKENS['sglang']}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests={launch.max_running}, context_len={launch.max_model_len}, available_gpu_mem=68.80 GB",
        "INFO:     Started server process",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        f"INFO:     Uvicorn running on http://{launch.host}:{launch.port} (Press CTRL+C to quit)",
    ]
    for line in lines:
        yield stamp("sglang", line)


SGLANG_READY = "The server is fired up and ready to roll!"


def goodbye(launch: Launch) -> str:
    """The last lines of an orderly end."""
    if launch.dialect == "llamacpp":
        return stamp("llamacpp", "srv    operator(): operator(): cleaning up before exit...")
    prefix = f"(APIServer pid={os.getpid()}) " if launch.dialect == "vllm" else ""
    return "\n".join(f"{prefix}INFO:     {text}" for text in ("Shutting down", "Application shutdown complete."))
