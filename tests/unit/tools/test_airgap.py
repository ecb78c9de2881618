"""Packing for a host without an index, and unpacking there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.environments import install
from orchestrator.environments.requirements import REQUIREMENTS_FOLDER, Requirements, read_requirements
from orchestrator.errors import ConfigError, MachineError
from tests.support.packing import PYTHON, pack
from tests.support.paths import ROOT
from tests.support.wheels import write_requirements
from tools.airgap import pack as packing
from tools.airgap import unpack

UNPACK_SCRIPT = Path(unpack.__file__)


def test_a_packed_environment_runs_where_it_is_unpacked(root: Path) -> None:
    first, second = pack(root, "first", "second")
    assert (first.packages, first.from_host) == ({"alpha": "1.0", "common": "3.0"}, {"numpy": "2.3.5"})
    assert (root / "offered.txt").read_text() == "torch==2.11.0\n"
    assert all(part.bytes <= 1000 for part in first.parts)
    assert len(first.parts) > 1
    unpack.unpack(root / "parts", root / "host/.engines")
    for name, said in (("first/bin/alpha", "alpha speaks\n"), ("second/bin/beta", "beta speaks\n")):
        shown = subprocess.run([root / "host/.engines" / name], capture_output=True, text=True, check=True)
        assert shown.stdout == said
    assert (root / "host/.engines/first/bin/common-tool").read_text() == "a compiled program"
    assert second.needs == {"first": first.archive_sha256}


def test_a_file_that_two_archives_share_travels_once(root: Path) -> None:
    alone = pack(root, "second")[0]
    first, second = pack(root, "first", "second")
    assert second.unpacked_bytes == alone.unpacked_bytes
    assert sum(p.bytes for p in second.parts) < sum(p.bytes for p in alone.parts)
    unpack.unpack(root / "parts", root / "engines")
    relative = f"lib/python{PYTHON}/site-packages/common.py"
    assert (root / "engines/first" / relative).samefile(root / "engines/second" / relative)
    assert first.needs == {}


def test_links_into_another_build_of_an_archive_are_refused(root: Path) -> None:
    pack(root, "first", "second")
    (root / "elsewhere").mkdir()
    for path in (root / "parts").glob("second*"):
        path.rename(root / "elsewhere" / path.name)
    # Packed alone and anew, as one does after a change of its requirements.
    (root / "first.resolution").write_text("alpha==1.0\n")
    pack(root, "first")
    unpack.unpack(root / "parts", root / "engines")
    with pytest.raises(unpack.UnpackError, match="pack both in one call"):
        unpack.unpack(root / "elsewhere", root / "engines")


def test_an_unpacked_environment_sees_the_packages_of_its_host(root: Path) -> None:
    pack(root, "first")
    (target,) = unpack.unpack(root / "parts", root / "engines", ["first"])
    found = subprocess.run(
        [target / "bin/python", "-c", "import alpha, sys, numpy; print(numpy.__file__); print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    ).stdout.split()
    assert found[0].startswith(sys.prefix)
    assert found[1] == str(target)


def test_the_script_needs_nothing_but_python_and_says_what_it_did(root: Path) -> None:
    pack(root, "first")
    argv = [sys.executable, "-I", str(UNPACK_SCRIPT), str(root / "parts"), "--into", str(root / "engines")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("first: alpha 1.0 unpacked into ")
    again = subprocess.run(argv, capture_output=True, text=True, cwd=root)
    assert again.stdout == "first: there already\n"


def test_what_was_unpacked_is_listed_as_ready(root: Path) -> None:
    pack(root, "first")
    unpack.unpack(root / "parts", root / ".engines")
    shown = {info.name: (info.state, info.engine_version) for info in install.list_environments(root)}
    assert shown == {"first": ("ready", "1.0"), "second": ("absent", None)}


def test_parts_may_be_unpacked_without_the_program_xz(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(root, "first")
    monkeypatch.setenv("PATH", str(root / "empty"))
    (target,) = unpack.unpack(root / "parts", root / "engines")
    assert (target / "bin/alpha").exists()


def test_a_missing_a_damaged_and_a_foreign_part_are_told_apart(root: Path) -> None:
    pack(root, "first")
    part = root / "parts/first.tar.xz.001"
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(unpack.UnpackError, match=r"first\.tar\.xz\.001 is missing"):
        unpack.unpack(root / "parts", root / "engines")
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(unpack.UnpackError, match=r"first\.tar\.xz\.001 is damaged"):
        unpack.unpack(root / "parts", root / "engines")
    assert install.read_stamp(root / "engines/first") is None


def test_an_archive_for_another_python_is_refused(root: Path) -> None:
    pack(root, "first")
    path = root / "parts/first.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "3.99"}))
    with pytest.raises(unpack.UnpackError, match=r"packed for Python 3\.99"):
        unpack.unpack(root / "parts", root / "engines")


def test_an_archive_that_links_to_another_one_asks_for_it(root: Path) -> None:
    pack(root, "first", "second")
    with pytest.raises(unpack.UnpackError, match="unpack first into"):
        unpack.unpack(root / "parts", root / "engines", ["second"])
    with pytest.raises(unpack.UnpackError, match="no manifest of third"):
        unpack.unpack(root / "parts", root / "engines", ["third"])


def test_files_and_packages_left_out_do_not_travel(root: Path) -> None:
    write_requirements(
        root, "#: engine alpha\n#: pack-without common\n#: pack-without-file alpha-*/WHEEL\nalpha\n", "first"
    )
    (manifest,) = pack(root, "first")
    assert manifest.packages == {"alpha": "1.0"}
    (target,) = unpack.unpack(root / "parts", root / "engines")
    assert not list(target.rglob("alpha-*/WHEEL"))
    assert list(target.rglob("alpha-*/METADATA"))


def test_a_pattern_of_files_that_matches_nothing_is_an_error(root: Path) -> None:
    write_requirements(root, "#: engine alpha\n#: pack-without-file alpha/gone.so\nalpha\n", "first")
    with pytest.raises(ConfigError, match=r"alpha/gone\.so"):
        pack(root, "first")


def test_a_resolution_that_fails_tells_the_resolvers_words(root: Path) -> None:
    write_requirements(root, "#: engine alpha\nalpha\n", "unsolvable")
    with pytest.raises(MachineError, match="No solution found"):
        pack(root, "unsolvable")


def test_without_uv_the_error_says_where_it_comes_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root / "empty"))
    with pytest.raises(MachineError, match=r"uv on PATH \(package uv\)"):
        pack(root, "first")


@pytest.mark.parametrize(
    ("host_version", "directive", "place"),
    [
        ("2.3.5", (), "host"),
        (None, (), "host"),
        ("2.5.2", (), "inside"),
        ("2.5.2", ("numpy",), "differs"),
        ("2.5.2", ("NumPy",), "differs"),
    ],
)
def test_the_hosts_package_serves_when_its_version_fits(
    host_version: str | None, directive: tuple[str, ...], place: str
) -> None:
    wanted = Requirements(name="n", path=Path("n.txt"), engine="e", pack_from_host=directive)
    inside, from_host, differs = packing.divide({"numpy": "2.3.5"}, {"numpy": host_version}, wanted)
    assert inside == ({"numpy": "2.3.5"} if place == "inside" else {})
    assert from_host == ({} if place == "inside" else {"numpy": "2.3.5"})
    assert differs == ({"numpy": "2.3.5, host 2.5.2"} if place == "differs" else {})


def test_the_hosts_list_is_what_pip_freeze_prints(tmp_path: Path) -> None:
    path = tmp_path / "host.txt"
    path.write_text("Foo_Bar==1.2+local\nbaz[extra]==3 # a remark\n\nqux\nnamed @ file:///somewhere\n")
    assert packing.host_packages(path) == {"foo-bar": "1.2", "baz": "3", "qux": None, "named": None}
    path.write_text("fine\n=1.0\n")
    with pytest.raises(ConfigError, match=r"host\.txt:2"):
        packing.host_packages(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        packing.host_packages(tmp_path / "absent.txt")


def test_the_projects_airgap_sources_can_be_read() -> None:
    root = ROOT
    folder = root / "tools" / "airgap"
    assert {read_requirements(str(folder / f"{name}.txt"), root).name for name in ("orchestrator", "smollm2")}
    host = packing.host_packages(folder / "host-h200.txt")
    assert host["torch"] == "2.11.0"
    for name in ("vllm", "sglang"):
        assert read_requirements(name, root).pack_without_files


def test_parts_of_an_earlier_and_longer_archive_do_not_stay(root: Path) -> None:
    pack(root, "first", part_bytes=500)
    before = len(list((root / "parts").glob("first.tar.xz.*")))
    (manifest,) = pack(root, "first", part_bytes=100_000)
    assert before > 1
    assert [p.file for p in manifest.parts] == ["first.tar.xz.000"]
    assert len(list((root / "parts").glob("first.tar.xz.*"))) == 1


def test_an_archive_is_the_same_whenever_it_is_made(root: Path) -> None:
    once = pack(root, "first")[0]
    shutil.rmtree(root / "parts")
    assert pack(root, "first")[0].archive_sha256 == once.archive_sha256
    assert (root / REQUIREMENTS_FOLDER).is_dir()


def test_packing_from_the_command_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    options = [
        "--python",
        PYTHON,
        "--platform",
        "x86_64-manylinux_2_28",
        "--exclude-from",
        "host.txt",
        "--part-mb",
        "1",
    ]
    assert packing.main(["first", "--out", "parts", *options, "second"]) == 0
    for name in ("first", "second"):
        manifest = json.loads((root / f"parts/{name}.json").read_text())
        assert (manifest["python"], manifest["platform"]) == (PYTHON, "x86_64-manylinux_2_28")
    assert list(json.loads((root / "parts/first.json").read_text())["from_host"]) == ["numpy"]


@pytest.mark.parametrize(
    ("arguments", "path", "code", "words"),
    [
        (["absent", "--out", "parts"], None, 2, "conf/engine/environments/absent.txt"),
        (["first", "--out", "parts", "--exclude-from", "absent.txt"], None, 2, "absent.txt: cannot be read"),
        (["first", "--out", "parts", "--exclude-from", "bin/uv"], None, 2, "expected NAME or NAME==VERSION"),
        (["first", "--out", "parts"], "empty", 3, "uv on PATH"),
        (["first", "--out", "host.txt"], None, 3, "host.txt: "),
    ],
)
def test_what_stops_packing_is_one_sentence(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    path: str | None,
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(root)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    assert packing.main(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
