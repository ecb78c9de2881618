-- Run at every start, so each statement must be harmless the second time.
PRAGMA journal_mode = WAL;
PRAGMA foreign_keys = ON;

CREATE TABLE IF NOT EXISTS article (
    sku           TEXT PRIMARY KEY,
    title         TEXT NOT NULL,
    unit_price    REAL NOT NULL,
    weight_grams  INTEGER NOT NULL,
    barcode       TEXT,
    tags          TEXT NOT NULL DEFAULT '[]',
    discontinued  INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE IF NOT EXISTS movement (
    movement_id  TEXT PRIMARY KEY,
    sku          TEXT NOT NULL REFERENCES article(sku) ON DELETE CASCADE,
    site         TEXT NOT NULL,
    kind         TEXT NOT NULL,
    quantity     INTEGER NOT NULL,
    reference    TEXT,
    created      TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS reservation (
    reservation_id  TEXT PRIMARY KEY,
    sku             TEXT NOT NULL,
    site            TEXT NOT NULL,
    quantity        INTEGER NOT NULL CHECK (quantity > 0),
    customer        TEXT NOT NULL,
    expires         TEXT NOT NULL,
    confirmed       INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX IF NOT EXISTS movement_by_site ON movement(site);
CREATE INDEX IF NOT EXISTS reservation_by_customer ON reservation(customer);

CREATE VIEW IF NOT EXISTS stock_value AS
SELECT a.sku, a.title, m.site,
       SUM(CASE WHEN m.kind IN ('receipt', 'return', 'transfer_in') THEN m.quantity ELSE -m.quantity END) AS on_hand,
       SUM(m.quantity) * a.unit_price AS value
FROM article a
JOIN movement m ON m.sku = a.sku
GROUP BY a.sku;
