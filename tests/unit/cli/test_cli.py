"""The command line as its user meets it: exit codes, one clear sentence per mistake, strict JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import __main__ as cli
from tests.support.paths import ROOT

PUBLISHED = (
    "--served-model-name dsv4-0731 --tokenizer-mode deepseek_v4 --trust-remote-code "
    "--distributed-executor-backend mp --tensor-parallel-size 2 --max-model-len 1048576 "
    "--max-num-batched-tokens 8192 --max-num-seqs 1 --block-size 256 --gpu-memory-utilization 0.96 "
    "--kv-cache-dtype fp8 --disable-custom-all-reduce --no-async-scheduling --speculative-config "
    '\'{"method":"dspark","num_speculative_tokens":6,"draft_sample_method":"greedy"}\''
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """run(*words) -> (exit code, stdout, stderr), in an empty folder that has this project's conf."""
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["orchestrator", *map(str, words)])
        code = cli.main()
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_seven_published_command_lines(run: Run) -> None:
    code, out, _ = run("tune", "conf/dspark.yaml", "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)
    assert [trial["name"] for trial in plan["trials"]] == ["no-spec", "k=4", "k=5", "k=6", "k=7", "k=8", "k=10"]
    k6 = plan["trials"][3]
    argv = k6["argv"]
    assert argv[argv.index("--served-model-name") :] == shlex.split(PUBLISHED)
    assert k6["env"] == {"NCCL_P2P_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert "--speculative-config" not in plan["trials"][0]["argv"]
    assert plan["num_starts"] == {"least": 10, "most": 35}
    assert plan["estimate_s"] is None


def test_a_dry_run_can_be_pasted_into_a_shell(run: Run) -> None:
    code, out, _ = run("tune", "conf/dspark.yaml", "--dry-run")
    assert code == 0
    assert PUBLISHED in out


def test_two_gpus_are_missing(run: Run) -> None:
    code, out, err = run("tune", "conf/dspark.yaml")
    assert code == 3
    assert out == ""
    assert err.count("\n") <= 2
    assert "needs 2 GPUs on one node, this machine has 0" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "conf/nothing.yaml"], "conf/nothing.yaml: there is no such file"),
        (["tune", "conf/dspark.yaml", "placment.gpus=1"], "Did you mean: 'placement'?"),
        (["tune", "conf/dspark.yaml", "placement.gpus=two"], "placement.gpus"),
        (["tune", "conf/dspark.yaml", "placement.gpus"], "expected key=value"),
        (["tune", "conf/dspark.yaml", "placement.gpus=[1"], "not valid YAML"),
        (["tune", "conf/dspark.yaml", "search.baseline=nospec"], "no-spec"),
        (["tune", "conf/dspark.yaml", "objective.metric=code-review-8k/decode_toks"], "decode_tok_s"),
        (["tune", "conf/dspark.yaml", "placement.ports=[9,1]"], "placement.ports"),
        (["tune", "conf/quickstart.yaml", "engine.model=./no-such-model", "engine.environment=null"], "no-such-model"),
        (["tune", "conf/dspark.yaml", "engine.args.port=1", "--dry-run"], "placement.ports"),
        (["tune"], "Missing argument"),
        (["tun"], "tune"),
        (["engine", "install", "vllm-gpu"], "vllm"),
        (["promote", "conf/dspark.yaml", "--stop", "--status"], "exclude each other"),
        (["bench", "conf/dspark.yaml", "--base-url", "http://127.0.0.1:9", "--api-key-env", "NOT_SET"], "NOT_SET"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert code == 2, err
    assert out == ""
    assert said in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


UNKNOWN_KIND = "engine.kind=vlm"
UNKNOWN_KINDS = (
    UNKNOWN_KIND,
    "search.variants.other={engine.kind: vlm}",
    "search.grid={engine.kind: [vllm, vlm]}",
    "search={sampler: tpe, baseline: null, variants: {}, grid: {}, space: {engine.kind: [vllm, vlm]}}",
)
CAMPAIGN_VERBS = (["tune"], ["tune", "--dry-run"], ["doctor"], ["promote"], ["promote", "--status"])


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--base-url", "http://127.0.0.1:9", UNKNOWN_KIND],
        *([*verb, setting] for verb in CAMPAIGN_VERBS for setting in UNKNOWN_KINDS),
    ],
    ids=" ".join,
)
def test_an_engine_that_there_is_none_of(run: Run, words: list[str]) -> None:
    code, out, err = run(words[0], "conf/quickstart.yaml", *words[1:])
    assert (code, out) == (2, ""), err
    assert err == "error: engine.kind: found 'vlm', allowed are vllm, sglang, llamacpp; did you mean 'vllm'?\n"


def test_an_engine_that_is_not_installed(run: Run) -> None:
    (Path.cwd() / "model").mkdir()
    code, _, err = run("tune", "conf/quickstart.yaml", "engine.model=./model", "placement.cpus=1")
    assert code == 3
    assert "engine install" in err


def test_a_folder_that_cannot_be_written(run: Run) -> None:
    Path("mlruns").write_text("a file, not a folder")
    code, _, err = run("tune", "conf/quickstart.yaml", "engine.command=[/bin/true]", "engine.model=org/x")
    assert code == 3
    assert "mlruns" in err
    assert "Traceback" not in err


def test_a_store_that_cannot_be_reached(run: Run) -> None:
    code, _, err = run("results", "conf/quickstart.yaml", "tracking.uri=http://127.0.0.1:9")
    assert code == 3
    assert "127.0.0.1:9" in err
    assert len(err.strip().splitlines()) <= 2


def test_no_results_yet(run: Run) -> None:
    code, _, err = run("results", "conf/quickstart.yaml")
    assert code == 1
    assert "no results of quickstart yet" in err


@pytest.mark.slow
def test_doctor_names_what_is_missing(run: Run) -> None:
    code, out, _ = run("doctor", "conf/dspark.yaml", "--json")
    assert code == 3
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["configuration"]["ok"] is True
    assert checks["GPUs"]["ok"] is False
    assert "2 needed on one node: none here" in checks["GPUs"]["detail"]


@pytest.mark.parametrize("verb", ["tune", "results", "compare", "promote", "bench", "doctor", "ui", "engine"])
def test_every_verb_explains_itself(run: Run, verb: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.slow
def test_a_bench_of_a_server_that_runs(run: Run, fake_engine: Callable[..., object], tmp_path: Path) -> None:
    server = fake_engine("vllm", model="org/model")
    conf = tmp_path / "bench.yaml"
    conf.write_text(
        "engine: {kind: vllm, model: org/model}\n"
        "workloads: {chat: {kind: chat, output_tokens: 32, num_prompts: 2, repeats: 3}}\n"
    )
    code, out, err = run("bench", conf, "--base-url", f"{server.base_url}/v1", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["model"] == "org/model"
    assert told["measurements"]["chat"]["decode_tok_s"]["value"] > 0
    assert told["verdict"]["level"] == "valid", told["verdict"]


def test_a_bench_of_nothing(run: Run) -> None:
    code, _, err = run("bench", "conf/quickstart.yaml", "--base-url", "http://127.0.0.1:9")
    assert code == 3
    assert "127.0.0.1:9" in err
