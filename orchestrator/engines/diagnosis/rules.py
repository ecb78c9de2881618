"""The sentences with which engines and their libraries report why they end. All data; a new sentence is one row.

`<name>` stands for a number, a space for any white space. The order of the rows has no effect: the sentence that
stands first in the log counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.engines.diagnosis.facts import expression


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of an engine that reports a cause. Named groups that are numbers with a unit become facts.

    weak: the sentence also stands in messages that do not end an engine, or that wrap the real error; any other rule
    that matches goes first. quoted: the text stands in a source line that a traceback quotes, for errors without a
    message. summary and lever replace the cause's own.
    """

    code: str
    pattern: re.Pattern[str]
    weak: bool = False
    quoted: bool = False
    summary: str | None = None
    lever: str | None = None


def _rule(
    code: str,
    pattern: str,
    *,
    weak: bool = False,
    quoted: bool = False,
    summary: str | None = None,
    lever: str | None = None,
) -> Rule:
    return Rule(code, expression(pattern), weak, quoted, summary, lever)


RULES: tuple[Rule, ...] = (
    # Values that the engine refuses.
    _rule(
        "block_size",
        r"DSpark requires num_speculative_tokens >= dspark_block_size \(<block>\); got <got>",
        summary="the engine refuses {got} draft tokens: the draft model's block is {block}",
        lever="set num_speculative_tokens to {block} or more, or use a version that allows fewer",
    ),
    _rule(
        "block_size",
        r"DSpark speculative_num_draft_tokens must equal gamma \+ 1 \(= <want> for gamma=<block>\), but got "
        r"speculative_num_draft_tokens=<got>",
        summary="the engine refuses speculative-num-draft-tokens {got}: the block of {block} needs {want}",
        lever="leave it out and set speculative-dspark-block-size, or give {want}",
    ),
    _rule("block_size", r"DSpark speculative_num_draft_tokens must be >= 2 \(= gamma \+ 1\), got <got>"),
    _rule(
        "heads_not_divisible",
        r"Total number of attention heads \(<heads>\) must be divisible by tensor parallel size \(<gpus>\)",
        summary="{heads} attention heads cannot be split over {gpus} GPUs",
        lever="choose a tensor parallel size that divides {heads}",
    ),
    _rule("heads_not_divisible", r"total_num_(?:kv_)?heads % (?:attn_)?tp_size == 0", quoted=True),
    _rule(
        "heads_not_divisible",
        r"AssertionError: <heads> is not divisible by <gpus>",
        summary="{heads} cannot be split over {gpus} GPUs",
        lever="choose a tensor parallel size that divides {heads}",
    ),
    _rule(
        "bad_value",
        r"(?P<message>tp_size <gpus> should be smaller than or equal to number of numa node[^,]*)",
        lever="a smaller tp-size, or set SGLANG_CPU_OMP_THREADS_BIND",
    ),
    _rule("draft_not_divisible", r"num_speculative_tokens:<got> must be divisible by n_predict=<block>"),
    _rule("no_schedulable_tokens", r"which does not allow any tokens to be scheduled"),
    _rule(
        "batch_below_sequences",
        r"max_num_batched_tokens \(<budget>\) must be greater than or equal to max_num_seqs \(<sequences>\)",
        summary="max-num-batched-tokens {budget} is smaller than max-num-seqs {sequences}",
    ),
    _rule(
        "max_len_over_model",
        r"(?:max_model_len|context_length) \(<wanted>\) is greater than the derived (?:max_model_len|context_length) "
        r"\((?:max_position_embeddings=)?<model>",
    ),
    _rule("draft_vocabulary_differs", r"should have the same vocabulary size|draft vocabs are not compatible"),
    _rule(
        "bad_value",
        r"(?P<message>`?num_speculative_tokens`? (?:was not|must be) provided)",
        lever="set num_speculative_tokens",
    ),
    _rule(
        "unknown_flag",
        r"error: unrecognized arguments: (?P<flag>\S+)",
        lever="remove it from engine.args or use the engine's own name; `tune --dry-run` names the nearest",
    ),
    _rule("unknown_flag", r"error: ambiguous option: (?P<flag>\S+)"),
    _rule("unknown_flag", r"error: invalid argument: (?P<flag>\S+)"),
    _rule(
        "unknown_flag",
        r'error while handling argument "(?P<flag>[^"]+)": the argument has been removed\. (?P<hint>[^\n]+)',
        summary="the engine no longer has {flag}",
        lever="{hint}",
    ),
    _rule("unknown_method", r"Unsupported speculative method: '(?P<method>[^']*)'"),
    _rule("unknown_method", r"Unknown speculative algorithm name: (?P<method>\S+)"),
    _rule("unknown_method", r"unknown speculative type: (?P<method>\S+)"),
    _rule(
        "unknown_method",
        r"validation errors? for SpeculativeConfig\s+method\s+Input should be [\s\S]*?input_value='(?P<method>[^']*)'",
    ),
    _rule("unknown_method", r"argument --speculative-algorithm: invalid choice: '(?P<method>[^']*)'"),
    _rule("bad_value", r"error: argument (?P<message>[^\n]*(?:invalid|expected|not allowed)[^\n]*)"),
    _rule(
        "bad_value",
        r"\d+ validation errors? for (?P<what>\w+)\s+(?P<message>[^\n]+(?:\n  Input [^\n\[]+)?)",
        weak=True,
        summary="the engine refuses a value ({what}): {message}",
    ),
    _rule(
        "bad_value",
        r'error while handling argument "(?P<flag>[^"]+)": (?P<message>[^\n]+)',
        weak=True,
        summary="the engine refuses the value of {flag}: {message}",
    ),
    _rule(
        "bad_value",
        r"No common block size for (?P<size>\w+)",
        summary="the attention backend does not take block-size {size}",
        lever="leave block-size out, or give a multiple that the evidence names",
    ),
    _rule("remote_code_refused", r"contains custom code which must be executed|requires you to execute the \w+ file"),
    _rule(
        "model_unsupported",
        r"Model architectures .{1,200}? are not supported for now|unknown model architecture: '[^']*'"
        r"|does not recognize this architecture|architectures? .{1,120}? (?:is|are) not supported by",
    ),
    # SGLang checks its own values in two places; an error that is raised there refuses a value too.
    _rule(
        "bad_value",
        r'File "[^"]*/sglang/srt/(?:server_args|arg_groups/\w+)\.py"[^\n]*\n'
        r"(?:[^\S\n][^\n]*\n){0,60}(?:ValueError|AssertionError|NotImplementedError): (?P<message>[^\n]+)",
        weak=True,
        quoted=True,
    ),
    # The KV cache.
    _rule(
        "kv_cache_too_small",
        r"at least one request with the model\S{0,3} max seq len \(<max_len_tokens>\), \(?<kv_needed_gib> GiB KV cache "
        r"is needed, which is larger than the available KV cache memory \(<kv_available_gib> GiB\)\.?"
        r"(?:[\s\S]{0,60}?the estimated maximum model length is <max_len_estimate_tokens>)?",
    ),
    _rule(
        "kv_cache_too_small",
        r"max seq len \(<max_len_tokens>\) is larger than the maximum number of tokens that can be stored in KV cache "
        r"\(<max_len_estimate_tokens>\)",
    ),
    _rule(
        "kv_cache_too_small",
        r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory",
        summary="nothing is left for the KV cache",
    ),
    _rule(
        "kv_cache_too_small",
        r"Not enough memory\. Please try to increase --mem-fraction-static\."
        r"(?: Current value: mem_fraction_static=<mem_fraction_static>)?",
        summary="nothing is left for the KV cache",
        lever="raise mem-fraction-static by 0.01, fewer max-running-requests, or a smaller draft model",
    ),
    _rule(
        "kv_cache_too_small",
        r"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=<now>\. "
        r"Raise --mem-fraction-static above <least>",
        summary="nothing is left for the KV cache",
        lever="raise mem-fraction-static from {now} to more than {least}",
    ),
    _rule(
        "kv_cache_too_small",
        r"failed to allocate buffer for (?:kv|rs) cache",
        lever="lower ctx-size or parallel, or quantise the cache (cache-type-k, cache-type-v)",
    ),
    # Memory of the device and of the host.
    _rule(
        "gpu_memory_busy",
        r"Free memory on device \S* ?\(<gpu_free_gib>/<gpu_total_gib> GiB\) on startup is less than desired GPU memory "
        r"utilization \(<gpu_memory_utilization>, <gpu_wanted_gib> GiB\)",
    ),
    _rule("gpu_memory_busy", r"The memory capacity is unbalanced\. Some GPUs may be occupied by other processes"),
    _rule("gpu_memory_changed", r"Error in memory profiling\. Initial free memory"),
    _rule(
        "host_out_of_memory",
        r"Available memory on node \S+ \(<host_free_gib>/<host_total_gib> GiB\) on (?:startup|kv cache allocation) "
        r"is less than (?:desired CPU memory utilization \(\S+ <host_wanted_gib> GiB|requested memory for kv)",
        summary="the host has {host_free_gib} of {host_total_gib} GiB free, less than the engine is to use",
        lever="lower gpu-memory-utilization (on a CPU it means the host's memory) or VLLM_CPU_KVCACHE_SPACE",
    ),
    _rule(
        "host_out_of_memory",
        r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|\bMemoryError\b|std::bad_alloc"
        r"|oom-kill|Out of memory: Killed process|(?:unable|failed) to allocate CPU buffer",
    ),
    _rule("weights_too_large", r"Failed to load model - not enough GPU memory"),
    _rule("out_of_memory_load", r"(?:Prefill|Decode) out of memory\. Try to lower your batch size"),
    _rule(
        "out_of_memory",
        r"(?:OutOfMemoryError: )?(?:CUDA|HIP|XPU) out of memory\.?"
        r"(?: Tried to allocate <oom_tried> (?P<oom_unit>[KMG]iB)\.)?"
        r"|OutOfMemoryError|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
    ),
    # llama.cpp reports first that memory ran out and then for what.
    _rule(
        "out_of_memory",
        r"cudaMalloc failed: out of memory|unable to allocate (?!CPU)\S+ buffer|failed to allocate compute \w+ buffers",
        weak=True,
    ),
    # The environment.
    _rule("module_missing", r"No module named '?(?P<module>[\w.]*\w)'?", weak=True),
    _rule(
        "module_missing",
        r"No package metadata was found for (?P<module>[\w.-]+\w)",
        weak=True,
        lever="its program needs the metadata of {module}: start it as `python -m` with the module instead",
    ),
    _rule("script_unguarded", r"attempt has been made to start a new process before the current process has finished"),
    _rule("module_mismatch", r"operator (?P<module>torchvision)::nms does not exist", weak=True),
    _rule("module_mismatch", r"(?<!\S)(?P<module>\S{1,300}): undefined symbol", weak=True),
    _rule(
        "module_mismatch",
        r"cannot import name '\w+' from (?:partially initialized module )?'(?P<module>[\w.]+)'",
        weak=True,
    ),
    _rule(
        "gpu_unavailable",
        r"(?P<library>lib(?:cuda|nvidia-ml)\.so\.1): cannot open shared object file",
        weak=True,
        summary="the engine is built for NVIDIA GPUs and this machine has no driver ({library} is missing)",
    ),
    _rule("module_mismatch", r"(?<!\S)(?P<module>\S{1,300}\.so[\d.]*): cannot open shared object file", weak=True),
    _rule(
        "gpu_unavailable",
        r"No CUDA GPUs are available|Found no NVIDIA driver|Failed to infer device type|no CUDA-capable device"
        r"|CUDA driver version is insufficient|NVIDIA driver on your system is too old|invalid device ordinal"
        r"|No accelerator \(.{1,80}?\) or platform plugin is available|RuntimeError: 0 active drivers",
    ),
    _rule(
        "toolchain_missing",
        r"Could not find nvcc|CUDA_HOME environment variable is not set|Ninja is required|ninja exited with status",
        weak=True,
    ),
    _rule("toolchain_missing", r"No such file or directory: '[^']*(?:nvcc|ninja)'", weak=True),
    _rule("command_missing", r"command not found|Permission denied: '[^']*bin/", weak=True),
    _rule(
        "port_taken",
        r"[Aa]ddress already in use|EADDRINUSE|Port is already in use|_port at \d+ is not available"
        r"|couldn't bind HTTP server socket",
    ),
    _rule("cache_broken", r"UnpicklingError|pickle data was truncated|EOFError: Ran out of input", weak=True),
    _rule("disk_full", r"No space left on device"),
    # The model's files.
    _rule(
        "model_missing",
        r"Repo id must (?:be in the form|use alphanumeric)|is not a valid model identifier"
        r"|Invalid repository ID or local directory"
        r"|does not appear to have a file named|Cannot find any model weights|RepositoryNotFoundError|GatedRepoError"
        r"|LocalEntryNotFoundError|We couldn't connect to '?https?://"
        r"|Can't load (?:tokenizer|image processor|the config)|Couldn't instantiate the backend tokenizer"
        r"|No such file or directory: '[^']*(?:\.json|\.safetensors|\.gguf)'"
        r"|failed to open \S+\.gguf|failed to open GGUF file|Unrecognized model in|No \S+ found in \S+ model",
    ),
    _rule(
        "weights_mismatch",
        r"[Ww]eights were not initialized from checkpoint|Missing keys \(.{1,200}?\) in"
        r"|There is no module or parameter named '\S+' in",
    ),
    _rule("weights_damaged", r"Error while deserializing header|MetadataIncompleteBuffer|not fully covered"),
    _rule(
        "weights_damaged",
        r"config file at '(?P<file>[^']+)' is not a valid JSON file",
        summary="a file of the model is damaged: {file} is not valid JSON",
    ),
    # The rest.
    _rule("graph_capture_failed", r"Capture cuda graph failed", weak=True),
    _rule("no_progress", r"Watchdog timeout|RPC call to \S+ timed out|watchdog got stuck", weak=True),
    _rule("gpu_fault", r"an illegal memory access|device-side assert|misaligned address|Xid", weak=True),
    _rule("communication_failed", r"NCCL error|ncclSystemError|ncclUnhandledCudaError|DistBackendError", weak=True),
    _rule(
        "killed",
        r"(?P<who>(?:Worker proc|Process|Subprocess|Rank|Scheduler or DataParallelController) \S+).{0,40}?"
        r"(?:died|crashed|terminated|exited).{0,40}?(?:exit ?code:?|with) (?P<died>-(?:4|6|7|8|9|11))\b",
        weak=True,
    ),
)

# A running engine reports that it loaded its draft model only in part.
DRAFT_WEIGHTS = expression(
    r"draft: unexpected weight|skipping unexpected weight|[Dd]raft(?:er)? .{0,80}?(?:weights?|parameters?) .{0,40}?"
    r"(?:not (?:initialized|loaded|found)|missing)|(?:unexpected|missing) keys? .{0,80}?[Dd]raft"
)

# The package that provides a module of another name.
PACKAGES = {
    "arctic_inference": "arctic-inference",
    "cpuinfo": "py-cpuinfo",
    "cutlass": "nvidia-cutlass-dsl (a real installation: its .pth file must be processed)",
    "cv2": "opencv-python-headless",
    "deep_gemm": "deep-gemm (vLLM bundles it) or sgl-deep-gemm",
    "flashinfer": "flashinfer-python",
    "PIL": "pillow",
    "quack": "quack-kernels",
    "sgl_kernel": "sglang-kernel",
    "torchvision": "torchvision, in the version made for the installed torch (torch 2.11: torchvision 0.26)",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}
