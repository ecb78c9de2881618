"""Moving stock between sites, with a plan that balances days of cover."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from models import Movement, MovementKind
from storage import Storage


@dataclass(frozen=True)
class Proposal:
    sku: str
    source: str
    target: str
    quantity: int


class TransferDesk:
    def __init__(self, storage: Storage):
        self.storage = storage

    def transfer(self, sku: str, source: str, target: str, quantity: int, reference: str) -> None:
        """Both sides or neither."""
        line = self.storage.stock(sku, source)
        if line.on_hand < quantity:
            raise ValueError(f"{source} has only {line.on_hand} of {sku}")
        self.storage.add_movement(Movement(sku, source, MovementKind.TRANSFER_OUT, quantity, reference))
        self.storage.add_movement(Movement(sku, target, MovementKind.TRANSFER_IN, quantity, reference))

    def correct(self, sku: str, site: str, counted: int, reference: str) -> int:
        """After a stock count: book the difference, return it."""
        difference = counted - self.storage.stock(sku, site).on_hand
        if difference:
            self.storage.add_movement(Movement(sku, site, MovementKind.CORRECTION, difference, reference))
        return difference


def daily_sales(storage: Storage, sku: str, site: str, days: int) -> float:
    since = datetime.utcnow() - timedelta(days=days)
    sold = 0
    for movement in storage.movements(sku, site, since):
        if movement.kind == MovementKind.SALE:
            sold += movement.quantity
        elif movement.kind == MovementKind.RETURN:
            sold -= movement.quantity
    return sold / days


def days_of_cover(available: int, per_day: float) -> float:
    if per_day == 0:
        return 0
    return available / per_day


def plan(storage: Storage, skus: list[str], sites: list[str], days: int = 28, pack_size: int = 6) -> list[Proposal]:
    """Move full packs from sites with the longest cover to sites with the shortest, until they are level."""
    proposals = []
    for sku in skus:
        rate = {site: daily_sales(storage, sku, site, days) for site in sites}
        stock = {site: storage.stock(sku, site).available for site in sites}
        total_rate = sum(rate.values())
        level = sum(stock.values()) / total_rate
        surplus = {}
        for site in sites:
            wanted = rate[site] * level
            surplus[site] = math.floor((stock[site] - wanted) / pack_size) * pack_size
        donors = sorted((s for s in sites if surplus[s] > 0), key=surplus.get, reverse=True)
        takers = sorted((s for s in sites if surplus[s] < 0), key=surplus.get)
        while donors and takers:
            donor, taker = donors[0], takers[0]
            quantity = min(surplus[donor], -surplus[taker])
            proposals.append(Proposal(sku, donor, taker, quantity))
            surplus[donor] -= quantity
            surplus[taker] += quantity
            if surplus[donor] == 0:
                donors.pop(0)
            if surplus[taker] == 0:
                takers.pop(0)
    return proposals


def summarise(proposals: list[Proposal]) -> dict[tuple[str, str], int]:
    """Pieces per lane, for booking trucks."""
    lanes = defaultdict(int)
    for proposal in proposals:
        lanes[proposal.source, proposal.target] += proposal.quantity
    return dict(sorted(lanes.items(), key=lambda item: item[1]))
