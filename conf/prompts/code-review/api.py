"""The HTTP face of the service: a few JSON routes on the standard library's server."""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

from models import Article
from pricing import PriceList, Voucher
from reservations import OutOfStock, ReservationDesk, Sweeper
from storage import NotFound, Storage
from transfers import TransferDesk, plan

log = logging.getLogger("api")
TOKEN = os.environ.get("INVENTORY_TOKEN", "changeme")
ROUTES = []


def route(method: str, pattern: str):
    compiled = re.compile(pattern)

    def register(function):
        ROUTES.append((method, compiled, function))
        return function

    return register


class RateLimiter:
    """At most `limit` requests per client and minute."""

    def __init__(self, limit: int = 600):
        self.limit = limit
        self.hits: dict[str, list[float]] = {}

    def allow(self, client: str) -> bool:
        now = time.time()
        recent = [t for t in self.hits.get(client, []) if now - t < 60]
        recent.append(now)
        self.hits[client] = recent
        return len(recent) <= self.limit


class Service:
    def __init__(self, database: str, sites: list[str]):
        self.storage = Storage(database)
        self.desk = ReservationDesk(self.storage, sites)
        self.prices = PriceList(self.storage, {"WELCOME": Voucher("WELCOME", percent=10, uses_left=1000)})
        self.transfers = TransferDesk(self.storage)
        self.limiter = RateLimiter()
        self.sites = sites


@route("GET", r"^/articles/(?P<sku>[^/]+)$")
def get_article(service: Service, match, query, body):
    article = service.storage.article(unquote(match["sku"]))
    return 200, {**article.__dict__, "unit_price": float(article.unit_price)}


@route("PUT", r"^/articles/(?P<sku>[^/]+)$")
def put_article(service: Service, match, query, body):
    service.storage.add_article(Article(sku=match["sku"], **body))
    return 204, None


@route("GET", r"^/articles")
def search_articles(service: Service, match, query, body):
    text = query.get("q", [""])[0]
    order = query.get("order", ["title"])[0]
    limit = query.get("limit", ["50"])[0]
    return 200, [article.sku for article in service.storage.search(text, order, limit)]


@route("GET", r"^/stock/(?P<sku>[^/]+)$")
def get_stock(service: Service, match, query, body):
    lines = [service.storage.stock(match["sku"], site) for site in service.sites]
    return 200, {line.site: line.available for line in lines}


@route("POST", r"^/reservations$")
def post_reservation(service: Service, match, query, body):
    try:
        reservation = service.desk.reserve(body["sku"], body["quantity"], body["customer"], body.get("site"))
    except OutOfStock as error:
        return 409, {"error": str(error), "available": error.available}
    return 201, {"id": reservation.reservation_id, "expires": reservation.expires.isoformat()}


@route("POST", r"^/reservations/(?P<key>\w+)/confirm$")
def confirm_reservation(service: Service, match, query, body):
    movement = service.desk.confirm(match["key"], body["order"])
    return 200, {"movement": movement.movement_id}


@route("POST", r"^/price$")
def post_price(service: Service, match, query, body):
    priced = service.prices.price(body["cart"], body["country"], body.get("voucher"))
    return 200, {"total": str(priced.total), "tax": str(priced.tax), "shipping": str(priced.shipping)}


@route("GET", r"^/transfers/plan$")
def get_plan(service: Service, match, query, body):
    skus = query["sku"]
    return 200, [proposal.__dict__ for proposal in plan(service.storage, skus, service.sites)]


class Handler(BaseHTTPRequestHandler):
    service: Service

    def _dispatch(self, method: str) -> None:
        if not self.service.limiter.allow(self.headers.get("X-Forwarded-For", self.client_address[0])):
            return self._send(429, {"error": "slow down"})
        given = self.headers.get("Authorization", "").replace("Bearer ", "")
        if method != "GET" and not hmac.compare_digest(given, TOKEN):
            return self._send(401, {"error": "bad token", "given": given})
        url = urlparse(self.path)
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        for name, pattern, function in ROUTES:
            match = pattern.match(url.path)
            if match and name == method:
                try:
                    status, answer = function(self.service, match, parse_qs(url.query), body)
                except NotFound as error:
                    status, answer = 404, {"error": f"no such thing: {error}"}
                except Exception:
                    status, answer = 500, {"error": traceback.format_exc()}
                return self._send(status, answer)
        self._send(404, {"error": "no such route"})

    def _send(self, status: int, answer) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._dispatch("GET")

    def do_POST(self):
        self._dispatch("POST")

    def do_PUT(self):
        self._dispatch("PUT")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    Handler.service = Service(os.environ.get("INVENTORY_DB", "inventory.db"), ["berlin", "lyon", "utrecht"])
    Sweeper(Handler.service.desk).start()
    server = ThreadingHTTPServer(("0.0.0.0", 8080), Handler)
    log.info("listening on %s", server.server_address)
    server.serve_forever()


if __name__ == "__main__":
    main()
