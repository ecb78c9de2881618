"""trial.run over the stand-ins: every end is a result with the right status, and nothing measured is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import trial
from orchestrator.config import TrialSpec, Workload
from orchestrator.node import launch
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from orchestrator.trial.run import run
from tests.support.fake_nvml import FakeNvml
from tests.support.launches import KINDS, Ready, alive, gone, marked, program, trial_spec
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SHORT = Workload(output_tokens=16, num_prompts=2, repeats=3, stall_s=20.0)


def checked_run(spec: TrialSpec, folder: Path, **more: object) -> TrialResult:
    """The result, after checking what holds for every end: nobody lives on, the file says the same, strictly."""
    threads = set(threading.enumerate())
    result = run(spec, folder / "trial", **more)
    assert marked() == []
    assert set(threading.enumerate()) <= threads
    text = (folder / "trial" / "result.json").read_text()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} in result.json")

    json.loads(text, parse_constant=refuse)
    assert trial.from_json(text) == trial.from_json(trial.to_json(result))
    assert trial.read_result(folder / "trial").memory_series == result.memory_series
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_from_start_to_end(tmp_path: Path, kind: str) -> None:
    phases = []
    spec = trial_spec(tmp_path, kind, workloads={"a": SHORT, "b": replace(SHORT, num_prompts=1)})
    result = checked_run(spec, tmp_path, on_progress=lambda phase, done, total: phases.append(phase))
    assert (result.status, result.cause, result.reason) == (TrialStatus.COMPLETE, None, None)
    assert list(dict.fromkeys(phases)) == ["starting", "warming", "measuring", "stopping"]
    assert set(result.phases_s) == {"starting", "warming", "measuring", "stopping"}
    assert {name: m.num_requests for name, m in result.measurements.items()} == {"a": 6, "b": 3}
    assert all(m.num_failed == 0 for m in result.measurements.values())
    assert set(result.verdicts) == {"a", "b"}
    assert result.memory["host_rss_peak_gib"].value > 0.01
    assert result.provenance["python"]
    assert result.launch["argv"][2] == kind
    assert result.started_at <= result.ended_at
    traces = [json.loads(line) for line in (tmp_path / "trial" / "traces.jsonl").read_text().splitlines()]
    assert [trace["workload"] for trace in traces] == ["a"] * 6 + ["b"] * 3
    assert json.loads((tmp_path / "trial" / "plan.json").read_text())["argv"] == result.launch["argv"]


def test_a_second_attempt_in_the_same_folder_starts_clean(tmp_path: Path) -> None:
    checked_run(trial_spec(tmp_path), tmp_path)
    first = (tmp_path / "trial" / "traces.jsonl").read_text()
    result = checked_run(trial_spec(tmp_path, fail="vllm_cpu_fail_bad_flag.log", fail_code=2), tmp_path)
    assert result.cause == "unknown_flag"
    assert not (tmp_path / "trial" / "traces.jsonl").exists()
    again = checked_run(trial_spec(tmp_path), tmp_path)
    assert again.status is TrialStatus.COMPLETE
    assert len((tmp_path / "trial" / "traces.jsonl").read_text().splitlines()) == len(first.splitlines())


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        ("vllm_cpu_fail_bad_flag.log", TrialStatus.REFUSED, "unknown_flag"),
        ("vllm_cpu_fail_maxlen_over_model.log", TrialStatus.REFUSED, "max_len_over_model"),
        ("vllm_cpu_fail_unknown_model.log", TrialStatus.REFUSED, "model_missing"),
        ("vllm_cpu_fail_maxlen_over_kv.log", TrialStatus.UNFIT, "kv_cache_too_small"),
        ("vllm_cpu_fail_port_in_use.log", TrialStatus.INFRASTRUCTURE, "port_taken"),
        ("nothing that a rule knows", TrialStatus.FAILED, "unknown"),
    ],
)
def test_a_start_that_fails_is_a_result(tmp_path: Path, log: str, status: TrialStatus, cause: str) -> None:
    result = checked_run(trial_spec(tmp_path, fail=log, fail_after_s=0.2), tmp_path)
    assert (result.status, result.cause) == (status, cause)
    assert result.reason
    assert result.measurements == {}
    assert result.verdict is None
    assert (tmp_path / "trial" / "engine.log").stat().st_size > 0


def test_a_refused_k_is_no_failure_of_the_machine(tmp_path: Path) -> None:
    args = {"speculative-config": {"method": "dspark", "num_speculative_tokens": 4}}
    result = checked_run(trial_spec(tmp_path, args=args, refuse_k=[4]), tmp_path)
    assert (result.status, result.cause) == (TrialStatus.REFUSED, "block_size")
    assert result.speculation is not None
    assert result.speculation.proposals == 4


def test_what_the_method_should_reach_is_known_to_the_verdict(tmp_path: Path) -> None:
    args = {"speculative-config": {"method": "dspark", "num_speculative_tokens": 6}}
    # No position collapses after the one before it: only the method's own band tells that these are too few.
    result = checked_run(trial_spec(tmp_path, args=args, acceptance=[0.25, 0.2, 0.15, 0.1, 0.05, 0.02]), tmp_path)
    assert result.verdict is not None
    assert "acceptance_collapse" in {reason.code for reason in result.verdict.reasons}


def test_a_drafter_that_learns_is_made_to_forget(tmp_path: Path) -> None:
    args = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 5}
    workloads = {"chat": replace(SHORT, num_prompts=4, output_tokens=24)}
    slow = {"acceptance": [0.5, 0.3, 0.2, 0.1], "remembers": True}
    result = checked_run(trial_spec(tmp_path, "sglang", args=args, workloads=workloads, **slow), tmp_path)
    assert result.verdict is not None
    assert result.verdict.reasons == ()


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_under_load_keeps_what_was_measured(tmp_path: Path, kind: str) -> None:
    # Readiness 1, warm-up 2, six measured: it dies in the second workload.
    workloads = {"first": SHORT, "second": replace(SHORT, num_prompts=6)}
    result = checked_run(trial_spec(tmp_path, kind, workloads=workloads, oom_after=14), tmp_path)
    assert (result.status, result.cause) == (TrialStatus.UNFIT, "out_of_memory_load")
    assert "out of memory" in (result.evidence or "")
    assert list(result.measurements) == ["first"]
    assert result.measurements["first"].num_failed == 0
    assert result.verdicts["first"].level == "valid" or result.verdicts["first"].reasons
    assert len((tmp_path / "trial" / "traces.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("die_signal", "status", "cause"),
    [("SIGKILL", TrialStatus.INFRASTRUCTURE, "killed"), ("SIGABRT", TrialStatus.FAILED, "crashed")],
)
def test_an_engine_that_is_killed_while_measured(
    tmp_path: Path, die_signal: str, status: TrialStatus, cause: str
) -> None:
    workloads = {"long": replace(SHORT, num_prompts=40, output_tokens=64)}
    result = checked_run(trial_spec(tmp_path, workloads=workloads, die_after_s=1.0, die_signal=die_signal), tmp_path)
    assert (result.status, result.cause) == (status, cause)
    assert die_signal in (result.reason or "")


def test_a_request_without_a_token_ends_the_trial_and_keeps_the_rest(tmp_path: Path) -> None:
    workloads = {"first": SHORT, "second": replace(SHORT, stall_s=1.0, num_prompts=4), "third": SHORT}
    spec = trial_spec(tmp_path, workloads=workloads, hang={"after": 12, "seconds": 60})
    began = time.monotonic()
    result = checked_run(spec, tmp_path)
    assert time.monotonic() - began < 30
    assert (result.status, result.cause) == (TrialStatus.FAILED, "no_token")
    assert "second: request" in (result.reason or "")
    assert "stall_s" in (result.lever or "")
    assert list(result.measurements) == ["first", "second"]
    assert result.measurements["first"].num_failed == 0
    assert result.measurements["second"].num_failed == 1
    lines = (tmp_path / "trial" / "traces.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"] for line in lines if json.loads(line)["error"]] == ["no token for 1 s"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_refuses_every_request(tmp_path: Path, kind: str) -> None:
    # The first completion is readiness's own; from then on every request is refused.
    spec = trial_spec(tmp_path, kind, faults={"http_400": 1}, faults_after=1)
    result = checked_run(spec, tmp_path)
    assert (result.status, result.cause) == (TrialStatus.FAILED, "no_successful_request")
    assert "HTTP 400" in (result.reason or "")
    measured = result.measurements["chat"]
    assert measured.num_failed == measured.num_requests
    assert result.verdict is not None
    assert result.verdict.level == "invalid"


DEAD_INSIDE = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        self.reply(200, {"data": [{"id": "org/model"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.asked += 1
        if Handler.asked == 1:
            return self.reply(200, {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}})
        print("(EngineCore pid=9) ERROR 11-29 10:00:00 [core.py:1004] EngineCore encountered a fatal error.\\n"
              "(EngineCore pid=9) ERROR 11-29 10:00:00 [core.py:1004] Traceback (most recent call last):\\n"
              "(EngineCore pid=9) ERROR 11-29 10:00:00 [core.py:1004] torch.OutOfMemoryError: CUDA out of memory. "
              "Tried to allocate 2.32 GiB.", flush=True)
        self.reply(500, {"error": {"message": "EngineCore encountered an issue."}})
    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        return
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_a_front_end_that_outlives_its_engine_is_explained_by_the_log(tmp_path: Path) -> None:
    result = checked_run(trial_spec(tmp_path, command=program(tmp_path, DEAD_INSIDE)), tmp_path)
    assert result.status is TrialStatus.UNFIT
    assert "none of its 6 requests succeeded" in (result.reason or "")
    assert "OutOfMemoryError" in (result.evidence or "")


def test_draft_weights_that_were_not_loaded_are_told_though_it_ran(tmp_path: Path) -> None:
    args = {"speculative-config": {"method": "dspark", "num_speculative_tokens": 5}}
    result = checked_run(trial_spec(tmp_path, args=args, draft_warnings=True), tmp_path)
    assert (result.status, result.cause) == (TrialStatus.COMPLETE, "draft_weights_missing")
    assert result.facts["draft_weights_lost"].value > 0
    assert result.measurements


def test_a_trial_that_is_clearly_worse_is_ended_early(tmp_path: Path) -> None:
    asked = []

    def go_on(workload: str, _measurement: object) -> bool:
        asked.append(workload)
        return False

    result = checked_run(trial_spec(tmp_path, workloads={"a": SHORT, "b": SHORT}), tmp_path, on_measurement=go_on)
    assert (result.status, result.cause) == (TrialStatus.PRUNED, "clearly_worse")
    assert asked == ["a"]
    assert result.measurements["a"].num_requests == 2


def test_no_progress_keeps_the_facts_of_the_log(tmp_path: Path) -> None:
    spec = trial_spec(tmp_path, silent_load_s=60.0, ready=Ready(timeout_s=60.0, stall_s=1.5))
    result = checked_run(spec, tmp_path)
    assert (result.status, result.cause) == (TrialStatus.FAILED, "no_progress")
    assert result.evidence
    assert result.launch["argv"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ["no-such-engine"]}, "no-such-engine: there is no such program"),
        ({"gpus": 2}, "needs 2 GPUs and was given none"),
    ],
)
def test_what_this_node_cannot_start_is_infrastructure(tmp_path: Path, fields: dict, words: str) -> None:
    result = checked_run(trial_spec(tmp_path, **fields), tmp_path)
    assert (result.status, result.cause) == (TrialStatus.INFRASTRUCTURE, "machine")
    assert words in (result.reason or "")
    assert result.launch == {}


def test_prompts_that_are_not_there_are_told(tmp_path: Path) -> None:
    workloads = {"chat": replace(SHORT, prompts=str(tmp_path / "nowhere"))}
    result = checked_run(trial_spec(tmp_path, workloads=workloads), tmp_path)
    assert result.cause == "configuration"
    assert "nowhere" in (result.reason or "")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "GPU_RELEASE_TIMEOUT_S", 1.0)
    fake = FakeNvml(tmp_path)
    fake.load(monkeypatch)
    return fake


def test_memory_of_both_gpus_is_recorded_and_given_back(node: FakeNvml, tmp_path: Path) -> None:
    record = tmp_path / "record"
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").peers(0, 1, 5).holder(0, record, 40_000).holder(1, record, 41_000)
    spec = trial_spec(tmp_path, gpus=2, args={"tensor-parallel-size": 2}, record=str(record))
    result = checked_run(spec, tmp_path, gpu_ids=("0", "1"))
    assert result.status is TrialStatus.COMPLETE
    assert result.memory["gpu0_peak_gib"].value == pytest.approx(40_500 / 1024, abs=0.001)
    assert result.memory["gpu1_peak_gib"].value == pytest.approx(41_500 / 1024, abs=0.001)
    assert result.memory["gpu0_peak_gib"].source.startswith("NVML")
    assert result.launch["gpu_ids"] == ["0", "1"]
    assert result.provenance["topology"][0]["p2p_read"] == "not supported"
    assert not [r for v in result.verdicts.values() for r in v.reasons if r.code == "gpu_shared"]


def test_a_neighbour_on_the_gpu_makes_the_numbers_invalid(node: FakeNvml, tmp_path: Path) -> None:
    node.gpu("GPU-aaaa")
    neighbour = subprocess.Popen(["/bin/sleep", "60"])
    try:
        spec = trial_spec(tmp_path, gpus=1)
        came = lambda phase, *_: node.pid(0, neighbour.pid, 100) if phase == "warming" else None  # noqa: E731
        result = checked_run(spec, tmp_path, gpu_ids=("0",), on_progress=came)
    finally:
        neighbour.kill()
        neighbour.wait(10)
    reasons = {r.code: r.detail for v in result.verdicts.values() for r in v.reasons}
    assert f"pid {neighbour.pid} (sleep)" in reasons["gpu_shared"]
    assert result.verdict is not None
    assert result.verdict.level == "invalid"


def test_a_gpu_that_does_not_come_back_is_named_and_not_used_again(node: FakeNvml, tmp_path: Path) -> None:
    record, later = tmp_path / "record", tmp_path / "later"
    node.gpu("GPU-aaaa").gpu("GPU-bbbb").holder(0, later, 30_000)
    holder = subprocess.Popen(["/bin/sleep", "60"])
    spec = trial_spec(tmp_path, gpus=1, record=str(record))
    try:
        came = lambda phase, *_: later.write_text(str(holder.pid)) if phase == "stopping" else None  # noqa: E731
        result = checked_run(spec, tmp_path, gpu_ids=("0",), on_progress=came)
        assert (result.status, result.cause) == (TrialStatus.INFRASTRUCTURE, "not_released")
        assert f"GPU 0 still holds 29.8 GiB, 0.5 GiB before the trial; held by pid {holder.pid} (sleep)" in (
            result.reason or ""
        )
        # The measurement itself was sound and is kept.
        assert result.measurements["chat"].num_failed == 0
        assert checked_run(spec, tmp_path, gpu_ids=("1",)).status is TrialStatus.COMPLETE
        refused = checked_run(spec, tmp_path, gpu_ids=("0",))
        assert (refused.status, refused.cause) == (TrialStatus.INFRASTRUCTURE, "gpu_busy")
        assert "in quarantine: GPU 0 still holds" in (refused.reason or "")
        assert len(record.read_text().splitlines()) == 2
    finally:
        holder.kill()
        holder.wait(10)
    assert checked_run(spec, tmp_path, gpu_ids=("0",)).status is TrialStatus.COMPLETE


def test_a_process_that_is_killed_in_mid_measurement_leaves_no_engine(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}]
from tests.support.launches import trial_spec
from orchestrator.trial.run import run
from orchestrator.config import Workload
root = Path({str(tmp_path)!r})
work = Workload(output_tokens=400, num_prompts=100, repeats=1)
def tell(phase, done, total):
    (root / "phase").write_text(phase)
run(trial_spec(root, workloads={{"long": work}}, children=str(root / "children"), record=str(root / "record")),
          root / "trial", on_progress=tell)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        phase = tmp_path / "phase"
        while not phase.exists() or phase.read_text() != "measuring":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = [int(word) for word in (tmp_path / "children").read_text().split()]
        pids.append(json.loads((tmp_path / "record").read_text())["pid"])
        assert all(map(alive, pids))
        os.kill(owner.pid, signal.SIGKILL)
        assert gone(pids, 15.0)
    finally:
        owner.kill()
        owner.wait(10)
    assert not (tmp_path / "trial" / "result.json").exists()


def test_secrets_are_in_nothing_that_is_written(tmp_path: Path) -> None:
    record = tmp_path / "record"
    wishes = {"record": str(record), "record_env": ["HF_TOKEN"]}
    spec = trial_spec(tmp_path, env={"HF_TOKEN": "hf-5ecret", "NCCL_DEBUG": "INFO"}, **wishes)
    result = checked_run(spec, tmp_path)
    assert json.loads(record.read_text())["env"]["HF_TOKEN"] == "hf-5ecret"
    record.unlink()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or "hf-5ecret" not in path.read_text(errors="replace"), path
    # The caller keeps what it needs to start the point once more.
    assert result.spec == spec
    written = trial.from_json((tmp_path / "trial" / "result.json").read_text()).spec.engine.env
    assert (written["HF_TOKEN"], written["NCCL_DEBUG"]) == ("****", "INFO")
