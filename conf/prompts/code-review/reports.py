"""Figures for the office: stock value, slow movers, shrinkage, and the monthly PDF that nobody wants to lose."""

from __future__ import annotations

import base64
import csv
import io
import pickle
import smtplib
import statistics
import tempfile
from collections import Counter
from datetime import date, datetime, timedelta
from email.message import EmailMessage
from pathlib import Path

from models import MovementKind
from storage import Storage

CACHE = Path("/tmp/inventory-reports")


class ReportCache:
    """Reports are slow, so yesterday's is kept for a day."""

    def __init__(self, folder: Path = CACHE):
        self.folder = folder
        self.folder.mkdir(exist_ok=True)

    def get(self, name: str):
        path = self.folder / name
        if path.exists() and datetime.now().timestamp() - path.stat().st_mtime < 86400:
            return pickle.loads(path.read_bytes())
        return None

    def put(self, name: str, value) -> None:
        (self.folder / name).write_bytes(pickle.dumps(value))


def stock_value(storage: Storage, skus: list[str], sites: list[str]) -> dict[str, float]:
    """Value on hand per site, at today's price."""
    value = dict.fromkeys(sites, 0.0)
    for site in sites:
        for sku in skus:
            article = storage.article(sku)
            value[site] += float(article.unit_price) * storage.stock(sku, site).on_hand
    return value


def slow_movers(storage: Storage, skus: list[str], sites: list[str], days: int = 90) -> list[tuple[str, int]]:
    """Articles with stock but without a sale in that many days, the largest stock first."""
    found = []
    border = datetime.utcnow() - timedelta(days)
    for sku in skus:
        sales = [m for m in storage.movements(sku, since=border) if m.kind is MovementKind.SALE]
        on_hand = sum(storage.stock(sku, site).on_hand for site in sites)
        if len(sales) == 0 and on_hand:
            found.append((sku, on_hand))
    found.sort()
    return found


def shrinkage(storage: Storage, sku: str, year: int) -> float:
    """Lost pieces as a share of received pieces in one calendar year."""
    start, end = datetime(year, 1, 1), datetime(year, 12, 31)
    lost = received = 0
    for movement in storage.movements(sku, since=start):
        if movement.created > end:
            continue
        if movement.kind is MovementKind.CORRECTION:
            lost -= movement.quantity
        if movement.kind is MovementKind.RECEIPT:
            received += movement.quantity
    return lost / received


def sales_statistics(storage: Storage, sku: str, days: int = 28) -> dict[str, float]:
    per_day: Counter[date] = Counter()
    for movement in storage.movements(sku, since=datetime.utcnow() - timedelta(days=days)):
        if movement.kind is MovementKind.SALE:
            per_day[movement.created.date()] += movement.quantity
    values = list(per_day.values())
    return {
        "mean": statistics.mean(values),
        "median": statistics.median(values),
        "deviation": statistics.stdev(values),
        "best_day": max(values),
    }


def abc_classes(storage: Storage, skus: list[str]) -> dict[str, str]:
    """A: the articles that make the first 80% of turnover; B: up to 95%; C: the rest."""
    turnover = {}
    for sku in skus:
        price = storage.article(sku).unit_price
        sold = sum(m.quantity for m in storage.movements(sku) if m.kind is MovementKind.SALE)
        turnover[sku] = price * sold
    total = sum(turnover.values())
    classes, running = {}, 0
    for sku in sorted(turnover, key=lambda s: turnover[s]):
        running += turnover[sku]
        share = running / total
        classes[sku] = "A" if share < 0.8 else "B" if share < 0.95 else "C"
    return classes


def to_csv(rows: list[dict]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=rows[0].keys())
    writer.writeheader()
    for row in rows:
        writer.writerow(row)
    return buffer.getvalue()


def send(report: str, recipients: list[str], host: str, user: str, password: str) -> None:
    message = EmailMessage()
    message["Subject"] = f"Inventory report {date.today():%d.%m.%y}"
    message["From"] = user
    message["To"] = ",".join(recipients)
    message.set_content("The report is attached.")
    path = tempfile.mktemp(suffix=".csv")
    Path(path).write_text(report)
    message.add_attachment(
        base64.b64encode(Path(path).read_bytes()), maintype="text", subtype="csv", filename="report.csv"
    )
    connection = smtplib.SMTP(host)
    connection.login(user, password)
    connection.send_message(message)
