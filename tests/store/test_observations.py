"""The book against what a driver shows: real processes hold leases and are named on cards; the cards are made up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from agents import BELOW, Agent, agent, need
from fleet import cuda, gpus, scene
from processes import until

from jayrun import kernel
from jayrun.domain.audit import Finding
from jayrun.embedded import Throwaway
from jayrun.settings import child_environment
from jayrun.store import admission, audit, devices, leases, observations, reclaim, withheld
from jayrun.store.holders import attest_host
from jayrun.store.observations import Card, CardProcess
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Start = Callable[..., Agent]
Stray = Callable[..., int]
GB = 10**9

HOLD = "here = scene(book, gpus(1)); lease = here.granted(cuda({}, device_id=0))"
BEHIND = 'subprocess.Popen(["sleep", "300"], start_new_session={}).pid'


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """`start()` starts an agent, which may hold leases."""
    with ExitStack() as stack:
        yield lambda *before, **environment: stack.enter_context(agent(url, tmp_path, before=before, **environment))


@pytest.fixture
def stray() -> Iterator[Stray]:
    """`stray("NAME", **environment)` starts a process of that name that comes from no holder; its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str = "stray", **environment: str) -> int:
        line = ["bash", "-c", f"exec -a {name} sleep 300"]
        started.append(subprocess.Popen(line, env=child_environment(environment), start_new_session=True))
        pid = started[-1].pid
        until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode()))
        return pid

    yield begin
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def host_id(book: Book) -> int:
    """This host with one GPU of 24 GB; this process holds nothing."""
    key = attest_host(book, "test-host")
    devices.declare(book, key, gpus(1))
    return key


def card(
    *used: tuple[int, float | None], index: int = 0, in_all: float | None = None, total: float | None = None
) -> Card:
    return Card(
        index=index,
        total_bytes=None if total is None else int(total * GB),
        used_bytes=None if in_all is None else int(in_all * GB),
        processes=tuple(CardProcess(pid=pid, used_bytes=None if gb is None else int(gb * GB)) for pid, gb in used),
    )


def observe(book: Book, host_id: int, *cards: Card, problem: str | None = None) -> bool:
    return observations.observe(book, host_id, cards, since=observations.instant(book), problem=problem)


def found(book: Book) -> list[tuple[Any, ...]]:
    return [(row["finding"], row["pid"], row["used_bytes"], row["leased_bytes"]) for row in audit.audit(book)]


def withheld_bytes(sql: Sql) -> int:
    [(amount,)] = sql.execute("SELECT withheld_bytes FROM jayrun.devices WHERE host_index = 0")
    return int(amount)


def withheld_for(book: Book) -> str | None:
    [row] = audit.capacity(book)
    return None if row["withheld_for"] is None else str(row["withheld_for"])


def test_a_holder_and_what_it_started_use_what_is_leased(book: Book, host_id: int, start: Start) -> None:
    holder = start()
    holder(HOLD.format(10))
    child, apart = holder(BEHIND.format(False)), holder(BEHIND.format(True))
    observe(book, host_id, card((holder.pid, 5), (child, 5.5), (apart, 0.9)))
    assert found(book) == [("ok", holder.pid, 11.4 * GB, 10 * GB)]
    observe(book, host_id, card((holder.pid, 5), (child, 5.5), (apart, 1.1)))
    assert found(book) == [("over-use", holder.pid, 11.6 * GB, 10 * GB)]
    [row] = audit.audit(book)
    assert row["detail"] == "3 processes use 11.6 GB, but 10 GB are leased"
    assert (row["host"], row["device"], row["device_id"]) == (kernel.host_name(), "gpu", 0)
    assert str(row["lease_id"]) == holder("str(lease.id)")
    assert not row["stale"]


def test_a_lease_of_which_nothing_is_used_is_idle_after_a_time(
    book: Book, sql: Sql, host_id: int, start: Start
) -> None:
    holder = start()
    holder(HOLD.format(10))
    observe(book, host_id, card())
    assert found(book) == [("ok", holder.pid, 0, 10 * GB)]
    sql.execute("UPDATE jayrun.lease_observations SET unused_since = unused_since - interval '11 minutes'")
    observe(book, host_id, card())
    assert found(book) == [("idle-lease", holder.pid, 0, 10 * GB)]
    assert audit.audit(book)[0]["detail"] == "10 GB are leased, and nothing was used for 11 m"
    # It starts anew with any use, and where nobody had looked for a while.
    observe(book, host_id, card((holder.pid, 1)))
    observe(book, host_id, card())
    assert found(book) == [("ok", holder.pid, 0, 10 * GB)]
    sql.execute("UPDATE jayrun.lease_observations SET unused_since = unused_since - interval '11 minutes'")
    sql.execute("UPDATE jayrun.device_observations SET observed_at = observed_at - interval '10 minutes'")
    observe(book, host_id, card())
    assert found(book) == [("ok", holder.pid, 0, 10 * GB)]


def test_a_squatter_is_shown_with_pid_user_bytes_and_age(book: Book, sql: Sql, host_id: int, stray: Stray) -> None:
    pid = stray()
    observe(book, host_id, card((pid, 3)))
    sql.execute("UPDATE jayrun.process_observations SET first_seen = first_seen - interval '1 hour'")
    observe(book, host_id, card((pid, 4)))
    [row] = audit.audit(book)
    assert (row["finding"], row["pid"], row["user"], row["used_bytes"]) == (
        *("squatter", pid, kernel.user_name(), 4 * GB),
    )
    assert row["command"].startswith("stray")
    assert row["detail"] == "uses 4 GB without a lease"
    assert 3600 <= row["lasts"].total_seconds() < 3700
    # Another process with that number is seen for the first time.
    sql.execute("UPDATE jayrun.process_observations SET start_ticks = start_ticks - 1000")
    observe(book, host_id, card((pid, 4)))
    assert audit.audit(book)[0]["lasts"].total_seconds() < 60


def test_a_desktop_is_passed_over(book: Book, host_id: int, stray: Stray) -> None:
    desktop, small = stray("Xorg"), stray()
    observe(book, host_id, card((desktop, 2), (small, 0.3)))
    assert [row[:2] for row in found(book)] == sorted([("ok", desktop), ("ok", small)], key=lambda row: row[1])
    devices.ignore(book, host_id, kind="gpu", host_indexes=[0], below_bytes=GB // 5)
    observe(book, host_id, card((desktop, 2), (small, 0.3)))
    assert {(row[0], row[1]) for row in found(book)} == {("ok", desktop), ("squatter", small)}
    devices.ignore(book, host_id, kind="gpu", host_indexes=[0], commands=["stray"])
    observe(book, host_id, card((desktop, 2), (small, 0.3)))
    assert {(row[0], row[1]) for row in found(book)} == {("squatter", desktop), ("ok", small)}


def kill_and_sweep(book: Book, host_id: int, holder: Agent) -> None:
    holder.kill()
    reclaim.sweep(book, host_id)
    admission.combine(book, host_id)


@pytest.mark.parametrize("apart", [False, True])
def test_a_child_of_a_dead_holder_is_an_orphan(book: Book, host_id: int, start: Start, apart: bool) -> None:
    holder = start()
    holder(HOLD.format(10))
    lease, child = holder("str(lease.id)"), holder(BEHIND.format(apart))
    try:
        if apart:  # nothing binds it to the dead but that somebody saw it before
            observe(book, host_id, card((child, 3)))
            assert [row[0] for row in found(book)] == ["ok"]
        kill_and_sweep(book, host_id, holder)
        observe(book, host_id, card((child, 3)))
        [row] = audit.audit(book)
        assert (row["finding"], row["pid"], str(row["lease_id"])) == ("orphan", child, lease)
        assert row["detail"] == "uses 3 GB of a lease that has ended"
        observe(book, host_id, card((child, 3)))
        assert [row[0] for row in found(book)] == ["orphan"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_bears_a_lease_counts_to_it(book: Book, host_id: int, start: Start, stray: Stray) -> None:
    holder = start()
    holder(HOLD.format(10))
    lease = holder("str(lease.id)")
    pid = stray(JAYRUN_LEASE=lease)
    observe(book, host_id, card((pid, 3)))
    assert found(book) == [("ok", holder.pid, 3 * GB, 10 * GB)]
    kill_and_sweep(book, host_id, holder)
    observe(book, host_id, card((pid, 3)))
    assert found(book) == [("orphan", pid, 3 * GB, None)]


def test_memory_that_stays_after_the_lease_is_an_orphan(book: Book, sql: Sql, host_id: int, start: Start) -> None:
    holder = start()
    holder(HOLD.format(10))
    holder(
        "from jayrun.store import leases; leases.release(book, here.host_id, here.holder.id, [(lease.id, lease.epoch)])"
    )
    sql.execute("UPDATE jayrun.settings SET respect_observed = true")
    for _ in range(2):
        observe(book, host_id, card((holder.pid, 3)))
        assert found(book) == [("orphan", holder.pid, 3 * GB, None)]
        assert withheld_bytes(sql) == 0  # it may ask again, and would wait for itself
    kill_and_sweep(book, host_id, holder)
    observe(book, host_id, card((holder.pid, 3)))
    assert withheld_bytes(sql) == 3 * GB


def test_a_holder_in_a_container_is_known_by_its_number_on_the_host(book: Book, host_id: int, start: Start) -> None:
    need(*BELOW)
    below = start(*BELOW)
    below(HOLD.format(10))
    observe(book, host_id, card((below.pid, 3)))
    assert found(book) == [("ok", 1, 3 * GB, 10 * GB)]


def test_who_looks_from_a_container_sees_no_processes_and_does_not_hide_what_others_saw(
    book: Book, sql: Sql, host_id: int, start: Start, stray: Stray
) -> None:
    need(*BELOW)
    below, pid = start(*BELOW), stray()
    look = (
        "from jayrun.store import observations as o; host = holders.attest_host(book, 'test-host');"
        "o.observe(book, host, [o.Card(index=0, processes=(o.CardProcess(pid=1, used_bytes=10**10),))],"
        " since=o.instant(book))"
    )
    below(look)
    [row] = audit.audit(book)
    assert row["finding"] == "unreadable"
    assert "--pid=host" in row["detail"]
    observe(book, host_id, card((pid, 3)))
    below(look)
    assert [row[:2] for row in found(book)] == [("squatter", pid)]
    sql.execute("UPDATE jayrun.device_observations SET observed_at = observed_at - interval '10 minutes'")
    assert audit.audit(book)[0]["stale"]
    below(look)
    assert [row[0] for row in found(book)] == ["unreadable"]


def test_what_cannot_be_read_is_told_and_is_not_zero(
    book: Book, sql: Sql, host_id: int, start: Start, stray: Stray
) -> None:
    [row] = audit.audit(book)
    assert (row["finding"], row["detail"]) == ("unreadable", "nobody has looked at it yet")
    holder, pid = start(), stray()
    holder(HOLD.format(10))
    observe(book, host_id, card((holder.pid, None), (pid, None)))
    assert sorted(found(book)) == [("squatter", pid, None, None), ("unreadable", holder.pid, None, 10 * GB)]
    details = {row["detail"] for row in audit.audit(book)}
    assert f"the driver does not tell what pid {holder.pid} uses; 10 GB are leased" in details
    assert "uses an unknown amount without a lease" in details
    observe(book, host_id, problem="the driver is not loaded")  # in a container without GPUs, perhaps
    assert "uses an unknown amount without a lease" in {row["detail"] for row in audit.audit(book)}
    observe(book, host_id, Card(index=0, used_bytes=3 * GB, problem="it is lost"))
    assert {(row["finding"], row["detail"]) for row in audit.audit(book)} == {("unreadable", "it is lost")}
    observe(book, host_id, problem="the driver is not loaded")
    by_hand = "it is declared by hand, and no driver here tells who uses it"
    assert {row["detail"] for row in audit.audit(book)} == {by_hand}
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-1'")
    observe(book, host_id, problem="the driver is not loaded")
    assert {row["detail"] for row in audit.audit(book)} == {"the driver is not loaded"}
    observe(book, host_id)
    assert {row["detail"] for row in audit.audit(book)} == {"NVML does not show this device"}


def test_a_device_is_found_by_its_uuid_before_its_number(book: Book, sql: Sql, host_id: int, stray: Stray) -> None:
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-1'")
    pid, other = stray(), stray()
    moved = Card(index=5, uuid="GPU-1", processes=(CardProcess(pid=pid, used_bytes=GB),))
    observe(book, host_id, card((other, 1)), moved)
    assert [row[:2] for row in found(book)] == [("squatter", pid)]
    observe(book, host_id, Card(index=0, uuid="GPU-2", processes=()), moved)
    assert [row[:2] for row in found(book)] == [("squatter", pid)]


# --- what is withheld ------------------------------------------------------------------------------------------------


def test_what_others_use_is_withheld_if_that_is_respected(
    book: Book, sql: Sql, host_id: int, start: Start, stray: Stray
) -> None:
    holder, pid = start(), stray()
    holder(HOLD.format(10))
    observe(book, host_id, card((holder.pid, 10), (pid, 6)))
    assert withheld_bytes(sql) == 0
    sql.execute("UPDATE jayrun.settings SET respect_observed = true")
    assert not observe(book, host_id, card((holder.pid, 10), (pid, 6)))
    assert withheld_bytes(sql) == 6 * GB  # and not what the holder uses: that is leased
    [row] = audit.capacity(book)
    assert row["free_bytes"] == 8 * GB
    assert row["withheld_for"] == f"6 GB used without a lease by pid {pid} ({kernel.user_name()})"
    assert observe(book, host_id, card((holder.pid, 10), (pid, 5)))
    assert not observe(book, host_id, card((holder.pid, 10), (pid, 5)))
    assert withheld_bytes(sql) == 5 * GB
    assert observe(book, host_id, card((holder.pid, 10), (pid, 0.4)))
    assert (withheld_bytes(sql), withheld_for(book)) == (0, None)


def test_what_is_reserved_for_others_is_not_subtracted_twice(book: Book, sql: Sql, host_id: int, stray: Stray) -> None:
    sql.execute("UPDATE jayrun.settings SET respect_observed = true")
    pid = stray()
    for total, amount in [(24, 6), (28, 2), (40, 0), (20, 6)]:  # of the device, 24 GB may be leased
        observe(book, host_id, card((pid, 6), total=total))
        assert withheld_bytes(sql) == amount * GB
    observe(book, host_id, card((pid, None)))
    assert withheld_bytes(sql) == 24 * GB  # nobody can tell how much it uses
    observe(book, host_id, card((pid, None), in_all=7))
    assert withheld_bytes(sql) == 7 * GB


def test_what_nobody_has_looked_at_for_long_is_withheld_no_longer(
    book: Book, sql: Sql, host_id: int, stray: Stray
) -> None:
    sql.execute("UPDATE jayrun.settings SET respect_observed = true")
    observe(book, host_id, card((stray(), 6)))
    reclaim.sweep(book, host_id)
    assert withheld_bytes(sql) == 6 * GB
    sql.execute("UPDATE jayrun.device_observations SET observed_at = observed_at - interval '91 seconds'")
    reclaim.sweep(book, host_id)
    assert withheld_bytes(sql) == 0


def test_what_the_dead_had_is_withheld_until_the_driver_shows_it_free(
    book: Book, sql: Sql, host_id: int, start: Start
) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600")
    holder = start()
    holder(HOLD.format(10))
    before = observations.instant(book)
    kill_and_sweep(book, host_id, holder)
    [row] = audit.capacity(book)
    assert (row["reserved_bytes"], row["withheld_bytes"], row["free_bytes"]) == (0, 10 * GB, 14 * GB)
    assert "10 GB in quarantine since lease " in row["withheld_for"]
    assert "was reclaimed, for 600 s more at most" in row["withheld_for"]
    observe(book, host_id, card((holder.pid, 7)))  # the driver has not cleared up yet
    assert [row[:2] for row in found(book)] == [("orphan", holder.pid)]
    assert audit.audit(book)[0]["detail"] == "is gone, and the driver still keeps 7 GB of it"
    assert withheld_bytes(sql) == 10 * GB
    observe(book, host_id, card(in_all=7))
    assert withheld_bytes(sql) == 10 * GB
    assert not observations.observe(book, host_id, [card()], since=before)  # read before it died
    assert withheld_bytes(sql) == 10 * GB
    assert observe(book, host_id, card(in_all=0.3))
    assert (withheld_bytes(sql), withheld_for(book)) == (0, None)


def test_a_quarantine_is_in_force_before_anybody_can_be_granted_the_share(
    book: Book, sql: Sql, host_id: int, start: Start
) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600")
    holder = start()
    holder(HOLD.format(10))
    holder.kill()
    with sql.transaction():
        reclaim.sweep(book, host_id)  # its end, and nothing folded yet
        [(reserved, amount)] = sql.execute("SELECT reserved_bytes, withheld_bytes FROM jayrun.devices")
        assert (reserved, amount) == (10 * GB, 0)
        assert audit.capacity(book)[0]["free_bytes"] == 14 * GB
        sql.execute("UPDATE jayrun.lease_shares SET folded_at = clock_timestamp() WHERE folded_at IS NULL")
        [(reserved, amount)] = sql.execute("SELECT reserved_bytes, withheld_bytes FROM jayrun.devices")
        assert (reserved, amount) == (0, 10 * GB)


def test_a_quarantine_ends_with_its_time(book: Book, sql: Sql, host_id: int, start: Start) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600")
    holder = start()
    holder(HOLD.format(10))
    kill_and_sweep(book, host_id, holder)
    sql.execute("UPDATE jayrun.quarantines SET until = clock_timestamp()")
    reclaim.sweep(book, host_id)
    assert withheld_bytes(sql) == 0
    assert sql.execute("SELECT ended_at = until FROM jayrun.quarantines").fetchall() == [(True,)]


def test_a_quarantine_ends_when_there_shall_be_none(book: Book, sql: Sql, host_id: int, start: Start) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600")
    holder = start()
    holder("here = scene(book, gpus(1)); lease = here.granted(cuda(0, exclusive=True))")
    kill_and_sweep(book, host_id, holder)
    assert withheld_bytes(sql) == 24 * GB  # the whole device
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 0")
    assert withheld.withhold(book, host_id)
    assert (withheld_bytes(sql), withheld_for(book)) == (0, None)


def test_only_an_unclean_end_is_followed_by_a_quarantine(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(10))
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600")
    leases.release(book, here.host_id, here.holder.id, [(lease.id, lease.epoch)])
    admission.combine(book, here.host_id)
    assert withheld_bytes(sql) == 0
    assert sql.execute("SELECT FROM jayrun.quarantines").fetchall() == []


def test_what_is_withheld_is_the_larger_of_both(book: Book, sql: Sql, host_id: int, start: Start, stray: Stray) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600, respect_observed = true")
    holder, pid = start(), stray()
    holder(HOLD.format(10))
    kill_and_sweep(book, host_id, holder)
    observe(book, host_id, card((holder.pid, 7), (pid, 2)))
    assert withheld_bytes(sql) == 10 * GB
    reason = withheld_for(book)
    assert reason is not None
    assert "9 GB used without a lease" in reason
    assert "10 GB in quarantine" in reason
    observe(book, host_id, card((pid, 2)))
    assert withheld_bytes(sql) == 2 * GB


# --- leases are nobody's but their holders' --------------------------------------------------------------------------

OBSERVER = """
CREATE ROLE observer;
GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO observer;
GRANT SELECT ON ALL TABLES IN SCHEMA jayrun, jayrun_audit TO observer;
GRANT INSERT, UPDATE, DELETE ON jayrun.device_observations, jayrun.lease_observations, jayrun.process_observations
    TO observer;
GRANT UPDATE (withheld_bytes) ON jayrun.devices TO observer;
GRANT UPDATE (ended_at) ON jayrun.quarantines TO observer;
GRANT UPDATE, DELETE, TRUNCATE ON jayrun.gate TO observer;
"""
LEASE_TABLES = (
    "leases",
    "lease_shares",
    "lease_holders",
    "lease_events",
    "holders",
    "executions",
    "placement_requests",
)


def test_observing_needs_no_right_to_change_a_lease_and_changes_none(
    book: Book, sql: Sql, server: Throwaway, host_id: int, start: Start, stray: Stray
) -> None:
    sql.execute("UPDATE jayrun.settings SET quarantine_seconds = 600, respect_observed = true")
    dead, alive, pid = start(), start(), stray()
    dead(HOLD.format(5))
    alive(HOLD.format(10))
    kill_and_sweep(book, host_id, dead)

    def rows() -> dict[str, list[Any]]:
        versions = "SELECT ctid, xmin::text, xmax::text, t FROM jayrun.{} t"  # xmax: nor locked
        return {table: sql.execute(versions.format(table)).fetchall() for table in LEASE_TABLES}

    before = rows()
    sql.execute(OBSERVER)
    try:
        theirs = Book(f"{server.url}%20-crole%3Dobserver", role="test", patience_seconds=10)
        try:
            for table, verb in product(LEASE_TABLES, ("INSERT", "UPDATE", "DELETE")):
                rights = "SELECT has_table_privilege(%s, %s) OR has_any_column_privilege(%s, 'UPDATE')"
                assert not theirs.value(rights, (f"jayrun.{table}", verb, f"jayrun.{table}"))
            observe(theirs, host_id, card((alive.pid, 20), (pid, 6)))
        finally:
            theirs.close()
    finally:
        sql.execute("DROP OWNED BY observer; DROP ROLE observer")
    assert {row[0] for row in found(book)} == {"over-use", "squatter"}
    assert withheld_bytes(sql) == 6 * GB  # and the quarantine is over
    assert rows() == before


def test_every_finding_of_the_code_is_one_of_the_book(sql: Sql) -> None:
    words = sql.execute(
        """
        SELECT DISTINCT m[1] FROM pg_constraint c, regexp_matches(pg_get_constraintdef(c.oid), '''([a-z-]+)''', 'g') m
        WHERE c.contype = 'c' AND c.conname LIKE '%observations_finding_check'
        """
    ).fetchall()
    assert {word for (word,) in words} == set(Finding)


def test_an_unknown_lease_in_the_environment_is_no_lease(book: Book, host_id: int, stray: Stray) -> None:
    pid, other = stray(JAYRUN_LEASE=str(UUID(int=5))), stray(JAYRUN_LEASE="nonsense")
    observe(book, host_id, card((pid, 1), (other, 1)))
    assert {row[0] for row in found(book)} == {"squatter"}
