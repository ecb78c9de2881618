"""Which nodes of the Ray cluster can hold a trial, and which of them may still be used."""

from __future__ import annotations

import os
import time
from collections import Counter

from orchestrator import cluster
from orchestrator.config import Placement
from orchestrator.errors import MachineError
from orchestrator.node import gpus

REFRESH_S = 1.0


def check_local_placement(placement: Placement) -> None:
    """Whether this machine alone could hold one trial; asked before Ray is started. Raises MachineError."""
    num_gpus, num_cpus = len(gpus.read_gpus()), os.cpu_count() or 1
    if placement.gpus > num_gpus:
        seen = ", ".join(gpu.name for gpu in gpus.read_gpus()) or "none"
        raise MachineError(
            f"placement.gpus: a trial needs {placement.gpus} GPUs on one node, this machine has {num_gpus} ({seen}); "
            "join a cluster that has such a node with --address, or look at the command lines with --dry-run"
        )
    if placement.cpus > num_cpus:
        raise MachineError(
            f"placement.cpus: a trial needs {placement.cpus} CPUs on one node, this machine has {num_cpus}"
        )


class Nodes:
    """The nodes that can hold one trial. Each holds one at a time: two engines side by side would measure each other.

    Raises MachineError at once when no node can ever hold one.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._fitting: dict[str, str] = {}
        self._taken: set[str] = set()
        self._barred: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._read_s = 0.0
        self.refresh()
        if not self._fitting:
            raise MachineError(self._nothing_fits())

    def refresh(self) -> None:
        """Look again who is there; at most once in REFRESH_S."""
        if time.monotonic() - self._read_s < REFRESH_S:
            return
        self._read_s = time.monotonic()
        fitting = [n for n in cluster.alive_nodes() if cluster.num_that_fit(n, self._placement)]
        self._fitting = {node["NodeID"]: node["NodeManagerAddress"] for node in fitting}

    def take(self) -> str | None:
        """The id of a free node, now taken; None when all are busy, gone or barred."""
        self.refresh()
        free = [node for node in self._fitting if node not in self._taken and node not in self._barred]
        if not free:
            return None
        node = min(free, key=self._failures.__getitem__)
        self._taken.add(node)
        return node

    def give_back(self, node: str, *, failed: bool = False) -> None:
        """failed: the machine was at fault; other nodes are taken first from now on."""
        self._taken.discard(node)
        self._failures[node] += failed

    def bar(self, node: str, why: str) -> None:
        """Never use this node again in this campaign: what it holds was not released."""
        self._barred[node] = f"{self.address(node)}: {why}"

    def is_there(self, node: str) -> bool:
        self.refresh()
        return node in self._fitting

    def address(self, node: str) -> str:
        return self._fitting.get(node, node)

    def none_left(self) -> str | None:
        """Why no node can be used any more; None as long as one can, be it busy now."""
        self.refresh()
        if any(node not in self._barred for node in self._fitting):
            return None
        barred = "; ".join(self._barred.values())
        return f"not to be used again: {barred}" if barred else self._nothing_fits()

    def _nothing_fits(self) -> str:
        return f"no node of this Ray cluster can hold a trial: it needs {cluster.describe_need(self._placement)}"
