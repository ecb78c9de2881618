"""Specs -> command lines: the published lines flag by flag, each engine's spelling, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES, LaunchPlan
from orchestrator.engines.base import Speculation
from orchestrator.engines.flags import check_flags, flag_name, known_flags
from orchestrator.errors import ConfigError
from tests.support.paths import RECORDED

PUBLISHED_VLLM = """--served-model-name dsv4-0731 --tokenizer-mode deepseek_v4 --trust-remote-code
--distributed-executor-backend mp --tensor-parallel-size 2 --max-model-len 1048576 --max-num-batched-tokens 8192
--max-num-seqs 1 --block-size 256 --gpu-memory-utilization 0.96 --kv-cache-dtype fp8 --disable-custom-all-reduce
--no-async-scheduling
--speculative-config '{"method":"dspark","num_speculative_tokens":6,"draft_sample_method":"greedy"}'"""
PUBLISHED_SGLANG = """--tp-size 2 --mem-fraction-static 0.96 --context-length 1048576 --max-total-tokens 1053184
--max-running-requests 1 --chunked-prefill-size 12288 --max-prefill-tokens 12288 --attention-backend dsv4
--disable-custom-all-reduce --cuda-graph-bs-decode 1 --speculative-algorithm DSPARK --speculative-num-draft-tokens 6
--speculative-moe-runner-backend marlin --moe-runner-backend marlin --warmups prefill_shapes"""


def plan(kind: str, args: dict[str, Any] | None = None, **spec: Any) -> LaunchPlan:
    spec.setdefault("model", "org/model")
    return ENGINES[kind].plan(EngineSpec(kind=kind, args=args or {}, **spec), 8101, Path("/tmp/trial"))


def rendered(kind: str, args: dict[str, Any]) -> list[str]:
    """Only what the args add to the command line."""
    return list(plan(kind, args).argv[len(plan(kind).argv) :])


def test_vllm_published_line_comes_out_flag_by_flag() -> None:
    made = plan(
        "vllm",
        {
            "tokenizer-mode": "deepseek_v4",
            "trust-remote-code": True,
            "distributed-executor-backend": "mp",
            "tensor-parallel-size": 2,
            "max-model-len": 1048576,
            "max-num-batched-tokens": 8192,
            "max-num-seqs": 1,
            "block-size": 256,
            "gpu-memory-utilization": 0.96,
            "kv-cache-dtype": "fp8",
            "disable-custom-all-reduce": True,
            "async-scheduling": False,
            "speculative-config": {
                "method": "dspark",
                "num_speculative_tokens": 6,
                "draft_sample_method": "greedy",
            },
        },
        model="deepseek-ai/DeepSeek-V4-Flash-0731",
        served_model_name="dsv4-0731",
        env={"NCCL_P2P_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    )
    start = ["vllm", "serve", "deepseek-ai/DeepSeek-V4-Flash-0731", "--host", "127.0.0.1", "--port", "8101"]
    assert list(made.argv) == [*start, *shlex.split(PUBLISHED_VLLM)]
    assert made.env == {"NCCL_P2P_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert (made.parallel_size, made.speculation) == (2, Speculation(method="dspark", family="dspark", proposals=6))
    assert (made.model_name, made.base_url) == ("dsv4-0731", "http://127.0.0.1:8101")
    assert (made.api_key_variable, made.api_key_flag) == ("VLLM_API_KEY", None)


def test_sglang_published_line_comes_out_flag_by_flag() -> None:
    made = plan(
        "sglang",
        {
            "tp-size": 2,
            "mem-fraction-static": 0.96,
            "context-length": 1048576,
            "max-total-tokens": 1053184,
            "max-running-requests": 1,
            "chunked-prefill-size": 12288,
            "max-prefill-tokens": 12288,
            "attention-backend": "dsv4",
            "disable-custom-all-reduce": True,
            "cuda-graph-bs-decode": [1],
            "speculative-algorithm": "DSPARK",
            "speculative-num-draft-tokens": 6,
            "speculative-moe-runner-backend": "marlin",
            "moe-runner-backend": "marlin",
            "warmups": "prefill_shapes",
        },
        served_model_name="dsv4",
    )
    start = "python -m sglang.launch_server --model-path org/model --host 127.0.0.1 --port 8101 --enable-metrics"
    assert list(made.argv) == [*start.split(), "--served-model-name", "dsv4", *shlex.split(PUBLISHED_SGLANG)]
    assert (made.parallel_size, made.speculation) == (2, Speculation(method="DSPARK", family="dspark", proposals=5))
    assert (made.api_key_variable, made.api_key_flag) == (None, "--api-key")


def test_llamacpp_line() -> None:
    args = {"ctx_size": 8192, "flash-attn": True, "mmap": False, "spec-type": "ngram-mod", "-ngl": 99}
    made = plan("llamacpp", args, model="/models/x.gguf", served_model_name="smol")
    start = "llama-server -m /models/x.gguf --host 127.0.0.1 --port 8101 --metrics --alias smol"
    assert list(made.argv) == [
        *start.split(),
        *["--ctx-size", "8192", "--flash-attn", "on", "--no-mmap", "--spec-type", "ngram-mod", "-ngl", "99"],
    ]
    assert made.speculation == Speculation(method="ngram-mod", family="ngram", proposals=64)
    assert made.api_key_variable == "LLAMA_API_KEY"


@pytest.mark.parametrize(
    ("kind", "args", "words"),
    [
        ("vllm", {"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ("vllm", {"enable_prefix_caching": True}, ["--enable-prefix-caching"]),
        ("vllm", {"disable-log-stats": False}, []),
        ("vllm", {"max-model-len": None}, []),
        ("vllm", {"cudagraph-capture-sizes": [1, 2, 4]}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ("vllm", {"allowed-origins": ["a", "b"]}, ["--allowed-origins", '["a","b"]']),
        ("vllm", {"lora-modules": [{"name": "a b"}]}, ["--lora-modules", '{"name":"a b"}']),
        ("vllm", {"hf-overrides": {"a": {"b": None, "c": False}}}, ["--hf-overrides", '{"a":{"c":false}}']),
        (
            "vllm",
            {"speculative_config.num_speculative_tokens": 3},
            ["--speculative-config.num_speculative_tokens", "3"],
        ),
        ("vllm", {"kernel-config.enable_jit_warmup": False}, ["--kernel-config.enable_jit_warmup", "false"]),
        ("vllm", {"compilation-config.sizes": [1, 2]}, ["--compilation-config.sizes", "[1,2]"]),
        ("vllm", {"revision": "6e1234"}, ["--revision", "6e1234"]),
        ("vllm", {"x": 0.00001}, ["-x", "1e-05"]),
        ("sglang", {"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ("sglang", {"disable-radix-cache": True, "enable-mixed-chunk": False}, ["--disable-radix-cache"]),
        ("sglang", {"dllm-fdfo": False}, ["--no-dllm-fdfo"]),
        ("sglang", {"json-model-override-args": {"a": 1}}, ["--json-model-override-args", '{"a":1}']),
        ("llamacpp", {"c": 4096}, ["-c", "4096"]),
        ("llamacpp", {"-fa": False}, ["-fa", "off"]),
        ("llamacpp", {"flash-attn": "auto"}, ["--flash-attn", "auto"]),
        ("llamacpp", {"cont-batching": False, "mlock": True}, ["--no-cont-batching", "--mlock"]),
        ("llamacpp", {"tensor-split": [3, 1]}, ["--tensor-split", "3,1"]),
    ],
)
def test_values_are_spelled_as_the_engine_spells_them(kind: str, args: dict[str, Any], words: list[str]) -> None:
    assert rendered(kind, args) == words


def test_order_of_args_is_kept() -> None:
    args = {f"flag-{letter}": index for index, letter in enumerate("zyxabc")}
    assert rendered("vllm", args) == [word for key, value in args.items() for word in (f"--{key}", str(value))]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("vllm", key) for key in ("host", "port", "model", "served_model_name", "api-key", "uds")),
        *(("sglang", key) for key in ("host", "port", "model_path", "served-model-name", "api_key", "enable_metrics")),
        *(("llamacpp", key) for key in ("host", "port", "m", "model", "alias", "-a", "api-key", "metrics")),
    ],
)
def test_flags_that_the_program_sets_are_refused_with_what_to_use(kind: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(kind, {key: "x"})
    message = str(caught.value)
    assert f"engine.args.{key}" in message
    assert message.count("\n") == 0
    assert message.partition(";")[2].strip()


@pytest.mark.parametrize(
    ("kind", "args", "size"),
    [
        ("vllm", {}, 1),
        ("vllm", {"tensor_parallel_size": 2, "pipeline-parallel-size": 3}, 6),
        ("vllm", {"-tp": 4}, 4),
        ("vllm", {"data-parallel-size": 2, "tensor-parallel-size": 2}, 4),
        ("sglang", {"tp": 2, "dp-size": 2}, 4),
        ("sglang", {"tp-size": 4, "dp-size": 4, "enable-dp-attention": True}, 4),
        ("sglang", {"tensor-parallel-size": 2, "pp-size": 2}, 4),
        ("llamacpp", {}, 1),
        ("llamacpp", {"tensor-split": [3, 1]}, 2),
        ("llamacpp", {"-ts": "3,1,2"}, 3),
        ("llamacpp", {"device": "CUDA0,CUDA1"}, 2),
        ("llamacpp", {"split-mode": "none", "tensor-split": [1, 1]}, 1),
    ],
)
def test_parallel_size(kind: str, args: dict[str, Any], size: int) -> None:
    assert plan(kind, args).parallel_size == size


@pytest.mark.parametrize("value", [0, -1, "two", True, 1.5])
def test_parallel_size_that_is_no_number_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        plan("vllm", {"tensor-parallel-size": value})


def test_false_that_sglang_cannot_be_told_is_a_warning() -> None:
    made = plan("sglang", {"enable-multimodal": False})
    assert rendered("sglang", {"enable-multimodal": False}) == []
    assert "--enable-multimodal" in made.warnings[0]


@pytest.mark.parametrize(
    ("kind", "command", "start"),
    [
        ("vllm", ["python", "-m", "m.api_server", "--model"], ["python", "-m", "m.api_server", "--model", "org/model"]),
        ("vllm", ["python", "-m", "m.api_server"], ["python", "-m", "m.api_server", "--model", "org/model"]),
        ("vllm", ["/opt/run", "vllm"], ["/opt/run", "vllm", "org/model"]),
        ("sglang", ["sglang", "serve"], ["sglang", "serve", "--model-path", "org/model"]),
        ("sglang", ["sg", "--model-path"], ["sg", "--model-path", "org/model"]),
        ("llamacpp", ["llama-server"], ["llama-server", "-m", "org/model"]),
    ],
)
def test_the_model_follows_the_command(kind: str, command: list[str], start: list[str]) -> None:
    assert list(plan(kind, command=command).argv[: len(start)]) == start


def test_an_environment_fills_the_interpreter(tmp_path: Path) -> None:
    made = plan("vllm", command=["python", "-m", "x"], environment="vllm-cpu", root=str(tmp_path))
    bin_folder = str(tmp_path / ".engines" / "vllm-cpu" / "bin")
    assert (made.argv[0], made.path_prefix) == (f"{bin_folder}/python", bin_folder)
    # One made by hand is named by its path.
    by_hand = plan("vllm", command=["python"], environment="envs/mine", root=str(tmp_path))
    assert by_hand.argv[0] == str(tmp_path / "envs" / "mine" / "bin" / "python")
    # A program around the engine is not in its environment, and the engine is still found there.
    Path(bin_folder).mkdir(parents=True)
    (Path(bin_folder) / "python").touch()
    wrapped = plan("vllm", command=["env", "python", "-m", "x"], environment="vllm-cpu", root=str(tmp_path))
    assert (wrapped.argv[:2], wrapped.path_prefix) == (("env", "python"), bin_folder)
    # One that PATH has too is not taken from there: it would be another engine.
    missing = plan("vllm", command=["env", "-m", "x"], environment="vllm-cpu", root=str(tmp_path))
    assert missing.argv[0] == f"{bin_folder}/env"


def test_a_model_below_the_root_becomes_its_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    made = plan("vllm", model="model", root=str(tmp_path))
    assert made.model_name == str(tmp_path / "model") == made.argv[2]


@pytest.mark.parametrize("kind", ENGINES)
def test_planning_is_pure(kind: str) -> None:
    spec = EngineSpec(kind=kind, model="org/model", args={"some-flag": {"b": [1]}}, env={"X": "1"})
    before = json.dumps(spec.args)
    first, second = (ENGINES[kind].plan(spec, 8101, Path("/tmp/trial")) for _ in range(2))
    assert first == second
    assert json.dumps(spec.args) == before
    assert first.env is not spec.env
    assert first.argv != ENGINES[kind].plan(replace(spec, args={}), 8101, Path("/tmp/trial")).argv


def test_flag_names() -> None:
    assert flag_name("max_model_len") == "--max-model-len"
    assert flag_name("a_b.c_d") == "--a-b.c_d"
    assert (flag_name("c"), flag_name("-ngl"), flag_name("--x_y")) == ("-c", "-ngl", "--x_y")


VLLM_HELP = (RECORDED / "vllm_cpu_help.txt").read_text(encoding="utf-8")
LLAMA_HELP = (RECORDED / "made_llama_help.txt").read_text(encoding="utf-8")


def test_known_flags_of_the_recorded_help() -> None:
    known = known_flags(VLLM_HELP)
    wanted = {"--max-model-len", "--speculative-config", "-sc", "-tp", "--no-async-scheduling", "--api-server-count"}
    assert wanted <= known
    assert len(known) > 400


def test_the_published_line_holds_only_known_flags() -> None:
    argv = ["python", "-m", "vllm.x", "--model", "m", *shlex.split(PUBLISHED_VLLM)]
    assert check_flags(argv, VLLM_HELP) == []


@pytest.mark.parametrize(
    ("argv", "complaints"),
    [
        (["vllm", "--max-model-length", "8"], ["unknown flag --max-model-length; did you mean --max-model-len?"]),
        (["vllm", "--zzzz-qqqq", "--zzzz-qqqq"], ["unknown flag --zzzz-qqqq"]),
        (["vllm", "--max_num_seqs", "1", "--seed", "-1", "--hf-overrides", '{"-a": 1}'], []),
        (["vllm", "--compilation-config.mode=3", "--speculative-config.method", "x"], []),
        (["/x/bin/python3.11", "-u", "-X", "dev", "-m", "m", "--enforce-eager"], []),
        (["/x/bin/python", "fake_engine.py", "--no-such-thing"], ["unknown flag --no-such-thing"]),
    ],
)
def test_unknown_flags_are_named_with_the_nearest(argv: list[str], complaints: list[str]) -> None:
    assert check_flags(argv, VLLM_HELP) == complaints


def test_removed_flags_of_llamacpp_are_reported_with_their_successor() -> None:
    argv = plan("llamacpp", {"draft-max": 8, "flash-attn": True, "-ngl": 9, "ctx-siz": 1}).argv
    assert check_flags(argv, LLAMA_HELP) == [
        "--draft-max has been removed; use --spec-draft-n-max or --spec-ngram-mod-n-max",
        "unknown flag --ctx-siz; did you mean --ctx-size?",
    ]


def test_a_help_text_that_tells_nothing_yields_no_complaint() -> None:
    assert check_flags(["vllm", "--anything"], "Traceback ...") == []


def test_help_commands() -> None:
    spec = EngineSpec(kind="vllm", model="m", command=["python", "-m", "x.api_server", "--model"])
    assert ENGINES["vllm"].help_command(spec) == ("python", "-m", "x.api_server", "--help=all")
    assert ENGINES["sglang"].help_command(EngineSpec(kind="sglang", model="m"))[-1] == "--help"
    assert ENGINES["llamacpp"].help_command(EngineSpec(kind="llamacpp", model="m")) == ("llama-server", "--help")
