"""launch.run_engine over the stand-ins: ready means ready, and afterwards nothing is left, whoever was killed."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from orchestrator.config import EngineSpec, Ready
from orchestrator.errors import EngineFailure, MachineError
from orchestrator.measure import client
from orchestrator.node import claims, leftovers
from orchestrator.node.launch import new_key
from orchestrator.node.program import shell_line
from orchestrator.node.server import Server
from tests.support.launches import KINDS, alive, engine_spec, gone, marked, program, run_stand_in, written_pids
from tests.support.paths import ROOT


def failure_of(spec: EngineSpec, folder: Path, **more: object) -> tuple[EngineFailure, float]:
    """How it failed to become ready, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(EngineFailure) as caught, run_stand_in(spec, folder, **more):
        pytest.fail("it became ready")
    assert marked() == []
    return caught.value, time.monotonic() - began


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


@pytest.mark.parametrize("kind", KINDS)
def test_ready_is_not_believed_too_early(tmp_path: Path, kind: str) -> None:
    spec = engine_spec(tmp_path, kind, models_early=True, load_s=0.5, health_late_s=0.7, completion_500_s=0.8)
    began = time.monotonic()
    with run_stand_in(spec, tmp_path) as running:
        assert time.monotonic() - began > 2.0
        assert client.one_completion(running.target)


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


def test_a_dead_engine_ends_the_wait_at_once(tmp_path: Path) -> None:
    failure, waited_s = failure_of(
        engine_spec(tmp_path, fail="vllm_cpu_fail_bad_flag.log", fail_code=2, fail_after_s=1.0), tmp_path
    )
    assert failure.diagnosis.cause == "unknown_flag"
    assert waited_s < 5.0


def test_slow_progress_is_waited_for(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, load_s=4.0, ready=Ready(timeout_s=60.0, stall_s=2.5))
    with run_stand_in(spec, tmp_path) as running:
        assert running.exit_code is None


@pytest.mark.parametrize("kind", KINDS)
def test_no_progress_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    spec = engine_spec(tmp_path, kind, load_s=0.2, silent_load_s=60.0, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "no_progress"
    assert "engine.ready.stall_s" in failure.diagnosis.lever
    assert waited_s < 12.0


def test_an_engine_that_failed_and_hangs_is_not_waited_for(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, fail="vllm_cpu_fail_disk.log", fail_hangs_s=120.0)
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "disk_full"
    assert waited_s < 30.0


def test_progress_without_end_is_ended_by_the_cap(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, load_s=60.0, ready=Ready(timeout_s=2.0, stall_s=30.0))
    failure, _ = failure_of(spec, tmp_path)
    assert "engine.ready.timeout_s" in failure.diagnosis.lever


SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            self.answer({health}, {{}})
        else:
            self.answer(200, {{"data": [{{"id": "org/model"}}]}})
    def do_POST(self):
        time.sleep(60)
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_our_own_questions_in_its_log_are_no_progress(tmp_path: Path) -> None:
    command = program(tmp_path, SERVER.format(health=503))
    spec = engine_spec(tmp_path, command=command, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert "/health answers 503" in failure.diagnosis.summary
    assert (tmp_path / "trial" / "engine.log").read_text().count("GET /health") > 3
    assert waited_s < 12.0


def test_a_completion_that_hangs_is_not_readiness(tmp_path: Path) -> None:
    command = program(tmp_path, SERVER.format(health=200))
    spec = engine_spec(tmp_path, command=command, ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, waited_s = failure_of(spec, tmp_path)
    assert failure.diagnosis.cause == "no_progress"
    assert "a first completion is not answered" in failure.diagnosis.summary
    assert waited_s < 12.0


def test_another_model_is_never_measured(tmp_path: Path) -> None:
    spec = engine_spec(tmp_path, model_id="other/model", ready=Ready(timeout_s=60.0, stall_s=2.0))
    failure, _ = failure_of(spec, tmp_path)
    assert "other/model" in failure.diagnosis.summary


class Stranger(http.server.BaseHTTPRequestHandler):
    """Answers everything with 200, lists our model and remembers the keys that it was shown."""

    keys: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("Authorization"))
        body = b'{"data": [{"id": "org/model"}], "choices": [{"text": "a"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield
        other.shutdown()


def test_a_stranger_on_our_port_is_never_measured_nor_shown_the_key(tmp_path: Path) -> None:
    Stranger.keys.clear()
    command = program(tmp_path, "time.sleep(60)")
    with contextlib.ExitStack() as stack:

        def take_its_port(running: Server) -> None:
            stack.enter_context(stranger(int(running.plan.base_url.rsplit(":", 1)[1])))

        failure, waited_s = failure_of(engine_spec(tmp_path, command=command), tmp_path, on_start=take_its_port)
    assert failure.diagnosis.cause == "port_taken"
    assert failure.diagnosis.status == "infrastructure"
    assert f"pid {os.getpid()}" in failure.diagnosis.summary
    assert set(Stranger.keys) == {None}
    assert waited_s < 5.0


def test_a_port_that_somebody_has_is_not_handed_out(tmp_path: Path) -> None:
    with stranger(24001), socket.socket() as bound:
        # Bound, not listening yet: vLLM takes its port before it loads.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 24008))
        with claims.reserved_port((24000, 24099)) as port:
            assert port == 24016
        with pytest.raises(MachineError, match="no block of 8 free ports"), claims.reserved_port((24000, 24007)):
            pass


def test_a_port_in_time_wait_is_used_when_there_is_no_other() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 24200))
        listener.listen()
        with socket.create_connection(("127.0.0.1", 24200)):
            accepted, _ = listener.accept()
            accepted.close()
    with claims.reserved_port((24200, 24215)) as port:
        assert port == 24208
        with claims.reserved_port((24200, 24215)) as second:
            assert second == 24200


def test_eight_starts_at_once_share_no_port_and_no_cache(tmp_path: Path) -> None:
    record = tmp_path / "record"
    together = threading.Barrier(8)

    def start(number: int) -> tuple[str, str, str]:
        spec = engine_spec(tmp_path, KINDS[number % 3], lock_cache=True, record=str(record))
        with run_stand_in(spec, tmp_path / str(number)) as running:
            together.wait(60)
            return running.plan.base_url, running.given_env["TRITON_CACHE_DIR"], running.given_env["TMPDIR"]

    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(start, range(8)))
    for column in zip(*claimed, strict=True):
        assert len(set(column)) == 8
    argvs = [json.loads(line)["argv"] for line in record.read_text().splitlines()]
    meeting = [argv[argv.index("--nccl-port") + 1] for argv in argvs if argv[0] == "sglang"]
    assert len(set(meeting)) == len(meeting) > 0
    assert marked() == []


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


def test_a_killed_keeper_is_noticed_and_its_engine_ended(tmp_path: Path) -> None:
    children = tmp_path / "children"
    with run_stand_in(engine_spec(tmp_path), tmp_path / "other") as other:
        with run_stand_in(engine_spec(tmp_path, children=str(children)), tmp_path) as running:
            pids = [running.pid, *written_pids(children)]
            running.keeper.send_signal(signal.SIGKILL)
            assert running.wait(10)
            with pytest.raises(EngineFailure) as caught:
                running.check_alive()
        assert caught.value.diagnosis.status == "infrastructure"
        assert gone(pids, 5.0)
        # Only that launch: another engine of the same owner goes on.
        other.check_alive()
        assert client.one_completion(other.target)


def test_an_engine_that_dies_while_it_serves(tmp_path: Path) -> None:
    with run_stand_in(engine_spec(tmp_path, die_after_s=0.5, die_signal="SIGSEGV"), tmp_path) as running:
        assert running.wait(10) or running.exit_code is not None
        with pytest.raises(EngineFailure) as caught:
            running.check_alive()
    assert caught.value.diagnosis.cause == "crashed"
    assert running.exit_code == -signal.SIGSEGV


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from tests.support.launches import Stop, engine_spec
from orchestrator.node.launch import run_engine
from orchestrator.engines import ENGINES
root = Path({root!r})
with run_engine(ENGINES["vllm"], engine_spec(root, children=str(root / "children"), ignore_sigterm=True, {more}),
                    workdir=root / "trial", ports=(23000, 23999),
                    on_start=lambda s: (root / "keeper").write_text(str(s.keeper.pid))) as running:
    (root / "ready").write_text(f"{{running.keeper.pid}} {{running.pid}}")
    time.sleep(100)
"""


@contextlib.contextmanager
def driver(root: Path, awaited: str = "ready", more: str = "") -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that holds an engine which ignores TERM, with the pids of all below it."""
    text = DRIVER.format(paths=[str(ROOT)], root=str(root), more=more)
    owner = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    try:
        pids = written_pids(root / awaited, 1 if awaited == "keeper" else 2, 60.0)
        yield owner, [*pids, *written_pids(root / "children")]
    finally:
        owner.kill()
        owner.wait(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_owner_ends_by_any_signal(tmp_path: Path, number: signal.Signals) -> None:
    with driver(tmp_path) as (owner, pids):
        owner.send_signal(number)
        owner.wait(20)
        assert gone(pids, 15.0)
        assert marked(owner.pid) == []


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_does_not_wait_for_a_long_grace(tmp_path: Path, interrupts: int) -> None:
    with driver(tmp_path, more="stop=Stop(grace_s=300.0)") as (owner, pids):
        for _ in range(interrupts):
            owner.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert gone(pids, 14.0)
        owner.wait(20)


def test_the_owner_is_killed_while_the_engine_loads(tmp_path: Path) -> None:
    with driver(tmp_path, "keeper", "silent_load_s=60.0") as (owner, pids):
        assert not (tmp_path / "ready").exists()
        owner.kill()
        assert gone(pids, 15.0)


def test_owner_and_keeper_are_killed_together(tmp_path: Path) -> None:
    with driver(tmp_path) as (owner, pids):
        keeper, engine, *children = pids
        for pid in (keeper, owner.pid):
            os.kill(pid, signal.SIGKILL)
        owner.wait(10)
        assert gone([keeper, engine], 5.0)
        assert [process.pid for process in leftovers.abandoned() if process.pid in children] == sorted(children)
        # The next start on this node, whoever makes it, sweeps first.
        with run_stand_in(engine_spec(tmp_path), tmp_path / "next"):
            assert gone(children, 0.0)


def test_a_process_of_the_same_name_or_another_container_is_left_alone(tmp_path: Path) -> None:
    with driver(tmp_path) as (owner, pids):
        foreign = {leftovers.MARKER: "9:1:1:another-namespace", "FAKE": "engine"}
        bystander = subprocess.Popen(["vllm serve", "60"], executable="/bin/sleep", env=foreign)
        try:
            owner.kill()
            assert gone(pids, 15.0)
            leftovers.sweep()
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait(10)


def test_shared_memory_of_others_stays(tmp_path: Path) -> None:
    mine, in_use = Path(f"/dev/shm/engine-{os.getpid()}"), Path(f"/dev/shm/busy_{os.getpid()}")
    unrelated = Path(f"/dev/shm/build{os.getpid()}cache")
    try:
        for path in (mine, in_use, unrelated):
            path.write_bytes(b"x")
        with in_use.open() as _:
            removed = leftovers.remove_shared_memory(frozenset(), frozenset({os.getpid()}), time.time() - 60)
            assert removed == (mine,)
            assert leftovers.remove_shared_memory(frozenset({mine, unrelated}), frozenset(), time.time() + 60) == ()
        assert (in_use.exists(), unrelated.exists()) == (True, True)
    finally:
        for path in (mine, in_use, unrelated):
            path.unlink(missing_ok=True)
