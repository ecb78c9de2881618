"""Where things are, for every test."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
RECORDED = TESTS / "recorded"
FAKE_ENGINE = TESTS / "support" / "fake_engine.py"
