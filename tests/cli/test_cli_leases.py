"""`jayrun leases` and `jayrun queue`, looking at real processes."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

import psycopg
import pytest
from cli_helpers import Holder, Jayrun, wait_for

GB = 10**9


@pytest.fixture
def fleet(jayrun: Jayrun) -> None:
    assert jayrun("devices", "declare", "--simulate", "3x8GB").code == 0


def columns(sql: psycopg.Connection, view: str) -> list[str]:
    description = sql.execute(f"SELECT * FROM jayrun_audit.{view} LIMIT 0").description
    assert description is not None
    return [column.name for column in description]


@pytest.mark.usefixtures("fleet")
def test_who_holds_and_who_waits(jayrun: Jayrun, sql: psycopg.Connection, hold: Callable[..., Holder]) -> None:
    assert jayrun("leases", "list").out == "no live leases\n"
    assert jayrun("leases", "list", "--json").json == []
    assert jayrun("queue").out == "nobody waits\n"
    assert jayrun("queue", "--json").json == []

    first = hold("the first", 5, 0).wait_until_held()
    second = hold("\x1b[31m[red]", 7.5).wait_until_held()
    second.ask(6)
    waiting = wait_for(lambda: jayrun("queue", "--json").json)

    rows = jayrun("leases", "list", "--json").json
    assert [list(row) for row in rows] == [columns(sql, "leases")] * 3
    assert [(row["pid"], row["label"], row["device_ids"], row["memory_bytes"], row["exclusive"]) for row in rows] == [
        (first.pid, "the first", [0], 5 * GB, False),
        (first.pid, "the first", [1], 0, True),
        (second.pid, "\x1b[31m[red]", [2], 7_500_000_000, False),
    ]
    for row in rows:
        assert datetime.fromisoformat(row["granted_at"]).tzinfo is not None
        assert 0 < row["age"] < 60

    assert [list(row) for row in waiting] == [columns(sql, "queue")]
    assert waiting[0]["pid"] == second.pid
    assert waiting[0]["asks"] == "cuda 6 GB"
    assert "gpu 1: exclusively leased" in waiting[0]["reason"]
    devices = jayrun("devices", "list", "--json").json
    assert [list(row) for row in devices] == [columns(sql, "capacity")] * 3
    assert [row["free_bytes"] for row in devices] == [3 * GB, 0, GB // 2]

    table = jayrun("leases", "list").out.splitlines()
    assert table[0].split() == ["ID", "HOST", "DEVICES", "MEMORY", "EXECUTION", "USER", "PID", "LABEL", "AGE", "SINCE"]
    assert [line[:12] for line in table[1:]] == [row["id"].replace("-", "")[-12:] for row in rows]
    assert "exclusive" in table[2]
    assert "7.5 GB" in table[3]
    assert "\N{REPLACEMENT CHARACTER}[31m[red]" in table[3]
    line = jayrun("queue").out.splitlines()[1]
    assert "cuda 6 GB" in line
    assert "gpu 0: 3 of 8 GB free, 1 lease; gpu 1: exclusively leased" in line


@pytest.mark.usefixtures("fleet")
def test_the_killed_are_not_shown_as_living(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    for listing in (("leases", "list"), ("leases", "show"), ("devices", "list"), ("queue",)):
        holder = hold("victim", 5, 0).wait_until_held()
        [first, second] = [row["id"] for row in jayrun("leases", "list", "--json").json]
        holder.kill()
        shown = jayrun(*listing, *([first] if listing[-1] == "show" else []), "--json").json
        if listing[0] == "leases":
            assert shown == [] or shown["state"] == "reclaimed"
        elif listing[0] == "devices":
            assert [row["leases"] for row in shown] == [0, 0, 0]
        assert jayrun("leases", "show", second, "--json").json["state"] == "reclaimed"


@pytest.mark.usefixtures("fleet")
def test_who_may_only_read_still_sees_what_there_is(
    jayrun: Jayrun, sql: psycopg.Connection, url: str, hold: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold("victim", 5).wait_until_held().kill()
    sql.execute("CREATE ROLE onlooker LOGIN")
    try:
        sql.execute("GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO onlooker")
        sql.execute("GRANT SELECT ON ALL TABLES IN SCHEMA jayrun, jayrun_audit TO onlooker")
        monkeypatch.setenv("JAYRUN_DATABASE_URL", f"{url}%20-crole%3Donlooker")
        assert [row["label"] for row in jayrun("leases", "list", "--json").json] == ["victim"]
        assert len(jayrun("devices", "list", "--json").json) == 3
    finally:
        monkeypatch.undo()
        sql.execute("DROP OWNED BY onlooker")
        sql.execute("DROP ROLE onlooker")


@pytest.mark.usefixtures("fleet")
def test_looking_adds_no_host(jayrun: Jayrun, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAYRUN_HOST_ID", "not in the book")
    for listing in (("leases", "list"), ("devices", "list"), ("queue",)):
        assert jayrun(*listing).code == 0
    assert sql.execute("SELECT count(*) FROM jayrun.hosts").fetchone() == (1,)


@pytest.mark.usefixtures("fleet")
def test_filters(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    hold("one", 5, 0).wait_until_held()
    mine = getpass.getuser()
    for arguments, count in [
        (("--user", mine), 2),
        (("--user", "nobody-else"), 0),
        (("--device", "0"), 1),
        (("--device", "2"), 0),
        (("--user", mine, "--device", "1"), 1),
    ]:
        assert len(jayrun("leases", "list", "--json", *arguments).json) == count
    assert jayrun("leases", "list", "--device", "2").out == "no live leases\n"
    assert jayrun("leases", "list", "--device", "x").code == 2


@pytest.mark.usefixtures("fleet")
def test_one_lease(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    holder = hold("the holder", 5).wait_until_held()
    lease_id = jayrun("leases", "list", "--json").json[0]["id"]
    shown = jayrun("leases", "show", lease_id, "--json").json
    assert shown["id"] == lease_id
    assert shown["state"] == "live"
    assert [share["memory_bytes"] for share in shown["shares"]] == [5 * GB]
    assert [(each["pid"], each["label"]) for each in shown["holders"]] == [(holder.pid, "the holder")]
    assert [event["kind"] for event in shown["events"]] == ["granted"]
    for wanted in (lease_id, lease_id.upper(), lease_id.replace("-", ""), lease_id[:13], lease_id[-12:]):
        assert jayrun("leases", "show", wanted, "--json").json["id"] == lease_id
    text = jayrun("leases", "show", lease_id[-12:]).out
    assert text.startswith(f"lease      {lease_id}\nstate      live, for ")
    assert f"\nholder     pid {holder.pid} of {getpass.getuser()}, the holder, holds it: " in text
    assert "\nshare      gpu 0: 5 GB\n" in text

    holder.kill()
    jayrun("reconciler", "--once")
    shown = jayrun("leases", "show", lease_id, "--json").json
    assert shown["state"] == "reclaimed"
    assert shown["ended_at"] > shown["granted_at"]
    text = jayrun("leases", "show", lease_id).out
    assert "state      reclaimed, lasted " in text
    assert ", reclaimed 2" in text


@pytest.mark.usefixtures("fleet")
def test_leases_that_do_not_exist(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    for wanted in (str(uuid4()), "abcdef", "abc", "not-an-id", "%%%%", "'; --"):
        told = jayrun("leases", "show", "--", wanted)
        assert told.code == 2
        assert "`jayrun leases list`" in told.err
        assert told.out == ""
    hold("two", 1, 1).wait_until_held()
    common = jayrun("leases", "list", "--json").json[0]["id"][:6]
    told = jayrun("leases", "show", common)  # ids that were made at about the same time begin alike
    assert told.code == 2
    assert "several leases" in told.err
