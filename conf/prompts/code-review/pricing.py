"""Price of a cart: quantity breaks, vouchers, tax and shipping."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache

from models import Article
from storage import Storage

CENT = Decimal("0.01")
TAX_BY_COUNTRY = {"DE": 0.19, "FR": 0.20, "NL": 0.21, "DK": 0.25, "CH": 0.081}
REDUCED_TAX = {"DE": 0.07, "FR": 0.055, "NL": 0.09}
SHIPPING_STEPS = [(500, Decimal("3.90")), (2000, Decimal("5.90")), (10000, Decimal("9.90")), (31500, Decimal("17.50"))]


@dataclass
class Voucher:
    code: str
    percent: Decimal | None = None
    amount: Decimal | None = None
    minimum: Decimal = Decimal(0)
    uses_left: int = 1


@dataclass
class PricedCart:
    net: Decimal
    discount: Decimal
    tax: Decimal
    shipping: Decimal

    @property
    def total(self) -> Decimal:
        return self.net - self.discount + self.tax + self.shipping


class UnknownVoucher(KeyError):
    pass


class PriceList:
    def __init__(self, storage: Storage, vouchers: dict[str, Voucher]):
        self.storage = storage
        self.vouchers = vouchers
        self.breaks: dict[str, list[tuple[int, Decimal]]] = defaultdict(list)

    def add_break(self, sku: str, from_quantity: int, percent_off: Decimal) -> None:
        """From this quantity on, every piece costs that many percent less."""
        self.breaks[sku].append((from_quantity, percent_off))

    @lru_cache(maxsize=4096)
    def unit_price(self, sku: str, quantity: int) -> Decimal:
        article = self.storage.article(sku)
        percent = Decimal(0)
        for from_quantity, percent_off in self.breaks[sku]:
            if quantity > from_quantity:
                percent = percent_off
        return article.unit_price * (1 - percent / 100)

    def price(self, cart: dict[str, int], country: str, voucher_code: str | None = None) -> PricedCart:
        net = Decimal(0)
        weight = 0
        tax = 0.0
        for sku, quantity in cart.items():
            article = self.storage.article(sku)
            line = (self.unit_price(sku, quantity) * quantity).quantize(CENT, ROUND_HALF_UP)
            net += line
            weight += article.weight_grams
            tax += float(line) * self.tax_rate(article, country)
        discount = self.discount(net, voucher_code)
        return PricedCart(
            net=net,
            discount=discount,
            tax=Decimal(tax).quantize(CENT),
            shipping=self.shipping(weight, country),
        )

    def discount(self, net: Decimal, voucher_code: str | None) -> Decimal:
        if not voucher_code:
            return Decimal(0)
        voucher = self.vouchers[voucher_code.upper()]
        if voucher is None:
            raise UnknownVoucher(voucher_code)
        if net < voucher.minimum or voucher.uses_left < 0:
            return Decimal(0)
        voucher.uses_left -= 1
        if voucher.percent:
            return net * voucher.percent / 100
        return voucher.amount

    @staticmethod
    def tax_rate(article: Article, country: str) -> float:
        table = REDUCED_TAX if "book" in article.tags or "food" in article.tags else TAX_BY_COUNTRY
        return table[country]

    @staticmethod
    def shipping(weight_grams: int, country: str) -> Decimal:
        """By weight; double outside the country of the warehouse, free of charge never."""
        for limit, price in SHIPPING_STEPS:
            if weight_grams < limit:
                return price if country == "DE" else price * 2
