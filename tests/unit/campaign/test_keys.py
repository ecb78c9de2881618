"""The key of a point: equal for equal trials, and made without asking an engine or a model twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.campaign import keys
from orchestrator.config import EngineSpec, TrialSpec, Workload
from orchestrator.environments import install
from tests.support.builders import make_spec


@pytest.fixture
def engine(tmp_path: Path) -> EngineSpec:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("one")
    return EngineSpec(kind="vllm", model="model", root=str(tmp_path))


def make_point(engine: EngineSpec, **args: Any) -> TrialSpec:
    return make_spec("point", engine=replace(engine, args={**engine.args, **args}))


def count_calls(monkeypatch: pytest.MonkeyPatch, room: Any, name: str) -> list[tuple[object, ...]]:
    """The arguments of every call of a function from now on; the function itself still answers."""
    calls: list[tuple[object, ...]] = []
    original: Callable[..., object] = getattr(room, name)

    def call(*arguments: object) -> object:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(room, name, call)
    return calls


def test_a_thousand_points_ask_one_engine_and_one_model_once(
    engine: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, models = (
        count_calls(monkeypatch, install, "engine_version"),
        count_calls(monkeypatch, keys, "fingerprint_model"),
    )
    specs = keys.Keys().add(make_point(engine, size=size) for size in range(1000))
    assert len({spec.key for spec in specs}) == 1000
    assert (len(versions), len(models)) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sglang"},
        {"command": ["another-program"]},
        {"environment": "another"},
        {"env": {"PYTHONPATH": "/another"}},
    ],
)
def test_another_program_is_asked_for_its_own_version(
    engine: EngineSpec, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    versions, models = (
        count_calls(monkeypatch, install, "engine_version"),
        count_calls(monkeypatch, keys, "fingerprint_model"),
    )
    keys.Keys().add(
        [
            make_point(engine),
            make_point(replace(engine, **change)),
            make_point(engine),
            make_point(replace(engine, **change)),
        ]
    )
    assert (len(versions), len(models)) == (2, 1)


def test_another_model_has_another_fingerprint(engine: EngineSpec, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights").write_text("two")
    first, second, again = keys.Keys().add(
        [make_point(engine), make_point(replace(engine, model="other")), make_point(replace(engine, model="model"))]
    )
    assert first.key == again.key != second.key


def test_a_model_whose_files_change_is_read_again_by_the_next_plan(engine: EngineSpec, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "weights"
    before = keys.fingerprint_model(engine.root, engine.model)
    (first,) = keys.Keys().add([make_point(engine)])
    os.utime(weights, ns=(0, 0))
    assert keys.fingerprint_model(engine.root, engine.model) != before
    (second,) = keys.Keys().add([make_point(engine)])
    assert first.key != second.key


def test_a_model_on_the_hub_has_no_fingerprint(engine: EngineSpec) -> None:
    assert keys.fingerprint_model(engine.root, "org/on-the-hub") is None


def key_of(engine: EngineSpec, machine: str | None = None, **changes: Any) -> str:
    (spec,) = keys.Keys(machine=machine).add([replace(make_point(engine), **changes)])
    return spec.key


def test_another_machine_is_another_trial(engine: EngineSpec) -> None:
    assert key_of(engine, "8 x NVIDIA H200 140 GiB, driver 550") != key_of(
        engine, "8 x NVIDIA H200 140 GiB, driver 560"
    )
    assert key_of(engine, "2 x A") == key_of(engine, "2 x A")


@pytest.mark.parametrize(
    "place",
    [
        {"command": ["python", "./server.py"]},
        {"args": {"chat-template": "server.py"}},
        {"args": {"nested": {"speed-file": "./server.py"}}},
        {"args": {"several": ["a", "server.py"]}},
    ],
)
def test_a_file_that_the_command_line_names_counts_by_its_content(
    engine: EngineSpec, tmp_path: Path, place: dict[str, Any]
) -> None:
    """A program changed its speed between a campaign and its --resume: the twin of a finished arm was 100% ahead."""
    program = tmp_path / "server.py"
    program.write_text("fast")
    before = key_of(replace(engine, **place))
    os.utime(program, ns=(0, 0))
    assert key_of(replace(engine, **place)) == before, "only the content counts"
    program.write_text("slow")
    assert key_of(replace(engine, **place)) != before


def test_a_file_that_the_engine_writes_decides_nothing(engine: EngineSpec, tmp_path: Path) -> None:
    written = replace(engine, args={"log-file": "engine.log"})
    (tmp_path / "engine.log").write_text("first start")
    before = key_of(written)
    (tmp_path / "engine.log").write_text("second start")
    assert key_of(written) == before


def test_prompts_count_by_their_content(engine: EngineSpec, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    workloads = {"code": Workload(prompts=str(path))}
    path.write_text('"one"\n')
    before = key_of(engine, workloads=workloads)
    path.write_text('"two"\n')
    assert key_of(engine, workloads=workloads) != before


def test_an_upgraded_package_is_another_trial(engine: EngineSpec, tmp_path: Path) -> None:
    """The engine's own version stays; torch beside it does not."""
    home = tmp_path / "environment"
    packages = home / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to(sys.executable)
    (packages / "torch-2.8.0.dist-info").mkdir()
    installed = replace(engine, command=[str(home / "bin" / "python"), "-m", "engine"])
    before = key_of(installed)
    (packages / "torch-2.8.0.dist-info").rename(packages / "torch-2.9.0.dist-info")
    assert key_of(installed) != before


def test_every_file_is_read_once_for_a_thousand_points(
    engine: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server.py").write_text("fast")
    reads = count_calls(monkeypatch, keys, "fingerprint_file")
    named = replace(engine, command=["./server.py"])
    keys.Keys().add(make_point(named, size=size) for size in range(100))
    assert len(reads) == 1


def test_what_changed_is_said() -> None:
    before = {"machine": "A", "engine": "0.26.0", "files": "1", "model": None}
    assert (
        keys.explain_change(before, {**before, "machine": "B", "files": "2", "model": "x"}) == "machine: A -> B, files"
    )
    assert keys.explain_change({}, before) == ""
