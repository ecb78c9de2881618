"""What one engine claims on a node, so that two never share it: a block of ports, a compile-cache slot.

Every claim is a file lock. It ends with the process that holds it, however that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import MachineError

# The HTTP port and the ports behind it, for an engine's own rendezvous (NCCL, data parallel).
PORTS_PER_ENGINE = 8
# Compile caches that break when two engines write them at once (vllm#24601, vllm#31199).
CACHE_VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
}


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether the lock was free. It is held while entered and ends with this process, however that ends."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextlib.contextmanager
def reserved_port(ports: tuple[int, int]) -> Iterator[int]:
    """A free block of PORTS_PER_ENGINE ports on this node; its first port is the HTTP port."""
    first, last = ports
    for port in range(first, last - PORTS_PER_ENGINE + 2, PORTS_PER_ENGINE):
        with locked(_folder() / f"port-{port}") as free:
            if free and all(_port_is_free(port + i) for i in range(PORTS_PER_ENGINE)):
                yield port
                return
    raise MachineError(f"placement.ports: no block of {PORTS_PER_ENGINE} free ports between {first} and {last}")


def _port_is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a connection in TIME_WAIT does not make a port taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


@contextlib.contextmanager
def cache_slot(root: Path) -> Iterator[dict[str, str]]:
    """Compile-cache folders that persist between trials and that no other engine uses at the same time."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{root}: the engines' compile caches cannot be kept here: {error.strerror}") from None
    for number in range(1024):
        slot = root / f"slot-{number}"
        with locked(root / f"slot-{number}.lock") as free:
            if free:
                yield {name: str(slot / folder) for name, folder in CACHE_VARIABLES.items()}
                return
    raise MachineError(f"{root}: all compile-cache slots are taken")
