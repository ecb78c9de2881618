"""What the integration tests share beside the fixtures of every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.drivers import Driver


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """make(behaviour=..., **sections) -> Driver in the folder of the test; nothing of it outlives the test."""
    made: list[Driver] = []

    def make(**arguments: object) -> Driver:
        made.append(Driver(tmp_path, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()
