"""Which nodes of the Ray cluster can hold a trial, and which of them may still be used."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator import cluster
from orchestrator.config import Placement, TrialSpec
from orchestrator.errors import MachineError
from orchestrator.node import gpus

REFRESH_S = 1.0


def check_local_placements(specs: Sequence[TrialSpec]) -> None:
    """Whether this machine alone could hold each of the trials; asked before Ray is started. Raises MachineError."""
    seen, num_cpus = gpus.read_gpus(), os.cpu_count() or 1
    alike = len({(spec.placement.gpus, spec.placement.cpus) for spec in specs}) <= 1
    for spec in specs:
        who = "a trial" if alike else f"the trial {spec.name}"
        if spec.placement.gpus > len(seen):
            names = ", ".join(gpu.name for gpu in seen) or "none"
            raise MachineError(
                f"placement.gpus: {who} needs {spec.placement.gpus} GPUs on one node, this machine has {len(seen)} "
                f"({names}); join a cluster that has such a node with --address, or look at the command lines with "
                "--dry-run"
            )
        if spec.placement.cpus > num_cpus:
            raise MachineError(
                f"placement.cpus: {who} needs {spec.placement.cpus} CPUs on one node, this machine has {num_cpus}"
            )


class Nodes:
    """The nodes of the cluster. Each holds one trial at a time: two engines side by side would measure each other."""

    def __init__(self) -> None:
        self._alive: dict[str, dict[str, Any]] = {}
        self._addresses: dict[str, str] = {}
        self._taken: set[str] = set()
        self._barred: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._read_s = 0.0
        self.refresh()

    def require(self, placements: Iterable[Placement]) -> None:
        """Raises MachineError when one of the placements fits on no node."""
        for placement in placements:
            if not self._fitting(placement):
                raise MachineError(_nothing_fits(placement))

    def refresh(self) -> None:
        """Look again who is there; at most once in REFRESH_S."""
        if time.monotonic() - self._read_s < REFRESH_S:
            return
        self._read_s = time.monotonic()
        self._alive = {node["NodeID"]: node for node in cluster.alive_nodes()}
        self._addresses |= {name: node["NodeManagerAddress"] for name, node in self._alive.items()}

    def _fitting(self, placement: Placement) -> list[str]:
        self.refresh()
        return [name for name, node in self._alive.items() if cluster.num_that_fit(node, placement)]

    def take(self, placement: Placement) -> str | None:
        """The id of a free node that can hold the placement, now taken; None when all are busy, gone or barred."""
        fitting = self._fitting(placement)
        free = [node for node in fitting if node not in self._taken and node not in self._barred]
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
        """Whether the node is alive."""
        self.refresh()
        return node in self._alive

    def address(self, node: str) -> str:
        """The node's address, also after it has gone."""
        return self._addresses.get(node, node)

    def any_left(self) -> bool:
        """Whether any node may still be used, for whatever placement."""
        self.refresh()
        return any(node not in self._barred for node in self._alive)

    def none_left(self, placement: Placement) -> str | None:
        """Why no node can hold the placement any more; None as long as one can, be it busy now."""
        fitting = self._fitting(placement)
        if any(node not in self._barred for node in fitting):
            return None
        barred = "; ".join(self._barred.values())
        return f"not to be used again: {barred}" if barred else _nothing_fits(placement)


def _nothing_fits(placement: Placement) -> str:
    return f"no node of this Ray cluster can hold a trial: it needs {cluster.describe_need(placement)}"
