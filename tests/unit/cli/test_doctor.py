"""`doctor` as a person runs it: one screen, every obstacle named, the exit code of the contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import config
from orchestrator.cli import machine_checks
from tests.support.fake_nvml import FakeNvml
from tests.support.launches import FAKE_ENGINE, KINDS, program
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

MODULE_MISSING = """
if "--help=all" in sys.argv:
    print("Traceback (most recent call last):\\n"
          '  File "/venv/vllm/model_executor/warmup/kernel_warmup.py", line 9, in <module>\\n    import torchvision\\n'
          "ModuleNotFoundError: No module named 'torchvision'", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(tmp_path)
    fake.load(monkeypatch)
    return fake


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A healthy experiment over the stand-in for vLLM, on no GPU."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "healthy.yaml"
    path.write_text(
        f"""
engine: {{kind: vllm, model: ./model, command: ["{sys.executable}", "{FAKE_ENGINE}", vllm], root: "{tmp_path}"}}
placement: {{cpus: 1, ports: [25000, 25999]}}
workloads: {{chat: {{output_tokens: 16}}}}
search:
  grid: {{engine.args.max-num-seqs: [1, 2]}}
  launches: 3
objective: {{metric: chat/decode_tok_s}}
tracking: {{folder: "{tmp_path}/mlruns"}}
"""
    )
    return path


def examined(path: Path, *overrides: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code that the checks mean, and the checks by name."""
    document = machine_checks.document(machine_checks.check_machine(config.load(path, list(overrides))))
    assert set(document) == {"checks"}
    checks = {check["name"]: check for check in document["checks"]}
    assert len(checks) == len(document["checks"])
    # One screen: a line per check, at most the usual height of a terminal.
    assert len(checks) <= 20
    return 3 if any(check["ok"] is False for check in checks.values()) else 0, checks


def engine_check(checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = (check for name, check in checks.items() if name.startswith("engine"))
    return found


def test_a_healthy_machine(experiment: Path) -> None:
    code, checks = examined(experiment)
    assert code == 0
    assert all(check["ok"] is True for check in checks.values()), checks
    assert checks["configuration"]["detail"] == "2 points, 4 to 6 engine starts; workloads: chat"
    assert "1 files" in checks["model"]["detail"]
    assert "25000 is free" in checks["ports"]["detail"]


def command_line(path: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", "doctor", str(path), *arguments],
        env={**os.environ, "TMPDIR": str(path.parent), **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_person_reads_one_screen(experiment: Path) -> None:
    answer = command_line(experiment)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stderr
    assert lines[0].split() == ["check", "detail"]
    assert any(line.startswith("GPUs") and " ok " in line for line in lines)
    assert len(lines) < 24


def test_a_program_reads_json(experiment: Path, tmp_path: Path) -> None:
    node = FakeNvml(tmp_path).gpu("GPU-aaaa")
    answer = command_line(experiment, "placement.gpus=2", "--json", env=node.env)
    assert answer.returncode == 3
    (gpus,) = (check for check in json.loads(answer.stdout)["checks"] if check["name"] == "GPUs")
    assert gpus["detail"] == "2 needed on one node: 1 x NVIDIA H200 140 GiB; driver 580.159.03"


def test_everything_that_is_wrong_is_told_at_once(experiment: Path, tmp_path: Path) -> None:
    code, checks = examined(
        experiment,
        "engine.model=./nowhere",
        "engine.command=[no-such-engine]",
        "placement.gpus=2",
        "placement.cpus=4096",
        "workloads.chat.prompts=./no-prompts",
    )
    assert code == 3
    failed = {name for name, check in checks.items() if check["ok"] is False}
    assert {"model", "GPUs", "CPUs", "prompts", "engine vllm"} <= failed
    assert "./nowhere" in checks["model"]["detail"]
    assert "no-such-engine: there is no such program" in checks["engine vllm"]["detail"]
    assert "2 needed on one node: none here, no NVIDIA driver" in checks["GPUs"]["detail"]
    # Nothing is said about GPUs that are not there.
    assert "GPUs free" not in checks


@pytest.mark.parametrize("kind", KINDS)
def test_flags_are_held_against_the_installed_engine(experiment: Path, kind: str) -> None:
    command = f"engine.command=[{sys.executable}, {FAKE_ENGINE}, {kind}]"
    grid = "search.grid={engine.args.paralel: [1, 2]}"
    code, checks = examined(experiment, f"engine.kind={kind}", command, grid)
    found = engine_check(checks)
    assert found["ok"] is None
    assert "--paralel" in found["detail"]
    assert code == 0


def test_an_environment_that_lacks_a_module(experiment: Path, tmp_path: Path) -> None:
    source = tmp_path / "program.py"
    source.write_text("import sys\n" + MODULE_MISSING)
    code, checks = examined(experiment, f"engine.command=[{sys.executable}, {source}]")
    assert code == 3
    assert engine_check(checks)["ok"] is False
    assert "lacks the Python module torchvision; install torchvision" in engine_check(checks)["detail"]


def test_gpus_their_users_and_their_links(experiment: Path, node: FakeNvml, neighbour: subprocess.Popen[bytes]) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").peers(0, 1, 5).pid(1, neighbour.pid, 2048)
    code, checks = examined(experiment, "placement.gpus=2")
    assert code == 3
    assert checks["GPUs"]["ok"] is True
    assert checks["GPUs"]["detail"] == "2 needed on one node: 2 x NVIDIA H200 140 GiB; driver 580.159.03"
    assert checks["GPUs free"]["ok"] is False
    assert checks["GPUs free"]["detail"] == f"GPU 1: pid {neighbour.pid} (sleep) 2.0 GiB"
    assert checks["GPU links"]["ok"] is None
    assert "peer access not supported (0-1)" in checks["GPU links"]["detail"]
    # One busy GPU of two does not stop an experiment that needs one.
    code, checks = examined(experiment, "placement.gpus=1")
    assert (code, checks["GPUs free"]["ok"]) == (0, None)
    assert "GPU links" not in checks


def test_eight_gpus_fit_on_one_screen(experiment: Path, node: FakeNvml) -> None:
    for number in range(8):
        node.gpu(f"GPU-{number}")
    code, checks = examined(experiment, "placement.gpus=8")
    assert code == 0
    assert checks["GPU links"]["detail"] == "peer access ok (28 pairs)"


def test_a_quarantined_and_a_lost_gpu(experiment: Path, tmp_path: Path, node: FakeNvml) -> None:
    node.gpu("GPU-aaaa", used_mib=40_000).gpu("GPU-bbbb", flags="lost")
    folder = tmp_path / f"orchestrator-{os.getuid()}"
    folder.mkdir()
    sentence = {"sentence": "GPU 0 still holds 39.1 GiB", "baseline_gib": 0.5}
    (folder / "quarantine-GPU-aaaa.json").write_text(json.dumps(sentence))
    _, checks = examined(experiment, "placement.gpus=1")
    assert checks["GPUs free"]["ok"] is False
    assert "in quarantine: GPU 0 still holds 39.1 GiB" in checks["GPUs free"]["detail"]
    assert "GPU 1: GPU is lost" in checks["GPUs free"]["detail"]


def test_no_free_port(experiment: Path, tmp_path: Path) -> None:
    holder = program(
        tmp_path, "import socket\ns = socket.create_server(('127.0.0.1', PORT))\nprint(1, flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([*holder, "--port", "25103"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        code, checks = examined(experiment, "placement.ports=[25100, 25107]")
    finally:
        process.kill()
        process.wait(10)
    assert code == 3
    assert "no block of 8 free ports between 25100 and 25107" in checks["ports"]["detail"]


def test_a_folder_that_cannot_be_written(experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, checks = examined(experiment, f"tracking.folder={tmp_path}/file/mlruns")
    assert code == 3
    assert checks["MLflow"]["ok"] is False
    assert engine_check(checks)["ok"] is True
