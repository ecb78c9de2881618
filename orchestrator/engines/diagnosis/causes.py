"""Every cause of a failed trial that has a name: its status, what it means, and what to change. All data.

A new cause is one row here. rules.py has the sentences that report them. docs/troubleshooting.md lists the same causes
for people; a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.outcome import TrialStatus


@dataclass(frozen=True, slots=True)
class Cause:
    """A stable code, the status that it gives a trial, one sentence for a person, and what to change.

    summary and lever may name groups of the rule that matched, in braces.
    """

    code: str
    status: TrialStatus
    summary: str
    lever: str


def _causes(status: TrialStatus, *rows: tuple[str, str, str]) -> dict[str, Cause]:
    return {code: Cause(code, status, summary, lever) for code, summary, lever in rows}


CAUSES: dict[str, Cause] = {
    **_causes(
        TrialStatus.REFUSED,
        ("unknown_flag", "the engine does not know {flag}", "remove it from engine.args or use the engine's own name"),
        ("bad_value", "the engine refuses a value: {message}", "give a value that it allows"),
        ("unknown_method", "the engine does not know the speculative method {method}", "use a method of this version"),
        (
            "block_size",
            "the engine refuses {got} draft tokens: they do not fit the draft model's block",
            "set the number of draft tokens to the block size or more",
        ),
        (
            "heads_not_divisible",
            "the model's attention heads cannot be split over this many GPUs",
            "choose a tensor parallel size that divides the number of heads",
        ),
        (
            "draft_not_divisible",
            "{got} draft tokens are not a multiple of the {block} that the draft layers predict",
            "use a multiple of {block}",
        ),
        (
            "draft_vocabulary_differs",
            "the draft model has another vocabulary than the model",
            "choose a draft model with the same tokenizer",
        ),
        (
            "no_schedulable_tokens",
            "the draft slots take the whole token budget of a step",
            "raise max-num-batched-tokens, or lower max-num-seqs or num_speculative_tokens",
        ),
        (
            "batch_below_sequences",
            "the token budget of a step is smaller than the number of sequences",
            "raise max-num-batched-tokens or lower max-num-seqs",
        ),
        (
            "max_len_over_model",
            "the context of {wanted} tokens is longer than the {model} that the model was made for",
            "lower the context length to {model}",
        ),
        (
            "model_unsupported",
            "this engine version does not know the model's architecture",
            "use a newer engine environment",
        ),
        (
            "remote_code_refused",
            "the model brings code of its own, which was not allowed",
            "set trust-remote-code: true if you trust it",
        ),
        (
            "model_missing",
            "the model's weights, configuration or tokenizer were not found",
            "check engine.model and the draft model: folders with config, weights and tokenizer, or names to download",
        ),
        (
            "weights_mismatch",
            "the checkpoint does not hold the weights that the model needs",
            "use the checkpoint that belongs to this architecture",
        ),
        (
            "weights_damaged",
            "a file of the model's weights is incomplete or damaged",
            "compare its size with the source and copy it again",
        ),
    ),
    **_causes(
        TrialStatus.UNFIT,
        (
            "kv_cache_too_small",
            "the KV cache does not fit",
            "1. fewer tokens in flight: concurrent batches x max-num-batched-tokens, doubled by async scheduling; "
            "2. memory utilisation up by 0.01; 3. only then a shorter context",
        ),
        (
            "weights_too_large",
            "the weights do not fit into the GPU's memory",
            "more GPUs (tensor parallel), a quantised checkpoint, or no draft model",
        ),
        (
            "graphs_too_large",
            "the GPU's memory ran out while CUDA graphs were captured",
            "fewer or smaller capture sizes, or memory utilisation down by 0.01",
        ),
        (
            "out_of_memory_start",
            "the GPU's memory ran out while the engine warmed up",
            "a smaller token budget per step (max-num-batched-tokens, chunked-prefill-size), "
            "or memory utilisation down by 0.01",
        ),
        (
            "out_of_memory_load",
            "the GPU's memory ran out under load",
            "memory utilisation down by 0.01, a smaller token budget per step, or fewer concurrent sequences",
        ),
        (
            "host_out_of_memory",
            "the host's memory ran out",
            "a smaller CPU KV cache or offload, or fewer processes; see the peak of host memory in the result",
        ),
    ),
    **_causes(
        TrialStatus.INFRASTRUCTURE,
        (
            "gpu_memory_busy",
            "the GPU has less free memory at the start than the engine is to use",
            "end what holds it (a leftover, a neighbour), or lower memory utilisation",
        ),
        ("gpu_busy", "another process uses the GPU", "end it or choose other GPUs"),
        (
            "gpu_memory_changed",
            "another process changed the GPU's memory while the engine measured it",
            "leave the GPUs to this engine alone",
        ),
        (
            "gpu_unavailable",
            "the engine sees no usable GPU",
            "check the driver and its version, placement.gpus and the engine's build (CPU or CUDA)",
        ),
        (
            "module_missing",
            "the engine's environment lacks the Python module {module}",
            "install {package} into it",
        ),
        (
            "module_mismatch",
            "two packages of the engine's environment do not match: {module}",
            "install the versions that were built for each other",
        ),
        (
            "script_unguarded",
            "the engine's worker processes ran its start script a second time",
            'guard the script\'s call with `if __name__ == "__main__":`, or start the module with `python -m`',
        ),
        (
            "toolchain_missing",
            "a kernel could not be built when it was needed",
            "give the engine a CUDA toolkit (nvcc, CUDA_HOME) and ninja, or choose a backend that needs no build",
        ),
        (
            "command_missing",
            "the engine's program was not found or may not be run",
            "check engine.command and engine.environment",
        ),
        ("port_taken", "the port is in use", "none needed: it is tried again with another port"),
        (
            "cache_broken",
            "a compile cache is damaged",
            "remove the cache folder of this slot below .engines/.cache; it is made anew",
        ),
        ("disk_full", "there is no space left on a disk or in /dev/shm", "make room; /dev/shm counts as memory"),
        (
            "killed",
            "the engine was killed from outside ({signal})",
            "see who did it; after SIGKILL the kernel log tells whether the host ran out of memory",
        ),
        (
            "machine",
            "this node could not start the engine at all",
            "read the sentence: a program, a port range, a driver or a GPU count",
        ),
        (
            "configuration",
            "the point's configuration is wrong",
            "read the sentence: it names the key and what is allowed",
        ),
        (
            "trial_process_lost",
            "the process of the trial ended without a result",
            "see the log of its Ray worker; the host may have run out of memory",
        ),
        (
            "node_lost",
            "the node was gone before the trial had started on it",
            "none; the trial is tried again on another node",
        ),
        (
            "not_placed",
            "the node had no room for the trial within placement.timeout_s",
            "end what else holds its GPUs in the Ray cluster, or raise placement.timeout_s",
        ),
        ("not_released", "a process or GPU memory of the engine was still there after its end", "see the named pid"),
    ),
    **_causes(
        TrialStatus.FAILED,
        (
            "no_progress",
            "the engine was not ready in time, or stopped answering its own workers",
            "read the last lines; raise engine.ready.stall_s if it was compiling",
        ),
        (
            "no_successful_request",
            "every request failed",
            "read the first error: it is the engine's own answer",
        ),
        ("no_token", "a request got no token for stall_s", "read the end of the log; raise stall_s for long prefills"),
        (
            "graph_capture_failed",
            "CUDA graphs could not be captured",
            "another attention or graph backend, or decode graphs only",
        ),
        (
            "communication_failed",
            "the GPUs could not talk to each other",
            "set NCCL_DEBUG=INFO and read the log; try NCCL_P2P_DISABLE=1 or disable-custom-all-reduce: true",
        ),
        (
            "gpu_fault",
            "a kernel failed on the GPU",
            "another attention or MoE backend; CUDA_LAUNCH_BLOCKING=1 names it",
        ),
        (
            "internal_error",
            "the process of the trial failed with an error of our own",
            "report it with the reason: it is a fault of this program, not of the engine",
        ),
        ("crashed", "the engine crashed ({signal})", "another backend or version; the evidence is all that it said"),
        ("unknown", "the engine ended and the reason has no name yet", "read the evidence"),
    ),
    **_causes(
        TrialStatus.PRUNED,
        (
            "clearly_worse",
            "stopped early: clearly worse than the best so far",
            "none; search.stop_early: false runs all",
        ),
    ),
    **_causes(
        TrialStatus.COMPLETE,
        (
            "draft_weights_missing",
            "the draft model was loaded without some of its weights",
            "do not believe its acceptance: use an engine version whose loader knows these weights",
        ),
    ),
}
