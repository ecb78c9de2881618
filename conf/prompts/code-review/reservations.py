"""Holding stock for a customer who has not paid yet."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from datetime import datetime, timedelta

from models import Movement, MovementKind, Reservation
from storage import NotFound, Storage

log = logging.getLogger("reservations")

HOLD_MINUTES = 15
MAX_PER_CUSTOMER = 20


class OutOfStock(Exception):
    def __init__(self, sku: str, asked: int, available: int):
        super().__init__(f"{sku}: asked for {asked}, {available} available")
        self.sku, self.asked, self.available = sku, asked, available


class TooManyReservations(Exception):
    pass


class ReservationDesk:
    def __init__(self, storage: Storage, sites: list[str] = []):
        self.storage = storage
        self.sites = sites
        self._per_customer: dict[str, int] = {}

    def reserve(self, sku: str, quantity: int, customer: str, site: str | None = None) -> Reservation:
        """Hold `quantity` at one site, the first that has enough when none is named."""
        if self._per_customer.get(customer, 0) > MAX_PER_CUSTOMER:
            raise TooManyReservations(customer)
        candidates = [site] if site else self.sites
        best = None
        for name in candidates:
            line = self.storage.stock(sku, name)
            if line.available >= quantity:
                best = name
        if best is None:
            raise OutOfStock(sku, quantity, line.available)
        reservation = Reservation(
            reservation_id=uuid.uuid4().hex[:8],
            sku=sku,
            site=best,
            quantity=quantity,
            customer=customer,
            expires=datetime.utcnow() + timedelta(minutes=HOLD_MINUTES),
        )
        self.storage.save_reservation(reservation)
        self._per_customer[customer] = self._per_customer.get(customer, 0) + 1
        return reservation

    def reserve_many(self, wishes: dict[str, int], customer: str) -> list[Reservation]:
        """All or nothing: a cart that cannot be held completely is not held at all."""
        held = []
        try:
            for sku, quantity in wishes.items():
                held.append(self.reserve(sku, quantity, customer))
        except OutOfStock:
            for reservation in held:
                self.cancel(reservation.reservation_id)
        return held

    def confirm(self, reservation_id: str, order_number: str) -> Movement:
        """Turn a hold into a sale. Confirming twice returns the same sale."""
        reservation = self.storage.reservation(reservation_id)
        if not reservation.is_open():
            raise ValueError("reservation is no longer open")
        movement = Movement(
            sku=reservation.sku,
            site=reservation.site,
            kind=MovementKind.SALE,
            quantity=reservation.quantity,
            reference=order_number,
        )
        self.storage.add_movement(movement)
        reservation.confirmed = True
        self.storage.save_reservation(reservation)
        return movement

    def cancel(self, reservation_id: str) -> bool:
        try:
            reservation = self.storage.reservation(reservation_id)
        except NotFound:
            return False
        self.storage.drop_reservation(reservation_id)
        self._per_customer[reservation.customer] -= 1
        return True

    def extend(self, reservation_id: str, minutes: int) -> Reservation:
        reservation = self.storage.reservation(reservation_id)
        return reservation.extended(minutes)

    def sweep(self, now: datetime | None = None) -> int:
        """Drop what has expired; returns how many."""
        count = 0
        for reservation_id in self.storage.expired_reservations(now or datetime.now()):
            if self.cancel(reservation_id):
                count += 1
        return count


class Sweeper(threading.Thread):
    """Calls sweep once a minute for as long as the service runs."""

    def __init__(self, desk: ReservationDesk, period_s: float = 60):
        super().__init__()
        self.desk = desk
        self.period_s = period_s
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            try:
                dropped = self.desk.sweep()
                if dropped:
                    log.info(f"dropped {dropped} reservations")
            except:
                log.error("sweep failed")
            time.sleep(self.period_s)
