"""`jayrun reconciler`: it ends what a killed process left, and lives through a database that does not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import Popen

import psycopg
import pytest
from cli_helpers import Holder, Jayrun, wait_for

from jayrun import kernel
from jayrun.embedded import Throwaway

Command = Callable[..., "Popen[str]"]
PASS = ("reclaimed", "returned", "admitted", "flagged", "failed")
COUNT = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'jayrun:reconciler%'"


@pytest.fixture
def fleet(jayrun: Jayrun) -> None:
    assert jayrun("devices", "declare", "--simulate", "1x8GB").code == 0


def attested(sql: psycopg.Connection) -> object:
    row = sql.execute("SELECT max(seen_at) FROM jayrun.hosts").fetchone()
    assert row is not None
    return row[0]


@pytest.mark.usefixtures("fleet")
def test_one_pass(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    assert jayrun("reconciler", "--once", "--json").json == dict.fromkeys(PASS, 0)
    holder = hold("victim", 5).wait_until_held()
    assert jayrun("reconciler", "--once", "--json").json["reclaimed"] == 0
    assert len(jayrun("leases", "list", "--json").json) == 1
    holder.kill()
    told = jayrun("reconciler", "--once")
    assert told.code == 0
    assert "reclaimed from 1 dead" in told.out
    assert jayrun("leases", "list", "--json").json == []


@pytest.mark.usefixtures("fleet")
def test_the_loop_reclaims_what_a_killed_process_held(
    jayrun: Jayrun, sql: psycopg.Connection, hold: Callable[..., Holder], command: Command
) -> None:
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.1")
    loop = command("reconciler")
    holder = hold("victim", 5).wait_until_held()
    before = attested(sql)
    wait_for(lambda: attested(sql) != before)  # it looks, and finds the holder alive
    assert len(jayrun("leases", "list", "--json").json) == 1
    holder.kill()
    assert loop.stdout is not None
    assert "reclaimed from 1 dead" in loop.stdout.readline()
    assert jayrun("leases", "list", "--json").json == []
    assert sql.execute(COUNT).fetchone() == (1,)
    loop.terminate()
    assert loop.wait(timeout=10) == 0
    assert loop.communicate() == ("", f"watching host {kernel.host_name()} every 0.1 s; Ctrl-C ends it\n")


@pytest.mark.usefixtures("fleet")
def test_an_outage_is_told_once_and_outlived(server: Throwaway, command: Command) -> None:
    loop = command("reconciler", "--every", "0.1")
    assert loop.stderr is not None
    assert loop.stderr.readline().startswith("watching host ")
    with psycopg.connect(server.url, autocommit=True) as connection:
        before = attested(connection)
        wait_for(lambda: attested(connection) != before)
    server.stop()
    try:
        assert loop.stderr.readline().startswith("the book is out of reach, trying on: ")
    finally:
        server.start()
    assert loop.stderr.readline().startswith("the book is back after ")
    loop.send_signal(signal.SIGINT)
    assert loop.wait(timeout=10) == 0
    assert loop.communicate() == ("", "")


def test_arguments_and_places_that_are_none(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> None:
    for every in ("0", "-1", "x", "nan"):
        assert jayrun("reconciler", "--every", every).code == 2
    monkeypatch.setenv("JAYRUN_DATABASE_URL", "postgresql://me@127.0.0.1:1/book")
    assert jayrun("reconciler").code == 5
    assert jayrun("reconciler", "--once").code == 5
