"""The key of a point: equal for equal trials, and made without asking an engine or a model twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.campaign import keys
from orchestrator.config import EngineSpec, TrialSpec
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
    specs = keys.add_keys(make_point(engine, size=size) for size in range(1000))
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
    keys.add_keys(
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
    first, second, again = keys.add_keys(
        [make_point(engine), make_point(replace(engine, model="other")), make_point(replace(engine, model="model"))]
    )
    assert first.key == again.key != second.key


def test_a_model_whose_files_change_is_read_again_by_the_next_plan(engine: EngineSpec, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "weights"
    before = keys.fingerprint_model(engine.root, engine.model)
    (first,) = keys.add_keys([make_point(engine)])
    os.utime(weights, ns=(0, 0))
    assert keys.fingerprint_model(engine.root, engine.model) != before
    (second,) = keys.add_keys([make_point(engine)])
    assert first.key != second.key


def test_a_model_on_the_hub_has_no_fingerprint(engine: EngineSpec) -> None:
    assert keys.fingerprint_model(engine.root, "org/on-the-hub") is None
