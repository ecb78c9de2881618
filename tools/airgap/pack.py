"""Pack engine environments for a host without a package index.

    python -m tools.airgap.pack NAME... --out PARTS

Run it in the project's folder. The program uv resolves, because it can do so for another Python and another platform.
A package of the host is left out where its version fits. A file that several archives hold is stored once.
Each archive is split into parts of a given size. unpack.py turns the parts into environments on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from orchestrator.environments.requirements import Requirements, read_requirements
from orchestrator.errors import ConfigError, MachineError, OrchestratorError
from tools.airgap.archive import Part, program, write_archive

DEFAULT_PLATFORM = "x86_64-manylinux_2_35"
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?(?:==([^\s;]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an archive holds and what it needs from the host and other archives; NAME.json beside the parts.

    packages: name -> version of what the archive holds. from_host: name -> resolved version of what the host provides.
    differs: name -> "resolved, host" where the requirements take the host's package despite its other version.
    needs: name -> archive_sha256 of the archives that this one links to.
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
    needs: dict[str, str]
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
) -> list[Manifest]:
    """Pack `sources` (names of engine environments, or paths of requirements files) into `out`.

    `exclude_from` lists what the host has, one NAME or NAME==VERSION per line (`pip freeze` of it will do).
    Later sources link to files of earlier ones.
    Raises ConfigError (source, host list), MachineError (uv, xz) and OSError.
    """
    host = host_packages(exclude_from) if exclude_from else {}
    out.mkdir(parents=True, exist_ok=True)
    manifests: list[Manifest] = []
    shared: dict[tuple[int, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="pack-") as scratch:
        for source in sources:
            wanted = read_requirements(source, root)
            print(f"{wanted.name}: resolving {wanted.path} for Python {python} on {platform}")
            resolved = _resolve(wanted, Path(scratch), host, python, platform)
            inside, from_host, differs = divide(resolved, host, wanted)
            print(f"{wanted.name}: {len(inside)} packages inside, {len(from_host)} from the host")
            stage = Path(scratch) / "stage"
            _install_into(stage / wanted.name, wanted, inside, python, platform)
            needs, size, parts, digest = write_archive(stage, wanted.name, shared, out, part_bytes)
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
                needs={each.name: each.archive_sha256 for each in manifests if each.name in needs},
                unpacked_bytes=size,
                archive_sha256=digest,
                parts=parts,
            )
            _write_manifest(out / f"{wanted.name}.json", manifest)
            total = sum(part.bytes for part in parts)
            print(f"{wanted.name}: {total / 1e6:.0f} MB in {len(parts)} parts, {size / 1e6:.0f} MB unpacked")
            manifests.append(manifest)
    return manifests


def host_packages(path: Path) -> dict[str, str | None]:
    """The host's packages by normalized name; None where the list gives no version. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
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
    """(inside, from_host, differs): what the archive must hold, what the host has, and where the versions differ."""
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
    # uv prefers the versions that its output file names already.
    output.write_text("".join(f"{name}=={version}\n" for name, version in host.items() if version), encoding="utf-8")
    target = ["--python-version", python, "--python-platform", platform]
    quiet = ["--no-header", "--no-annotate"]
    _run([program("uv", "uv"), "pip", "compile", str(wanted.path), "-o", str(output), *target, *quiet])
    pins = (_PIN.match(line) for line in (*output.read_text(encoding="utf-8").splitlines(), *wanted.no_deps))
    return {_normalized(pin[1]): pin[2] for pin in pins if pin and pin[2]}


def _install_into(prefix: Path, wanted: Requirements, inside: Mapping[str, str], python: str, platform: str) -> None:
    """Install exactly `inside` into `prefix`, laid out like a virtual environment, without the files left out."""
    site = prefix / "lib" / f"python{python}" / "site-packages"
    site.mkdir(parents=True)
    pins = site.parent / "inside.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in inside.items()), encoding="utf-8")
    target = ["--target", str(site), "--python-version", python, "--python-platform", platform]
    _run([program("uv", "uv"), "pip", "install", "--no-deps", "-r", str(pins), *target])
    pins.unlink()
    # uv's console scripts name an interpreter of this machine; unpack.py writes them for the host's.
    scripts = {e.name for d in distributions(path=[str(site)]) for e in d.entry_points if e.group == "console_scripts"}
    for name in scripts:
        (site / "bin" / name).unlink(missing_ok=True)
    if (site / "bin").is_dir():
        (site / "bin").rename(prefix / "bin")
    for pattern in wanted.pack_without_files:
        found = list(site.glob(pattern))
        if not found:
            raise ConfigError(f"{wanted.path}: pack-without-file {pattern}: there is no such file in what it installs")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _version_of(wanted: Requirements, inside: Mapping[str, str]) -> str:
    version = inside.get(_normalized(wanted.engine))
    if version is None:
        raise ConfigError(f"{wanted.path}: {wanted.engine} (the line '#: engine') is not among what would be packed")
    return version


def _write_manifest(path: Path, manifest: Manifest) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(argv: list[str]) -> None:
    # Packing needs no interpreter of the target's version, so uv must not download one.
    env = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise MachineError(f"{' '.join(argv[:3])} failed (exit {done.returncode})\n  {tail}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 for a wrong argument or requirement, 3 for the machine."""
    parser = argparse.ArgumentParser(prog="python -m tools.airgap.pack", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="an engine environment, or a requirements file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--python", default="3.12", help="the host's Python (default: %(default)s)")
    parser.add_argument("--platform", default=DEFAULT_PLATFORM, help="as uv names it (default: %(default)s)")
    parser.add_argument("--exclude-from", type=Path, help="what the host has, NAME or NAME==VERSION a line")
    parser.add_argument("--part-mb", type=int, default=60, help="size of a part in MB (default: %(default)s)")
    arguments = parser.parse_intermixed_args(argv)
    try:
        pack(
            arguments.names,
            Path.cwd(),
            arguments.out,
            python=arguments.python,
            platform=arguments.platform,
            exclude_from=arguments.exclude_from,
            part_bytes=arguments.part_mb * 1_000_000,
        )
    except OrchestratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {arguments.out}: the parts cannot be written: {error}", file=sys.stderr)
        return MachineError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
