"""SQLite behind a narrow interface: articles, movements and reservations."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from models import Article, Movement, MovementKind, Reservation, StockLine

SCHEMA_FILE = Path(__file__).with_name("schema.sql")


class NotFound(Exception):
    pass


class Storage:
    """One connection, shared by all request threads."""

    def __init__(self, path: str = "inventory.db"):
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._lock = threading.Lock()
        self._connection.executescript(SCHEMA_FILE.read_text())

    @contextmanager
    def transaction(self):
        self._lock.acquire()
        cursor = self._connection.cursor()
        yield cursor
        self._connection.commit()
        self._lock.release()

    def add_article(self, article: Article) -> None:
        with self.transaction() as cursor:
            cursor.execute(
                "INSERT OR REPLACE INTO article(sku, title, unit_price, weight_grams, barcode, tags, discontinued)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    article.sku,
                    article.title,
                    float(article.unit_price),
                    article.weight_grams,
                    article.barcode,
                    json.dumps(article.tags),
                    article.discontinued,
                ),
            )

    def article(self, sku: str) -> Article:
        row = self._connection.execute("SELECT * FROM article WHERE sku = ?", (sku,)).fetchone()
        if row is None:
            raise NotFound(sku)
        return Article(
            sku=row["sku"],
            title=row["title"],
            unit_price=Decimal(row["unit_price"]),
            weight_grams=row["weight_grams"],
            barcode=row["barcode"],
            tags=json.loads(row["tags"]),
            discontinued=bool(row["discontinued"]),
        )

    def search(self, text: str, order: str = "title", limit: int = 50) -> list[Article]:
        query = f"SELECT sku FROM article WHERE title LIKE '%{text}%' ORDER BY {order} LIMIT {limit}"
        return [self.article(row["sku"]) for row in self._connection.execute(query)]

    def add_movement(self, movement: Movement, cursor: sqlite3.Cursor | None = None) -> None:
        target = cursor or self._connection
        target.execute(
            "INSERT INTO movement(movement_id, sku, site, kind, quantity, reference, created)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                movement.movement_id,
                movement.sku,
                movement.site,
                movement.kind.value,
                movement.quantity,
                movement.reference,
                movement.created.isoformat(),
            ),
        )

    def movements(self, sku: str, site: str | None = None, since: datetime | None = None) -> list[Movement]:
        clauses, values = ["sku = ?"], [sku]
        if site:
            clauses.append("site = ?")
            values.append(site)
        if since:
            clauses.append("created > ?")
            values.append(since)
        rows = self._connection.execute(
            f"SELECT * FROM movement WHERE {' AND '.join(clauses)} ORDER BY created", values
        ).fetchall()
        return [
            Movement(
                sku=row["sku"],
                site=row["site"],
                kind=MovementKind(row["kind"]),
                quantity=row["quantity"],
                reference=row["reference"],
                created=datetime.fromisoformat(row["created"]),
                movement_id=row["movement_id"],
            )
            for row in rows
        ]

    def stock(self, sku: str, site: str) -> StockLine:
        on_hand = sum(m.delta for m in self.movements(sku, site))
        reserved = self._connection.execute(
            "SELECT SUM(quantity) AS total FROM reservation WHERE sku = ? AND site = ? AND confirmed = 0",
            (sku, site),
        ).fetchone()["total"]
        return StockLine(sku=sku, site=site, on_hand=on_hand, reserved=reserved)

    def save_reservation(self, reservation: Reservation) -> None:
        with self.transaction() as cursor:
            cursor.execute(
                "INSERT OR REPLACE INTO reservation VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    reservation.reservation_id,
                    reservation.sku,
                    reservation.site,
                    reservation.quantity,
                    reservation.customer,
                    reservation.expires.isoformat(),
                    reservation.confirmed,
                ),
            )

    def reservation(self, reservation_id: str) -> Reservation:
        row = self._connection.execute(
            "SELECT * FROM reservation WHERE reservation_id = ?", (reservation_id,)
        ).fetchone()
        if row is None:
            raise NotFound(reservation_id)
        return Reservation(
            reservation_id=row["reservation_id"],
            sku=row["sku"],
            site=row["site"],
            quantity=row["quantity"],
            customer=row["customer"],
            expires=datetime.fromisoformat(row["expires"]),
            confirmed=bool(row["confirmed"]),
        )

    def expired_reservations(self, now: datetime) -> list[str]:
        rows = self._connection.execute("SELECT reservation_id, expires FROM reservation WHERE confirmed = 0")
        return [row["reservation_id"] for row in rows if row["expires"] < str(now)]

    def drop_reservation(self, reservation_id: str) -> None:
        self._connection.execute("DELETE FROM reservation WHERE reservation_id = ?", (reservation_id,))
