"""GPU facts over a stand-in for NVIDIA's library: what is not told is unknown, and who uses a GPU is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config import EngineSpec
from orchestrator.errors import EngineFailure, MachineError
from orchestrator.node import claims, gpus, launch
from orchestrator.node.memory import MemorySampler
from orchestrator.node.provenance import provenance
from tests.support.fake_nvml import FakeNvml
from tests.support.launches import engine_spec, program, run_stand_in
from tests.support.paths import ROOT


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A node with a management library and no GPU yet, and with no earlier claims or quarantines."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "GPU_BUSY_PATIENCE_S", 0.5)
    fake = FakeNvml(tmp_path)
    fake.load(monkeypatch)
    return fake


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "60"])
    yield process
    process.kill()
    process.wait(10)


def used_by_engine(node: FakeNvml, folder: Path, mib: int = 40_000, gpu: int = 0) -> Path:
    """The engine to come takes memory: its stand-in writes its pid to the file that the GPU reads."""
    record = folder / "record"
    node.holder(gpu, record, mib)
    return record


def test_without_a_driver_nothing_is_known() -> None:
    assert gpus.read_gpus() == []
    assert gpus.topology() == []
    assert gpus.driver_version() is None
    assert gpus.find_foreign_users(("0",), frozenset()) == ()
    assert gpus.wait_until_free(("0",), {}, 0.0) == ()


def test_memory_and_users_per_gpu(node: FakeNvml, neighbour: subprocess.Popen[bytes]) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").pid(1, neighbour.pid, 2048)
    first, second = gpus.read_gpus()
    assert (first.index, first.uuid, str(first)) == (0, "GPU-aaaa", "NVIDIA H200 140 GiB")
    assert first.used_gib == pytest.approx(500 / 1024)
    assert (first.users, first.used_source) == ((), "NVML")
    assert second.used_gib == pytest.approx((500 + 2048) / 1024)
    expected = f"GPU 1: pid {neighbour.pid} (sleep) 2.0 GiB"
    assert gpus.find_foreign_users(("0", "1"), frozenset()) == (expected,)
    assert gpus.find_foreign_users(("1",), frozenset({neighbour.pid})) == ()
    assert gpus.driver_version() == "580.159.03"


def test_memory_that_is_not_told_is_summed_over_the_processes(
    node: FakeNvml, neighbour: subprocess.Popen[bytes]
) -> None:
    node.gpu("GPU-aaaa", flags="nomem").gpu("GPU-bbbb", flags="nomem").gpu("GPU-cccc", flags="nomem,noval")
    node.gpu("GPU-dddd", flags="nomem,nopid")
    node.pid(0, neighbour.pid, 2048).pid(2, neighbour.pid, 2048).pid(3, neighbour.pid, 2048)
    summed, idle, unknown, silent = gpus.read_gpus()
    assert (summed.used_gib, summed.total_gib) == (2.0, None)
    assert summed.used_source == "NVML, sum over the processes"
    # Never 0: nobody there and nothing told is not "nothing in use".
    assert (idle.used_gib, unknown.used_gib, silent.used_gib) == (None, None, None)
    assert str(unknown.users[0]) == f"pid {neighbour.pid} (sleep)"


def test_gpus_by_index_uuid_and_slice(node: FakeNvml) -> None:
    node.gpu("GPU-aaaa-1111").gpu("GPU-bbbb-2222").mig("MIG-cccc", 1)
    assert [gpu.uuid for gpu in gpus.read_gpus(("1", "GPU-aaaa"))] == ["GPU-bbbb-2222", "GPU-aaaa-1111"]
    (piece,) = gpus.read_gpus(("MIG-cccc",))
    assert (piece.index, piece.uuid, piece.total_gib) == (1, "MIG-cccc", pytest.approx(20_000 / 1024))
    assert gpus.read_gpus(("7", "MIG-none", "GPU-none")) == []


def test_a_lost_gpu_does_not_hide_the_others(node: FakeNvml) -> None:
    node.gpu("GPU-aaaa", flags="lost").gpu("GPU-bbbb")
    lost, healthy = gpus.read_gpus()
    assert "lost" in (lost.fault or "")
    assert healthy.fault is None
    assert [link["pair"] for link in gpus.topology()] == []


@pytest.mark.parametrize(("status", "words"), [(0, "ok"), (5, "not supported"), (4, "disabled"), (77, "unknown")])
def test_links_and_peer_access(node: FakeNvml, status: int, words: str) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").peers(0, 1, status)
    (link,) = gpus.topology()
    assert link["pair"] == [0, 1]
    assert link["common_ancestor_level"] == 30
    assert str(link["p2p_read"]).startswith(words)
    told = provenance("0.26.0")
    assert told["topology"] == [link]
    assert told["gpus"] == ["NVIDIA H200 140 GiB"] * 2
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_a_user_that_cannot_be_seen_or_ended_is_told_as_such(
    node: FakeNvml, neighbour: subprocess.Popen[bytes]
) -> None:
    node.gpu("GPU-aaaa").pid(0, neighbour.pid, 2048)
    neighbour.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not (users := gpus.find_foreign_users(("0",), frozenset())) or "stopped" not in users[0]:
        assert time.monotonic() < deadline, users
    assert users == (f"GPU 0: pid {neighbour.pid} (sleep, stopped) 2.0 GiB",)
    assert str(gpus.GpuUser(pid=9, name=None, used_gib=None)) == "pid 9 (not visible from here)"


@pytest.mark.slow
def test_memory_is_waited_for_until_it_is_back(node: FakeNvml, neighbour: subprocess.Popen[bytes]) -> None:
    node.gpu("GPU-aaaa", decay_s=2.0).pid(0, neighbour.pid, 40_000)
    neighbour.kill()
    neighbour.wait(10)
    began = time.monotonic()
    assert gpus.wait_until_free(("0",), {"GPU-aaaa": 0.5}, 20.0) == ()
    assert 1.0 < time.monotonic() - began < 10.0


@pytest.mark.slow
def test_a_start_waits_until_memory_no_longer_falls(node: FakeNvml, neighbour: subprocess.Popen[bytes]) -> None:
    node.gpu("GPU-aaaa", decay_s=3.0).gpu("GPU-bbbb", used_mib=30_000).pid(0, neighbour.pid, 40_000)
    neighbour.kill()
    neighbour.wait(10)
    settled = gpus.wait_until_settled(("0", "1"), 20.0)
    assert settled["GPU-aaaa"] == pytest.approx(500 / 1024, abs=0.2)
    # Memory that stays in use without a process is somebody's all the same; it is the baseline.
    assert settled["GPU-bbbb"] == pytest.approx(30_000 / 1024)


def test_a_gpu_that_does_not_come_back_is_in_quarantine_until_it_does(
    node: FakeNvml, neighbour: subprocess.Popen[bytes]
) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").pid(1, neighbour.pid, 40_000)
    (sentence,) = gpus.wait_until_free(("0", "1"), {"GPU-aaaa": 0.5, "GPU-bbbb": 0.5}, 0.5)
    assert "GPU 1 still holds 39.6 GiB, 0.5 GiB before the trial" in sentence
    assert f"pid {neighbour.pid} (sleep) 39.1 GiB" in sentence
    assert gpus.find_quarantined(("0",)) == ()
    assert gpus.find_quarantined(("0", "1")) == (f"in quarantine: {sentence}",)
    neighbour.kill()
    neighbour.wait(10)
    assert gpus.find_quarantined(("0", "1")) == ()


def test_a_gpu_without_numbers_is_free_when_nobody_is_on_it(node: FakeNvml, neighbour: subprocess.Popen[bytes]) -> None:
    node.gpu("GPU-aaaa", flags="nomem,noval").pid(0, neighbour.pid, 40_000)
    (sentence,) = gpus.wait_until_free(("0",), {"GPU-aaaa": None}, 0.0)
    assert sentence == f"GPU 0 still holds memory; held by pid {neighbour.pid} (sleep)"
    neighbour.kill()
    neighbour.wait(10)
    assert gpus.wait_until_free(("0",), {"GPU-aaaa": None}, 0.0) == ()


def test_memory_over_time(node: FakeNvml, tmp_path: Path) -> None:
    pid_file = tmp_path / "later"
    node.gpu("GPU-aaaa").gpu("GPU-bbbb", flags="nomem").holder(0, pid_file, 1024)
    sampler = MemorySampler(pid=os.getpid(), gpu_ids=("0", "1"), interval_s=0.05)
    sampler.start()
    time.sleep(0.3)
    pid_file.write_text(str(os.getpid()))
    time.sleep(0.3)
    sampler.stop()
    peaks = sampler.peaks()
    assert set(peaks) == {"gpu0_peak_gib", "host_rss_peak_gib"}
    assert peaks["gpu0_peak_gib"].value == pytest.approx(1524 / 1024, abs=0.001)
    assert peaks["gpu0_peak_gib"].source.startswith("NVML, largest of ")
    assert sampler.series["gpu0_used_gib"][0][1] == pytest.approx(500 / 1024, abs=0.001)
    assert 0.01 < peaks["host_rss_peak_gib"].value < 10


def refusal(spec: EngineSpec, folder: Path, gpu_ids: tuple[str, ...]) -> str:
    with pytest.raises(EngineFailure) as caught, run_stand_in(spec, folder, gpu_ids):
        pytest.fail("it was started")
    assert caught.value.diagnosis.cause == "gpu_busy"
    assert caught.value.diagnosis.status == "infrastructure"
    assert not (folder / "trial" / "engine.log").exists()
    return caught.value.diagnosis.summary


def test_a_busy_gpu_is_refused_with_the_pid_and_name_of_its_user(
    node: FakeNvml, neighbour: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").pid(1, neighbour.pid, 2048)
    summary = refusal(engine_spec(tmp_path, args={"tensor-parallel-size": 2}), tmp_path, ("0", "1"))
    assert f"GPU 1: pid {neighbour.pid} (sleep) 2.0 GiB" in summary
    with run_stand_in(engine_spec(tmp_path), tmp_path, ("0",)) as alone:
        assert alone.foreign_gpu_users() == ()


@pytest.mark.slow
def test_the_next_start_comes_after_the_memory_is_free(node: FakeNvml, tmp_path: Path) -> None:
    node.gpu("GPU-aaaa", decay_s=4.0)
    record = used_by_engine(node, tmp_path)
    spec = engine_spec(tmp_path, record=str(record), children=str(tmp_path / "children"))
    with run_stand_in(spec, tmp_path, ("0",)) as first:
        assert gpus.read_gpus(("0",))[0].used_gib == pytest.approx(40_500 / 1024)
        # It is the engine's own: nobody else is on the GPU.
        assert first.foreign_gpu_users() == ()
    assert first.held == ()
    with run_stand_in(spec, tmp_path, ("0",)):
        pass
    starts = [json.loads(line)["time_s"] for line in record.read_text().splitlines()]
    assert starts[1] - starts[0] > 4.0


@pytest.mark.slow
def test_a_start_on_the_gpu_of_an_owner_that_was_just_killed(node: FakeNvml, tmp_path: Path) -> None:
    node.gpu("GPU-aaaa", decay_s=3.0)
    record = used_by_engine(node, tmp_path)
    source = f"""
sys.path[:0] = [{str(ROOT)!r}]
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
from pathlib import Path
from tests.support.launches import engine_spec, run_stand_in
with run_stand_in(engine_spec(Path({str(tmp_path)!r}), record={str(record)!r}), Path({str(tmp_path)!r}), ("0",)):
    print("up", flush=True)
    time.sleep(60)
"""
    command = [*program(tmp_path, source), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **node.env}) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
    killed_s = time.time()
    with run_stand_in(engine_spec(tmp_path, record=str(record)), tmp_path / "next", ("0",)) as following:
        assert following.foreign_gpu_users() == ()
    starts = [json.loads(line)["time_s"] for line in record.read_text().splitlines()]
    assert len(starts) == 2
    assert starts[1] - killed_s > 2.0


def test_a_neighbour_that_comes_while_it_runs_is_seen(
    node: FakeNvml, neighbour: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    node.gpu("GPU-aaaa")
    record = used_by_engine(node, tmp_path)
    with run_stand_in(engine_spec(tmp_path, record=str(record)), tmp_path, ("0",)) as started:
        assert started.foreign_gpu_users() == ()
        node.pid(0, neighbour.pid, 1024)
        assert started.foreign_gpu_users() == (f"GPU 0: pid {neighbour.pid} (sleep) 1.0 GiB",)
        neighbour.kill()
        neighbour.wait(10)


def test_pids_of_another_namespace_are_the_engines_own_when_they_came_with_it(
    node: FakeNvml, neighbour: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    node.gpu("GPU-aaaa", flags="hostpid")
    record = used_by_engine(node, tmp_path)
    with run_stand_in(engine_spec(tmp_path, record=str(record)), tmp_path, ("0",)) as started:
        assert gpus.read_gpus(("0",))[0].users[0].pid == started.pid + 10_000_000
        assert started.foreign_gpu_users() == ()
        node.pid(0, neighbour.pid, 1024)
        hidden = f"GPU 0: pid {neighbour.pid + 10_000_000} (not visible from here) 1.0 GiB"
        assert started.foreign_gpu_users() == (hidden,)
        neighbour.kill()
        neighbour.wait(10)


def test_one_gpu_is_never_given_to_two_engines(node: FakeNvml, tmp_path: Path) -> None:
    node.gpu("GPU-aaaa").gpu("GPU-bbbb")
    with run_stand_in(engine_spec(tmp_path), tmp_path / "a", ("0",)):
        assert "GPU 0: another engine of ours has it" in refusal(engine_spec(tmp_path), tmp_path / "b", ("0",))
        with run_stand_in(engine_spec(tmp_path), tmp_path / "c", ("1",)):
            pass


def test_a_gpu_that_is_lost_or_not_there(node: FakeNvml, tmp_path: Path) -> None:
    node.gpu("GPU-aaaa", flags="lost")
    assert "GPU 0: GPU is lost" in refusal(engine_spec(tmp_path), tmp_path, ("0",))
    with (
        pytest.raises(MachineError, match="was given the GPUs 4; this node has 0"),
        run_stand_in(engine_spec(tmp_path), tmp_path, ("4",)),
    ):
        pass


def test_claims_end_with_the_process_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = f"""
sys.path[:0] = [{str(ROOT)!r}]
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
from orchestrator.node import claims
with claims.claim_gpus(["GPU-aaaa"]), claims.claim_scrap_folder() as scraps:
    (scraps / "left").touch()
    print(scraps, flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([*program(tmp_path, source), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        scraps = Path(holder.stdout.readline().strip())
        with claims.claim_gpus(["GPU-aaaa", "GPU-bbbb"]) as taken:
            assert taken == ("GPU-aaaa",)
        with claims.claim_scrap_folder() as other:
            assert other != scraps
    finally:
        holder.kill()
        holder.wait(10)
    with claims.claim_gpus(["GPU-aaaa"]) as taken:
        assert taken == ()
    assert (scraps / "left").exists()
    with claims.claim_scrap_folder() as again:
        assert again == scraps
        assert list(again.iterdir()) == []


def test_pynvml_finds_the_library_as_it_finds_the_real_one(tmp_path: Path) -> None:
    node = FakeNvml(tmp_path).gpu("GPU-aaaa").gpu("GPU-bbbb")
    code = "from orchestrator.node import gpus; print([gpu.uuid for gpu in gpus.read_gpus()])"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **node.env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "['GPU-aaaa', 'GPU-bbbb']"
