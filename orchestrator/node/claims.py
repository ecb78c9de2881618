"""What one engine claims on a node, so that two never share it: ports, GPUs, compile caches, a folder for its scraps.

Every claim is a file lock. It ends with the process that holds it, however that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from orchestrator.engines import ENGINES
from orchestrator.errors import MachineError

# The HTTP port and the ports behind it, for an engine's own rendezvous (NCCL, data parallel).
PORTS_PER_ENGINE = 8
MAX_SLOTS = 1024
# Compile caches of libraries that break when two engines write them at once (vllm#24601, vllm#31199).
LIBRARY_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}


def node_folder() -> Path:
    """Where this user's claims on this node are kept, one for all experiments."""
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock was free. It is held while entered and ends with this process, however that ends."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextlib.contextmanager
def reserve_port(ports: tuple[int, int]) -> Iterator[int]:
    """A free block of PORTS_PER_ENGINE ports on this node; its first port is the HTTP port."""
    first, last = ports
    # A port that ended connections of its own stays in TIME_WAIT: usable, but only when there is no better one, since
    # a server that is bound and not yet listening looks the same.
    for reuse in (False, True):
        for port in range(first, last - PORTS_PER_ENGINE + 2, PORTS_PER_ENGINE):
            with try_lock(node_folder() / f"port-{port}") as free:
                if free and all(_port_is_free(port + i, reuse) for i in range(PORTS_PER_ENGINE)):
                    yield port
                    return
    raise MachineError(f"placement.ports: no block of {PORTS_PER_ENGINE} free ports between {first} and {last}")


def _port_is_free(port: int, reuse: bool) -> bool:
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


@contextlib.contextmanager
def claim_gpus(uuids: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Claim GPUs; yields those that another engine of this user has claimed, which is none when all are ours now."""
    with contextlib.ExitStack() as held:
        names = {uuid: node_folder() / f"gpu-{uuid.replace('/', '_')}" for uuid in uuids}
        yield tuple(uuid for uuid, path in names.items() if not held.enter_context(try_lock(path)))


@contextlib.contextmanager
def claim_cache_slot(root: Path) -> Iterator[dict[str, str]]:
    """Variable -> compile-cache folder. They persist between trials; no other engine uses them at the same time."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{root}: the engines' compile caches cannot be kept here: {error.strerror}") from None
    # Every engine's: one may load another for its kernels.
    caches = {name: folder for engine in ENGINES.values() for name, folder in engine.cache_folders.items()}
    with _slot(root) as slot:
        yield {name: str(slot / folder) for name, folder in (LIBRARY_CACHES | caches).items()}


def empty_caches(caches: Mapping[str, str]) -> None:
    """Remove the content of a slot that is held: a damaged cache fails every start until it is gone."""
    for folder in set(caches.values()):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def claim_scrap_folder() -> Iterator[Path]:
    """An empty folder for temporary files, removed afterwards: killed engines leave sockets and files in theirs."""
    with _slot(node_folder() / "scraps") as slot:
        # What a predecessor left that was killed together with its owner.
        shutil.rmtree(slot, ignore_errors=True)
        slot.mkdir(mode=0o700)
        try:
            yield slot
        finally:
            shutil.rmtree(slot, ignore_errors=True)


@contextlib.contextmanager
def _slot(root: Path) -> Iterator[Path]:
    """The first of the numbered folders below `root` that nobody holds."""
    root.mkdir(parents=True, exist_ok=True)
    for number in range(MAX_SLOTS):
        with try_lock(root / f"slot-{number}.lock") as free:
            if free:
                yield root / f"slot-{number}"
                return
    raise MachineError(f"{root}: all {MAX_SLOTS} slots are taken")
