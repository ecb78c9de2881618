"""How each engine fails before or while it serves, and the flags it says it knows."""

from __future__ import annotations

import os
import time

from tests.support.fake.behaviour import Behaviour
from tests.support.fake.counters import RECORDED
from tests.support.fake.flags import Launch
from tests.support.fake.logs import stamp, start_lines


def failure_log(name: str) -> str:
    """A recorded failure by its file name, or the text itself."""
    path = RECORDED / name
    return path.read_text(encoding="utf-8") if name.endswith(".log") and path.is_file() else name


def port_in_use(launch: Launch) -> str:
    """What each program prints when its port is taken."""
    if launch.dialect == "vllm":
        return failure_log("vllm_cpu_fail_port_in_use.log")
    if launch.dialect == "sglang":
        where = f"('{launch.host}', {launch.port})"
        text = f"ERROR:    [Errno 98] error while attempting to bind on address {where}: address already in use"
        return stamp("sglang", text)
    where = f"hostname: {launch.host}, port: {launch.port}"
    return stamp("llamacpp", f"srv  llama_server: couldn't bind HTTP server socket, {where}", level="ERROR")


_HELP_FLAGS = {
    "vllm": "--no-async-scheduling --trust-remote-code --hf-overrides --performance-mode --max-cudagraph-capture-size",
    "sglang": (
        "--model-path --host --port --served-model-name --api-key --enable-metrics --tp-size --tensor-parallel-size "
        "--mem-fraction-static --context-length --max-total-tokens --max-running-requests --chunked-prefill-size "
        "--max-prefill-tokens --page-size --kv-cache-dtype --disable-radix-cache --disable-overlap-schedule "
        "--schedule-policy --stream-interval --decode-log-interval --skip-server-warmup --warmups --load-format "
        "--json-model-override-args --disable-cuda-graph --cuda-graph-bs --cuda-graph-max-bs --cuda-graph-bs-decode "
        "--cuda-graph-max-bs-decode --attention-backend --moe-runner-backend --speculative-moe-runner-backend "
        "--enforce-shared-experts-fusion --disable-custom-all-reduce --speculative-algorithm --speculative-num-steps "
        "--speculative-eagle-topk --speculative-num-draft-tokens --speculative-draft-model-path "
        "--speculative-dspark-block-size --enable-cache-report --trust-remote-code --quantization --dtype"
    ),
    "llamacpp": (
        "-m --model --host --port --alias --api-key --metrics --ctx-size --batch-size --ubatch-size --parallel "
        "--threads --n-gpu-layers --flash-attn --cache-type-k --cache-type-v --cache-reuse --cache-prompt "
        "--no-cache-prompt --cache-ram --slots --no-slots --props --split-mode --tensor-split --fit --jinja "
        "--spec-type --spec-draft-model --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --spec-draft-p-split "
        "--spec-ngram-mod-n-match --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-simple-size-n "
        "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-synth-len --spec-synth-rates --spec-default"
    ),
}


def help_text(dialect: str) -> str:
    """Every flag the program knows; vLLM's is the recorded usage."""
    listed = "\n".join(f"  {flag}" for flag in _HELP_FLAGS[dialect].split())
    if dialect != "vllm":
        return f"usage: {dialect} [-h]\n{listed}"
    usage = failure_log("vllm_cpu_fail_bad_flag.log")
    return usage[usage.index("usage:") : usage.rindex("api_server.py: error:")] + listed


_OUT_OF_MEMORY = """\
(EngineCore pid=PID) ERROR [core.py:1004] EngineCore encountered a fatal error.
(EngineCore pid=PID) ERROR [core.py:1004] Traceback (most recent call last):
(EngineCore pid=PID) ERROR [core.py:1004]   File "/venv/vllm/v1/engine/core.py", line 995, in run_engine_core
(EngineCore pid=PID) ERROR [core.py:1004]     engine_core.run_busy_loop()
(EngineCore pid=PID) ERROR [core.py:1004] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. \
GPU 0 has a total capacity of 139.80 GiB of which 1.05 GiB is free. Including non-PyTorch memory, this process has \
138.74 GiB memory in use.
(APIServer pid=PID) ERROR [async_llm.py:712] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an \
issue. See stack trace (above) for the root cause.
"""


def out_of_memory(dialect: str) -> str:
    """What is printed when memory runs out under load."""
    if dialect == "llamacpp":
        return "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:553"
    text = _OUT_OF_MEMORY.replace("PID", str(os.getpid()))
    if dialect == "vllm":
        return text.replace("ERROR [", f"ERROR {time.strftime('%m-%d %H:%M:%S')} [")
    cause = next(line.partition("] ")[2] for line in text.splitlines() if "OutOfMemoryError" in line)
    return stamp("sglang", f"Scheduler hit an exception: Traceback (most recent call last):\n{cause}")


CACHE_IN_USE = """\
Traceback (most recent call last):
  File "/venv/site-packages/vllm/compilation/compiler_interface.py", line 402, in load
    return pickle.load(file)
_pickle.UnpicklingError: pickle data was truncated
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""

_FRAMES = (
    ("entrypoints/cli/main.py", 82, "main", "args.dispatch_function(args)"),
    ("entrypoints/openai/api_server.py", 702, "run_server", "await run_server_worker(listen_address, sock, args)"),
    ("engine/arg_utils.py", 2218, "create_engine_config", "speculative_config = self.create_speculative_config("),
    ("engine/arg_utils.py", 1994, "create_speculative_config", "return SpeculativeConfig(**self.speculative_config)"),
)


def dspark_refusal(k: int, launch: Launch) -> str:
    """vLLM 0.26 refuses a k below the draft's block size: banner, traceback, pydantic's wrapping."""
    banner = "\n".join(line for line, _ in zip(start_lines(launch, Behaviour()), range(12), strict=False))
    frames = "".join(
        f'  File "/venv/lib/python3.12/site-packages/vllm/{path}", line {line}, in {name}\n    {code}\n'
        for path, line, name, code in _FRAMES
    )
    return (
        f"{banner}\nTraceback (most recent call last):\n{frames}"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        f"  Value error, DSpark requires num_speculative_tokens >= dspark_block_size (5); got {k}. Smaller values "
        "produce incorrect output. Use num_speculative_tokens=5 or larger (e.g. 7). [type=value_error, "
        f"input_value=ArgsKwargs((), {{'method': 'dspark', 'num_speculative_tokens': {k}}}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error\n"
    )
