"""Engine environments: one virtual environment per engine under `.engines/NAME`, because engines cannot share one.

A virtual environment cannot be moved, so each is built at `.engines/.builds/NAME-HASH` and `.engines/NAME` becomes a
link to it in one step, once it is complete. What was there before serves until then.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from orchestrator.config import EngineSpec
from orchestrator.engines import ENGINES, find_engine
from orchestrator.engines.base import resolve_command
from orchestrator.environments.requirements import REQUIREMENTS_FOLDER, Requirements, read_requirements
from orchestrator.errors import MachineError

STAMP = "environment.json"
_PRINT_VERSION = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""

Echo = Callable[[str], object]
State = Literal["ready", "outdated", "unmanaged", "broken", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """One engine environment as `engine list` shows it.

    state: ready; outdated (its requirements changed since); unmanaged (made by hand, usable); broken (its interpreter
    does not run); absent (requirements exist, nothing is installed). engine_version and python are None when unknown.
    """

    name: str
    state: State
    engine_version: str | None
    python: str | None
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What stands in a finished environment: `environment.json`."""

    name: str
    requirements_sha256: str
    python: str
    engine: str
    engine_version: str | None
    archive_sha256: str | None = None
    installed_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def install(name: str, root: Path, echo: Echo = print) -> Path:
    """Make `.engines/NAME` below `root` as its requirements file asks, and return its path.

    Does nothing when it already is. Raises ConfigError for an unknown name, MachineError when the interpreter, pip or
    the import check fails; the log of the whole installation stays in `.engines/NAME.log`.
    """
    wanted = read_requirements(name, root.absolute())
    engines = root.absolute() / ".engines"
    link = engines / name
    engines.mkdir(parents=True, exist_ok=True)
    with _locked(engines / f".{name}.lock", echo):
        stamp = read_stamp(link)
        if stamp is not None and stamp.requirements_sha256 == wanted.digest:
            echo(f"{name}: ready, {stamp.engine} {stamp.engine_version} on Python {stamp.python}")
            return link
        build = engines / ".builds" / f"{name}-{wanted.digest[:12]}"
        log = engines / f"{name}.log"
        log.write_bytes(b"")
        _build(wanted, build, log, echo)
        _switch(link, build)
        for old in build.parent.glob(f"{name}-*"):
            if old != build and re.fullmatch(rf"{re.escape(name)}-([0-9a-f]{{12}}|replaced)", old.name):
                shutil.rmtree(old)
    return link


def list_environments(root: Path) -> list[EnvironmentInfo]:
    """Every environment that exists or could be installed below `root`, by name."""
    root = root.absolute()
    engines = root / ".engines"
    known = {p.stem for p in (root / REQUIREMENTS_FOLDER).glob("*.txt")}
    present = {p.name for p in engines.iterdir() if p.is_dir() and p.name[0] != "."} if engines.is_dir() else set()
    return [_info(name, root, name in known) for name in sorted(known | present)]


def engine_version(spec: EngineSpec) -> str | None:
    """The version of the engine that `spec` starts, from its interpreter's metadata; the engine is not imported.

    None when there is no such interpreter, or the engine is not a Python distribution there.
    """
    command, _ = resolve_command(spec, ["python"])
    executable = shutil.which(command[0])
    interpreter = _interpreter(Path(executable).absolute()) if executable else None
    if interpreter is None:
        return None
    return _metadata_version(interpreter, find_engine(spec.kind).distributions, spec.env.get("PYTHONPATH"))


def digest_packages(spec: EngineSpec) -> str | None:
    """A digest of the names and versions of all distributions beside the engine; no process is started.

    None where the engine is no Python program, or its packages are not where an environment has them.
    """
    command, _ = resolve_command(spec, ["python"])
    executable = shutil.which(command[0])
    interpreter = _interpreter(Path(executable).absolute()) if executable else None
    if interpreter is None:
        return None
    names = sorted(path.name for path in interpreter.parent.parent.glob("lib/python3*/site-packages/*.dist-info"))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12] if names else None


def read_stamp(environment: Path) -> Stamp | None:
    """The stamp of a finished environment; None when it has none, or one that cannot be read."""
    try:
        return Stamp(**json.loads((environment / STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(environment: Path, stamp: Stamp) -> None:
    """Write the stamp aside and rename it: its presence means that the environment is finished."""
    aside = environment / f".{STAMP}"
    document = {name: getattr(stamp, name) for name in Stamp.__dataclass_fields__}
    aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    aside.replace(environment / STAMP)


def _build(wanted: Requirements, build: Path, log: Path, echo: Echo) -> None:
    python = _base_interpreter(wanted)
    echo(f"{wanted.name}: building {build} with {python}; full log in {log}")
    if build.exists():
        shutil.rmtree(build)
    own = build / "bin" / "python"
    pip = [str(own), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    steps = [("creating the environment", [python, "-m", "venv", str(build)])]
    steps.append((f"installing {wanted.path}", [*pip, "install", "-r", str(wanted.path)]))
    if wanted.no_deps:
        steps.append((f"installing {' '.join(wanted.no_deps)}", [*pip, "install", "--no-deps", *wanted.no_deps]))
    if wanted.remove:
        steps.append((f"removing {' '.join(wanted.remove)}", [*pip, "uninstall", "-y", *wanted.remove]))
    steps.extend((f"importing {module}", [str(own), "-c", f"import {module}"]) for module in wanted.imports)
    for what, argv in steps:
        echo(f"{wanted.name}: {what}")
        _logged(argv, log, f"{wanted.name}: {what}")
    for program in wanted.programs:
        _link_program(program, build)
    stamp = Stamp(
        name=wanted.name,
        requirements_sha256=wanted.digest,
        python=_python_version(own) or "unknown",
        engine=wanted.engine,
        engine_version=_read_version(own, (wanted.engine,), None),
    )
    if stamp.engine_version is None:
        raise MachineError(f"{wanted.name}: {wanted.engine} is not among what {wanted.path} installed; see {log}")
    write_stamp(build, stamp)
    echo(f"{wanted.name}: {stamp.engine} {stamp.engine_version} on Python {stamp.python}")


def _link_program(program: str, build: Path) -> None:
    """Make a program below site-packages one of the environment's bin. Raises MachineError when it is not there."""
    found = next(build.glob(f"lib/python*/site-packages/{program}"), None)
    if found is None or not os.access(found, os.X_OK):
        raise MachineError(f"{build.name}: site-packages has no program {program}")
    link = build / "bin" / found.name
    link.symlink_to(os.path.relpath(found, link.parent))


def _logged(argv: Sequence[str], log: Path, what: str) -> None:
    """Run one step with its output in the log; MachineError with the step's last lines when it fails."""
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        start = out.tell()
        # The caller's Python settings would leak into the new environment's interpreter.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        code = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env).returncode
    if code != 0:
        lines = [s for s in log.read_bytes()[start:].decode(errors="replace").splitlines() if s.strip()]
        tail = "\n  ".join(lines[-5:])
        raise MachineError(f"{what} failed (exit {code}); full log in {log}\n  {tail}")


def _switch(link: Path, build: Path) -> None:
    """Make `link` point to `build` in one step; a folder that stands there (made by hand) is moved aside first."""
    if link.is_dir() and not link.is_symlink():
        link.rename(build.parent / f"{link.name}-replaced")
    aside = link.parent / f".{link.name}.link"
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(build, link.parent))
    aside.replace(link)


def _base_interpreter(wanted: Requirements) -> str:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not wanted.pythons or running in wanted.pythons:
        return sys.executable
    for version in wanted.pythons:
        found = shutil.which(f"python{version}")
        if found and (_python_version(Path(found)) or "").startswith(f"{version}."):
            return found
    raise MachineError(
        f"{wanted.path}: needs Python {' or '.join(wanted.pythons)}; this one is {running} and PATH has none of them"
    )


@contextmanager
def _locked(path: Path, echo: Echo) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            echo(f"{path.parent}: another installation of this environment is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _info(name: str, root: Path, known: bool) -> EnvironmentInfo:
    path = root / ".engines" / name
    if not path.is_dir():
        return EnvironmentInfo(name=name, state="absent", engine_version=None, python=None, path=str(path))
    stamp = read_stamp(path)
    own = path / "bin" / "python"
    python = _python_version(own)
    if python is None:
        return EnvironmentInfo(name=name, state="broken", engine_version=None, python=None, path=str(path))
    state: State = "unmanaged" if stamp is None else "ready"
    if stamp is not None and known and stamp.requirements_sha256 != read_requirements(name, root).digest:
        state = "outdated"
    wanted = (
        (read_requirements(name, root).engine,)
        if known
        else tuple(name for engine in ENGINES.values() for name in engine.distributions)
    )
    version = stamp.engine_version if stamp is not None else _metadata_version(own, wanted, None)
    return EnvironmentInfo(name=name, state=state, engine_version=version, python=python, path=str(path))


def _interpreter(executable: Path) -> Path | None:
    """The Python interpreter behind a command: itself, the one its first lines name, or the one beside it."""
    if executable.name.startswith("python"):
        return executable
    with executable.open("rb") as script:
        head = script.read(1024)
    if head.startswith(b"#!"):
        # pip writes a shell line in place of a too long first line; both name the interpreter's path.
        named = re.search(r"(/[^\s\"']*/python[0-9.]*)", head.decode(errors="replace"))
        if named and Path(named[1]).exists():
            return Path(named[1])
    beside = executable.parent / "python"
    return beside if beside.exists() else None


def _python_version(interpreter: Path) -> str | None:
    return _answer([str(interpreter), "-c", "import platform; print(platform.python_version())"], None)


def _read_version(interpreter: Path, distributions: tuple[str, ...], pythonpath: str | None) -> str | None:
    return _answer([str(interpreter), "-c", _PRINT_VERSION, *distributions], pythonpath)


_metadata_version = functools.cache(_read_version)


def _answer(argv: list[str], pythonpath: str | None) -> str | None:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    if pythonpath:
        env["PYTHONPATH"] = pythonpath
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
