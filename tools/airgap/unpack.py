"""Unpack the engine environments that tools/airgap/pack.py made.

    python3 tools/airgap/unpack.py FOLDER --into .engines [NAME ...]

FOLDER holds manifests (NAME.json) and the parts of their archives. Each environment becomes a virtual environment that
also sees the packages of the interpreter that runs this script. It is finished once its environment.json exists.
The host may lack this project's dependencies and a package index, so this script imports only the standard library.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

STAMP = "environment.json"
_TEXTS = ("name", "python", "engine", "engine_version", "requirements_sha256", "archive_sha256")


class UnpackError(Exception):
    """The parts are incomplete, damaged or not for this interpreter, or the environment cannot be written."""


def unpack(folder: Path, into: Path, names: Sequence[str] = ()) -> list[Path]:
    """Unpack the environments in `folder` (all, or those named) below `into`; returns their folders.

    An environment that was unpacked from the same archive before is left alone. Raises UnpackError.
    """
    into = into.absolute()
    manifests = _read_manifests(folder, names)
    order = _unpacking_order(manifests, folder)
    with _naming(into):
        into.mkdir(parents=True, exist_ok=True)
    return [_unpack_one(manifests[name], folder, into) for name in order]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError into an UnpackError that names the file at fault, or `path` where the OSError names none."""
    try:
        yield
    except OSError as error:
        raise UnpackError(f"{error.filename or path}: {error.strerror or error}") from None


def _read_manifests(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The manifests in `folder` by name: those of `names`, or all of them. Raises UnpackError."""
    with _naming(folder):
        paths = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix == ".json"}
    missing = [name for name in names if name not in paths]
    if missing or not paths:
        raise UnpackError(
            f"{folder}: no manifest of {', '.join(missing) or 'any environment'}; it holds {sorted(paths)}"
        )
    return {name: _read_manifest(paths[name]) for name in names or paths}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with _naming(path):
            manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnpackError(f"{path} is not JSON: {error}") from None
    if not _is_manifest(manifest):
        raise UnpackError(f"{path} is not a manifest of a packed environment")
    return dict(manifest)


def _is_manifest(document: Any) -> bool:
    """Whether everything that is read from a manifest later is there, with its type."""
    return (
        isinstance(document, dict)
        and all(isinstance(document.get(key), str) for key in _TEXTS)
        and isinstance(document.get("needs"), dict)
        and isinstance(document.get("parts"), list)
        and bool(document["parts"])
        and all(
            isinstance(part, dict) and isinstance(part.get("file"), str) and isinstance(part.get("sha256"), str)
            for part in document["parts"]
        )
    )


def _unpacking_order(manifests: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """An archive may link to files of another one, which must be unpacked first. Raises UnpackError for a cycle."""
    links = {name: [other for other in manifest["needs"] if other in manifests] for name, manifest in manifests.items()}
    try:
        return list(TopologicalSorter(links).static_order())
    except CycleError as error:
        cycle = " and ".join(sorted(set(error.args[1])))
        raise UnpackError(f"{folder}: the archives of {cycle} link to one another: pack them in one call") from None


def _unpack_one(manifest: dict[str, Any], folder: Path, into: Path) -> Path:
    name = str(manifest["name"])
    target = into / name
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != here:
        raise UnpackError(f"{name} is packed for Python {manifest['python']}, this is {here} ({sys.executable})")
    if _unpacked_sha256(target) == manifest["archive_sha256"]:
        print(f"{name}: there already")
        return target
    for other, needed_sha256 in manifest["needs"].items():
        there = _unpacked_sha256(into / other)
        if there is None:
            raise UnpackError(f"{name} links to files of {other}: unpack {other} into {into} first")
        if there != needed_sha256:
            raise UnpackError(f"{name} links to files of another {other} than the one in {into}: pack both in one call")
    started = time.monotonic()
    parts = _checked_parts(manifest, folder)
    with _naming(target):
        _create_environment(target)
        _extract(parts, into)
        _finish_environment(target, target / "lib" / f"python{here}" / "site-packages")
        _write_stamp(target / STAMP, manifest)
    seconds = time.monotonic() - started
    print(f"{name}: {manifest['engine']} {manifest['engine_version']} unpacked into {target} in {seconds:.0f} s")
    return target


def _unpacked_sha256(target: Path) -> str | None:
    """Of the archive that `target` was unpacked from; None when its stamp is missing or cannot be read."""
    try:
        return str(json.loads((target / STAMP).read_text(encoding="utf-8"))["archive_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checked_parts(manifest: dict[str, Any], folder: Path) -> list[Path]:
    parts, whole = [], hashlib.sha256()
    for part in manifest["parts"]:
        path = folder / part["file"]
        if not path.is_file():
            raise UnpackError(f"{path} is missing ({len(manifest['parts'])} parts belong to {manifest['name']})")
        digest = hashlib.sha256()
        with _naming(path), path.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
                whole.update(block)
        if digest.hexdigest() != part["sha256"]:
            raise UnpackError(f"{path} is damaged: its SHA-256 is not the manifest's")
        parts.append(path)
    if whole.hexdigest() != manifest["archive_sha256"]:
        raise UnpackError(f"{manifest['name']}: the parts do not belong together")
    return parts


def _create_environment(target: Path) -> None:
    """Make `target` an empty virtual environment that sees this interpreter's packages. Raises UnpackError, OSError."""
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    argv = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(target)]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UnpackError(f"{target}: the virtual environment cannot be created: {reason[0]}")


def _extract(parts: list[Path], into: Path) -> None:
    """Extract the archive below `into`. Raises UnpackError where it is damaged, OSError where `into` takes no more."""
    archive_name = f"{parts[0].with_suffix('')}.*"
    try:
        with _decompressed(parts) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(into, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UnpackError(f"{archive_name} cannot be unpacked: {error}") from None
    except KeyError as error:
        # tarfile's, for a link whose target exists neither on disk nor in the archive.
        raise UnpackError(f"{archive_name} cannot be unpacked: a file that it links to is gone: {error}") from None


def _finish_environment(target: Path, site: Path) -> None:
    """Write what depends on the host: the path to its packages, console scripts, bytecode."""
    (site / "_host_packages.pth").write_text(_host_packages_line(), encoding="utf-8")
    _write_scripts(site, target / "bin")
    # Without bytecode the first start of an engine takes twice as long. Some packages hold files that do not compile.
    argv = [str(target / "bin" / "python"), "-W", "ignore", "-m", "compileall", "-q", "-j", "0", str(site)]
    subprocess.run(argv, stdout=subprocess.DEVNULL)


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
    """The tar stream of the parts; the program `xz`, where it exists, uses all cores.

    Raises lzma.LZMAError or EOFError where the parts cannot be decompressed to their end.
    """
    if shutil.which("xz") is None:
        with _Joined(parts) as joined, lzma.LZMAFile(io.BufferedReader(joined)) as plain:
            yield plain
            _read_to_end(plain)
        return
    argv = ["cat", *map(str, parts)]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as cat,
        subprocess.Popen(["xz", "-dc", "-T0"], stdin=cat.stdout, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as xz,
    ):
        assert cat.stdout is not None
        assert xz.stdout is not None
        assert xz.stderr is not None
        cat.stdout.close()
        yield xz.stdout
        _read_to_end(xz.stdout)
        if xz.wait() != 0 or cat.wait() != 0:
            message = " ".join(xz.stderr.read().decode(errors="replace").split())
            raise lzma.LZMAError(message or f"exit code of xz {xz.returncode}, of cat {cat.wait()}")


def _read_to_end(stream: IO[bytes]) -> None:
    """Read what tarfile leaves after the end mark of the archive: damage there is found only by reading it."""
    while stream.read(1 << 20):
        pass


def _host_packages_line() -> str:
    """A .pth line that appends the packages of this interpreter, even if it runs in a virtual environment itself."""
    paths = sysconfig.get_paths()
    folders = list(dict.fromkeys([paths["purelib"], paths["platlib"]]))
    return "; ".join(["import site", *(f"site.addsitedir({folder!r})" for folder in folders)]) + "\n"


def _write_scripts(site: Path, folder: Path) -> None:
    """Write the console scripts of the packages in `site` into `folder`, for the interpreter in `folder`."""
    for distribution in distributions(path=[str(site)]):
        for entry in distribution.entry_points:
            if entry.group != "console_scripts":
                continue
            script = folder / entry.name
            script.unlink(missing_ok=True)
            script.write_text(
                f"#!{folder / 'python'}\nimport sys\n\nfrom {entry.module} import {entry.attr.split('.')[0]}\n\n"
                # The guard is needed because an engine's spawned workers import the script again.
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
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the manifests and parts")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these environments")
    parser.add_argument("--into", type=Path, default=Path(".engines"), help="default: %(default)s")
    # Intermixed, because names may follow --into.
    arguments = parser.parse_intermixed_args()
    try:
        unpack(arguments.folder, arguments.into, arguments.names)
    except UnpackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
