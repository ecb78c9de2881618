"""What an engine prints before it serves: the recorded start, replayed with this launch's own values."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator

from fake.behaviour import Behaviour
from fake.counters import RECORDED
from fake.flags import Launch

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


def stamp(dialect: str, text: str, started_s: float, *, level: str = "INFO", where: str = "loggers.py:310") -> str:
    """One log line as the dialect writes it."""
    if dialect == "vllm":
        process = "APIServer" if level == "INFO" else "EngineCore"
        return f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{where}] {text}"
    if dialect == "sglang":
        return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}"
    seconds = time.time() - started_s
    clock = (
        f"{int(seconds // 60)}.{int(seconds % 60):02d}.{int(seconds * 1000 % 1000):03d}.{int(seconds * 1e6 % 1000):03d}"
    )
    return f"{clock} {level[0]} srv  llama_server: {text}"


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
        shown = {k.lstrip("-").replace("-", "_"): v for k, v in launch.args.items() if "key" not in k}
        line = line[: line.index("non-default args:")] + f"non-default args: {shown}"
    if launch.dialect == "vllm":
        line = _vllm_length(line, launch)
    return line


def _vllm_length(line: str, launch: Launch) -> str:
    line = line.replace("Using max model len 65536", f"Using max model len {launch.max_model_len}")
    if "Maximum concurrency for 65,536" in line:
        share = 1_320_868 / launch.max_model_len
        head = line[: line.index("Maximum concurrency")]
        return f"{head}Maximum concurrency for {launch.max_model_len:,} tokens per request: {share:.2f}x"
    return line.replace("num_spec_tokens=6", f"num_spec_tokens={launch.proposals}")


def _draft_warnings(launch: Launch) -> Iterator[str]:
    for stage in range(3):
        for part in ("gate_up_proj", "down_proj"):
            yield stamp(
                launch.dialect,
                f"DSpark V4 draft: unexpected weight 'mtp.{stage}.ffn.shared_experts.{part}.weight'",
                time.time(),
                level="WARNING",
                where="dspark.py:412",
            )


def _sglang_end(launch: Launch) -> Iterator[str]:
    lines = [
        "Capture target prefill CUDA graph end. elapsed=3.11 s, mem usage=0.35 GB, avail mem=68.9 GB.",
        "Capture target decode CUDA graph begin. backend=full, bs=[1, 2, 4, 8]",
        "Capture target decode CUDA graph end. elapsed=1.02 s, mem usage=0.12 GB, avail mem=68.8 GB.",
        f"max_total_num_tokens=3226426, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests={launch.max_running}, context_len={launch.max_model_len}, available_gpu_mem=68.80 GB",
        "INFO:     Started server process",
        "INFO:     Waiting for application startup.",
        "INFO:     Application startup complete.",
        f"INFO:     Uvicorn running on http://{launch.host}:{launch.port} (Press CTRL+C to quit)",
    ]
    for line in lines:
        yield stamp("sglang", line, time.time())


SGLANG_READY = "The server is fired up and ready to roll!"


def failure_log(name: str) -> str:
    """A recorded failure by its file name, or the text itself."""
    path = RECORDED / name
    return path.read_text(encoding="utf-8") if name.endswith(".log") and path.is_file() else name


def dspark_refusal(k: int, launch: Launch) -> str:
    """vLLM 0.26's refusal of a k below the draft's block size: banner, traceback, pydantic's wrapping."""
    banner = "\n".join(line for line, _ in zip(start_lines(launch, Behaviour()), range(12), strict=False))
    reason = (
        "DSpark requires num_speculative_tokens >= dspark_block_size (5); "
        f"got {k} speculative tokens for a draft of block size 5."
    )
    frames = "".join(
        f'  File "/venv/lib/python3.12/site-packages/vllm/{path}", line {line}, in {name}\n    {code}\n'
        for path, line, name, code in (
            ("entrypoints/cli/main.py", 82, "main", "args.dispatch_function(args)"),
            (
                "entrypoints/openai/api_server.py",
                702,
                "run_server",
                "await run_server_worker(listen_address, sock, args)",
            ),
            (
                "engine/arg_utils.py",
                1894,
                "create_engine_config",
                "speculative_config = self.create_speculative_config(",
            ),
            (
                "engine/arg_utils.py",
                1602,
                "create_speculative_config",
                "return SpeculativeConfig(**self.speculative_config)",
            ),
        )
    )
    return (
        f"{banner}\nTraceback (most recent call last):\n{frames}"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        f"  Value error, {reason} [type=value_error, input_value=ArgsKwargs((), {{'method': 'dspark', "
        f"'num_speculative_tokens': {k}}}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error\n"
    )
