"""A project whose environments are packed without an index: the resolver, uv, is replaced by a program of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.wheels import make_wheel, write_requirements
from tools.airgap import pack as packing

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# `uv pip compile` answers with what stands in resolution.txt, after checking that the host's versions were offered;
# `uv pip install --target` unzips wheels, as it does for packages without compiled code.
FAKE_UV = """#!{python}
import pathlib, sys, zipfile
root, (_, verb, *rest) = pathlib.Path({root!r}), sys.argv[1:]
if verb == "compile":
    output = pathlib.Path(rest[rest.index("-o") + 1])
    (root / "offered.txt").write_text(output.read_text())
    source = pathlib.Path(rest[0])
    if source.stem == "unsolvable":
        sys.exit("  x No solution found when resolving dependencies")
    output.write_text((root / f"{{source.stem}}.resolution").read_text())
else:
    target = pathlib.Path(rest[rest.index("--target") + 1])
    for line in pathlib.Path(rest[rest.index("-r") + 1]).read_text().split():
        name, version = line.split("==")
        with zipfile.ZipFile(root / "wheels" / f"{{name}}-{{version}}-py3-none-any.whl") as wheel:
            wheel.extractall(target)
    (target / "bin").mkdir(exist_ok=True)
    (target / "bin" / name).write_text("#!/the/wrong/python\\n")
    (target / "bin" / f"{{name}}-tool").write_text("a compiled program")
"""


def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environments first and second in `tmp_path`, with what they share, and the host's list of packages."""
    big = "DATA = '" + "shared between both " * 4000 + "'\n"
    make_wheel(tmp_path / "wheels", "alpha", "1.0", code=f"{big}def main():\n    print('alpha speaks')\n")
    make_wheel(tmp_path / "wheels", "beta", "2.0", code="import common\n\ndef main():\n    print('beta speaks')\n")
    make_wheel(tmp_path / "wheels", "common", "3.0", code=big)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "uv").write_text(FAKE_UV.format(python=sys.executable, root=str(tmp_path)))
    (bin_folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    write_requirements(tmp_path, "#: engine alpha\nalpha\n", "first")
    write_requirements(tmp_path, "#: engine beta\nbeta\n", "second")
    (tmp_path / "first.resolution").write_text("alpha==1.0\ncommon==3.0\nnumpy==2.3.5\n")
    (tmp_path / "second.resolution").write_text("beta==2.0\ncommon==3.0\n")
    (tmp_path / "host.txt").write_text("# the host\nnumpy\ntorch==2.11.0+cu130\n")
    return tmp_path


def pack(root: Path, *names: str, part_bytes: int = 1000) -> list[packing.Manifest]:
    return packing.pack(
        list(names),
        root,
        root / "parts",
        python=PYTHON,
        exclude_from=root / "host.txt",
        part_bytes=part_bytes,
    )
