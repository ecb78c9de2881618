"""Start-up logs -> facts: recorded logs against values read by hand, and the wordings of the versions between them."""

from __future__ import annotations

import pytest

from orchestrator.engines import ENGINES
from tests.support.paths import RECORDED


def facts(kind: str, log: str) -> dict[str, float]:
    return {name: fact.value for name, fact in ENGINES[kind].diagnose(log, None).facts.items()}


def recorded(kind: str, name: str) -> dict[str, float]:
    return facts(kind, (RECORDED / name).read_text(encoding="utf-8"))


def test_vllm_026_on_a_gpu() -> None:
    assert recorded("vllm", "vllm026_h200_dsv4_dspark.log") == {
        "model_gib": 92.9,
        "model_load_s": 8.837894,
        "kv_available_gib": 32.58,
        "kv_tokens": 1320868,
        "max_len_tokens": 65536,
        "max_concurrency": 20.15,
        "graph_capture_s": 11,
        "graph_gib": 0.24,
        "gpu_free_gib": 139.29,
        "gpu_total_gib": 139.8,
        "gpu_memory_utilization": 0.92,
        "gpu_wanted_gib": 128.62,
        "weights_gib": 92.9,
        "peak_activation_gib": 2.91,
        "non_torch_gib": 0.23,
        "engine_init_s": 157.51,
    }


@pytest.mark.parametrize(
    ("name", "load_s", "init_s"), [("vllm_cpu_ngram.log", 0.16, 51.37), ("vllm_cpu_eager_base.log", 0.13, 0.39)]
)
def test_vllm_032_on_a_cpu(name: str, load_s: float, init_s: float) -> None:
    assert recorded("vllm", name) == {
        "weights_load_s": load_s,
        "checkpoint_gib": 0.25,
        "kv_available_gib": 1.0,
        "host_total_gib": 22.96,
        "kv_tokens": 46592,
        "max_len_tokens": 2048,
        "max_concurrency": 22.75,
        "engine_init_s": init_s,
    }


def test_sglang_0517() -> None:
    assert recorded("sglang", "sglang0517_h200_smollm2_ngram_start.log") == {
        "model_load_s": 0.23,
        "model_gib": 0.27,
        "after_pool_free_gib": 69.55,
        "k_cache_gib": 34.62,
        "v_cache_gib": 34.62,
        "kv_available_gib": 69.24,
        "kv_tokens": 3226426,
    }


def test_sglang_0517_to_the_end_of_its_start() -> None:
    """On a CPU: what the H200 log above, which ends sooner, does not tell."""
    told = recorded("sglang", "sglang0517_cpu.log")
    assert told == {
        "model_load_s": 0.46,
        "model_gib": 0.27,
        "after_pool_free_gib": 18.89,
        "k_cache_gib": 0.21,
        "v_cache_gib": 0.21,
        "kv_available_gib": 0.42,
        "kv_tokens": 20000,
        "max_running_requests": 8,
        "max_len_tokens": 8192,
        "after_start_free_gib": 18.88,
    }


def test_llamacpp_b11434() -> None:
    assert recorded("llamacpp", "llama_ngmod.log") == {"slots": 4, "slot_len_tokens": 2048, "kv_tokens": 8192}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # 0.26: the first runner says "memory", the second does not.
        ("Model loading took 14.25 GiB memory and 3.141593 seconds", {"model_gib": 14.25, "model_load_s": 3.141593}),
        ("Model loading took 14.25 GiB and 3.1 seconds", {"model_gib": 14.25, "model_load_s": 3.1}),
        ("Available KV cache memory: -0.38 GiB", {"kv_available_gib": -0.38}),
        # Blocks, then tokens, then tokens and concurrency on one line.
        ("# GPU blocks: 27512, # CPU blocks: 2048", {"kv_blocks": 27512}),
        ("GPU KV cache size: 440,192 tokens", {"kv_tokens": 440192}),
        (
            "GPU KV cache size: 440,192 tokens, Maximum concurrency for 8,192 tokens per request: 53.73x",
            {"kv_tokens": 440192, "max_len_tokens": 8192, "max_concurrency": 53.73},
        ),
        (
            "GPU + host KV cache size: 9 tokens, Maximum concurrency for 1 tokens per request: 9.00x",
            {"kv_tokens": 9, "max_len_tokens": 1, "max_concurrency": 9},
        ),
        ("Auto set (3.50/22.96) GiB for KV cache on node 0, with", {"kv_available_gib": 3.5, "host_total_gib": 22.96}),
        ("Estimated CUDA graph memory: 1.20 GiB total", {"graph_estimated_gib": 1.2}),
        (
            "init engine (profile, create kv cache, warmup model) took 81.20 s (compilation: 31.50 s)",
            {"engine_init_s": 81.2, "compile_s": 31.5},
        ),
        ("torch.compile took 31.20 s in total", {"compile_s": 31.2}),
    ],
)
@pytest.mark.parametrize("process", ["EngineCore pid=1", "EngineCore_DP0 pid=1", "VllmWorker rank=0 pid=12"])
def test_wordings_of_vllm(line: str, expected: dict[str, float], process: str) -> None:
    assert facts("vllm", f"({process}) INFO 11-29 14:14:49 [x.py:1] {line}\n") == expected


def test_ranks_of_vllm_are_the_largest_used_and_the_smallest_left() -> None:
    lines = [
        (0, "Model loading took 74.85 GiB and 8.0 seconds"),
        (1, "Model loading took 75.10 GiB and 9.5 seconds"),
        (0, "Available KV cache memory: 12.50 GiB"),
        (1, "Available KV cache memory: 12.25 GiB"),
    ]
    log = "".join(f"(Worker_TP{rank} pid=6{rank}) INFO 11-29 14:14:49 [x.py:1] {text}\n" for rank, text in lines)
    found = ENGINES["vllm"].diagnose(log, None).facts
    assert (found["model_gib"].value, found["model_load_s"].value) == (75.10, 9.5)
    assert found["model_gib"].source == "max of 2 processes: Model loading took 75.10 GiB and 9.5 seconds"
    assert found["kv_available_gib"].value == 12.25
    assert found["kv_available_gib"].source == "min of 2 processes: Available KV cache memory: 12.25 GiB"


SGLANG_ROWS = [
    (
        "TP0",
        "Load weight end. elapsed=30.00 s, type=DeepseekV4ForCausalLM, quant=fp8, avail mem=64.00 GB, "
        "mem usage=74.00 GB.",
    ),
    (
        "TP1",
        "Load weight end. elapsed=31.00 s, type=DeepseekV4ForCausalLM, quant=fp8, avail mem=63.50 GB, "
        "mem usage=74.50 GB.",
    ),
    ("TP0", "Load weight end. elapsed=2.00 s, type=DeepseekV4DSpark, avail mem=60.00 GB, mem usage=4.00 GB."),
    ("TP1", "Load weight end. elapsed=2.50 s, type=DeepseekV4DSpark, avail mem=59.50 GB, mem usage=4.00 GB."),
    ("TP0", "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 1053184, KV size: 20.50 GB"),
    ("TP0", "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 1053184, KV size: 1.50 GB"),
    ("TP0", "Memory pool end. avail mem=30.25 GB"),
    ("TP0", "Capture target prefill CUDA graph end. elapsed=5.00 s, mem usage=0.50 GB, avail mem=29.75 GB."),
    ("TP0", "Capture target decode CUDA graph end. elapsed=4.00 s, mem usage=0.25 GB, avail mem=29.50 GB."),
    (
        "TP0",
        "Initialized DSpark draft runner. attention_backend=dsv4, model=X, gamma=5, "
        "verify_num_draft_tokens=6, mask_token_id=1, markov_head=Y",
    ),
    (
        "TP0",
        "max_total_num_tokens=1053184, chunked_prefill_size=12288, max_prefill_tokens=12288, "
        "max_running_requests=1, context_len=1048576, available_gpu_mem=29.40 GB",
    ),
]
SGLANG_START = "".join(f"[2026-10-30 14:27:42 {rank}] {text}\n" for rank, text in SGLANG_ROWS)


def test_sglang_with_a_draft_model_on_two_gpus() -> None:
    assert facts("sglang", SGLANG_START) == {
        "model_gib": 78.5,
        "model_load_s": 33.5,
        "kv_available_gib": 22.0,
        "kv_tokens": 1053184,
        "after_pool_free_gib": 30.25,
        "graph_gib": 0.75,
        "graph_capture_s": 9.0,
        "proposals": 5,
        "max_running_requests": 1,
        "max_len_tokens": 1048576,
        "after_start_free_gib": 29.4,
    }


def test_the_older_wording_of_graph_capture_in_sglang() -> None:
    line = (
        "[2026-05-23 14:27:59] Capture cuda graph end. Time elapsed: 5.00 s. mem usage=0.50 GB. avail mem=29.75 GB.\n"
    )
    assert facts("sglang", line) == {"graph_capture_s": 5.0, "graph_gib": 0.5}


def test_llamacpp_buffers_and_shared_slots() -> None:
    log = (
        "0.00.100.000 I load_tensors:        CUDA0 model buffer size =  4096.00 MiB\n"
        "0.00.100.000 I load_tensors:          CPU model buffer size =   512.00 MiB\n"
        "0.00.100.000 I llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB\n"
        "0.00.100.000 I sched_reserve:      CUDA0 compute buffer size =   256.00 MiB\n"
        "0.00.273.065 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'\n"
    )
    assert facts("llamacpp", log) == {
        "model_gib": 4.5,
        "kv_available_gib": 1.0,
        "peak_activation_gib": 0.25,
        "slots": 4,
        "slot_len_tokens": 8192,
        "kv_tokens": 8192,
    }


@pytest.mark.parametrize("kind", ENGINES)
def test_every_fact_keeps_the_line_it_was_read_from(kind: str) -> None:
    for path in RECORDED.glob("*.log"):
        text = " ".join(path.read_text(encoding="utf-8").split())
        for name, fact in ENGINES[kind].diagnose(path.read_text(encoding="utf-8"), None).facts.items():
            assert fact.source.rpartition(": ")[2] in text, name


def test_a_log_without_facts_has_none() -> None:
    assert facts("vllm", "") == {}
    assert facts("sglang", "hello\n") == {}
