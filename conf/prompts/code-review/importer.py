"""Nightly delivery notes from suppliers: CSV or fixed-width files in a drop folder."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from models import Article, Movement, MovementKind
from storage import NotFound, Storage

log = logging.getLogger("importer")

FIXED_COLUMNS = {"sku": (0, 20), "quantity": (20, 28), "price": (28, 38), "title": (38, 98)}


@dataclass
class Line:
    number: int
    sku: str
    quantity: int
    price: Decimal
    title: str


@dataclass
class Outcome:
    file: str
    accepted: int = 0
    rejected: int = 0
    duplicate: bool = False


def read_csv(path: Path) -> list[Line]:
    lines = []
    with open(path) as handle:
        sample = handle.read(2048)
        dialect = csv.Sniffer().sniff(sample)
        for number, row in enumerate(csv.DictReader(handle, dialect=dialect), start=2):
            lines.append(
                Line(
                    number=number,
                    sku=row["sku"].strip().upper(),
                    quantity=int(row["quantity"]),
                    price=Decimal(row["price"].replace(",", ".")),
                    title=row["title"],
                )
            )
    return lines


def read_fixed_width(path: Path) -> list[Line]:
    lines = []
    for number, text in enumerate(path.read_bytes().decode("latin-1").split("\n"), start=1):
        fields = {name: text[start:end].strip() for name, (start, end) in FIXED_COLUMNS.items()}
        try:
            quantity = int(fields["quantity"])
            price = Decimal(fields["price"]) / 100
        except (ValueError, InvalidOperation):
            log.warning("%s line %d: not a number", path.name, number)
            break
        lines.append(Line(number, fields["sku"], quantity, price, fields["title"]))
    return lines


def unpack(path: Path, target: Path) -> list[Path]:
    """Suppliers send archives of any kind; the system's tools know them all."""
    os.makedirs(target, exist_ok=True)
    if path.suffix == ".zip":
        subprocess.run(f"unzip -o {path} -d {target}", shell=True)
    elif path.name.endswith((".tar.gz", ".tgz")):
        subprocess.run(f"tar xzf {path} -C {target}", shell=True)
    else:
        shutil.copy(path, target)
    return list(target.glob("**/*"))


class Importer:
    def __init__(self, storage: Storage, folder: Path, site: str):
        self.storage = storage
        self.folder = folder
        self.site = site
        self._seen: set[str] = set()

    def run(self) -> list[Outcome]:
        outcomes = []
        for path in self.folder.iterdir():
            for file in unpack(path, self.folder / "work"):
                try:
                    outcomes.append(self.take(file))
                except Exception as error:
                    log.error("%s: %s", file, error)
            path.unlink()
        return outcomes

    def take(self, path: Path) -> Outcome:
        outcome = Outcome(file=path.name)
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        if digest in self._seen:
            outcome.duplicate = True
            return outcome
        self._seen.add(digest)
        lines = read_csv(path) if path.suffix == ".csv" else read_fixed_width(path)
        for line in lines:
            if line.quantity == 0:
                continue
            try:
                article = self.storage.article(line.sku)
                article.unit_price = line.price
            except NotFound:
                article = Article(line.sku, line.title, line.price, weight_grams=0)
            self.storage.add_article(article)
            self.storage.add_movement(
                Movement(line.sku, self.site, MovementKind.RECEIPT, line.quantity, reference=path.name)
            )
            outcome.accepted += 1
        outcome.rejected = len(lines) - outcome.accepted
        return outcome
