"""`tune --dry-run`: the exact command lines, what is wrong with them, and what the campaign will cost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import config, search, trial
from orchestrator.campaign.ledger import campaigns_folder
from orchestrator.cli import dry_run
from orchestrator.config import Experiment
from orchestrator.errors import ConfigError, MachineError
from orchestrator.outcome import TrialStatus
from tests.support.builders import make_result
from tests.support.launches import FAKE_ENGINE, KINDS, marked, program


def experiment(tmp_path: Path, *overrides: str, kind: str = "vllm") -> Experiment:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"""
engine:
  kind: {kind}
  model: org/model
  command: ["{sys.executable}", "{FAKE_ENGINE}", {kind}]
  root: "{tmp_path}"
  env: {{NCCL_DEBUG: INFO, HF_TOKEN: hf-secret}}
workloads: {{chat: {{output_tokens: 16}}}}
placement: {{gpus: 0, cpus: 1}}
search: {{launches: 3}}
objective: {{metric: chat/decode_tok_s}}
tracking: {{folder: "{tmp_path}/mlruns"}}
"""
    )
    return config.load(path, list(overrides))


def test_every_command_line_whole(tmp_path: Path) -> None:
    sweep = experiment(
        tmp_path,
        "search.grid={engine.args.speculative-config.num_speculative_tokens: [2, 4]}",
        "engine.args.speculative-config.method=ngram",
    )
    plan = dry_run.plan_campaign(sweep)
    assert plan.num_starts == (4, 6)
    assert plan.document()["num_starts"] == {"least": 4, "most": 6}
    document = json.loads(json.dumps(plan.document(), allow_nan=False))
    assert {"experiment", "trials", "skipped"} <= set(document)
    assert [set(each) for each in document["trials"]] == [{"name", "argv", "env", "placement"}] * 2
    configs = [json.loads(each["argv"][each["argv"].index("--speculative-config") + 1]) for each in document["trials"]]
    assert configs == [{"method": "ngram", "num_speculative_tokens": k} for k in (2, 4)]
    assert document["trials"][0]["env"] == {"NCCL_DEBUG": "INFO", "HF_TOKEN": "****"}
    assert not plan.warnings
    assert marked() == []
    assert not list(tmp_path.rglob("engine.log"))


def test_a_line_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    plan = dry_run.plan_campaign(
        experiment(tmp_path, "engine.args.speculative-config={method: ngram, num_speculative_tokens: 2}")
    )
    lines = plan.lines()
    assert "hf-secret" not in "\n".join(lines)
    (line,) = (line for line in lines if str(FAKE_ENGINE) in line)
    words = shlex.split(line)
    assert words[:2] == ["NCCL_DEBUG=INFO", "HF_TOKEN=****"]
    assert words[2:] == plan.document()["trials"][0]["argv"]
    answer = subprocess.run(["/bin/sh", "-c", f"{line} --version"], capture_output=True, text=True, check=True)
    assert answer.stdout.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_flag_is_named_with_the_nearest(tmp_path: Path, kind: str) -> None:
    nearest = {"vllm": "max-num-seqs", "sglang": "max-running-requests", "llamacpp": "ctx-size"}[kind]
    misspelt = nearest[:-1]
    plan = dry_run.plan_campaign(experiment(tmp_path, f"engine.args.{misspelt}=4", kind=kind))
    (warning,) = plan.warnings
    assert f"--{misspelt}" in warning
    assert f"--{nearest}" in warning
    assert dry_run.plan_campaign(experiment(tmp_path, f"engine.args.{nearest}=4", kind=kind)).warnings == ()


def test_help_is_asked_once_per_engine_and_may_be_missing(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    command = program(tmp_path, "").pop()
    Path(command).write_text(f"import sys\nopen({str(asked)!r}, 'a').write('x')\nsys.exit(3)\n")
    points = "search.grid={engine.args.max-num-seqs: [1, 2, 3]}"
    plan = dry_run.plan_campaign(experiment(tmp_path, f"engine.command=[{sys.executable}, {command}]", points))
    assert (len(plan.launches), plan.warnings, asked.read_text()) == (3, (), "x")
    assert len(dry_run.plan_campaign(experiment(tmp_path, "engine.command=[no-such-engine]", points)).launches) == 3


def test_help_runs_as_the_engine_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    source = program(tmp_path, "").pop()
    names = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
    Path(source).write_text(f"import os\nprint([os.environ.get(n) for n in {names!r}])\n")
    (spec,) = search.points(experiment(tmp_path, f"engine.command=[{sys.executable}, {source}]"))[0]
    answer = dry_run.ask_help(spec.engine, dry_run.plan_launch(spec))
    assert answer == dry_run.HelpAnswer(exit_code=0, text="[None, '', 'INFO']\n")


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "~/no-such-model", "a/b/c"])
def test_a_model_path_that_is_not_there_stops_before_the_first_start(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        dry_run.check_startable(experiment(tmp_path, f"engine.model={model}"))
    dry_run.check_startable(experiment(tmp_path, "engine.model=org/on-the-hub"))


def test_a_program_that_is_not_there_names_the_environment_to_install(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="engine install mine`"):
        dry_run.check_startable(experiment(tmp_path, "engine.environment=mine", "engine.command=[vllm, serve]"))


def test_the_estimate_comes_from_trials_that_were_timed_here(tmp_path: Path) -> None:
    sweep = experiment(tmp_path, "search.grid={engine.args.max-num-seqs: [1, 2]}")
    assert dry_run.plan_campaign(sweep).estimate_s is None
    assert any("No estimate" in line for line in dry_run.plan_campaign(sweep).lines())
    (spec, _) = dry_run.plan_campaign(sweep).launches[0]
    for number, seconds in enumerate((50.0, 60.0, 900.0, 3.0, 3.0)):
        folder = campaigns_folder(sweep) / "20261129-100000" / "trials" / str(number)
        folder.mkdir(parents=True)
        phases = {"starting": seconds - 10, "measuring": 10.0}
        status = TrialStatus.COMPLETE if seconds > 10 else TrialStatus.REFUSED
        trial.write_result(make_result(spec, status=status, phases_s=phases), folder)
    (folder / "result.json").with_name("torn.json").write_text("{")
    plan = dry_run.plan_campaign(sweep)
    # The median of the three that were measured, for two points in two passes or in three.
    assert plan.estimate_s == (60.0 * 4, 60.0 * 6)
    assert "About 4 to 6 min" in plan.lines()[-1]


def test_each_trials_placement_is_named_where_they_differ(tmp_path: Path) -> None:
    alike = dry_run.plan_campaign(experiment(tmp_path))
    assert alike.lines()[0].endswith("each on 0 GPUs and 1 CPUs of one node")
    variants = "search.variants={one: {placement.cpus: 1}, two: {placement.cpus: 2, placement.gpus: 2}}"
    differ = dry_run.plan_campaign(experiment(tmp_path, variants, "engine.args.tensor-parallel-size=2"))
    text = "\n".join(differ.lines())
    assert "2 points, 4 to 6 engine starts, of several sizes" in text
    assert "# 1 one, on 0 GPUs and 1 CPUs of one node" in text
    assert "# 2 two, on 2 GPUs and 2 CPUs of one node" in text
    placements = [each["placement"] for each in differ.document()["trials"]]
    assert placements == [{"gpus": 0, "cpus": 1}, {"gpus": 2, "cpus": 2}]
