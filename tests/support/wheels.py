"""Wheels and requirements files made on the spot, so that environments are built without an index."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from orchestrator.environments.requirements import REQUIREMENTS_FOLDER


def make_wheel(
    folder: Path, name: str, version: str, code: str = "", requires: tuple[str, ...] = (), program: str = ""
) -> Path:
    """A wheel with one module and, as engines have, a console script `NAME`; program: text of NAME_bin/NAME-server."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {r}\n" for r in requires)
    files = {
        f"{name}.py": code or f"def main() -> None:\n    print('{name} {version}')\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    if program:
        files[f"{name}_bin/{name}-server"] = program
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            member = zipfile.ZipInfo(path)
            member.external_attr = (0o100755 if text == program else 0o100644) << 16
            archive.writestr(member, text)
    return wheel


def write_requirements(root: Path, text: str, name: str = "tiny") -> Path:
    path = root / REQUIREMENTS_FOLDER / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
