"""Logs of failed starts for the tests of the diagnosis: recorded ones, and messages in the frame of a recorded one."""

from __future__ import annotations

from pathlib import Path

from orchestrator.outcome import TrialStatus

REFUSED, UNFIT, FAILED = TrialStatus.REFUSED, TrialStatus.UNFIT, TrialStatus.FAILED
INFRASTRUCTURE, COMPLETE = TrialStatus.INFRASTRUCTURE, TrialStatus.COMPLETE


def kind_of(path: Path) -> str:
    return next((kind for kind in ("sglang", "vllm") if kind in path.name), "llamacpp")


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

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB"

INFO = "(EngineCore pid=519) INFO 11-29 14:06:30 [x.py:1] "

LOADING = f"{INFO}Loading model from scratch..."

LOADED = f"{INFO}Model loading took 92.9 GiB and 8.837894 seconds"

CAPTURING = "(EngineCore pid=519) Capturing CUDA graphs (PIECEWISE):   0%|          | 0/4 [00:00<?, ?it/s]"

CAPTURED = f"{INFO}Graph capturing finished in 11 secs, took 0.24 GiB"

READY = "(APIServer pid=500) INFO:     Application startup complete."

SERVED = '(APIServer pid=500) INFO:     127.0.0.1:53326 - "POST /v1/completions HTTP/1.1" 200 OK'
