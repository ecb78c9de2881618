"""Pack engine environments for a host without a package index, and split them into parts that can be carried there.

The resolver is uv (a program on PATH), because it resolves for another Python and platform than the running one. What
the host has already is left out where its version fits; files that two archives share are stored once.
orchestrator/unpack.py is the other half and needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import IO

from orchestrator.environments import Echo
from orchestrator.errors import ConfigError, MachineError
from orchestrator.requirements import Requirements, read_requirements

DEFAULT_PLATFORM = "x86_64-manylinux_2_35"
# A link costs a tar header; below this size the file itself costs no more.
_SHARE_FROM_BYTES = 4096
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?(?:==([^\s;]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of at most the part size."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an archive holds and what it counts on; NAME.json beside the parts.

    packages: name -> version inside. from_host: name -> version resolved for it, left to the host.
    differs: name -> "resolved, host" where the requirements file says to take the host's all the same.
    needs: archives whose files this one links to.
    """

    name: str
    python: str
    platform: str
    engine: str
    engine_version: str
    requirements_sha256: str
    packages: dict[str, str]
    from_host: dict[str, str]
    differs: dict[str, str]
    needs: list[str]
    unpacked_bytes: int
    archive_sha256: str
    parts: list[Part]


def pack(
    sources: list[str],
    root: Path,
    out: Path,
    *,
    python: str = "3.12",
    platform: str = DEFAULT_PLATFORM,
    exclude_from: Path | None = None,
    part_bytes: int = 60_000_000,
    echo: Echo = print,
) -> list[Manifest]:
    """Pack `sources` (names of engine environments, or paths of requirements files) into `out`.

    `exclude_from` lists what the host has, one NAME or NAME==VERSION per line (`pip freeze` of it will do).
    Later sources link to files of earlier ones. Raises ConfigError (source, host list) and MachineError (uv, xz).
    """
    host = host_packages(exclude_from) if exclude_from else {}
    out.mkdir(parents=True, exist_ok=True)
    manifests: list[Manifest] = []
    shared: dict[tuple[int, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="pack-") as scratch:
        for source in sources:
            wanted = read_requirements(source, root)
            echo(f"{wanted.name}: resolving {wanted.path} for Python {python} on {platform}")
            resolved = _resolve(wanted, Path(scratch), host, python, platform)
            inside, from_host, differs = divide(resolved, host, wanted)
            echo(f"{wanted.name}: {len(inside)} packages inside, {len(from_host)} from the host")
            stage = Path(scratch) / "stage"
            _install_into(stage / wanted.name, wanted, inside, python, platform)
            needs, size, parts, digest = _archive(stage, wanted.name, shared, out, part_bytes)
            manifest = Manifest(
                name=wanted.name,
                python=python,
                platform=platform,
                engine=wanted.engine,
                engine_version=_version_of(wanted, inside),
                requirements_sha256=wanted.digest,
                packages=inside,
                from_host=from_host,
                differs=differs,
                needs=sorted(needs),
                unpacked_bytes=size,
                archive_sha256=digest,
                parts=parts,
            )
            _write_manifest(out / f"{wanted.name}.json", manifest)
            total = sum(part.bytes for part in parts)
            echo(f"{wanted.name}: {total / 1e6:.0f} MB in {len(parts)} parts, {size / 1e6:.0f} MB unpacked")
            manifests.append(manifest)
    return manifests


def host_packages(path: Path) -> dict[str, str | None]:
    """The host's packages by normalized name; None where the list does not tell the version. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--exclude-from {path}: cannot be read: {error}") from None
    host: dict[str, str | None] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _PIN.match(text)
        if match is None:
            raise ConfigError(f"{path}:{number}: {line!r}: expected NAME or NAME==VERSION")
        # A local build tag (2.11.0+cu130) is the same release to everything that depends on it.
        host[_normalized(match[1])] = match[2].split("+")[0] if match[2] else None
    return host


def divide(
    resolved: Mapping[str, str], host: Mapping[str, str | None], wanted: Requirements
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """(inside, from_host, differs): what must travel, what the host has, and where its version is another one."""
    leave_out = {_normalized(name) for name in (*wanted.remove, *wanted.pack_without)}
    trusted = {_normalized(name) for name in wanted.pack_from_host}
    inside: dict[str, str] = {}
    from_host: dict[str, str] = {}
    differs: dict[str, str] = {}
    for name, version in resolved.items():
        if name in leave_out:
            continue
        if name in host and (host[name] in (None, version) or name in trusted):
            from_host[name] = version
            if host[name] not in (None, version):
                differs[name] = f"{version}, host {host[name]}"
        else:
            inside[name] = version
    return inside, from_host, differs


def _resolve(
    wanted: Requirements, scratch: Path, host: Mapping[str, str | None], python: str, platform: str
) -> dict[str, str]:
    """Every package with its version, the host's versions preferred where the requirements allow them."""
    output = scratch / f"{wanted.name}.resolved.txt"
    # uv keeps to the versions that stand in its output file already, as far as it can.
    output.write_text("".join(f"{name}=={version}\n" for name, version in host.items() if version), encoding="utf-8")
    target = ["--python-version", python, "--python-platform", platform]
    _run(
        [_program("uv"), "pip", "compile", str(wanted.path), "-o", str(output), *target, "--no-header", "--no-annotate"]
    )
    pins = (_PIN.match(line) for line in (*output.read_text(encoding="utf-8").splitlines(), *wanted.no_deps))
    return {_normalized(pin[1]): pin[2] for pin in pins if pin and pin[2]}


def _install_into(prefix: Path, wanted: Requirements, inside: Mapping[str, str], python: str, platform: str) -> None:
    """Install exactly `inside` into `prefix` as a virtual environment has it, without the files left out."""
    site = prefix / "lib" / f"python{python}" / "site-packages"
    site.mkdir(parents=True)
    pins = site.parent / "inside.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in inside.items()), encoding="utf-8")
    target = ["--target", str(site), "--python-version", python, "--python-platform", platform]
    _run([_program("uv"), "pip", "install", "--no-deps", "-r", str(pins), *target])
    pins.unlink()
    # Scripts name the interpreter they were installed by; unpack writes them again for the one they will have.
    scripts = {e.name for d in distributions(path=[str(site)]) for e in d.entry_points if e.group == "console_scripts"}
    for program in sorted((site / "bin").glob("*")) if (site / "bin").is_dir() else []:
        if program.name in scripts:
            program.unlink()
    for pattern in wanted.pack_without_files:
        found = list(site.glob(pattern))
        if not found:
            raise ConfigError(f"{wanted.path}: pack-without-file {pattern}: there is no such file in what it installs")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _archive(
    stage: Path, name: str, shared: dict[tuple[int, str], str], out: Path, part_bytes: int
) -> tuple[set[str], int, list[Part], str]:
    """Write `stage/name` as NAME.tar.xz.000 ...; returns (archives linked to, bytes unpacked, parts, SHA-256)."""
    for old in out.glob(f"{name}.tar.xz.*"):
        old.unlink()
    needs: set[str] = set()
    size = 0
    # Blocks of their own let the host unpack with all its cores.
    argv = [_program("xz"), "-6", "-T0", "--block-size=48MiB", "-c"]
    with tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted((stage / name).rglob("*")):
                info = _member(archive, path, stage)
                size += info.size
                key = (info.size, _sha256(path)) if info.isreg() and info.size >= _SHARE_FROM_BYTES else None
                if key in shared:
                    info.type, info.linkname, info.size = tarfile.LNKTYPE, shared[key], 0
                    needs.add(info.linkname.split("/", 1)[0])
                elif key is not None:
                    shared[key] = info.name
                if info.isreg():
                    with path.open("rb") as content:
                        archive.addfile(info, content)
                else:
                    archive.addfile(info)
        plain.seek(0)
        with subprocess.Popen(argv, stdin=plain, stdout=subprocess.PIPE) as xz:
            assert xz.stdout is not None
            parts, digest = _split(xz.stdout, out / f"{name}.tar.xz", part_bytes)
        if xz.returncode != 0:
            raise MachineError(f"{name}: xz ended with exit {xz.returncode}")
    return needs - {name}, size, parts, digest


def _member(archive: tarfile.TarFile, path: Path, stage: Path) -> tarfile.TarInfo:
    info = archive.gettarinfo(path, arcname=str(path.relative_to(stage)))
    if info.islnk():
        # uv links files from its cache; what a tar would call a link to the cache is a file here.
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info


def _split(stream: IO[bytes], stem: Path, part_bytes: int) -> tuple[list[Part], str]:
    whole = hashlib.sha256()
    parts: list[Part] = []
    for number, blocks in enumerate(_chunks(stream, part_bytes)):
        path = stem.with_name(f"{stem.name}.{number:03d}")
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for block in blocks:
                digest.update(block)
                whole.update(block)
                file.write(block)
        parts.append(Part(file=path.name, bytes=path.stat().st_size, sha256=digest.hexdigest()))
    return parts, whole.hexdigest()


def _chunks(stream: IO[bytes], chunk_bytes: int) -> Iterator[Iterable[bytes]]:
    """The stream as pieces of `chunk_bytes`, each an iterable of blocks; the next piece begins when one is used up."""
    ahead = stream.read(1)

    def blocks() -> Iterator[bytes]:
        nonlocal ahead
        left = chunk_bytes - len(ahead)
        yield ahead
        while left and (block := stream.read(min(left, 1 << 20))):
            left -= len(block)
            yield block
        ahead = stream.read(1)

    while ahead:
        yield blocks()


def _version_of(wanted: Requirements, inside: Mapping[str, str]) -> str:
    version = inside.get(_normalized(wanted.engine))
    if version is None:
        raise ConfigError(f"{wanted.path}: {wanted.engine} (the line '#: engine') is not among what would be packed")
    return version


def _write_manifest(path: Path, manifest: Manifest) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MachineError(
            f"engine pack needs the program {name} on PATH" + ("; pip install uv" if name == "uv" else "")
        )
    return found


def _run(argv: list[str]) -> None:
    # Packing needs no interpreter of the target's version, so uv shall not go and look for one.
    env = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise MachineError(f"{' '.join(argv[:3])} failed (exit {done.returncode})\n  {tail}")
