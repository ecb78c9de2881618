"""Logs of dead and living engines -> Diagnosis: recorded failures, and every sentence that has a rule.

Where nothing is recorded, a message of the engine's source stands in the frame of a recorded failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.engines import ENGINES
from orchestrator.engines.diagnosis.causes import CAUSES
from orchestrator.engines.diagnosis.rules import RULES
from orchestrator.outcome import Diagnosis, TrialStatus
from tests.support.paths import RECORDED

REFUSED, UNFIT, FAILED = TrialStatus.REFUSED, TrialStatus.UNFIT, TrialStatus.FAILED
INFRASTRUCTURE, COMPLETE = TrialStatus.INFRASTRUCTURE, TrialStatus.COMPLETE
# Caused by the program around the engine, never read from a log.
FROM_OUTSIDE = {
    *("gpu_busy", "not_released", "no_token", "no_successful_request", "machine", "configuration", "clearly_worse"),
    "trial_process_lost",
    "node_lost",
    "not_placed",
    "internal_error",
}


def kind_of(path: Path) -> str:
    return next((kind for kind in ("sglang", "vllm") if kind in path.name), "llamacpp")


def recorded(name: str, exit_code: int | None = 1) -> Diagnosis:
    path = RECORDED / name
    return ENGINES[kind_of(path)].diagnose(path.read_text(encoding="utf-8"), exit_code)


def vllm_log(message: str, *before: str, process: str = "EngineCore pid=519") -> str:
    """A start of vLLM that ends with `message` in one process, as recorded: the front end speaks last."""
    error = f"({process}) ERROR 11-29 14:06:34 [core.py:1510] "
    return "\n".join(
        [
            "(APIServer pid=500) WARNING 11-29 14:06:20 [system_utils.py:255] Found ulimit of 20000 and failed to "
            "automatically increase with error current limit exceeds maximum limit.",
            *before,
            f"{error}EngineCore failed to start.",
            f"{error}Traceback (most recent call last):",
            f'{error}  File "/venv/vllm/v1/engine/core.py", line 1482, in run_engine_core',
            f"{error}    raise Something(",
            *(error + line for line in message.splitlines()),
            f"Process {process.split()[0]}:",
            "Traceback (most recent call last):",
            '  File "/venv/vllm/v1/engine/core.py", line 1482, in run_engine_core',
            "    raise Something(",
            message,
            "Traceback (most recent call last):",
            '  File "/venv/vllm/v1/engine/utils.py", line 1273, in wait',
            "    raise RuntimeError(",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
            "{'EngineCore': 1}",
            "",
        ]
    )


def sglang_log(message: str, *before: str, rank: str = " TP0") -> str:
    return "\n".join(
        [
            "[2026-11-29 14:27:41] server_args=ServerArgs(model_path='m', mem_fraction_static=0.96)",
            *before,
            f"[2026-11-29 14:27:53{rank}] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/venv/sglang/srt/managers/scheduler.py", line 4940, in run_scheduler_process',
            "    scheduler = Scheduler(",
            message,
            "",
            "[2026-11-29 14:27:53] Received sigquit from a child process. It usually means the child failed.",
            "Killed",
            "",
        ]
    )


# (recorded log, status, cause, a part of the evidence)
RECORDED_FAILURES = [
    ("vllm_cpu_fail_bad_flag.log", REFUSED, "unknown_flag", "unrecognized arguments: --no-such-flag"),
    ("vllm_cpu_fail_cli_metadata.log", INFRASTRUCTURE, "module_missing", "No package metadata was found for vllm"),
    ("vllm_cpu_fail_maxlen_over_kv.log", UNFIT, "kv_cache_too_small", "2.81 GiB KV cache is needed"),
    ("vllm_cpu_fail_maxlen_over_model.log", REFUSED, "max_len_over_model", "max_model_len (16384) is greater"),
    ("vllm_cpu_fail_port_in_use.log", INFRASTRUCTURE, "port_taken", "[Errno 98] Address already in use"),
    ("vllm_cpu_fail_spec_zero.log", REFUSED, "bad_value", "Input should be greater than 0"),
    ("vllm_cpu_fail_architecture.log", REFUSED, "model_unsupported", "['FooForCausalLM'] are not supported"),
    ("vllm_cpu_fail_block_size.log", REFUSED, "bad_value", "No common block size for 7"),
    ("vllm_cpu_fail_budget.log", REFUSED, "batch_below_sequences", "max_num_batched_tokens (2) must be greater"),
    ("vllm_cpu_fail_disk.log", INFRASTRUCTURE, "disk_full", "[Errno 28] No space left on device"),
    ("vllm_cpu_fail_draft_vocabulary.log", REFUSED, "draft_vocabulary_differs", "Draft model vocab_size=32000"),
    ("vllm_cpu_fail_heads.log", REFUSED, "heads_not_divisible", "Total number of attention heads (9)"),
    (
        "vllm_cpu_fail_memory_busy.log",
        UNFIT,
        "host_out_of_memory",
        "desired CPU memory utilization (0.99, 23.31 GiB)",
    ),
    ("vllm_cpu_fail_memory_wish.log", UNFIT, "host_out_of_memory", "requested memory for kv (4000.0 GiB)"),
    ("vllm_cpu_fail_method.log", REFUSED, "unknown_method", "input_value='nosuch'"),
    ("vllm_cpu_fail_mismatch.log", REFUSED, "weights_mismatch", "model.layers.30.post_attention_layernorm.weight"),
    ("vllm_cpu_fail_module.log", INFRASTRUCTURE, "module_missing", "No module named 'tensorizer'"),
    ("vllm_cpu_fail_no_count.log", REFUSED, "bad_value", "num_speculative_tokens must be provided"),
    ("vllm_cpu_fail_no_tokenizer.log", REFUSED, "model_missing", "Couldn't instantiate the backend tokenizer"),
    ("vllm_cpu_fail_no_weights.log", REFUSED, "model_missing", "Cannot find any model weights"),
    (
        "vllm_cpu_fail_other_weights.log",
        REFUSED,
        "weights_mismatch",
        "There is no module or parameter named 'model'",
    ),
    (
        "vllm_cpu_fail_remote_code.log",
        REFUSED,
        "remote_code_refused",
        "contains custom code which must be executed",
    ),
    ("vllm_cpu_fail_truncated.log", REFUSED, "weights_damaged", "incomplete metadata, file not fully covered"),
    ("vllm_cpu_fail_unknown_model.log", REFUSED, "model_missing", "Repo id must be in the form"),
    ("sglang0517_cpu_fail_architecture.log", REFUSED, "model_unsupported", "has model type `nosuch`"),
    ("sglang0517_cpu_fail_bad_flag.log", REFUSED, "unknown_flag", "unrecognized arguments: --no-such-flag"),
    ("sglang0517_cpu_fail_bad_number.log", REFUSED, "bad_value", "invalid int value: 'many'"),
    ("sglang0517_cpu_fail_broken_config.log", REFUSED, "weights_damaged", "is not a valid JSON file"),
    ("sglang0517_cpu_fail_choice.log", REFUSED, "bad_value", "invalid choice: 'nosuch'"),
    ("sglang0517_cpu_fail_compile.log", INFRASTRUCTURE, "toolchain_missing", "ninja exited with status 1"),
    ("sglang0517_cpu_fail_device.log", INFRASTRUCTURE, "gpu_unavailable", "Found no NVIDIA driver"),
    ("sglang0517_cpu_fail_device_of_method.log", REFUSED, "bad_value", "only supports CUDA device"),
    # Nothing of ours names this one: unknown, with its first traceback.
    ("sglang0517_cpu_fail_device_of_group.log", FAILED, "unknown", "Expected a cuda device, but got: cpu"),
    ("sglang0517_cpu_fail_hub_name.log", REFUSED, "model_missing", "LocalEntryNotFoundError"),
    ("sglang0517_cpu_fail_killed.log", INFRASTRUCTURE, "killed", "scheduler_0"),
    ("sglang0517_cpu_fail_kv_allocation.log", UNFIT, "host_out_of_memory", "DefaultCPUAllocator: can't allocate"),
    ("sglang0517_cpu_fail_max_len_over_model.log", REFUSED, "max_len_over_model", "context_length (16384) is greater"),
    ("sglang0517_cpu_fail_memory_fraction.log", UNFIT, "kv_cache_too_small", "leave no GPU memory for the KV cache"),
    ("sglang0517_cpu_fail_method.log", REFUSED, "unknown_method", "NOSUCH"),
    ("sglang0517_cpu_fail_module.log", INFRASTRUCTURE, "module_missing", "No module named 'vllm'"),
    ("sglang0517_cpu_fail_no_config.log", REFUSED, "model_missing", "Unrecognized model in"),
    ("sglang0517_cpu_fail_no_draft.log", INFRASTRUCTURE, "gpu_unavailable", "0 active drivers"),
    ("sglang0517_cpu_fail_no_draft_model.log", REFUSED, "model_missing", "Repo id must use alphanumeric chars"),
    ("sglang0517_cpu_fail_no_driver.log", INFRASTRUCTURE, "gpu_unavailable", "libcuda.so.1: cannot open"),
    ("sglang0517_cpu_fail_no_gpu.log", INFRASTRUCTURE, "gpu_unavailable", "No accelerator (CUDA"),
    ("sglang0517_cpu_fail_no_kernel.log", INFRASTRUCTURE, "gpu_unavailable", "libcuda.so.1: cannot open"),
    ("sglang0517_cpu_fail_no_model.log", REFUSED, "model_missing", "Repo id must use alphanumeric chars"),
    ("sglang0517_cpu_fail_no_tokenizer.log", REFUSED, "model_missing", "Couldn't instantiate the backend tokenizer"),
    ("sglang0517_cpu_fail_no_weights.log", REFUSED, "model_missing", "Cannot find any model weights"),
    ("sglang0517_cpu_fail_port_in_use.log", INFRASTRUCTURE, "port_taken", "address already in use"),
    ("sglang0517_cpu_fail_tensor_parallel.log", REFUSED, "bad_value", "tp_size 2 should be smaller"),
    ("sglang0517_cpu_fail_triton.log", INFRASTRUCTURE, "gpu_unavailable", "0 active drivers"),
    ("sglang0517_cpu_fail_truncated.log", REFUSED, "weights_damaged", "incomplete metadata, file not fully covered"),
    (
        "vllm026_h200_fail_unguarded.log",
        INFRASTRUCTURE,
        "script_unguarded",
        "An attempt has been made to start a new process before the current process",
    ),
    ("llama_fail_bad_spec.log", REFUSED, "unknown_method", "unknown speculative type: nosuch"),
]


@pytest.mark.parametrize(("name", "status", "cause", "evidence"), RECORDED_FAILURES)
def test_recorded_failures(name: str, status: TrialStatus, cause: str, evidence: str) -> None:
    found = recorded(name)
    assert (found.status, found.cause) == (status, cause)
    assert evidence in (found.evidence or "")
    assert found.summary
    assert found.lever


def test_every_recorded_failure_is_listed_above() -> None:
    assert {row[0] for row in RECORDED_FAILURES} == {path.name for path in RECORDED.glob("*_fail_*.log")}


def test_sglang_that_could_not_bind_is_given_up_though_it_hangs() -> None:
    log = (RECORDED / "sglang0517_cpu_fail_port_in_use.log").read_text(encoding="utf-8")
    # It said nothing more for 102 s, then its processes were ended from outside.
    hanging, ended, _ = log.partition("[2026-11-29 22:20:46]")
    assert ended
    assert ENGINES["sglang"].diagnose(hanging, None).cause == "port_taken"


def test_the_least_memory_fraction_is_told() -> None:
    lever = recorded("sglang0517_cpu_fail_memory_fraction.log").lever
    assert lever == "raise mem-fraction-static from 0.001 to more than 0.017"


def test_a_flag_is_not_its_own_nearest() -> None:
    lever = recorded("sglang0517_cpu_fail_bad_flag.log").lever
    assert lever is not None
    assert "did you mean --no-such-flag" not in lever


def test_recorded_kv_failure_in_numbers() -> None:
    found = recorded("vllm_cpu_fail_maxlen_over_kv.log")
    numbers = {name: fact.value for name, fact in found.facts.items()}
    assert numbers["kv_needed_gib"] == 2.81
    assert numbers["kv_available_gib"] == 1.0
    assert numbers["kv_shortfall_gib"] == 1.81
    assert numbers["max_len_tokens"] == 131072
    assert numbers["max_len_estimate_tokens"] == 46464
    assert found.lever is not None
    assert "VLLM_CPU_KVCACHE_SPACE" in found.lever
    assert "46464" in found.lever


HEALTHY = sorted(path for path in RECORDED.glob("*.log") if "_fail_" not in path.name and "made_" not in path.name)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.name)
def test_a_healthy_log_with_warnings_tells_no_fault(path: Path) -> None:
    engine = ENGINES[kind_of(path)]
    text = path.read_text(encoding="utf-8")
    assert (engine.diagnose(text, None).status, engine.diagnose(text, None).cause) == (COMPLETE, None)
    for exit_code in (-15, -2, 143):
        ended = engine.diagnose(text, exit_code)
        assert (ended.status, ended.cause) == (INFRASTRUCTURE, "killed")
    assert engine.diagnose(text, 0).cause == "unknown"


VLLM_MESSAGES = [
    (
        "ValueError: DSpark requires num_speculative_tokens >= dspark_block_size (5); got 4. Smaller values produce "
        "incorrect output. Use num_speculative_tokens=5 or larger (e.g. 7).",
        "block_size",
    ),
    (
        "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        "heads_not_divisible",
    ),
    ("AssertionError: 9 is not divisible by 2", "heads_not_divisible"),
    ("ValueError: num_speculative_tokens:3 must be divisible by n_predict=2", "draft_not_divisible"),
    (
        "ValueError: max_num_scheduled_tokens is set to -1024 based on the speculative decoding settings, which does "
        "not allow any tokens to be scheduled. Increase max_num_batched_tokens",
        "no_schedulable_tokens",
    ),
    (
        "ValueError: max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).",
        "batch_below_sequences",
    ),
    (
        "ValueError: Target and draft model should have the same vocabulary size. Target model vocab_size=1. Draft",
        "draft_vocabulary_differs",
    ),
    (
        "ValueError: A speculative model was provided, but `num_speculative_tokens` was not provided",
        "bad_value",
    ),
    ("NotImplementedError: Unsupported speculative method: 'nosuch'", "unknown_method"),
    (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nmethod\n"
        "  Input should be 'ngram', 'medusa' or 'dspark' [type=literal_error, input_value='nosuch', input_type=str]",
        "unknown_method",
    ),
    ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported", "model_unsupported"),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
        "kv_cache_too_small",
    ),
    (
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.",
        "kv_cache_too_small",
    ),
    (
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored "
        "in KV cache (20000). Try increasing `gpu_memory_utilization`",
        "kv_cache_too_small",
    ),
    (
        "ValueError: Free memory on device cuda:0 (12.5/139.8 GiB) on startup is less than desired GPU memory "
        "utilization (0.96, 134.21 GiB). Decrease GPU memory utilization or reduce GPU memory used by others.",
        "gpu_memory_busy",
    ),
    (
        "AssertionError: Error in memory profiling. Initial free memory 130.1 GiB, current free memory 138.9 GiB. "
        "This happens when other processes sharing the same container release GPU memory",
        "gpu_memory_changed",
    ),
    (
        "ValueError: Available memory on node 0 (1.2/22.96 GiB) on startup is less than desired CPU memory "
        "utilization (0.92, 21.12 GiB). On the CPU backend, the flag controls",
        "host_out_of_memory",
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 99999 bytes. Error code 12 (Cannot allocate memory)",
        "host_out_of_memory",
    ),
    ("MemoryError", "host_out_of_memory"),
    ("ModuleNotFoundError: No module named 'torchvision'", "module_missing"),
    ("ModuleNotFoundError: No module named 'cutlass'", "module_missing"),
    ("RuntimeError: operator torchvision::nms does not exist", "module_mismatch"),
    ("ImportError: /venv/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda", "module_mismatch"),
    ("ImportError: cannot import name 'Foo' from 'transformers.models' (/venv/x.py)", "module_mismatch"),
    ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "module_mismatch"),
    ("RuntimeError: No CUDA GPUs are available", "gpu_unavailable"),
    ("RuntimeError: Failed to infer device type", "gpu_unavailable"),
    ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "toolchain_missing"),
    ("OSError: [Errno 28] No space left on device", "disk_full"),
    ("_pickle.UnpicklingError: pickle data was truncated", "cache_broken"),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE", "port_taken"),
    (
        "OSError: /models/x does not appear to have a file named config.json. Checkout",
        "model_missing",
    ),
    ("OSError: Can't load tokenizer for '/models/x'. If you were trying to load it", "model_missing"),
    ("RuntimeError: Cannot find any model weights with `/models/x`", "model_missing"),
    (
        "ValueError: Following weights were not initialized from checkpoint: {'model.layers.0.x'}",
        "weights_mismatch",
    ),
    (
        "ValueError: The repository /models/x contains custom code which must be executed to correctly load the model.",
        "remote_code_refused",
    ),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "gpu_fault"),
    (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:94, unhandled cuda error",
        "communication_failed",
    ),
    ("TimeoutError: RPC call to sample_tokens timed out.", "no_progress"),
    ("RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "killed"),
    ("RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.", "crashed"),
]


@pytest.mark.parametrize(
    ("message", "cause"), VLLM_MESSAGES, ids=[f"{c}-{i}" for i, (_, c) in enumerate(VLLM_MESSAGES)]
)
def test_vllm_messages(message: str, cause: str) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert found.cause == cause
    assert found.status == CAUSES[cause].status
    assert "Engine core initialization failed" not in (found.evidence or "")
    assert found.evidence is not None
    assert " ".join(message.split())[:40] in found.evidence
    assert "{" not in found.summary + (found.lever or "")


SGLANG_MESSAGES = [
    (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        "mem_fraction_static=0.88",
        "kv_cache_too_small",
    ),
    (
        "ValueError: DSpark speculative_num_draft_tokens must equal gamma + 1 (= 6 for gamma=5), but got "
        "speculative_num_draft_tokens=8.",
        "block_size",
    ),
    ("ValueError: DSpark speculative_num_draft_tokens must be >= 2 (= gamma + 1), got 1.", "block_size"),
    ("ValueError: Unknown speculative algorithm name: NOSUCH", "unknown_method"),
    (
        "ValueError: Warning: User-specified context_length (99999) is greater than the derived context_length "
        "(8192). This may lead to incorrect model outputs",
        "max_len_over_model",
    ),
    (
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory=1.0",
        "gpu_memory_busy",
    ),
    ("ValueError: nccl_port at 30001 is not available in 30 seconds. nccl_port is used", "port_taken"),
    ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9", "killed"),
    ("Exception: Capture cuda graph failed: CUBLAS_STATUS_INTERNAL_ERROR\nPossible solutions:", "graph_capture_failed"),
    ("AssertionError", "unknown"),
]


@pytest.mark.parametrize(("message", "cause"), SGLANG_MESSAGES, ids=[c for _, c in SGLANG_MESSAGES])
@pytest.mark.parametrize("rank", ["", " TP1", " DP0 TP1"])
def test_sglang_messages(message: str, cause: str, rank: str) -> None:
    found = ENGINES["sglang"].diagnose(sglang_log(message, rank=rank), 1)
    assert (found.status, found.cause) == (CAUSES[cause].status, cause)
    assert message.split("\n")[0][:40] in (found.evidence or "")


def test_an_assertion_without_words_is_told_by_its_source_line() -> None:
    log = sglang_log("AssertionError").replace(
        "    scheduler = Scheduler(", "    assert self.total_num_heads % tp_size == 0"
    )
    assert ENGINES["sglang"].diagnose(log, 1).cause == "heads_not_divisible"


LLAMA_MESSAGES = [
    ("error: invalid argument: --no-such-flag", "unknown_flag"),
    (
        'error while handling argument "--draft-max": the argument has been removed. use --spec-draft-n-max or '
        "--spec-ngram-mod-n-max",
        "unknown_flag",
    ),
    ('error while handling argument "-c": expected value for argument', "bad_value"),
    ("0.00.300.001 E srv load_model: the target and draft vocabs are not compatible", "draft_vocabulary_differs"),
    ("0.00.300.001 E srv    start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8201", "port_taken"),
    (
        "0.00.300.001 E llama_model_load: error loading model: unknown model architecture: 'foo'",
        "model_unsupported",
    ),
    (
        "0.00.300.001 E gguf_init_from_file: failed to open GGUF file '/models/x.gguf' (No such file or directory)",
        "model_missing",
    ),
    (
        "0.00.300.001 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 999.00 MiB on device 0: cudaMalloc "
        "failed: out of memory\n"
        "0.00.300.001 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv "
        "cache",
        "kv_cache_too_small",
    ),
    (
        "0.00.300.001 E alloc_tensor_range: failed to allocate CPU buffer of size 437944320\n"
        "0.00.300.001 E llama_model_load: error loading model: unable to allocate CPU buffer",
        "host_out_of_memory",
    ),
    (
        "0.00.200.001 I srv    load_model: loading model '/models/x.gguf'\n"
        "0.00.300.001 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 999.00 MiB on device 0: cudaMalloc "
        "failed: out of memory\n"
        "0.00.300.001 E llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "weights_too_large",
    ),
]


@pytest.mark.parametrize(
    ("message", "cause"), LLAMA_MESSAGES, ids=[f"{c}-{i}" for i, (_, c) in enumerate(LLAMA_MESSAGES)]
)
def test_llamacpp_messages(message: str, cause: str) -> None:
    log = f"0.00.000.944 I srv  llama_server: initializing ...\n{message}\n0.00.400.000 I srv    exiting due to error\n"
    found = ENGINES["llamacpp"].diagnose(log, 1)
    assert (found.status, found.cause) == (CAUSES[cause].status, cause)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB"
INFO = "(EngineCore pid=519) INFO 11-29 14:06:30 [x.py:1] "
LOADING = f"{INFO}Loading model from scratch..."
LOADED = f"{INFO}Model loading took 92.9 GiB and 8.837894 seconds"
CAPTURING = "(EngineCore pid=519) Capturing CUDA graphs (PIECEWISE):   0%|          | 0/4 [00:00<?, ?it/s]"
CAPTURED = f"{INFO}Graph capturing finished in 11 secs, took 0.24 GiB"
READY = "(APIServer pid=500) INFO:     Application startup complete."
SERVED = '(APIServer pid=500) INFO:     127.0.0.1:53326 - "POST /v1/completions HTTP/1.1" 200 OK'


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([LOADING], "weights_too_large"),
        ([LOADING, LOADED], "out_of_memory_start"),
        ([LOADING, LOADED, CAPTURING], "graphs_too_large"),
        ([LOADING, LOADED, CAPTURING, CAPTURED], "out_of_memory_start"),
        ([LOADING, LOADED, CAPTURING, CAPTURED, READY, *[SERVED] * 10], "out_of_memory_load"),
    ],
)
def test_out_of_memory_is_told_by_what_the_engine_was_doing(before: list[str], cause: str) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(OOM, *before), 1)
    assert (found.status, found.cause) == (UNFIT, cause)
    assert found.facts["oom_tried_gib"].value == 2.5
    if cause == "out_of_memory_load":
        assert found.facts["requests_served"].value == 10
        assert "after 10 answered requests" in found.summary


def test_the_first_runner_names_the_weights_itself() -> None:
    message = f"Failed to load model - not enough GPU memory. Try lowering x. (original error: {OOM})"
    assert ENGINES["vllm"].diagnose(vllm_log(message, LOADING), 1).cause == "weights_too_large"


def test_out_of_memory_in_mib() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(OOM.replace("2.50 GiB", "512.00 MiB"), LOADING), 1)
    assert found.facts["oom_tried_gib"].value == 0.5


def test_the_cache_pool_of_sglang_under_load() -> None:
    log = sglang_log(
        "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate 4 tokens.",
        "[2026-11-29 14:27:53] The server is fired up and ready to roll!",
    )
    assert ENGINES["sglang"].diagnose(log, 1).cause == "out_of_memory_load"


def kv_message(needed: str, available: str, estimate: str | None = "1,003,520", apostrophe: str = "'s") -> str:
    hint = f" Based on the available memory, the estimated maximum model length is {estimate}." if estimate else ""
    return (
        f"ValueError: To serve at least one request with the model{apostrophe} max seq len (1048576), ({needed} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({available} GiB).{hint} Try increasing"
    )


@pytest.mark.parametrize(
    ("message", "needed", "available", "estimate"),
    [
        (kv_message("14.56", "14.26"), 14.56, 14.26, 1003520),
        (kv_message("26", "3", None), 26, 3, None),
        (kv_message("1,026.33", "3.5", "96000", "s's"), 1026.33, 3.5, 96000),
        (kv_message("26.33", "-0.38", None), 26.33, -0.38, None),
    ],
)
def test_kv_messages_of_several_versions(message: str, needed: float, available: float, estimate: float | None) -> None:
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert found.cause == "kv_cache_too_small"
    assert found.facts["kv_needed_gib"].value == needed
    assert found.facts["kv_available_gib"].value == available
    assert found.facts["kv_shortfall_gib"].value == pytest.approx(needed - available)
    told = found.facts.get("max_len_estimate_tokens")
    assert (told.value if told else None) == estimate


SETTINGS = (
    "(APIServer pid=500) INFO 11-29 14:06:20 [utils.py:1] non-default args: {'max_model_len': 1048576, "
    "'gpu_memory_utilization': 0.95, 'max_num_batched_tokens': 8192}"
)


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("enabled", "2 concurrent batches x max-num-batched-tokens 8,192 = 16,384 (no-async-scheduling halves it)"),
        ("disabled", "1 concurrent batches x max-num-batched-tokens 8,192 = 8,192"),
    ],
)
def test_the_kv_lever_counts_tokens_in_flight_before_context(switch: str, words: str) -> None:
    scheduling = f"(APIServer pid=500) INFO 11-29 14:06:20 [vllm.py:1] Asynchronous scheduling is {switch}."
    found = ENGINES["vllm"].diagnose(vllm_log(kv_message("14.56", "14.26"), SETTINGS, scheduling), 1)
    assert found.lever is not None
    assert words in found.lever
    assert "from 0.95 up by 0.01" in found.lever
    assert found.lever.index("in flight") < found.lever.index("0.01") < found.lever.index("context")


def test_the_utilisation_step_is_computed_where_the_size_of_the_gpu_is_known() -> None:
    total = (
        f"{INFO}Free memory on device (139.29/139.8 GiB) on startup. Desired GPU memory utilization is (0.95, 132.81 "
        "GiB). Actual usage is 92.9 GiB for weight, 2.91 GiB for peak activation, 0.23 GiB for non-torch memory, and "
        "0.24 GiB for CUDAGraph memory."
    )
    found = ENGINES["vllm"].diagnose(vllm_log(kv_message("14.56", "12.26"), SETTINGS, total), 1)
    # 2.3 GiB short, 1.398 GiB per hundredth: two hundredths.
    assert "from 0.95 to 0.97" in (found.lever or "")


def test_a_busy_gpu_is_told_with_the_largest_utilisation_that_fits() -> None:
    message = next(m for m, cause in VLLM_MESSAGES if cause == "gpu_memory_busy")
    found = ENGINES["vllm"].diagnose(vllm_log(message), 1)
    assert "12.5 of 139.8 GiB free, 134.21 GiB wanted" in found.summary
    assert "127.3 GiB" in (found.lever or "")
    assert "0.08 or less" in (found.lever or "")


def test_a_missing_module_names_the_package_that_provides_it() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log("ModuleNotFoundError: No module named 'cutlass.cute'"), 1)
    assert "cutlass.cute" in found.summary
    assert "nvidia-cutlass-dsl" in (found.lever or "")
    started = ENGINES["sglang"].diagnose("/opt/bin/python: No module named sglang\n", 1)
    assert (started.cause, started.status) == ("module_missing", INFRASTRUCTURE)


def test_a_mistyped_flag_is_told_with_the_nearest_that_the_usage_in_the_log_has() -> None:
    text = (RECORDED / "vllm_cpu_fail_bad_flag.log").read_text(encoding="utf-8")
    found = ENGINES["vllm"].diagnose(text.replace("--no-such-flag", "--max-model-length"), 2)
    assert "did you mean --max-model-len?" in (found.lever or "")


def test_a_harmless_import_error_does_not_hide_the_cause() -> None:
    early = vllm_log("ModuleNotFoundError: No module named 'flashinfer'")
    found = ENGINES["vllm"].diagnose(early + vllm_log(OOM, LOADING), 1)
    assert found.cause == "weights_too_large"


def test_the_first_of_two_causes_is_told() -> None:
    heads = "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    found = ENGINES["vllm"].diagnose(vllm_log(heads) + vllm_log(OOM, LOADING), 1)
    assert found.cause == "heads_not_divisible"
    assert found.summary == "9 attention heads cannot be split over 2 GPUs"


def test_a_warning_with_the_words_of_a_cause_is_no_cause() -> None:
    warning = (
        "(APIServer pid=500) WARNING 11-29 14:06:20 [model.py:2660] User-specified max_model_len (131072) is greater "
        "than the derived max_model_len (max_position_embeddings=8192.0"
    )
    assert ENGINES["vllm"].diagnose(vllm_log("RuntimeError: something new", warning), 1).cause == "unknown"


def test_unknown_stays_unknown_with_the_first_traceback() -> None:
    found = ENGINES["vllm"].diagnose(vllm_log("RuntimeError: something new"), 1)
    assert (found.status, found.cause) == (FAILED, "unknown")
    assert found.summary.endswith("RuntimeError: something new")
    assert found.evidence is not None
    assert found.evidence.startswith("Traceback (most recent call last):")
    assert "run_engine_core" in found.evidence
    assert "Engine core initialization failed" not in found.evidence


def test_an_exception_that_speaks_below_its_own_line_is_told_whole() -> None:
    found = ENGINES["vllm"].diagnose(
        vllm_log("RuntimeError: \n\n        Something of ours\n        was lost.\n\nMore."), 1
    )
    assert found.summary.endswith("no name yet: RuntimeError: Something of ours was lost.")
    assert "was lost." in (found.evidence or "")


def test_a_log_that_only_says_that_something_failed_names_no_cause() -> None:
    log = "Traceback (most recent call last):\n  File 'x'\nRuntimeError: Engine core initialization failed. See root\n"
    found = ENGINES["vllm"].diagnose(log, 1)
    assert found.summary == "the engine ended and its log names no cause (exit code 1)"
    assert "Engine core initialization failed" in (found.evidence or "")


def test_a_refused_choice_stays_one_readable_sentence() -> None:
    choices = ", ".join(f"'parser_{number}'" for number in range(200))
    log = f"usage: x [-h]\nx: error: argument --tool-call-parser: invalid choice: 'y' (choose from {choices})\n"
    found = ENGINES["vllm"].diagnose(log, 2)
    assert found.cause == "bad_value"
    assert "--tool-call-parser: invalid choice: 'y'" in found.summary
    assert len(found.summary) < 250


def test_of_a_chain_the_first_exception_is_told() -> None:
    chain = (
        "Traceback (most recent call last):\n  File 'a.py', line 1\n    f()\nKeyError: 'root'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'b.py', line 2\n    g()\nRuntimeError: wrapped\n"
    )
    found = ENGINES["vllm"].diagnose(chain, 1)
    assert "KeyError: 'root'" in found.summary
    assert "RuntimeError: wrapped" in (found.evidence or "")


@pytest.mark.parametrize(
    ("exit_code", "status", "cause", "word"),
    [
        (-9, INFRASTRUCTURE, "killed", "SIGKILL"),
        (137, INFRASTRUCTURE, "killed", "SIGKILL"),
        (-15, INFRASTRUCTURE, "killed", "SIGTERM"),
        (-11, FAILED, "crashed", "SIGSEGV"),
        (139, FAILED, "crashed", "SIGSEGV"),
        (-6, FAILED, "crashed", "SIGABRT"),
        (-4, FAILED, "crashed", "SIGILL"),
        (127, INFRASTRUCTURE, "command_missing", "program"),
        (126, INFRASTRUCTURE, "command_missing", "program"),
        (1, FAILED, "unknown", "exit code 1"),
        (0, FAILED, "unknown", "exit code 0"),
        (255, FAILED, "unknown", "exit code 255"),
    ],
)
@pytest.mark.parametrize("kind", ENGINES)
def test_exit_codes_where_the_log_tells_nothing(
    kind: str, exit_code: int, status: TrialStatus, cause: str, word: str
) -> None:
    found = ENGINES[kind].diagnose("starting\n", exit_code)
    assert (found.status, found.cause) == (status, cause)
    assert word in found.summary
    assert ENGINES[kind].diagnose("", exit_code).cause == cause


def test_ranks_that_an_error_took_along_do_not_hide_it() -> None:
    log = sglang_log("RuntimeError: something new") + (
        "[2026-11-29 14:27:54] Subprocess detokenizer (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
        "Traceback (most recent call last):\n  File 'x'\n"
        "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).\n"
    )
    found = ENGINES["sglang"].diagnose(log, -9)
    assert found.cause == "unknown"
    assert "something new" in found.summary


def test_the_process_that_was_killed_is_named() -> None:
    message = "RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."
    assert "SIGKILL to Worker proc VllmWorker-1" in ENGINES["vllm"].diagnose(message, 1).summary


def test_sglang_errors_without_a_level_are_heard() -> None:
    line = "[2026-11-29 14:27:54] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
    found = ENGINES["sglang"].diagnose(line, -3)
    assert (found.status, found.cause) == (INFRASTRUCTURE, "killed")
    assert "SIGKILL to Subprocess scheduler_0" in found.summary


def test_a_signal_after_a_known_error_is_that_error() -> None:
    assert ENGINES["vllm"].diagnose(vllm_log(OOM, LOADING), -9).cause == "weights_too_large"


DRAFT_LINES = [
    ("sglang", "[2026-11-29 14:27:42 TP0] DSpark V4 draft: unexpected weight 'mtp.0.ffn.shared_experts.w1' -> 'x'"),
    ("sglang", "[2026-11-29 14:27:42] Eagle3 MLA: skipping unexpected weight midlayer.x"),
    ("vllm", "(Worker pid=7) WARNING 11-29 14:06:20 [x.py:1] Draft model weights not initialized: lm_head"),
]


@pytest.mark.parametrize(("kind", "line"), DRAFT_LINES)
def test_draft_weights_that_were_not_loaded_are_told_by_a_living_engine(kind: str, line: str) -> None:
    found = ENGINES[kind].diagnose(f"{line}\n{line}\n", None)
    assert (found.status, found.cause) == (COMPLETE, "draft_weights_missing")
    assert found.facts["draft_weights_lost"].value == 2
    assert found.lever


def test_a_front_end_that_outlives_its_engine_is_not_healthy() -> None:
    dying = vllm_log(OOM, LOADING, LOADED, READY).replace("failed to start", "encountered a fatal error")
    assert ENGINES["vllm"].diagnose(dying, None).cause == "out_of_memory_load"
    stopping = vllm_log("ModuleNotFoundError: No module named 'x'", READY)
    assert ENGINES["vllm"].diagnose(stopping, None).cause is None


def test_every_cause_with_a_rule_is_tested_and_every_rule_has_a_cause() -> None:
    rows = [*VLLM_MESSAGES, *SGLANG_MESSAGES, *LLAMA_MESSAGES]
    tested = {cause for _, cause in rows} | {row[2] for row in RECORDED_FAILURES}
    tested |= {"command_missing", "draft_weights_missing"}
    tested |= {"weights_too_large", "out_of_memory_start", "graphs_too_large", "out_of_memory_load"}
    assert set(CAUSES) - FROM_OUTSIDE == tested
    assert {rule.code for rule in RULES} <= set(CAUSES) | {"out_of_memory"}
