"""`jayrun hosts` and `jayrun holders`: who is there, and what only an administrator declares."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from cli_helpers import Holder, Jayrun
from fleet import let_silence_count
from processes import command

from jayrun import kernel

Sql = psycopg.Connection[tuple[Any, ...]]
Hold = Callable[..., Holder]

HOUR_AGO = "clock_timestamp() - interval '1 hour'"
FAR = """
INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('far', 'far-away', 'its-boot');
INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes)
SELECT id, 0, 'gpu', '{cuda}', 10e9 FROM jayrun.hosts WHERE identity = 'far';
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, role)
SELECT 'aaaaaaaa-0000-0000-0000-00000000beef', id, 'its-boot', 1, 7, 1, 'eve', 'runtime'
FROM jayrun.hosts WHERE identity = 'far';
"""
BEEF = "aaaaaaaa-0000-0000-0000-00000000beef"


@pytest.fixture
def fleet(jayrun: Jayrun) -> None:
    assert jayrun("devices", "declare", "--simulate", "1x8GB").code == 0


@pytest.fixture
def far(fleet: None, sql: Sql) -> None:
    """Another host, which spoke just now."""
    sql.execute(FAR)


def silence(sql: Sql) -> None:
    for table in ("hosts", "holders"):
        sql.execute(f"UPDATE jayrun.{table} SET seen_at = {HOUR_AGO} WHERE boot_id = 'its-boot'")


def columns(sql: Sql, view: str) -> list[str]:
    description = sql.execute(f"SELECT * FROM jayrun_audit.{view} LIMIT 0").description
    assert description is not None
    return [column.name for column in description]


@pytest.mark.usefixtures("far")
def test_hosts_are_listed(jayrun: Jayrun, sql: Sql, hold: Hold) -> None:
    hold("mine", 5).wait_until_held()
    silence(sql)
    rows = jayrun("hosts", "list", "--json").json
    assert [list(row) for row in rows] == [columns(sql, "hosts")] * 2
    states = {row["host"]: (row["state"], row["devices"], row["leases"], row["holders"]) for row in rows}
    assert states == {"far-away": ("silent", 1, 0, 1), kernel.host_name(): ("online", 1, 1, 1)}
    assert {row["boot_id"] for row in rows} == {"its-boot", kernel.boot_id()}
    ages = {row["host"]: row["age"] for row in rows}
    assert 3600 <= ages["far-away"] < 3700
    table = jayrun("hosts", "list").out.splitlines()
    assert table[0].split()[:6] == ["HOST", "STATE", "SEEN", "DEVICES", "LEASES", "HOLDERS"]
    assert any(line.startswith("far-away") and "silent" in line and "1 h ago" in line for line in table)
    state = {row["host"]: row["state"] for row in jayrun("devices", "list", "--json").json}
    assert state == {"far-away": "offline", kernel.host_name(): "online"}
    # Offline is waited for: 4, and not 3.
    assert jayrun("can", "--memory-gb", "5", "--host", "far").code == 4
    assert jayrun("can", "--memory-gb", "50", "--host", "far").code == 3


@pytest.mark.usefixtures("fleet")
def test_a_host_without_running_programs_is_online_to_whoever_asks_there(jayrun: Jayrun, sql: Sql) -> None:
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    assert jayrun("can", "--memory-gb", "5").code == 0
    assert [row["state"] for row in jayrun("devices", "list", "--json").json] == ["online"]


@pytest.mark.usefixtures("far")
def test_holders_are_listed(jayrun: Jayrun, sql: Sql, hold: Hold) -> None:
    mine = hold("mine", 5).wait_until_held()
    silence(sql)
    rows = jayrun("holders", "list", "--json").json
    assert [list(row) for row in rows] == [columns(sql, "holders")] * 2
    shown = {row["pid"]: (row["host"], row["user"], row["state"], row["leases"], row["memory_bytes"]) for row in rows}
    assert shown == {
        mine.pid: (kernel.host_name(), getpass.getuser(), "alive", 1, 5 * 10**9),
        7: ("far-away", "eve", "silent", 0, 0),
    }
    table = jayrun("holders", "list").out
    assert "0000beef" in table
    assert "mine" in table
    mine.kill()
    assert [row["pid"] for row in jayrun("holders", "list", "--json").json] == [7]


def test_nothing_to_list(jayrun: Jayrun) -> None:
    assert jayrun("hosts", "list").out.startswith("no hosts: ")
    assert jayrun("holders", "list").out == "no holders\n"
    assert jayrun("hosts", "list", "--json").json == []


@pytest.mark.usefixtures("far")
def test_forgetting(jayrun: Jayrun, sql: Sql) -> None:
    told = jayrun("hosts", "forget", "far-away")
    assert (told.code, told.out) == (1, "")
    assert "far-away was heard of 0 s ago" in told.err
    assert "two programs in one GPU's memory" in told.err
    assert "--force" in told.err
    silence(sql)
    let_silence_count(sql)
    told = jayrun("hosts", "forget", "far")
    assert (told.code, told.err) == (0, "")
    assert told.out == "forgot host far: 1 holder(s) ended, its devices are removed\n"
    rows = {row["host"]: row for row in jayrun("hosts", "list", "--json").json}
    assert (rows["far-away"]["state"], rows["far-away"]["devices"]) == ("forgotten", 0)
    again = jayrun("hosts", "forget", "far", "--json").json
    assert [(row["state"], row["holders"]) for row in again] == [("forgotten", 0)]
    unknown = jayrun("hosts", "forget", "nowhere")
    assert unknown.code == 2
    assert "far-away (far)" in unknown.err


@pytest.mark.usefixtures("fleet")
def test_forgetting_this_very_host(jayrun: Jayrun, sql: Sql, hold: Hold) -> None:
    mine = hold("mine", 5).wait_until_held()
    told = jayrun("hosts", "forget", kernel.host_name())
    assert told.code == 1
    assert f"pid {mine.pid} is alive, says the kernel" in told.err
    assert len(jayrun("leases", "list", "--json").json) == 1
    assert jayrun("hosts", "forget", kernel.host_name(), "--force").code == 0
    assert jayrun("leases", "list", "--json").json == []
    assert jayrun("devices", "list", "--json").json == []


@pytest.mark.usefixtures("far")
def test_ending_who_cannot_be_seen(jayrun: Jayrun, sql: Sql) -> None:
    told = jayrun("holders", "end", BEEF)
    assert told.code == 1
    assert "pid 7 of eve on host far-away cannot be seen from here" in told.err
    silence(sql)
    let_silence_count(sql)
    assert jayrun("holders", "end", "0000beef").out == "ended holder 00000000beef\n"
    assert jayrun("holders", "end", "aaaaaaaa", "--json").json == {"id": BEEF, "ended": False}
    assert jayrun("holders", "end", BEEF).out == "holder 00000000beef had ended already\n"
    for wanted in ("abcd", "x", "00000000-0000-0000-0000-000000000000"):
        unknown = jayrun("holders", "end", wanted)
        assert unknown.code == 2
        assert "`jayrun holders list`" in unknown.err


@pytest.mark.usefixtures("fleet")
def test_ending_who_is_alive(jayrun: Jayrun, sql: Sql, hold: Hold) -> None:
    mine = hold("mine", 5).wait_until_held()
    [row] = jayrun("holders", "list", "--json").json
    told = jayrun("holders", "end", row["id"])
    assert told.code == 1
    assert f"pid {mine.pid} of {getpass.getuser()}" in told.err
    assert "end the process itself" in told.err
    assert jayrun("holders", "end", row["id"], "--force").code == 0
    assert jayrun("leases", "list", "--json").json == []
    [(detail,)] = sql.execute("SELECT detail FROM jayrun.lease_events WHERE kind = 'declared'")
    assert detail.startswith(
        f"{getpass.getuser()}, pid {os.getpid()} on {kernel.host_name()}, declared pid {mine.pid} of "
    )
    assert "by force (database user " in detail


@pytest.mark.usefixtures("far")
def test_no_question_is_asked(sql: Sql, url: str) -> None:
    """Neither of a terminal, nor where there is no standard input at all."""
    silence(sql)
    let_silence_count(sql)
    with command("hosts", "forget", "far", JAYRUN_DATABASE_URL=url) as process:
        assert process.wait(60) == 0


@pytest.mark.usefixtures("fleet")
def test_two_machines_that_pass_for_one(sql: Sql, url: str) -> None:
    """The other speaks on while this one waits for it to have been silent."""
    sql.execute("UPDATE jayrun.hosts SET boot_id = 'another'")
    with command("reconciler", JAYRUN_DATABASE_URL=url) as process:
        assert process.stderr is not None
        assert "was heard of" in process.stderr.readline() + process.stderr.readline()
        sql.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp()")
        assert process.wait(60) == 1
        assert "error: two machines pass for one host: " in process.stderr.read()
