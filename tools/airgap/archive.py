"""Write a folder as a compressed archive in parts of a given size; a file of an earlier archive becomes a link."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.errors import MachineError

# A link takes a tar header; a file below this size takes hardly more.
_SHARE_FROM_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of at most the part size."""

    file: str
    bytes: int
    sha256: str


def write_archive(
    stage: Path, name: str, shared: dict[tuple[int, str], str], out: Path, part_bytes: int
) -> tuple[set[str], int, list[Part], str]:
    """Write the folder `stage/name` as NAME.tar.xz.000 ... in `out`.

    `shared` maps (bytes, SHA-256) of the files of earlier archives to their paths; this archive's files are added.
    Returns (names of the archives that this one links to, bytes unpacked, parts, SHA-256 of the whole).
    """
    for old in out.glob(f"{name}.tar.xz.*"):
        old.unlink()
    needs: set[str] = set()
    size = 0
    # xz decompresses separate blocks on separate cores.
    argv = [program("xz", "xz-utils"), "-6", "-T0", "--block-size=48MiB", "-c"]
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
        # uv hard-links files from its cache; tarfile would record such a file as a link to another one.
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


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def program(name: str, package: str) -> str:
    """The path of a program that packing needs. Raises MachineError."""
    found = shutil.which(name)
    if found is None:
        raise MachineError(f"packing needs the program {name} on PATH (package {package})")
    return found
