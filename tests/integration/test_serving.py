"""Promotion over the stand-in engine, with a real Ray head, real Serve and a real MLflow store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import cluster
from orchestrator.config import Experiment
from orchestrator.errors import ConfigError, MachineError, PromotionError
from orchestrator.measure.verdict import Level
from orchestrator.serving import service as serving
from orchestrator.serving.head import Head, start_head, stop_head
from tests.support.fake.talk import FakeEngine
from tests.support.service_users import RETRY_AFTER, Stream, Watch, aliases, get, running, served, starts, until
from tests.support.stand_in_service import record_campaign, service_experiment, stand_in_result

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def every_503_says_when_to_come_back() -> Iterator[None]:
    RETRY_AFTER.clear()
    yield
    assert all(seconds >= 1 for seconds in RETRY_AFTER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    """A local head of ours with two pretended GPUs; every promotion of this module finds it by its state file."""
    started = start_head(folder / "mlruns" / "serving", num_gpus=2)
    yield started
    stop_head(folder / "mlruns" / "serving")


@pytest.fixture
def service(folder: Path, head: Head, free_port: Callable[[], int]) -> Iterator[Callable[..., Experiment]]:
    """make(name, **options) -> Experiment, whose service is stopped after the test. The head stays."""
    made: list[Experiment] = []

    def make(name: str, **options: Any) -> Experiment:
        made.append(service_experiment(folder, name, free_port(), **options))
        return made[-1]

    yield make
    for experiment in made:
        with cluster.join(head.address, with_token=True):
            serving.Deployment(experiment=experiment).delete()


def test_the_life_of_a_service_on_exactly_two_gpus(service: Callable[..., Experiment], tmp_path: Path) -> None:
    experiment = service("life", gpus=2)
    record = tmp_path / "starts.jsonl"
    behaviour = {"record": str(record), "record_env": ["CUDA_VISIBLE_DEVICES"]}
    slow, fast = (
        stand_in_result(experiment, n, tokens_per_s=r, **behaviour) for n, r in (("slow", 150), ("fast", 300))
    )
    same = stand_in_result(experiment, "same", tokens_per_s=301, **behaviour)
    slow_id, fast_id, same_id = record_campaign(experiment, slow, fast, same)
    said: list[str] = []

    first = serving.promote(experiment, run_id=slow_id, say=said.append)
    assert (first.decision, first.exit_code, first.serving_run_id) == ("promoted", 0, slow_id)
    assert aliases(experiment) == (slow_id, None)
    document = served(experiment)
    assert document["run_id"] == slow_id
    assert document["verified"]
    assert sorted(document["gpus"]) == ["0", "1"]
    assert "--tensor-parallel-size 2" in document["command_line"]
    assert document["recorded"]["talk"]["decode_tok_s"]["value"] == 150

    # The second needs the very GPUs that the first holds; meanwhile users are told to come back.
    said.clear()
    with Watch(experiment) as watch:
        second = serving.promote(experiment, run_id=fast_id, say=said.append)
    assert second.decision == "promoted"
    assert second.comparison is not None
    assert second.comparison.better
    assert second.downtime_s is not None
    assert any("stop, start, verify" in line for line in said)
    assert set(watch.statuses) <= {200, 503}
    assert 503 in watch.statuses
    assert aliases(experiment) == (fast_id, slow_id)
    assert len(running(record)) == 1
    assert {start["env"]["CUDA_VISIBLE_DEVICES"] for start in starts(record)} <= {"0,1", "1,0"}

    # Not really better: the champion stays, and nothing is started for that.
    before = len(starts(record))
    third = serving.promote(experiment, run_id=same_id)
    assert (third.decision, third.exit_code, third.serving_run_id) == ("kept", 0, fast_id)
    assert "does not prove it better" in third.reason
    assert len(starts(record)) == before

    # The best of the campaign is served already.
    assert serving.promote(experiment).decision == "kept"

    back = serving.rollback(experiment)
    assert (back.decision, back.serving_run_id) == ("promoted", slow_id)
    assert aliases(experiment) == (slow_id, fast_id)
    status = serving.status(experiment)
    assert status.status == "RUNNING"
    assert status.state is not None
    assert status.state["run_id"] == slow_id == status.champion_run_id
    json.dumps(back.document(), allow_nan=False)


def test_challengers_that_fail_are_rolled_back(service: Callable[..., Experiment], tmp_path: Path) -> None:
    experiment = service("failing")
    record = tmp_path / "starts.jsonl"
    good = stand_in_result(experiment, "good", tokens_per_s=200, record=str(record))
    crashing = stand_in_result(experiment, "crashing", tokens_per_s=400, fail="vllm_cpu_fail_maxlen_over_kv.log")
    slow = stand_in_result(experiment, "slow", tokens_per_s=201, recorded_tok_s=500, record=str(record))
    wrong = stand_in_result(experiment, "wrong", tokens_per_s=500, faults={"error_object": 2}, record=str(record))
    good_id, crashing_id, slow_id, wrong_id = record_campaign(experiment, good, crashing, slow, wrong)
    first = serving.promote(experiment, run_id=good_id)
    assert first.decision == "promoted", first

    for run_id, why in ((crashing_id, "did not start"), (slow_id, "worse than"), (wrong_id, "failed")):
        report = serving.promote(experiment, run_id=run_id)
        assert (report.decision, report.exit_code, report.serving_run_id) == ("rolled_back", 1, good_id)
        assert why in report.reason
        assert report.rollback is not None
        assert report.rollback.ok
        assert aliases(experiment) == (good_id, None)
        assert served(experiment)["run_id"] == good_id
        assert served(experiment)["verified"]
        assert len(running(record)) == 1


def test_the_first_challenger_that_fails_leaves_nothing(service: Callable[..., Experiment]) -> None:
    experiment = service("first", deadline_s=10)
    (run_id,) = record_campaign(experiment, stand_in_result(experiment, "dumb", silent_load_s=600))
    report = serving.promote(experiment, run_id=run_id)
    assert (report.decision, report.exit_code, report.serving_run_id) == ("failed", 1, None)
    assert "serving.deadline_s" in report.reason
    assert aliases(experiment) == (None, None)
    assert serving.status(experiment).status is None
    assert get(experiment, "/health")[0] == 0


def test_what_dies_in_service_is_replaced(service: Callable[..., Experiment], tmp_path: Path) -> None:
    experiment = service("dying")
    record = tmp_path / "starts.jsonl"
    (run_id,) = record_campaign(experiment, stand_in_result(experiment, "mortal", tokens_per_s=200, record=str(record)))
    assert serving.promote(experiment, force=True).decision == "promoted"
    body = {"model": "served", "prompt": "once", "max_tokens": 20_000, "stream": True}

    for victim in ("engine", "replica"):
        alive = running(record)
        assert len(alive) == 1
        long = Stream(experiment, body)
        assert served(experiment)["in_flight"] == 1
        # engine <- keeper <- replica
        keeper = psutil.Process(alive[0]).parent()
        assert keeper is not None
        os.kill(alive[0] if victim == "engine" else keeper.ppid(), signal.SIGKILL)
        with Watch(experiment) as watch:
            until(lambda: get(experiment, "/health")[0] == 503, 10)
            took_s = until(lambda gone=alive: get(experiment, "/health")[0] == 200 and running(record) != gone, 60)
        assert '"engine_lost"' in long.rest()
        assert set(watch.statuses) <= {200, 503}
        # Within 10 s plus the engine's own start: two seconds for the stand-in, its interpreter included.
        assert took_s < 12
        assert served(experiment)["run_id"] == run_id
        until(lambda: len(running(record)) == 1, 15)


def test_engines_come_and_go_with_the_requests(service: Callable[..., Experiment]) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "metrics_interval_s": 0.5}
    hasty = {"look_back_period_s": 1, "upscale_delay_s": 1, "downscale_delay_s": 2}
    experiment = service("scaling", autoscaling={**scaling, **hasty})
    record_campaign(experiment, stand_in_result(experiment, "scaling", tokens_per_s=50))
    assert serving.promote(experiment).decision == "promoted"
    assert served(experiment)["engines"] == 1
    body = {"model": "served", "prompt": "once", "max_tokens": 100, "ignore_eos": True}
    answers: list[tuple[int, str]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(get(experiment, "/v1/completions", body))

    users = [threading.Thread(target=ask) for _ in range(4)]
    for user in users:
        user.start()
    try:
        until(lambda: served(experiment)["engines"] == 2)
        # Both get requests: each sample of the merged page tells its replica.
        until(lambda: len({line for line in get(experiment, "/metrics")[1].splitlines() if _is_busy(line)}) == 2)
    finally:
        done.set()
        for user in users:
            user.join()
    assert {status for status, _ in answers} == {200}

    # Two requests, one at each engine, are work for one: the other goes, and its request is waited for.
    long = {**body, "max_tokens": 700, "stream": True}
    answers.clear()
    last = [threading.Thread(target=lambda: answers.append(get(experiment, "/v1/completions", long))) for _ in range(2)]
    for user in last:
        user.start()
    until(lambda: served(experiment)["engines"] == 1, 12)
    assert served(experiment)["in_flight"] == 2
    for user in last:
        user.join()
    assert [text.rstrip().endswith("data: [DONE]") for _, text in answers] == [True, True]
    assert served(experiment)["verified"]


def _is_busy(line: str) -> bool:
    return line.startswith("vllm:num_requests_running{") and float(line.split()[-1]) > 0


def test_a_killed_driver_leaves_a_service_that_the_next_command_manages(
    service: Callable[..., Experiment], folder: Path
) -> None:
    experiment = service("orphan")
    (run_id,) = record_campaign(experiment, stand_in_result(experiment, "only", tokens_per_s=100))
    script = (
        "import sys; from orchestrator import config; from orchestrator.serving import service as serving\n"
        "def say(text):\n    print(text, flush=True)\n"
        "serving.promote(config.load(sys.argv[1]), say=say)\n"
    )
    overrides_file = folder / "orphan.yaml"
    driver = subprocess.Popen(
        [sys.executable, "-c", script, str(overrides_file)], stdout=subprocess.PIPE, text=True, cwd=folder
    )
    assert driver.stdout is not None
    for line in driver.stdout:
        if "measuring" in line:
            break
    driver.kill()
    driver.wait()
    driver.stdout.close()
    # Nobody verified it, so nobody calls it champion; its pause ends by itself and it serves.
    until(lambda: get(experiment, "/v1/models")[0] == 200, 60)
    assert aliases(experiment) == (None, None)
    status = serving.status(experiment)
    assert status.state is not None
    assert (status.state["run_id"], status.state["verified"], status.state["open"]) == (run_id, False, True)
    report = serving.promote(experiment)
    assert report.decision == "promoted"
    assert aliases(experiment)[0] == run_id
    assert served(experiment)["verified"]


def test_the_key_of_the_environment_is_asked_for(
    service: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = service("locked", api_key_env="SERVICE_KEY", route="/llm")
    record_campaign(experiment, stand_in_result(experiment, "locked"))
    with pytest.raises(ConfigError, match="SERVICE_KEY is not set"):
        serving.promote(experiment)
    monkeypatch.setenv("SERVICE_KEY", "sesame")
    assert serving.promote(experiment).decision == "promoted"
    assert get(experiment, "/llm/v1/models")[0] == 401
    assert get(experiment, "/llm/v1/models", key="sesam")[0] == 401
    assert get(experiment, "/v1/models", key="sesame")[0] == 404
    status, text = get(experiment, "/llm/v1/models", key="sesame")
    assert (status, "served" in text) == (200, True)
    status, text = get(experiment, "/llm/metrics", key="sesame")
    assert "vllm:generation_tokens_total" in text
    assert "orchestrator_requests_total" in text


def test_only_what_is_proven_is_promoted(service: Callable[..., Experiment]) -> None:
    experiment = service("gate")
    invalid = stand_in_result(experiment, "invalid", level=Level.INVALID)
    suspect = stand_in_result(experiment, "suspect", level=Level.SUSPECT)
    invalid_id, suspect_id = record_campaign(experiment, invalid, suspect)
    for run_id, level in ((invalid_id, "invalid"), (suspect_id, "suspect")):
        with pytest.raises(PromotionError, match=f"its numbers are {level}"):
            serving.promote(experiment, run_id=run_id)
    forced = serving.promote(experiment, run_id=suspect_id, force=True)
    assert forced.decision == "promoted"
    assert any("suspect" in each for each in forced.forced)


def test_nobody_else_is_let_in_without_a_key(folder: Path) -> None:
    experiment = service_experiment(folder, "open", 8000, host="0.0.0.0")
    with pytest.raises(ConfigError, match="can be reached by others"):
        serving.promote(experiment)


def test_an_engine_that_has_no_room_is_refused(service: Callable[..., Experiment]) -> None:
    experiment = service("large", gpus=4)
    record_campaign(experiment, stand_in_result(experiment, "large"))
    with pytest.raises(MachineError, match=r"4 GPUs and 1 CPUs on ONE node; the nodes have: .* 2 GPUs"):
        serving.promote(experiment)


def test_a_port_that_is_taken_is_named(
    service: Callable[..., Experiment], fake_engine: Callable[..., FakeEngine]
) -> None:
    experiment = service("taken")
    stranger = fake_engine("vllm")
    record_campaign(experiment, stand_in_result(experiment, "taken"))
    taken = service_experiment(Path(experiment.engine.root), "taken", stranger.port)
    with pytest.raises(MachineError, match=f"serving.port: {stranger.port} on 127.0.0.1"):
        serving.promote(taken)
