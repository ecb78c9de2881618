"""The MLflow record of a campaign whose store fails for a while, or for good: no result is lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.campaigns import by_k, drive, k_sweep, open_checked, runs


@contextmanager
def failing_store(folder: Path) -> Iterator[None]:
    """While entered, the store is a database that lacks MLflow's table of runs."""
    _rename(folder, "runs", "runs_away")
    try:
        yield
    finally:
        _rename(folder, "runs_away", "runs")


def _rename(folder: Path, table: str, name: str) -> None:
    with closing(sqlite3.connect(folder / "mlruns" / "mlflow.db")) as database, database:
        # Foreign keys keep naming the table as MLflow knows it.
        database.execute("PRAGMA legacy_alter_table = ON")
        database.execute(f"ALTER TABLE {table} RENAME TO {name}")


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_has_every_result_in_the_end(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        with failing_store(tmp_path):
            assert drive(running, by_k, most=2) == ["k=2", "k=4"]
        assert runs(swept) == []
        assert drive(running, by_k) == ["k=6"]
        recorded, _ = running.finish()
        assert running.bookkeeping.warnings == []
    assert all(each.run_id for each in recorded)
    assert sorted(runs(swept)) == [(f"k={k}", "FINISHED", None) for k in (2, 4, 6)]


@pytest.mark.slow
def test_a_store_that_stays_down_costs_the_run_ids_until_the_campaign_is_resumed(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k, most=1)
        with failing_store(tmp_path):
            drive(running, by_k)
            recorded, selection = running.finish()
        first, second = running.bookkeeping.warnings
    assert "nothing is lost, record it later with --resume" in first
    assert "the runs are closed by the next campaign" in second
    assert [each.run_id is not None for each in recorded] == [True, False, False]
    assert selection.best is not None
    assert selection.best.spec.name == "k=4"
    with open_checked(swept, resume=True) as running:
        assert not running.wants_more()
        recorded, _ = running.finish()
    assert all(each.run_id for each in recorded)
    assert sorted(runs(swept)) == [(f"k={k}", "FINISHED", None) for k in (2, 4, 6)]


def test_only_the_first_close_does_anything(tmp_path: Path) -> None:
    swept = k_sweep(tmp_path)
    with open_checked(swept) as running:
        drive(running, by_k)
        running.finish()
        with failing_store(tmp_path):
            running.bookkeeping.close("KILLED")
        assert running.bookkeeping.warnings == []
