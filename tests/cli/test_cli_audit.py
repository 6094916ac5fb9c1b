"""`jayrun audit`: real processes that hold leases, or none, on the cards of a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpus
import psycopg
import pytest
from cli_helpers import COMMAND, Holder, Outcome
from gpus import Running
from processes import until

from jayrun.settings import child_environment

GB = 10**9
Hold = Callable[..., Holder]


class Cards:
    """What the stand-in shows: what is used of which card, by whom, in gigabytes."""

    def __init__(self, folder: Path) -> None:
        self._stub = gpus.stub_environment(folder, gpus.machine(2))
        self.environment = self._stub.environment

    def show(self, *fleet: dict[int, float | None], hidden: float = 0) -> None:
        """The processes on each card by their pids; None: not told. `hidden` is used beside on each."""
        shown = gpus.machine(len(fleet))
        for card, processes in zip(shown.gpus, fleet, strict=True):
            card.processes = [Running(pid, None if gb is None else int(gb * GB)) for pid, gb in processes.items()]
            card.used_bytes = int((sum(amount or 0 for amount in processes.values()) + hidden) * GB)
        self._stub.show(shown)


@pytest.fixture
def fleet(tmp_path: Path) -> Cards:
    return Cards(tmp_path)


@pytest.fixture
def jayrun(url: str, fleet: Cards) -> Callable[..., Outcome]:
    """`jayrun("audit")` in a process of its own, which finds the stand-in."""

    def run(*arguments: str) -> Outcome:
        environment = child_environment({"JAYRUN_DATABASE_URL": url, **fleet.environment}, without=("JAYRUN_",))
        done = subprocess.run([*COMMAND, *arguments], env=environment, check=False, capture_output=True, text=True)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def stray() -> Iterator[Callable[[str], int]]:
    """`stray("NAME")` starts a process of that name that comes from no holder; its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str) -> int:
        started.append(subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 300"], start_new_session=True))
        pid = started[-1].pid
        until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode()))
        return pid

    yield begin
    for each in started:
        each.kill()
        each.wait()


def words(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["device_id"], row["finding"], row["pid"], row["used_bytes"], row["leased_bytes"]) for row in rows]


def test_every_finding_with_its_numbers(
    jayrun: Callable[..., Outcome], fleet: Cards, hold: Hold, stray: Callable[[str], int], host_id: int,
    sql: psycopg.Connection,
) -> None:  # fmt: skip
    first, second = hold("train", 20).wait_until_held(), hold("serve", 20).wait_until_held()
    desktop, squatter = stray("Xorg"), stray("miner")
    fleet.show({first.pid: 19, desktop: 1}, {second.pid: 21, squatter: 2})
    told = jayrun("audit", "--json")
    assert told.code == 0, told.err
    assert words(told.json) == [
        (0, "ok", first.pid, 19 * GB, 20 * GB),
        (0, "ok", desktop, GB, None),
        (1, "over-use", second.pid, 21 * GB, 20 * GB),
        (1, "squatter", squatter, 2 * GB, None),
    ]

    told = jayrun("audit", "--fail-on", "squatter, over-use")
    assert told.code == 1
    assert f"pid {squatter} (" in told.err
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["found over-use", "found squatter"]
    assert "uses 2 GB without a lease" in told.out
    told = jayrun("audit", "--fail-on", "orphan,idle-lease,unreadable")
    assert (told.code, told.err) == (0, "")
    assert jayrun("audit", "--fail-on", "").code == 2
    told = jayrun("audit", "--fail-on", "squater")
    assert told.code == 2
    assert "squater" in told.err

    sql.execute("UPDATE jayrun.settings SET idle_lease_seconds = 0")
    fleet.show({desktop: 1}, {second.pid: None}, hidden=0.2)
    assert words(jayrun("audit", "--json").json) == [
        (0, "ok", first.pid, 0, 20 * GB),  # for the first time
        (0, "ok", desktop, GB, None),
        (1, "unreadable", second.pid, None, 20 * GB),
    ]
    assert words(jayrun("audit", "--json").json)[0] == (0, "idle-lease", first.pid, 0, 20 * GB)


def test_what_the_dead_left_on_a_card(
    jayrun: Callable[..., Outcome], fleet: Cards, hold: Hold, host_id: int, sql: psycopg.Connection
) -> None:
    jayrun("settings", "set", "quarantine_seconds", "600")
    holder = hold("train", 20).wait_until_held()
    holder.process.kill()  # not waited for: the driver may show it for a while
    until(lambda: Path(f"/proc/{holder.pid}/stat").read_text().split()[2] == "Z")
    fleet.show({holder.pid: 5}, {})
    assert words(jayrun("audit", "--json").json)[0] == (0, "orphan", holder.pid, 5 * GB, None)
    listed = {row["device_id"]: row for row in jayrun("devices", "list", "--json").json}
    assert (listed[0]["withheld_bytes"], listed[1]["withheld_bytes"]) == (20 * GB, 0)
    assert "20 GB: 20 GB in quarantine since lease" in jayrun("devices", "list").out
    fleet.show({}, {})
    assert words(jayrun("audit", "--json").json) == [(0, "ok", None, 0, None), (1, "ok", None, 0, None)]
    assert {row["withheld_bytes"] for row in jayrun("devices", "list", "--json").json} == {0}


def test_other_hosts_are_shown_as_they_were_seen_last(
    jayrun: Callable[..., Outcome], fleet: Cards, host_id: int, sql: psycopg.Connection
) -> None:
    sql.execute(
        """
        WITH h AS (INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('far', 'far', 'b') RETURNING id),
             d AS (INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes)
                   SELECT id, 0, 'gpu', '{cuda}', 10 FROM h RETURNING id),
             o AS (INSERT INTO jayrun.device_observations (
                       device_id, observed_at, finding, detail, shows_processes)
                   SELECT id, clock_timestamp() - interval '5 minutes', 'ok', '', true FROM d)
        INSERT INTO jayrun.process_observations (device_id, pid, finding, detail, user_name, command, first_seen)
        SELECT id, 7, 'squatter', 'uses 2 GB without a lease', 'eve', 'miner', clock_timestamp() - interval '2 hours'
        FROM d
        """
    )
    fleet.show({}, {})
    told = jayrun("audit", "--json", "--fail-on", "squatter")
    assert told.code == 0, "what is old is not found now"
    [far] = [row for row in told.json if row["host"] == "far"]
    assert (far["finding"], far["pid"], far["user"], far["stale"]) == ("squatter", 7, "eve", True)
    assert 300 <= far["age"] < 360
    assert 7200 <= far["lasts"] < 7260


def test_without_a_driver_nothing_is_made_up(
    jayrun: Callable[..., Outcome], fleet: Cards, hold: Hold, host_id: int
) -> None:
    hold("train", 20).wait_until_held()
    fleet.environment["LD_LIBRARY_PATH"] = os.devnull
    told = jayrun("audit", "--json", "--fail-on", "unreadable")
    assert told.code == 1
    assert {row["finding"] for row in told.json} == {"unreadable"}
    assert [row["device_id"] for row in told.json] == [0, 1], "each once, with and without a lease"
    assert {row["detail"] for row in told.json} == {"it is declared by hand, and no driver here tells who uses it"}
