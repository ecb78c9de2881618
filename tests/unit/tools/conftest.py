"""Fixtures of the tests of tools/airgap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.packing import make_project


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_project(tmp_path, monkeypatch)
