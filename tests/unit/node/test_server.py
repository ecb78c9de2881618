"""launch.run_engine over the stand-ins: what an engine is given, what is written down, and that nothing is left."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.errors import MachineError
from orchestrator.measure import client
from orchestrator.node.launch import new_key
from orchestrator.node.program import shell_line
from tests.support.launches import KINDS, alive, engine_spec, failure_of, marked, run_stand_in, written_pids

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_comes_answers_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    descriptors = psutil.Process().num_fds()
    children = tmp_path / "children"
    spec = engine_spec(tmp_path, kind, children=str(children), shm_file=True, lock_cache=True)
    with run_stand_in(spec, tmp_path) as running:
        assert client.list_models(running.target.base_url, running.target.api_key) == ["org/model"]
        assert client.one_completion(running.target)
        pids = [running.keeper.pid, running.pid, *written_pids(children)]
        assert set(pids) <= running.pids()
        assert Path(f"/dev/shm/fake_engine_{running.pid}").exists()
        scraps = Path(running.given_env["TMPDIR"])
        (scraps / "left.sock").touch()
    assert not [pid for pid in pids if alive(pid)]
    assert marked() == []
    assert running.left == ()
    assert not Path(f"/dev/shm/fake_engine_{running.pid}").exists()
    assert not scraps.exists()
    assert psutil.Process().num_fds() == descriptors
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(running.plan.base_url.rsplit(":", 1)[1])))


def test_the_key_is_asked_for_and_is_written_nowhere(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, "sglang", env={"HF_TOKEN": "hf-secret"})
    with run_stand_in(spec, tmp_path) as running:
        with pytest.raises(client.RequestError, match="401"):
            client.list_models(running.target.base_url, "wrong")
        written = json.dumps(running.record()) + running.log_text() + shell_line(running.plan)
    assert running.target.api_key not in written
    assert "hf-secret" not in written
    assert running.record()["env"]["HF_TOKEN"] == "****"


def test_a_key_is_never_taken_for_a_flag() -> None:
    # One in 64 of the keys that secrets.token_urlsafe makes begins with a dash, which ends argparse.
    keys = {new_key() for _ in range(2000)}
    assert len(keys) == 2000
    assert all(key.isalnum() and len(key) == 48 for key in keys)


def test_a_cache_persists_unless_it_is_damaged(tmp_path: Path) -> None:
    with run_stand_in(engine_spec(tmp_path, lock_cache=True), tmp_path) as running:
        cache = Path(running.given_env["VLLM_CACHE_ROOT"])
        (cache / "kernel").touch()
    with run_stand_in(engine_spec(tmp_path), tmp_path) as running:
        assert Path(running.given_env["VLLM_CACHE_ROOT"]) == cache
        assert (cache / "kernel").exists()
    torn = "_pickle.UnpicklingError: pickle data was truncated\n"
    text = f'Traceback (most recent call last):\n  File "compiler_interface.py", line 402, in load\n{torn}'
    failure, _ = failure_of(engine_spec(tmp_path, fail=text), tmp_path)
    assert failure.diagnosis.cause == "cache_broken"
    assert not cache.exists()


def test_what_an_engine_must_not_inherit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {
        "RAY_ADDRESS": "1.2.3.4:6379",
        "PYTHONPATH": "/nowhere",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "LLAMA_ARG_CTX_SIZE": "1",
        "VLLM_API_KEY": "someone-elses",
        "MLFLOW_TRACKING_URI": "http://nowhere",
    }
    for name, value in (inherited | {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf-secret", "UNRELATED": "stays"}).items():
        monkeypatch.setenv(name, value)
    record = tmp_path / "record"
    names = [*inherited, "NCCL_DEBUG", "UNRELATED", "VLLM_PORT", "CUDA_DEVICE_ORDER"]
    with run_stand_in(engine_spec(tmp_path, record=str(record), record_env=names), tmp_path) as running:
        given = running.record()["given_env"]
        assert running.target.api_key != "someone-elses"
        port = int(running.plan.base_url.rsplit(":", 1)[1])
    env = json.loads(record.read_text())["env"]
    assert env["VLLM_API_KEY"] == running.target.api_key
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert [name for name in inherited if env[name] is not None] == ["CUDA_VISIBLE_DEVICES", "VLLM_API_KEY"]
    assert (env["NCCL_DEBUG"], env["UNRELATED"], env["CUDA_DEVICE_ORDER"]) == ("INFO", "stays", "PCI_BUS_ID")
    assert env["VLLM_PORT"] == str(port + 1)
    # What a person set for engines is part of the experiment, so it is written down; secrets are not.
    assert given["NCCL_DEBUG"] == "INFO"
    assert given["HF_TOKEN"] == "****"
    assert "UNRELATED" not in given


def test_the_gpus_that_were_assigned_are_the_ones_it_sees(tmp_path: Path) -> None:
    record = tmp_path / "record"
    args = {"tensor-parallel-size": 2}
    spec = engine_spec(tmp_path, record=str(record), record_env=["CUDA_VISIBLE_DEVICES"], args=args)
    with run_stand_in(spec, tmp_path, gpu_ids=("5", "3")) as running:
        assert running.record()["gpu_ids"] == ["5", "3"]
    assert json.loads(record.read_text())["env"]["CUDA_VISIBLE_DEVICES"] == "5,3"
    with (
        pytest.raises(MachineError, match=r"asks for 2 GPUs .* given 1: 0"),
        run_stand_in(spec, tmp_path, gpu_ids=("0",)),
    ):
        pass


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, command=["no-such-engine", "serve"])
    with pytest.raises(MachineError, match="no-such-engine: there is no such program"), run_stand_in(spec, tmp_path):
        pass


def test_a_log_of_50_mb_is_kept_whole_and_read_in_part(tmp_path: Path) -> None:
    with run_stand_in(engine_spec(tmp_path, log_mib=50), tmp_path) as running:
        assert running.plan.log_path.stat().st_size > 50 << 20
        began = time.monotonic()
        text = running.log_text()
        assert running.engine.diagnose(text, None).cause is None
        assert len(text) < 13 << 20
        assert "[...]" in text
        assert time.monotonic() - began < 20.0
