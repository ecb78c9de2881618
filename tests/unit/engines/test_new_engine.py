"""A new engine is one module, one line of registry, one conf file: the toy engine passes through the whole program."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import config, search
from orchestrator.cli import dry_run, machine_checks
from orchestrator.config import Experiment
from orchestrator.engines import ENGINES
from orchestrator.engines.diagnosis.explain import compile_lines
from orchestrator.environments import install
from orchestrator.measure.checks import LEVELS
from orchestrator.measure.verdict import Level
from orchestrator.node import claims, program, readiness
from orchestrator.outcome import TrialStatus
from orchestrator.report.reference import reference_document
from orchestrator.search.pruning import hopeless
from orchestrator.trial import TrialResult
from orchestrator.trial.run import run
from tests.support.launches import marked
from tests.support.paths import ROOT, TESTS
from tests.support.toy_engine import Toy

SUPPORT = TESTS / "support"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line of registry."""
    monkeypatch.setitem(ENGINES, "toy", Toy())


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return load_toy(tmp_path)


def load_toy(folder: Path, *overrides: str) -> Experiment:
    command = f"engine.command=[{sys.executable}, {SUPPORT / 'toy_program.py'}]"
    settings = [command, f"engine.root={folder}", f"tracking.folder={folder}/mlruns"]
    return config.load(SUPPORT / "toy.yaml", [*settings, *overrides])


def test_it_is_one_short_module() -> None:
    assert len((SUPPORT / "toy_engine.py").read_text().splitlines()) < 120


def test_its_trial_is_complete_and_valid(experiment: Experiment, tmp_path: Path) -> None:
    search.check(experiment)
    planned = {spec.name: spec for spec in search.plan(experiment).points}
    result = run(planned["draft=4"], tmp_path / "trial")
    assert (result.status, result.reason) == (TrialStatus.COMPLETE, None)
    assert result.verdict is not None
    # A machine that is busy with other tests may be late; nothing else may take from the number.
    doubts = {reason.code for reason in result.verdict.reasons if LEVELS[reason.code] is not Level.VALID}
    assert doubts <= {"client_late"}, result.verdict
    assert result.measurements["chat"].metrics["acceptance_length"].value > 1
    assert result.memory["kv_tokens"].value > 0
    assert result.speculation is not None
    assert (result.speculation.family, result.speculation.proposals) == ("ngram", 4)
    assert marked() == []


def test_its_dry_run_shows_its_own_command_lines(experiment: Experiment) -> None:
    plan = dry_run.plan_campaign(experiment)
    flags = [dict(zip(launch.argv[2::2], launch.argv[3::2], strict=True)) for _, launch in plan.launches]
    assert [each.get("--draft") for each in flags] == [None, "2", "4"]
    assert {each["--checkpoint"] for each in flags} == {"org/toy"}
    assert plan.warnings == ()


def test_a_flag_that_it_does_not_have_is_named_with_the_nearest(tmp_path: Path) -> None:
    warnings = dry_run.plan_campaign(load_toy(tmp_path, "engine.args.contxt=1")).warnings
    assert any("--contxt" in line and "did you mean --context?" in line for line in warnings)


def test_doctor_asks_it_for_its_flags(experiment: Experiment) -> None:
    check = next(check for check in machine_checks.check_machine(experiment) if check.name == "engine toy")
    assert check.ok, check.detail


def test_its_variables_are_kept_from_every_engine_or_recorded() -> None:
    assert not program.is_inherited("TOY_ADDRESS")
    assert program.is_inherited("TOY_THREADS")
    assert program.is_setting("TOY_THREADS")
    assert not program.is_setting("TOYS")


def test_its_compile_cache_has_a_slot(tmp_path: Path) -> None:
    with claims.claim_cache_slot(tmp_path / "caches") as caches:
        assert Path(caches["TOY_CACHE"]).name == "toy"
        assert {"TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "SGLANG_DG_CACHE_DIR"} < set(caches)


def test_its_memory_arguments_prove_a_point_hopeless(tmp_path: Path) -> None:
    small, large = (
        search.plan(load_toy(tmp_path, f"engine.args.context={context}")).points[0] for context in (4096, 8192)
    )
    unfit = TrialResult(spec=large, status=TrialStatus.UNFIT, cause="kv_cache_too_small")
    assert hopeless(small, [unfit]) is None
    assert hopeless(replace(large, name="again"), [unfit]) is not None
    assert hopeless(large, [replace(unfit, spec=small)]) is not None


def test_its_own_log_phrases_are_read() -> None:
    assert compile_lines("Warming the toy\nwaiting\n", Toy.log) == ["Warming the toy"]
    assert compile_lines("Warming the toy\n", ENGINES["vllm"].log) == []


def test_its_health_path_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "health_path", "/alive")
    pattern = readiness.own_request(Toy())
    assert pattern.search(b'INFO: 127.0.0.1:1 - "GET /alive HTTP/1.1" 200 OK')
    assert pattern.search(b"done request: POST /v1/completions 127.0.0.1 200")
    assert not pattern.search(b'"GET /other HTTP/1.1" 200 OK')


def test_its_version_is_that_of_its_distribution(tmp_path: Path) -> None:
    metadata = tmp_path / "packages" / "toy_serve-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: toy-serve\nVersion: 1.2.3\n")
    experiment = load_toy(tmp_path, f"engine.env.PYTHONPATH={tmp_path / 'packages'}")
    assert install.engine_version(experiment.engine) == "1.2.3"


def test_a_published_table_has_its_own_columns(experiment: Experiment, tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "reference"
    folder.mkdir(parents=True)
    (folder / "toy.csv").write_text("# from a shop\ndraft,toy_decode_tok_s,vllm_decode_tok_s\n2,10,20\n")
    document = reference_document(experiment, [])
    assert document is not None
    assert [(row["draft"], row["metric"], row["published"]) for row in document["rows"]] == [("2", "decode_tok_s", 10)]
    assert "vllm_decode_tok_s" not in document["rows"][0]


# Where the name of an engine stands in code all the same, and why.
NAMED_ELSEWHERE = {
    # The configuration of ray.serve.llm, which is vLLM's own: it starts vLLM inside the replica.
    "serving/export.py",
}
_NAMES = re.compile(r"vllm|sglang|llama|ggml", re.IGNORECASE)


def test_no_other_room_names_an_engine() -> None:
    found = {
        str(path.relative_to(ROOT / "orchestrator"))
        for path in sorted((ROOT / "orchestrator").rglob("*.py"))
        if "engines" not in path.relative_to(ROOT / "orchestrator").parts and _NAMES.search(_code_of(path))
    }
    assert found == NAMED_ELSEWHERE


def _code_of(path: Path) -> str:
    """Strings and names of a file; comments and docstrings are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    words: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            words.append(str(node.value))
        words += [
            str(getattr(node, field)) for field in ("id", "attr", "name", "arg", "module") if hasattr(node, field)
        ]
    return "\n".join(words)
