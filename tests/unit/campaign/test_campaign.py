"""The state of a campaign, on real folders and real MLflow stores, without Ray: the trials' answers are made up."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from orchestrator import search, trial
from orchestrator.campaign import campaign
from orchestrator.campaign.campaign import Campaign, Event, Launch
from orchestrator.config import Confirm, EngineSpec, Experiment, Objective, Search, Tracking, Workload
from orchestrator.errors import ConfigError, MachineError
from orchestrator.measure.verdict import Level, Verdict
from orchestrator.outcome import TrialStatus
from orchestrator.trial import TrialResult
from orchestrator.tuning.sampler import for_experiment
from tests.support import made_results as made
from tests.support.paths import TESTS

K = "engine.args.speculative-config.num_speculative_tokens"
NO_SPEC = {"no-spec": {"engine.args.speculative-config": None}}
SPECULATION = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}


def experiment(folder: Path, **sections: Any) -> Experiment:
    """A k sweep; keyword arguments that are no section of an Experiment are those of the search."""
    others = {key: sections.pop(key) for key in ("objective", "engine") if key in sections}
    return Experiment(
        name="swept",
        workloads={"chat": Workload()},
        search=Search(**{"grid": {K: [2, 4, 6]}, **sections}),
        tracking=Tracking(folder=str(folder / "mlruns")),
        **{
            "engine": EngineSpec(kind="vllm", model="org/model", root=str(folder), args=SPECULATION),
            "objective": Objective(metric="chat/decode_tok_s"),
            **others,
        },
    )


def answer(launch: Launch, rate: float = 100.0, **changes: Any) -> TrialResult:
    valid = Verdict(level=Level.VALID, reasons=())
    result = TrialResult(
        spec=launch.spec,
        status=TrialStatus.COMPLETE,
        measurements={"chat": made.measurement(decode_tok_s=(rate * 0.999, rate, rate * 1.001))},
        verdicts={"chat": valid},
        verdict=valid,
        phases_s={"starting": 1.0},
        started_at="2026-01-01T00:00:00+00:00",
    )
    return replace(result, **changes)


def fault(launch: Launch, status: TrialStatus, cause: str, reason: str = "as it said") -> TrialResult:
    return TrialResult(spec=launch.spec, status=status, cause=cause, reason=reason)


def by_k(launch: Launch) -> TrialResult:
    return answer(launch, {None: 50.0, 2: 100.0, 4: 140.0, 6: 120.0}[launch.spec.params.get(K)])


def drive(running: Campaign, respond: Callable[[Launch], TrialResult], most: int = 100) -> list[str]:
    """What tune.py does, one trial at a time. Returns the names in the order of their starts."""
    started: list[str] = []
    while len(started) < most and (launch := running.next_launch()) is not None:
        running.started(str(len(started)), launch)
        started.append(launch.spec.name)
        running.ended(launch, respond(launch))
    return started


@contextmanager
def opened(made_of: Experiment, *, resume: bool = False, **arguments: Any) -> Iterator[Campaign]:
    with campaign.opened(made_of, resume=resume, **arguments) as running:
        yield running
        assert_adds_up(running)


def assert_adds_up(running: Campaign) -> None:
    account = running.account()
    assert account.planned == account.earlier + account.started + account.skipped + len(account.not_run)
    assert account.planned >= len(running.launches)


def runs(made_of: Experiment) -> list[tuple[str, str, str | None]]:
    """(name, status, cause) of every trial's run in MLflow, oldest first."""
    client = MlflowClient(f"sqlite:///{made_of.tracking.folder}/mlflow.db")
    found = client.get_experiment_by_name(made_of.name)
    assert found is not None
    trials = client.search_runs([found.experiment_id], "tags.kind = 'trial'", order_by=["attributes.start_time ASC"])
    return [(str(run.info.run_name), run.info.status, run.data.tags.get("cause")) for run in trials]


def test_every_point_is_started_once_and_the_best_is_named(tmp_path: Path) -> None:
    swept = experiment(tmp_path, variants=NO_SPEC, baseline="no-spec")
    with opened(swept) as running:
        assert drive(running, by_k) == ["no-spec", "k=2", "k=4", "k=6"]
        recorded, selection = running.finish()
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    assert [r.result.spec.name for r in recorded] == ["no-spec", "k=2", "k=4", "k=6"]
    assert recorded[2].result.measurements["chat"].metrics["speedup"].value == pytest.approx(2.8)
    assert str(running.account()) == "4 planned: 4 started, 0 skipped"
    assert [status for _, status, _ in runs(swept)] == ["FINISHED"] * 4


def test_machine_at_fault_is_tried_again_and_every_attempt_is_recorded(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    faults = iter(["port_taken", "gpu_busy"])

    def respond(launch: Launch) -> TrialResult:
        cause = next(faults, None) if launch.spec.params[K] == 4 else None
        return fault(launch, TrialStatus.INFRASTRUCTURE, cause) if cause else by_k(launch)

    with opened(swept) as running:
        assert drive(running, respond) == ["k=2", "k=4", "k=6", "k=4", "k=4"]
        recorded, _ = running.finish()
    assert [r.result.status for r in recorded] == [TrialStatus.COMPLETE] * 3
    assert [run for run in runs(swept) if run[0] == "k=4"] == [
        ("k=4", "KILLED", "port_taken"),
        ("k=4", "KILLED", "gpu_busy"),
        ("k=4", "FINISHED", None),
    ]


@pytest.mark.parametrize(
    ("status", "cause", "num_starts"),
    [
        (TrialStatus.INFRASTRUCTURE, "gpu_busy", 3),
        (TrialStatus.FAILED, "missing_module", 3),
        # The engine's own answer to a value is a result each time, however alike.
        (TrialStatus.REFUSED, "unknown_flag", 6),
        (TrialStatus.UNFIT, "out_of_memory_load", 6),
    ],
)
def test_three_faults_alike_in_a_row_stop(tmp_path: Path, status: TrialStatus, cause: str, num_starts: int) -> None:
    # Sizes that fall, so that none is proven hopeless by the one before it.
    with opened(experiment(tmp_path, grid={K: [12, 10, 8, 6, 4, 2]})) as running:
        assert len(drive(running, lambda launch: fault(launch, status, cause))) == num_starts
        assert (running.stopped is not None) == (num_starts == 3)
        if running.stopped:
            assert cause in running.stopped
            assert [name for name, _ in running.skipped] == ["k=6", "k=4", "k=2"]
            assert all(why == running.stopped for _, why in running.skipped)


def test_faults_that_differ_do_not_stop(tmp_path: Path) -> None:
    reasons = iter(range(100))
    with opened(experiment(tmp_path, grid={K: [1, 2, 3, 4, 5]})) as running:
        drive(running, lambda launch: fault(launch, TrialStatus.FAILED, "crashed", f"at address {next(reasons)}"))
        assert running.stopped is None
        assert len(running.results) == 5


def test_finalists_are_started_again_interleaved_and_all_launches_decide(tmp_path: Path) -> None:
    swept = experiment(tmp_path, confirm=Confirm(top=2, launches=2))
    # In its first launch k=4 was lucky: seen alone, it is 8% ahead.
    rates = {2: [90.0] * 3, 4: [130.0, 99.0, 99.5], 6: [120.0] * 3}

    def respond(launch: Launch) -> TrialResult:
        return answer(launch, rates[launch.spec.params[K]][launch.launch - 1])

    with opened(swept) as running:
        assert drive(running, respond) == ["k=2", "k=4", "k=6", "k=4#2", "k=6#2", "k=4#3", "k=6#3"]
        first = [result for result in running.ordered_results() if "#" not in result.spec.name]
        assert "ahead of k=6" in search.select(swept, first).reason
        _, selection = running.finish()
    assert "within the noise of k=6" in selection.reason


def test_hopeless_point_is_skipped_with_its_witness(tmp_path: Path) -> None:
    with opened(experiment(tmp_path, grid={"engine.args.max-model-len": [4096, 8192, 16384]})) as running:
        started = drive(
            running, lambda n: answer(n) if n.spec.params["engine.args.max-model-len"] == 4096 else unfit(n)
        )
        assert len(started) == 2
        assert len(running.skipped) == 1
        assert "did not fit" in running.skipped[0][1]
        assert "8192" in running.skipped[0][1]


def unfit(launch: Launch) -> TrialResult:
    return fault(launch, TrialStatus.UNFIT, "kv_cache_too_small")


def test_budget_is_told_after_the_first_start_and_kept(tmp_path: Path) -> None:
    told: list[Event] = []
    with opened(experiment(tmp_path, time_budget_s=300.0), on_event=told.append) as running:
        assert drive(running, lambda launch: answer(launch, phases_s={"measuring": 400.0})) == ["k=2"]
        notes = [event.note for event in told if event.note]
        assert len(notes) == 1
        assert "k=6" in notes[0]
        assert [name for name, _ in running.skipped] == ["k=4", "k=6"]
        assert "300" in running.skipped[0][1]


def test_no_budget_no_note(tmp_path: Path) -> None:
    told: list[Event] = []
    with opened(experiment(tmp_path), on_event=told.append) as running:
        drive(running, answer)
    assert not [event for event in told if event.note]


def test_every_trial_is_held_against_the_best_so_far(tmp_path: Path) -> None:
    swept = experiment(tmp_path, variants=NO_SPEC, baseline="no-spec", stop_early=True)
    with opened(swept) as running:
        launch = running.next_launch()
        assert launch is not None
        assert running.incumbent() is None
        running.started("0", launch)
        running.ended(launch, by_k(launch))
        best = running.incumbent()
        assert best is not None
        assert best.spec.name == launch.spec.name


def test_without_stop_early_there_is_no_incumbent(tmp_path: Path) -> None:
    with opened(experiment(tmp_path)) as running:
        drive(running, by_k)
        assert running.incumbent() is None


def test_pruned_trial_is_recorded_and_cannot_win(tmp_path: Path) -> None:
    swept = experiment(tmp_path, stop_early=True)

    def respond(launch: Launch) -> TrialResult:
        result = by_k(launch)
        # Better than the rest, to show that its number is not even looked at.
        return replace(answer(launch, 900.0), status=TrialStatus.PRUNED) if launch.spec.params[K] == 6 else result

    with opened(swept) as running:
        drive(running, respond)
        _, selection = running.finish()
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    assert ("k=6", "FINISHED", None) in runs(swept)


def test_resume_starts_only_what_is_missing(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept) as running:
        drive(running, by_k, most=2)
        folder, first = running.folder, running.ordered_results()
    with opened(swept, resume=True) as running:
        assert running.folder == folder
        assert drive(running, by_k) == ["k=6"]
        recorded, selection = running.finish()
    assert [r.result.measurements["chat"].repeats for r in recorded[:2]] == [
        r.measurements["chat"].repeats for r in first
    ]
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    assert all(r.run_id for r in recorded)
    assert sorted(runs(swept)) == sorted((f"k={k}", "FINISHED", None) for k in (2, 4, 6))
    assert running.account().earlier == 2


def test_resume_of_a_finished_campaign_starts_nothing(tmp_path: Path) -> None:
    swept = experiment(tmp_path, confirm=Confirm(top=2, launches=2))
    with opened(swept) as running:
        assert len(drive(running, by_k)) == 7
        before = running.finish()[1]
    with opened(swept, resume=True) as running:
        assert not running.wants_more()
        _, after = running.finish()
    assert (after.best.spec.name, after.reason) == (before.best.spec.name, before.reason)
    assert len(runs(swept)) == 7


def test_resume_repeats_a_torn_result_and_a_fault_of_the_machine(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept) as running:
        drive(running, by_k, most=2)
        drive(running, lambda launch: fault(launch, TrialStatus.INFRASTRUCTURE, "gpu_busy"), most=1)
        torn = running.workdir(running.launches[0]) / "result.json"
        torn.write_text(torn.read_text()[:-200])
    with opened(swept, resume=True) as running:
        assert drive(running, by_k) == ["k=2", "k=6"]


def test_resume_repeats_what_changed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("one")
    local = EngineSpec(kind="vllm", model="model", root=str(tmp_path), args=SPECULATION)
    with opened(experiment(tmp_path, engine=local)) as running:
        drive(running, by_k)
    changed = replace(local, args={**SPECULATION, "max-num-seqs": 2})
    for engine, starts in ((local, 0), (changed, 3), (local, 0)):
        with opened(experiment(tmp_path, engine=engine), resume=True) as running:
            assert len(drive(running, by_k)) == starts
    (model / "weights").write_text("another")
    with opened(experiment(tmp_path, engine=local), resume=True) as running:
        assert len(drive(running, by_k)) == 3


def test_without_resume_everything_runs_again(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    for _ in range(2):
        with opened(swept) as running:
            assert len(drive(running, by_k)) == 3
    assert len({path.parent for path in Path(swept.tracking.folder).glob("campaigns/swept/*/trials")}) == 2


def test_second_campaign_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept), pytest.raises(ConfigError, match=str(os.getpid())), opened(swept):
        pass
    with opened(swept, resume=True) as running:
        assert running.wants_more()


DYING_DRIVER = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_campaign import by_k, campaign, drive, experiment
with campaign.opened(experiment(Path({folder!r})), resume=False) as running:
    drive(running, by_k, most=1)
    running.started("x", running.next_launch())
    os.kill(os.getpid(), {number})
"""


def test_killed_driver_leaves_a_stale_lock_and_runs_that_the_next_one_closes(tmp_path: Path) -> None:
    script = DYING_DRIVER.format(tests=str(TESTS), folder=str(tmp_path), number=int(signal.SIGKILL))
    died = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    swept = experiment(tmp_path)
    assert [status for _, status, _ in runs(swept)] == ["FINISHED", "RUNNING"]
    with opened(swept, resume=True) as running:
        assert [status for _, status, _ in runs(swept)] == ["FINISHED", "KILLED"]
        assert drive(running, by_k) == ["k=4", "k=6"]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("a file where a folder is needed")
    with (
        pytest.raises(MachineError, match=r"mlruns/campaigns/swept: results cannot be written here"),
        opened(experiment(tmp_path)),
    ):
        pass


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this: the kernel's answer to a write is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_stops_the_campaign_and_keeps_what_was_written(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept) as running:
        drive(running, by_k, most=1)
        launch = running.next_launch()
        assert launch is not None
        running.started("1", launch)
        with files_end_at(512):
            running.ended(launch, by_k(launch))
        assert running.stopped is not None
        assert "cannot be written" in running.stopped
        assert running.next_launch() is None
        recorded, _ = running.finish()
        assert [r.result.spec.name for r in recorded] == ["k=2", "k=4"]
    with opened(swept, resume=True) as running:
        assert drive(running, by_k) == ["k=4", "k=6"]


def test_interrupted_trial_is_not_a_result(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept) as running:
        drive(running, by_k, most=1)
        launch = running.next_launch()
        assert launch is not None
        running.started("1", launch)
        running.interrupted = "SIGINT"
        running.ended(launch, fault(launch, TrialStatus.INFRASTRUCTURE, "trial_process_lost"))
        assert running.next_launch() is None
        recorded, _ = running.finish()
        assert len(recorded) == 1
        assert running.unfinished == ["k=4", "k=6"]
        assert running.skipped == []
    assert runs(swept)[1] == ("k=4", "KILLED", "no_result")


SPACE = {
    "engine.args.speculative-config.method": ["ngram", "suffix"],
    K: {"low": 1, "high": 12, "when": {"engine.args.speculative-config.method": "ngram"}},
    "engine.args.max-num-seqs": [1, 2, 4],
}


def sampled(folder: Path, **changes: Any) -> Experiment:
    return experiment(folder, **{"grid": {}, "space": SPACE, "sampler": "tpe", "num_samples": 24, "seed": 3, **changes})


def landscape(launch: Launch) -> TrialResult:
    """Best at ngram, k = 8, one sequence; k above 10 is refused."""
    params = launch.spec.params
    k = params.get(K, 0)
    if k > 10:
        return fault(launch, TrialStatus.REFUSED, "value_refused", f"k={k}")
    return answer(launch, 100 - 2 * abs(k - 8) - 5 * params["engine.args.max-num-seqs"])


def points(running: Campaign) -> list[dict[str, Any]]:
    return [launch.spec.params for launch in running.launches]


def test_tpe_draws_different_points_learns_and_keeps_conditions(tmp_path: Path) -> None:
    with opened(sampled(tmp_path), sampler=for_experiment) as running:
        assert len(drive(running, landscape)) == 24
        drawn = points(running)
        assert len({json.dumps(p, sort_keys=True) for p in drawn}) == 24
        assert all((K in p) == (p["engine.args.speculative-config.method"] == "ngram") for p in drawn)
        refused = [p.get(K, 0) > 10 for p in drawn]
        _, selection = running.finish()
    assert selection.best is not None
    assert abs(selection.best.spec.params[K] - 8) <= 1
    # A sixth of the k in the space is refused; what was learnt shows in the second half.
    assert sum(refused[12:]) <= 2


def test_tpe_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        with opened(sampled(tmp_path / str(number), num_samples=8, seed=seed), sampler=for_experiment) as running:
            drive(running, landscape)
            drawn.append(points(running))
    assert drawn[0] == drawn[1] != drawn[2]


def test_tpe_resumes_where_it_was(tmp_path: Path) -> None:
    parts, started = sampled(tmp_path, num_samples=12), list[str]()
    earlier: list[dict[str, Any]] = []
    for _ in range(4):
        with opened(parts, resume=bool(started), sampler=for_experiment) as running:
            started += drive(running, landscape, most=3)
            assert points(running)[: len(earlier)] == earlier
            earlier, ledger = points(running), running.folder / "samples.jsonl"
        with ledger.open("a") as torn:
            torn.write('{"engine.args.max')
    assert len(started) == len(set(started)) == len(earlier) == 12


def test_tpe_says_when_the_space_is_exhausted(tmp_path: Path) -> None:
    small = sampled(tmp_path, space={"engine.args.max-num-seqs": [1, 2, 4]}, num_samples=5)
    with opened(small, sampler=for_experiment) as running:
        assert len(drive(running, answer)) == 3
        assert running.skipped == [("2 samples", "5 samples asked for, no more than 3 different points were found")]


def test_tpe_does_not_start_a_variant_again(tmp_path: Path) -> None:
    variants = {"one": {"engine.args.max-num-seqs": 1}}
    small = sampled(tmp_path, variants=variants, space={"engine.args.max-num-seqs": [1, 2, 4]}, num_samples=3)
    with opened(small, sampler=for_experiment) as running:
        started = drive(running, answer)
        assert started[0] == "one"
        assert len(started) == 3
        assert len({launch.spec.key for launch in running.launches}) == 3


def test_results_on_disk_are_what_search_selects_from(tmp_path: Path) -> None:
    swept = experiment(tmp_path)
    with opened(swept) as running:
        drive(running, by_k)
        read = [trial.from_json((running.workdir(n) / "result.json").read_text()) for n in running.launches]
    assert search.select(swept, read).best == by_k(running.launches[1])
