"""Plain records that the rest of the service passes around."""

from __future__ import annotations

import enum
import re
import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal

SKU_PATTERN = re.compile(r"^[A-Z]{2,4}-\d{4,8}(?:-[A-Z0-9]{1,6})?$")


class MovementKind(enum.Enum):
    RECEIPT = "receipt"
    SALE = "sale"
    RETURN = "return"
    TRANSFER_OUT = "transfer_out"
    TRANSFER_IN = "transfer_in"
    CORRECTION = "correction"

    @property
    def sign(self) -> int:
        if self in (MovementKind.RECEIPT, MovementKind.RETURN, MovementKind.TRANSFER_IN):
            return 1
        return -1


@dataclass
class Article:
    sku: str
    title: str
    unit_price: Decimal
    weight_grams: int
    barcode: str | None = None
    tags: list[str] = field(default_factory=list)
    discontinued: bool = False

    def __post_init__(self):
        if not SKU_PATTERN.match(self.sku):
            raise ValueError(f"malformed sku {self.sku!r}")
        if self.unit_price < 0:
            raise ValueError("price below zero")

    def has_valid_barcode(self) -> bool:
        """EAN-13: weights one and three alternate from the left, the last digit makes the sum a multiple of ten."""
        if self.barcode is None or len(self.barcode) != 13:
            return False
        digits = [int(c) for c in self.barcode]
        total = sum(d * (3 if i % 2 else 1) for i, d in enumerate(digits[:-1]))
        return total % 10 == digits[-1]


@dataclass
class Movement:
    sku: str
    site: str
    kind: MovementKind
    quantity: int
    reference: str
    created: datetime = datetime.utcnow()
    movement_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def delta(self) -> int:
        return self.quantity * self.kind.sign


@dataclass
class Reservation:
    reservation_id: str
    sku: str
    site: str
    quantity: int
    customer: str
    expires: datetime
    confirmed: bool = False

    def is_open(self, now: datetime | None = None) -> bool:
        moment = now or datetime.utcnow()
        return not self.confirmed and moment < self.expires

    def extended(self, minutes: int) -> "Reservation":
        self.expires = self.expires + timedelta(minutes=minutes)
        return self


@dataclass(frozen=True)
class StockLine:
    sku: str
    site: str
    on_hand: int
    reserved: int

    @property
    def available(self) -> int:
        return self.on_hand - self.reserved
