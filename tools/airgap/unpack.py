"""Unpack engine environments that `engine pack` made: `python3 unpack.py FOLDER --into .engines [NAME ...]`.

Runs on a host that may have neither this project nor a package index, so it imports nothing beyond Python itself.
FOLDER holds manifests (NAME.json) and the parts of their archives. Each environment becomes a virtual environment
that also sees the packages of the interpreter running this script, and is finished once its environment.json stands.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from graphlib import TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

STAMP = "environment.json"


class UnpackError(Exception):
    """The parts are not complete, not what the manifest says, or not for this interpreter."""


def unpack(
    folder: Path, into: Path, names: list[str] | None = None, echo: Callable[[str], object] = print
) -> list[Path]:
    """Unpack the environments in `folder` (all, or those named) below `into`; returns their folders.

    One that is there already, from the same archive, is left alone. Raises UnpackError.
    """
    into = into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    known = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    missing = [name for name in names or [] if name not in known]
    if missing or not known:
        raise UnpackError(
            f"{folder}: no manifest of {', '.join(missing) or 'any environment'}; it holds {sorted(known)}"
        )
    chosen = names or list(known)
    # An archive may link to files of another one, which then must be there first.
    links = {name: [other for other in known[name]["needs"] if other in chosen] for name in chosen}
    return [_unpack_one(known[name], folder, into, echo) for name in TopologicalSorter(links).static_order()]


def _unpack_one(manifest: dict[str, Any], folder: Path, into: Path, echo: Callable[[str], object]) -> Path:
    name = str(manifest["name"])
    target = into / name
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != here:
        raise UnpackError(f"{name} is packed for Python {manifest['python']}, this is {here} ({sys.executable})")
    stamp = target / STAMP
    if _unpacked_sha256(target) == manifest["archive_sha256"]:
        echo(f"{name}: there already")
        return target
    for other, needed_sha256 in manifest["needs"].items():
        there = _unpacked_sha256(into / other)
        if there is None:
            raise UnpackError(f"{name} links to files of {other}: unpack {other} into {into} first")
        if there != needed_sha256:
            raise UnpackError(f"{name} links to files of another {other} than the one in {into}: pack both in one call")
    started = time.monotonic()
    parts = _checked_parts(manifest, folder)
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    venv = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(target)]
    subprocess.run(venv, check=True)
    with _decompressed(parts) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(into, filter="data")
    site = target / "lib" / f"python{here}" / "site-packages"
    (site / "_host_packages.pth").write_text(_host_packages_line(), encoding="utf-8")
    _write_scripts(site, target / "bin")
    own = target / "bin" / "python"
    # Without bytecode the first start of an engine is twice as slow.
    argv = [str(own), "-W", "ignore", "-m", "compileall", "-q", "-j", "0", str(site)]
    subprocess.run(argv, stdout=subprocess.DEVNULL)
    _write_stamp(stamp, manifest)
    seconds = time.monotonic() - started
    echo(f"{name}: {manifest['engine']} {manifest['engine_version']} unpacked into {target} in {seconds:.0f} s")
    return target


def _unpacked_sha256(target: Path) -> str | None:
    """Of the archive that `target` was unpacked from; None when it is not there or not finished."""
    stamp = target / STAMP
    return json.loads(stamp.read_text(encoding="utf-8")).get("archive_sha256") if stamp.is_file() else None


def _checked_parts(manifest: dict[str, Any], folder: Path) -> list[Path]:
    parts, whole = [], hashlib.sha256()
    for part in manifest["parts"]:
        path = folder / part["file"]
        if not path.is_file():
            raise UnpackError(f"{path} is missing ({len(manifest['parts'])} parts belong to {manifest['name']})")
        digest = hashlib.sha256()
        with path.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
                whole.update(block)
        if digest.hexdigest() != part["sha256"]:
            raise UnpackError(f"{path} is damaged: its SHA-256 is not the manifest's")
        parts.append(path)
    if whole.hexdigest() != manifest["archive_sha256"]:
        raise UnpackError(f"{manifest['name']}: the parts do not belong together")
    return parts


class _Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._rest = list(paths)
        self._file: IO[bytes] = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            block = self._file.read(len(buffer))
            if block or not self._rest:
                buffer[: len(block)] = block
                return len(block)
            self._file.close()
            self._file = self._rest.pop(0).open("rb")

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _decompressed(parts: list[Path]) -> Iterator[IO[bytes]]:
    """The tar stream of the parts, by all cores where the program `xz` is there."""
    if shutil.which("xz") is None:
        with _Joined(parts) as joined, lzma.LZMAFile(io.BufferedReader(joined)) as plain:
            yield plain
        return
    with (
        subprocess.Popen(["cat", *map(str, parts)], stdout=subprocess.PIPE) as cat,
        subprocess.Popen(["xz", "-dc", "-T0"], stdin=cat.stdout, stdout=subprocess.PIPE) as xz,
    ):
        assert cat.stdout is not None
        assert xz.stdout is not None
        cat.stdout.close()
        yield xz.stdout


def _host_packages_line() -> str:
    """What makes the running interpreter's packages visible, last, also when it is itself a virtual environment."""
    paths = sysconfig.get_paths()
    folders = list(dict.fromkeys([paths["purelib"], paths["platlib"]]))
    return "; ".join(["import site", *(f"site.addsitedir({folder!r})" for folder in folders)]) + "\n"


def _write_scripts(site: Path, folder: Path) -> None:
    """The console scripts of the packages in `site`, naming the interpreter in `folder`."""
    for distribution in distributions(path=[str(site)]):
        for entry in distribution.entry_points:
            if entry.group != "console_scripts":
                continue
            script = folder / entry.name
            script.unlink(missing_ok=True)
            script.write_text(
                f"#!{folder / 'python'}\nimport sys\n\nfrom {entry.module} import {entry.attr.split('.')[0]}\n\n"
                # Guarded: an engine's workers import the script again when they are spawned.
                f'if __name__ == "__main__":\n    sys.exit({entry.attr}())\n',
                encoding="utf-8",
            )
            script.chmod(0o755)


def _write_stamp(stamp: Path, manifest: dict[str, Any]) -> None:
    document = {key: manifest[key] for key in ("name", "requirements_sha256", "engine", "engine_version")}
    document["archive_sha256"] = manifest["archive_sha256"]
    document["python"] = ".".join(map(str, sys.version_info[:3]))
    document["installed_at"] = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    aside = stamp.with_name(f".{stamp.name}")
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, stamp)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--into", type=Path, default=Path(".engines"))
    arguments = parser.parse_args()
    try:
        unpack(arguments.folder, arguments.into, arguments.names)
    except UnpackError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
