"""What happens to logs on their way: terminals, colours, ranks that interleave, progress bars, floods."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable

import pytest

from orchestrator.engines import ENGINES
from orchestrator.engines.diagnosis.dialect import LIBRARIES_ONLY, LogDialect
from orchestrator.engines.diagnosis.explain import compile_lines, override_lines
from orchestrator.engines.diagnosis.logs import HEAD_CHARS, TAIL_CHARS, bounded, read_lines
from orchestrator.outcome import TrialStatus

PREFIX = "(EngineCore pid=519) ERROR 11-29 14:06:34 [core.py:1510] "
KV = (
    "ValueError: To serve at least one request with the model's max seq len (1048576), (14.56 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (14.26 GiB). Based on the available memory, the estimated "
    "maximum model length is 1003520. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
)
INFO = "(EngineCore pid=519) INFO 11-29 14:14:49 [kv_cache_utils.py:2177] "
LOG = f"""\
(APIServer pid=500) INFO 11-29 14:06:20 [model.py:1] Resolved architecture: DeepseekV4ForCausalLM
{INFO}Available KV cache memory: 14.26 GiB
{PREFIX}EngineCore failed to start.
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "/venv/lib/python3.12/site-packages/vllm/v1/core/kv_cache_utils.py", line 1030, in check
{PREFIX}    raise ValueError(
{PREFIX}{KV}
Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/vllm/entrypoints/openai/api_server.py", line 59, in <module>
    main()
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
"""


def hard(text: str, width: int) -> str:
    """As a terminal of that width leaves it: broken wherever the line is full."""
    return "\n".join(
        "\n".join(line[start : start + width] for start in range(0, max(len(line), 1), width))
        for line in text.splitlines()
    )


def soft(text: str, width: int) -> str:
    """Broken at spaces, as a pretty printer does."""
    return "\n".join(
        "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""])
        for line in text.splitlines()
    )


def prefixed(text: str, width: int) -> str:
    """Only the message is broken, and every piece has the prefix of its process."""
    pieces = textwrap.wrap(KV, width - len(PREFIX))
    return text.replace(PREFIX + KV, "\n".join(PREFIX + piece for piece in pieces))


def coloured(text: str, _: int) -> str:
    painted = text.replace("(EngineCore pid=519)", "\x1b[0;36m(EngineCore pid=519)\x1b[0;0m")
    return painted.replace(" ERROR ", " \x1b[31mERROR\x1b[0m ").replace("GiB KV", "\x1b[1mGiB\x1b[0m KV")


def windows(text: str, _: int) -> str:
    return text.replace("\n", "\r\n")


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("change", [hard, soft, prefixed, coloured, windows], ids=lambda change: change.__name__)
def test_the_same_numbers_however_the_lines_were_broken(change: Callable[[str, int], str], width: int) -> None:
    found = ENGINES["vllm"].diagnose(change(LOG, width), 1)
    assert (found.status, found.cause) == (TrialStatus.UNFIT, "kv_cache_too_small")
    numbers = {name: fact.value for name, fact in found.facts.items()}
    assert numbers["kv_needed_gib"] == 14.56
    assert numbers["kv_available_gib"] == 14.26
    assert numbers["kv_shortfall_gib"] == pytest.approx(0.3)
    assert numbers["max_len_estimate_tokens"] == 1003520
    assert found.evidence is not None
    assert "Engine core" not in found.evidence


@pytest.mark.parametrize("change", [hard, soft, coloured], ids=lambda change: change.__name__)
def test_facts_of_a_living_engine_survive_the_same(change: Callable[[str, int], str]) -> None:
    log = (
        f"{INFO}GPU KV cache size: 1,320,868 tokens\n{INFO}Maximum concurrency for 65,536 tokens per request: 20.15x\n"
    )
    facts = ENGINES["vllm"].diagnose(change(log, 80), None).facts
    assert facts["kv_tokens"].value == 1320868
    assert facts["max_concurrency"].value == 20.15


def test_two_ranks_that_interleave_line_by_line() -> None:
    def rank(number: int) -> list[str]:
        prefix = f"(Worker_TP{number} pid=60{number}) ERROR 11-29 14:06:34 [core.py:1510] "
        body = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    raise OutOfMemoryError("]
        oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
        return [prefix + line for line in [*body, oom]]

    loading = "(Worker_TP0 pid=600) INFO 11-29 14:06:30 [x.py:1] Loading model from scratch..."
    lines = [line for pair in zip(rank(0), rank(1), strict=True) for line in pair]
    found = ENGINES["vllm"].diagnose("\n".join([loading, *lines]), 1)
    assert found.cause == "weights_too_large"
    assert found.evidence == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."


def test_unknown_errors_of_interleaved_ranks_are_kept_apart() -> None:
    def rank(number: int) -> list[str]:
        prefix = f"(Worker_TP{number} pid=60{number}) ERROR 11-29 14:06:34 [core.py:1510] "
        return [
            prefix + line for line in ["Traceback (most recent call last):", f"  File 'r{number}.py'", f"E{number}: x"]
        ]

    lines = [line for pair in zip(rank(0), rank(1), strict=True) for line in pair]
    found = ENGINES["vllm"].diagnose("\n".join(lines), 1)
    assert found.evidence == "Traceback (most recent call last):\n  File 'r0.py'\nE0: x"


@pytest.mark.parametrize("where", ["head", "tail"])
def test_fifty_megabytes_are_read_in_bounded_time(where: str) -> None:
    flood = f"{INFO}Engine 000: Avg prompt throughput: 3276.4 tokens/s, Running: 1 reqs, Waiting: 0 reqs\n" * 420_000
    text = LOG + flood if where == "head" else flood + LOG
    assert len(text) > 50_000_000
    started = time.perf_counter()
    found = ENGINES["vllm"].diagnose(text, 1)
    assert time.perf_counter() - started < 10
    assert found.cause == "kv_cache_too_small"
    assert found.facts["kv_available_gib"].value == 14.26


def test_one_line_without_end_is_read_in_bounded_time() -> None:
    started = time.perf_counter()
    found = ENGINES["sglang"].diagnose("Traceback (most recent call last):\n" + "x" * 5_000_000, 1)
    assert time.perf_counter() - started < 10
    assert found.cause == "unknown"
    assert len(found.evidence or "") <= 4000


def test_bounded_keeps_whole_lines_of_both_ends() -> None:
    text = "".join(f"line {number}\n" for number in range(600_000))
    short = bounded(text)
    assert len(short) <= HEAD_CHARS + TAIL_CHARS
    assert short.startswith("line 0\n")
    assert short.endswith("line 599999\n")
    assert all(line.startswith("line ") for line in short.splitlines())
    assert bounded("x\n") == "x\n"


def test_of_a_progress_bar_the_last_state_stays() -> None:
    assert [line.text for line in read_lines("a 0%\ra 50%\ra 100%\nb\r\n", LIBRARIES_ONLY)] == ["a 100%", "b", ""]


VLLM, SGLANG, LLAMACPP = (ENGINES[kind].log for kind in ("vllm", "sglang", "llamacpp"))


@pytest.mark.parametrize(
    ("dialect", "raw", "process", "loud", "text"),
    [
        (VLLM, "(Worker_TP1 pid=7) ERROR 11-29 14:06:34 [a.py:1] bad", "Worker_TP1 pid=7", True, "bad"),
        (VLLM, "(Worker_TP1 pid=7) WARNING 11-29 14:06:34 [a.py:1] hm", "Worker_TP1 pid=7", False, "hm"),
        (SGLANG, "[2026-11-29 14:27:41 DP0 TP1] fine", "DP0 TP1", False, "fine"),
        (SGLANG, "[2026-11-29 14:27:41 TP1] Decode out of memory", "TP1", True, "Decode out of memory"),
        (LLAMACPP, "0.00.283.373 I srv  llama_server: model loaded", "", False, "srv  llama_server: model loaded"),
        (LLAMACPP, "0.00.283.373 E srv  start: bad", "", True, "srv  start: bad"),
    ],
)
def test_lines_know_their_process_and_level(dialect: LogDialect, raw: str, process: str, loud: bool, text: str) -> None:
    (line,) = read_lines(raw, dialect)
    assert (line.process, line.loud, line.text) == (process, loud, text)


@pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMACPP, LIBRARIES_ONLY])
def test_lines_of_libraries_are_read_the_same_in_every_dialect(dialect: LogDialect) -> None:
    lines = read_lines(
        "[rank1]: RuntimeError: x\n"
        "[W1129 14:14:30.634843989 socket.cpp:207] [c10d] hm\n"
        "/venv/a.py:24: DeprecationWarning: old\n"
        "2026-11-29 14:14:55,832 - INFO - autotuner.py:651 - flashinfer.jit: fine\n"
        "INFO 11-29 14:06:34 [__init__.py:1] Automatically detected platform cuda.\n"
        "ERROR:    Exception in ASGI application\n"
        "plain",
        dialect,
    )
    assert [(line.process, line.loud) for line in lines] == [
        ("rank1", True),
        ("", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
        ("", True),
    ]
    assert lines[5].text == "Exception in ASGI application"


def test_a_line_without_prefix_belongs_to_the_message_before_it_where_a_message_has_one_prefix() -> None:
    log = "[2026-11-29 14:27:41 TP1] Traceback (most recent call last):\n  File 'x'\n"
    assert [line.process for line in read_lines(log, SGLANG)] == ["TP1", "TP1", "TP1"]
    assert {line.process for line in read_lines(log, LIBRARIES_ONLY)} == {""}


COMPILING = [
    "(EngineCore pid=8519) WARNING 11-29 14:17:50 [jit_monitor.py:135] Triton kernel JIT compilation during inference: "
    "_combine_kernel. This causes a latency spike; consider extending warmup to cover this shape/config.",
    "2026-11-29 14:17:23  [TileLang:tilelang.jit.kernel:INFO] (kernel.py:133): TileLang begins to compile kernel `mhc`",
    "(Worker pid=1) INFO 11-29 14:00:11 [decorators.py:743] [backbone] saved AOT compiled function to /x",
    "(Worker pid=1) INFO 11-29 14:00:11 [backends.py:1] Compiling a graph for compile range (1, 8192) takes 3.10 s",
    "(Worker pid=1) INFO 11-29 14:00:11 [monitor.py:1] torch.compile took 31.20 s in total",
    "(EngineCore pid=8519) Capturing CUDA graphs (FULL):   0%|          | 0/1 [00:00<?, ?it/s]",
    "[2026-11-29 14:27:53] Capture target decode CUDA graph begin. backend=full, bs=[1], avail mem=1.00 GB",
    "DeepGEMM warmup:  12%|█         | 200/1690 [00:10<01:00]",
    "[2026-11-29 14:27:53] Entering DeepGEMM JIT Pre-Compile session. It may take a long time",
]
QUIET = [
    "(EngineCore pid=8519) INFO 11-29 14:17:16 [jit_monitor.py:79] Kernel JIT monitor activated; monitored JIT "
    "compilations during inference will use mode=warn.",
    "(EngineCore pid=1) WARNING 11-29 14:14:13 [vllm.py:1213] Inductor compilation was disabled by user settings",
    "(APIServer pid=1) INFO 11-29 14:14:13 [compilation.py:329] Enabled custom fusions: norm_quant, act_quant",
    '(APIServer pid=1) INFO:     127.0.0.1:53326 - "POST /v1/completions HTTP/1.1" 200 OK',
]


@pytest.mark.parametrize("line", COMPILING)
def test_lines_that_report_compiling(line: str) -> None:
    dialect = SGLANG if line.startswith("[2026") else VLLM
    assert len(compile_lines(f"{QUIET[3]}\n{line}\n{QUIET[3]}\n", dialect)) == 1


@pytest.mark.parametrize("line", [line for line in COMPILING if "TileLang" in line or "DeepGEMM" in line])
def test_what_libraries_compile_is_seen_in_every_dialect(line: str) -> None:
    assert all(compile_lines(line, dialect) for dialect in (VLLM, SGLANG, LLAMACPP, LIBRARIES_ONLY))


@pytest.mark.parametrize("line", QUIET)
def test_lines_that_only_speak_of_it(line: str) -> None:
    assert compile_lines(line, VLLM) == []


def test_overridden_sampling_parameters_are_found() -> None:
    line = (
        "(APIServer pid=8267) WARNING 11-29 14:17:18 [model.py:1546] Default vLLM sampling parameters have been "
        "overridden by the model's `generation_config.json`: `{'temperature': 0.0}`."
    )
    assert override_lines(f"{QUIET[0]}\n{line}\n", VLLM) == [line.partition("] ")[2]]
