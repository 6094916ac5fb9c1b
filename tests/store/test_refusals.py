"""What the database itself refuses, whoever writes: here it is a hand in psql."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from processes import PATIENCE
from psycopg.errors import IntegrityError, SerializationFailure

from jayrun import kernel
from jayrun.store import holders
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Share = tuple[int, int, int, bool]
"""Lease, device, bytes, exclusive."""

# A host with three devices of 100 bytes, three processes, and four leases without shares, held by the first process.
# Ids are small numbers, so that the tests can be read.
SITUATION = """
INSERT INTO jayrun.hosts (id, identity, name, boot_id) OVERRIDING SYSTEM VALUE VALUES (1, 'one', 'one', 'boot');
INSERT INTO jayrun.devices (id, host_id, host_index, kind, backends, capacity_bytes) OVERRIDING SYSTEM VALUE
SELECT n, 1, n, 'gpu', '{cuda}', 100 FROM generate_series(1, 3) n;
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, role)
SELECT lpad(n::text, 32, '0')::uuid, 1, 'boot', 1, n, n, 'someone', 'runtime' FROM generate_series(1, 3) n;
INSERT INTO jayrun.executions (id, unit_id, kind, name, host_id, holder_id, state)
SELECT id, id, 'operator', 'by hand', 1, lpad('1', 32, '0')::uuid, 'running'
FROM (SELECT lpad(n::text, 32, '0')::uuid AS id FROM generate_series(1, 4) n) n;
INSERT INTO jayrun.placement_requests
SELECT id, 0, 'gpu', 'cuda', false, 1, 1, false, 0, 1, false FROM jayrun.executions;
INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
SELECT id, id, 0, 1, 1 FROM jayrun.executions;
INSERT INTO jayrun.lease_holders (lease_id, holder_id) SELECT id, lpad('1', 32, '0')::uuid FROM jayrun.leases;
"""


@pytest.fixture
def hand(sql: Sql) -> Sql:
    """A connection in autocommit to a book with the situation above."""
    sql.execute(SITUATION)
    return sql


@pytest.fixture
def other(hand: Sql, url: str) -> Iterator[Sql]:
    """A second hand in the same book."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def key(number: int) -> UUID:
    return UUID(int=number)


def give(sql: Sql, *shares: Share) -> None:
    """Add all shares in one statement."""
    sql.execute(
        "INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive)"
        " SELECT * FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::boolean[])",
        ([key(lease) for lease, *_ in shares], *([each[n] for each in shares] for n in (1, 2, 3))),
    )


def join(sql: Sql, lease: int, holder: int) -> None:
    sql.execute("INSERT INTO jayrun.lease_holders (lease_id, holder_id) VALUES (%s, %s)", (key(lease), key(holder)))


def leave(sql: Sql, lease: int, holder: int, reason: str = "released") -> None:
    sql.execute(
        "UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = %s"
        " WHERE lease_id = %s AND holder_id = %s AND ended_at IS NULL",
        (reason, key(lease), key(holder)),
    )


def end_holder(sql: Sql, holder: int) -> None:
    sql.execute(
        "UPDATE jayrun.holders SET state = 'ended', ended_at = clock_timestamp(), end_reason = 'dead' WHERE id = %s",
        (key(holder),),
    )


def fold(sql: Sql) -> None:
    sql.execute(
        "UPDATE jayrun.lease_shares SET folded_at = clock_timestamp() WHERE ended_at IS NOT NULL AND folded_at IS NULL"
    )


def counters(sql: Sql, device: int) -> tuple[int, int, int]:
    """Reserved bytes, shares and exclusive shares of a device."""
    row = sql.execute(
        "SELECT reserved_bytes, share_count, exclusive_count FROM jayrun.devices WHERE id = %s", (device,)
    ).fetchone()
    assert row is not None
    return row


def lease(sql: Sql, number: int) -> tuple[str | None, int, int, list[str]]:
    """How a lease ended, how many hold it, how many live shares it has, and what the log tells of it."""
    row = sql.execute(
        "SELECT l.end_reason, l.holder_count,"
        " (SELECT count(*) FROM jayrun.lease_shares WHERE lease_id = l.id AND ended_at IS NULL),"
        " (SELECT array_agg(kind ORDER BY id) FROM jayrun.lease_events WHERE lease_id = l.id)"
        " FROM jayrun.leases l WHERE l.id = %s",
        (key(number),),
    ).fetchone()
    assert row is not None
    return row


@contextmanager
def refused(*constraints: str) -> Iterator[None]:
    with pytest.raises(IntegrityError) as refusal:
        yield
    assert refusal.value.diag.constraint_name in constraints


def meet(first: Sql, act: Callable[[Sql], None], second: Sql, act_too: Callable[[Sql], None]) -> None:
    """`first` acts, and commits only when `second`, acting too, has come to its end or waits for it.

    Raises what befell `second`.
    """
    with ThreadPoolExecutor(1) as pool:
        with first.transaction():
            act(first)
            acting = pool.submit(act_too, second)
            until(lambda: acting.done() or waits(first, second))
        acting.result()


def waits(sql: Sql, waiter: Sql) -> bool:
    row = sql.execute("SELECT pg_blocking_pids(%s) <> '{}'", (waiter.info.backend_pid,)).fetchone()
    return row == (True,)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "what this waits for does not come"


# --- more than there is ----------------------------------------------------------------------------------------------


def test_a_device_is_filled_to_its_last_byte_and_no_further(hand: Sql) -> None:
    give(hand, (1, 1, 60, False))
    with refused("devices_capacity"):
        give(hand, (2, 1, 41, False))
    give(hand, (2, 1, 40, False))
    with refused("devices_capacity"):
        give(hand, (3, 1, 1, False))
    assert counters(hand, 1) == (100, 2, 0)


def test_two_shares_of_one_statement_are_added_up(hand: Sql) -> None:
    with refused("devices_capacity"):
        give(hand, (1, 1, 60, False), (2, 1, 41, False))
    give(hand, (1, 1, 60, False), (2, 1, 40, False))
    assert counters(hand, 1) == (100, 2, 0)


def test_a_group_gets_all_its_shares_or_none(hand: Sql) -> None:
    with refused("devices_capacity"):
        give(hand, (1, 1, 50, False), (1, 2, 50, False), (1, 3, 101, False))
    assert [counters(hand, device) for device in (1, 2, 3)] == [(0, 0, 0)] * 3


def test_two_hands_at_once_do_not_fill_a_device_twice(hand: Sql, other: Sql) -> None:
    with refused("devices_capacity"):
        meet(hand, lambda sql: give(sql, (1, 1, 60, False)), other, lambda sql: give(sql, (2, 1, 60, False)))
    assert counters(hand, 1) == (60, 1, 0)


def test_two_hands_at_once_fill_what_is_there(hand: Sql, other: Sql) -> None:
    meet(hand, lambda sql: give(sql, (1, 1, 60, False)), other, lambda sql: give(sql, (2, 1, 40, False)))
    assert counters(hand, 1) == (100, 2, 0)


def test_a_capacity_below_what_is_in_use_is_taken_and_nothing_new_fits(hand: Sql) -> None:
    give(hand, (1, 1, 60, False), (2, 1, 30, False))
    hand.execute("UPDATE jayrun.devices SET capacity_bytes = 50 WHERE id = 1")
    with refused("devices_capacity"):
        give(hand, (3, 1, 1, False))
    leave(hand, 2, 1)
    fold(hand)
    assert counters(hand, 1) == (60, 1, 0)
    with refused("devices_capacity"):
        give(hand, (3, 1, 1, False))
    leave(hand, 1, 1)
    fold(hand)
    assert counters(hand, 1) == (0, 0, 0)
    with refused("devices_capacity"):
        give(hand, (3, 1, 51, False))
    give(hand, (3, 1, 50, False))
    assert counters(hand, 1) == (50, 1, 0)


# --- alone means alone -----------------------------------------------------------------------------------------------

BESIDE = [
    pytest.param((1, 1, 0, True), (2, 1, 1, False), id="shared beside exclusive"),
    pytest.param((1, 1, 1, False), (2, 1, 0, True), id="exclusive beside shared"),
    pytest.param((1, 1, 0, True), (2, 1, 0, True), id="two exclusive of no bytes"),
    pytest.param((1, 1, 50, True), (2, 1, 50, True), id="two exclusive that would fit"),
]


@pytest.mark.parametrize(("one", "another"), BESIDE)
def test_nothing_is_added_beside_an_exclusive_share(hand: Sql, one: Share, another: Share) -> None:
    give(hand, one)
    with refused("devices_exclusive_alone"):
        give(hand, another)
    give(hand, (*another[:1], 2, *another[2:]))  # on the next device it is welcome


@pytest.mark.parametrize(("one", "another"), BESIDE)
def test_nothing_comes_with_an_exclusive_share(hand: Sql, one: Share, another: Share) -> None:
    with refused("devices_exclusive_alone"):
        give(hand, one, another)


@pytest.mark.parametrize(("one", "another"), BESIDE)
def test_nothing_slips_in_beside_an_exclusive_share(hand: Sql, other: Sql, one: Share, another: Share) -> None:
    with refused("devices_exclusive_alone"):
        meet(hand, lambda sql: give(sql, one), other, lambda sql: give(sql, another))


def test_a_share_is_of_bytes_or_exclusive(hand: Sql) -> None:
    with refused("lease_shares_check"):
        give(hand, (1, 1, 0, False))
    with refused("lease_shares_memory_bytes_check"):
        give(hand, (1, 1, -1, True))


# --- leases and their holders ----------------------------------------------------------------------------------------


def test_the_last_holder_ends_the_lease_and_its_shares(hand: Sql) -> None:
    join(hand, 1, 2)
    give(hand, (1, 1, 50, False), (1, 2, 50, False))
    leave(hand, 1, 1)
    assert lease(hand, 1) == (None, 1, 2, ["granted", "joined", "left"])
    leave(hand, 1, 2, "reclaimed")
    assert lease(hand, 1) == ("reclaimed", 0, 0, ["granted", "joined", "left", "reclaimed"])
    assert counters(hand, 1) == (50, 1, 0)  # until an admission folds it
    fold(hand)
    assert counters(hand, 1) == counters(hand, 2) == (0, 0, 0)


def test_one_statement_by_which_all_leave(hand: Sql) -> None:
    join(hand, 1, 2)
    give(hand, (1, 1, 50, False), (2, 1, 50, False))
    hand.execute("UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = 'released'")
    assert lease(hand, 1) == ("released", 0, 0, ["granted", "joined", "released"])
    assert lease(hand, 2) == ("released", 0, 0, ["granted", "released"])


def test_two_holders_leave_at_once(hand: Sql, other: Sql) -> None:
    join(hand, 1, 2)
    give(hand, (1, 1, 50, False))
    meet(hand, lambda sql: leave(sql, 1, 1), other, lambda sql: leave(sql, 1, 2))
    assert lease(hand, 1) == ("released", 0, 0, ["granted", "joined", "left", "released"])
    fold(hand)
    assert counters(hand, 1) == (0, 0, 0)


def test_one_holder_leaves_twice_at_once(hand: Sql, other: Sql) -> None:
    join(hand, 1, 2)
    give(hand, (1, 1, 50, False))
    meet(hand, lambda sql: leave(sql, 1, 1), other, lambda sql: leave(sql, 1, 1))
    assert lease(hand, 1) == (None, 1, 1, ["granted", "joined", "left"])


def test_one_joins_while_the_last_leaves(hand: Sql, other: Sql) -> None:
    with refused("holders_joined"):
        meet(hand, lambda sql: leave(sql, 1, 1), other, lambda sql: join(sql, 1, 2))
    assert lease(hand, 1)[:2] == ("released", 0)


def test_the_first_leaves_while_another_joins(hand: Sql, other: Sql) -> None:
    meet(hand, lambda sql: join(sql, 1, 2), other, lambda sql: leave(sql, 1, 1))
    assert lease(hand, 1)[:2] == (None, 1)


def test_nobody_joins_a_lease_that_has_ended(hand: Sql) -> None:
    leave(hand, 1, 1)
    with refused("holders_joined"):
        join(hand, 1, 2)


def test_no_share_is_added_to_a_lease_that_has_ended(hand: Sql) -> None:
    leave(hand, 1, 1)
    with refused("shares_on_live_lease"):
        give(hand, (1, 1, 50, False))
    with refused("shares_on_live_lease"):
        give(hand, (2, 2, 50, False), (1, 1, 50, False))


def test_no_share_is_added_while_the_lease_ends(hand: Sql, other: Sql) -> None:
    with refused("shares_on_live_lease"):
        meet(hand, lambda sql: leave(sql, 1, 1), other, lambda sql: give(sql, (1, 1, 50, False)))
    assert lease(hand, 1) == ("released", 0, 0, ["granted", "released"])


def test_a_share_ends_also_when_its_lease_ends_while_it_is_added(hand: Sql, other: Sql) -> None:
    meet(hand, lambda sql: give(sql, (1, 1, 50, False)), other, lambda sql: leave(sql, 1, 1))
    assert lease(hand, 1) == ("released", 0, 0, ["granted", "released"])


def test_each_park_leaves_a_line_in_the_log(hand: Sql) -> None:
    hand.execute("UPDATE jayrun.executions SET state = 'waiting', waiting_since = clock_timestamp(), shape = 'a'")
    hand.execute("UPDATE jayrun.executions SET state = 'waiting', bypassed = 1")  # no new park
    hand.execute(
        "INSERT INTO jayrun.executions (id, unit_id, kind, name, host_id, holder_id, state, shape, waiting_since)"
        " SELECT %(id)s, %(id)s, kind, name, host_id, holder_id, state, shape, waiting_since"
        " FROM jayrun.executions LIMIT 1",
        {"id": key(9)},
    )
    told = hand.execute("SELECT execution_id, holder_id FROM jayrun.lease_events WHERE kind = 'parked'").fetchall()
    assert sorted(told) == [(key(execution), key(1)) for execution in (1, 2, 3, 4, 9)]


# --- dead or alive ---------------------------------------------------------------------------------------------------


def test_no_holder_ends_before_its_leases(hand: Sql) -> None:
    with refused("holders_end_without_leases"):
        end_holder(hand, 1)
    for number in (1, 2, 3, 4):
        leave(hand, number, 1)
    end_holder(hand, 1)


def test_a_holder_that_has_ended_joins_nothing(hand: Sql) -> None:
    end_holder(hand, 2)
    with refused("holders_joined"):
        join(hand, 1, 2)


def test_no_holder_ends_while_it_joins(hand: Sql, other: Sql) -> None:
    with refused("holders_end_without_leases"):
        meet(hand, lambda sql: join(sql, 1, 2), other, lambda sql: end_holder(sql, 2))


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_no_holder_ends_by_an_old_picture(hand: Sql, other: Sql, isolation: str) -> None:
    """It would wait for the lease that is just being given, and then not see it."""

    def end(sql: Sql) -> None:
        sql.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        end_holder(sql, 2)

    with refused("holders_end_without_leases"):
        meet(hand, lambda sql: join(sql, 1, 2), other, end)


def test_no_holder_joins_while_it_ends(hand: Sql, other: Sql) -> None:
    with refused("holders_joined"):
        meet(hand, lambda sql: end_holder(sql, 2), other, lambda sql: join(sql, 1, 2))


def test_an_admission_that_saw_its_holder_alive_is_refused_when_it_has_ended_since(hand: Sql, other: Sql) -> None:
    other.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
    assert other.execute("SELECT count(*) FROM jayrun.holders WHERE state = 'alive'").fetchone() == (3,)
    end_holder(hand, 2)
    with pytest.raises(SerializationFailure):
        join(other, 1, 2)


def test_heartbeats_do_not_disturb_an_admission(hand: Sql, other: Sql, book: Book) -> None:
    holder = holders.Holder(key(1), 1)
    with ThreadPoolExecutor(1) as pool, other.transaction():
        other.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        other.execute("SELECT FROM jayrun.holders, jayrun.hosts")
        pool.submit(holders.beat, book, holder).result(10)  # after the snapshot was taken
        other.execute(
            "INSERT INTO jayrun.executions (id, unit_id, kind, name, host_id, holder_id, state)"
            " VALUES (%(id)s, %(id)s, 'operator', 'by hand', 1, %(holder)s, 'running')",
            {"id": key(9), "holder": key(1)},
        )
        other.execute(
            "INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id) VALUES (%s, %s, 0, 2, 1)",
            (key(9), key(1)),
        )
        join(other, 9, 1)
        pool.submit(holders.beat, book, holder).result(10)  # while the new rows refer to holder and host
    assert lease(hand, 9)[:2] == (None, 1)


def test_heartbeats_touch_no_index(hand: Sql, book: Book) -> None:
    def alone() -> bool:
        """Whether every other session has ended, and so has told what it did; those of earlier tests are made to."""
        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return hand.execute(others).fetchone() is None

    def updates() -> list[tuple[Any, ...]]:
        """Of each of the two tables: how many rows were updated, and how many of them not HOT."""
        return hand.execute(
            "SELECT relname, n_tup_upd, n_tup_upd - n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE schemaname = 'jayrun' AND relname IN ('hosts', 'holders') ORDER BY relname"
        ).fetchall()

    # Its host is this one, and is told at each beat.
    hand.execute("UPDATE jayrun.hosts SET boot_id = %s", (kernel.boot_id(),))
    hand.execute("UPDATE jayrun.settings SET tick_seconds = 1e-9")
    until(alone)
    before = updates()
    for _ in range(50):
        holders.beat(book, holders.Holder(key(1), 1))
    book.close()
    until(lambda: [count for _, count, _ in updates()] == [count + 50 for _, count, _ in before])
    assert [cold for *_, cold in updates()] == [cold for *_, cold in before]


# --- one hand, one statement -----------------------------------------------------------------------------------------

# Lease 1 lives, with 60 bytes of device 1. Leases 2 and 3 have ended, with device 2; 3 was folded. Lease 4 has no
# shares. Holder 3 and execution 3 have ended.
STATEMENTS = {
    # the counters of devices move only with shares
    "devices_counters": [
        "UPDATE jayrun.devices SET reserved_bytes = 0 WHERE id = 1",
        "UPDATE jayrun.devices SET reserved_bytes = reserved_bytes + 1",
        "UPDATE jayrun.devices SET share_count = 0 WHERE id = 1",
        "UPDATE jayrun.devices SET exclusive_count = 1 WHERE id = 1",
    ],
    "devices_start_empty": [
        """INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes, reserved_bytes)
           VALUES (1, 9, 'gpu', '{cuda}', 100, 1)""",
        """INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes, share_count)
           VALUES (1, 9, 'gpu', '{cuda}', 100, 1)""",
        """INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes, exclusive_count)
           VALUES (1, 9, 'gpu', '{cuda}', 100, 1)""",
    ],
    "devices_removed_empty": ["UPDATE jayrun.devices SET removed_at = clock_timestamp() WHERE id = 1"],
    # shares are what was granted until they have ended
    "shares_fixed": [
        "UPDATE jayrun.lease_shares SET memory_bytes = 1",
        "UPDATE jayrun.lease_shares SET exclusive = true",
        "UPDATE jayrun.lease_shares SET device_id = 3 WHERE ended_at IS NULL",
        "UPDATE jayrun.lease_shares SET lease_id = gen_random_uuid() WHERE ended_at IS NULL",
        "UPDATE jayrun.lease_shares SET ended_at = NULL WHERE folded_at IS NULL",
        "UPDATE jayrun.lease_shares SET ended_at = clock_timestamp() WHERE folded_at IS NOT NULL",
        "UPDATE jayrun.lease_shares SET folded_at = NULL",
        "UPDATE jayrun.lease_shares SET folded_at = clock_timestamp() WHERE folded_at IS NOT NULL",
    ],
    "shares_end_with_lease": ["UPDATE jayrun.lease_shares SET ended_at = clock_timestamp() WHERE ended_at IS NULL"],
    "lease_shares_check1": ["UPDATE jayrun.lease_shares SET folded_at = clock_timestamp() WHERE ended_at IS NULL"],
    "shares_kept": [
        "DELETE FROM jayrun.lease_shares WHERE ended_at IS NULL",
        "DELETE FROM jayrun.lease_shares WHERE folded_at IS NOT NULL",
    ],
    "shares_not_truncated": ["TRUNCATE jayrun.lease_shares", "TRUNCATE jayrun.devices CASCADE"],
    "shares_on_live_lease": [
        """INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive, ended_at)
           SELECT lease_id, 3, 1, false, clock_timestamp() FROM jayrun.lease_shares WHERE ended_at IS NULL""",
    ],
    # a lease ends through its holders, once
    "leases_end_with_last_holder": [
        """UPDATE jayrun.leases SET ended_at = clock_timestamp(), end_reason = 'released', holder_count = 0
           WHERE ended_at IS NULL""",
        "UPDATE jayrun.leases SET holder_count = 0 WHERE ended_at IS NULL",
        "UPDATE jayrun.leases SET holder_count = 2 WHERE ended_at IS NULL",
        "UPDATE jayrun.leases SET ended_at = NULL, end_reason = NULL WHERE ended_at IS NOT NULL",
    ],
    "leases_fixed": [
        "UPDATE jayrun.leases SET end_reason = 'returned' WHERE ended_at IS NOT NULL",
        "UPDATE jayrun.leases SET epoch = nextval('jayrun.epochs')",
        "UPDATE jayrun.leases SET invocation = 2",
        "UPDATE jayrun.leases SET granted_at = clock_timestamp()",
    ],
    "leases_start_live": [
        """INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id, ended_at, end_reason)
           SELECT gen_random_uuid(), execution_id, 0, 2, 1, clock_timestamp(), 'released' FROM jayrun.leases""",
        """INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id, holder_count)
           SELECT gen_random_uuid(), execution_id, 0, 2, 1, 1 FROM jayrun.leases""",
    ],
    "leases_kept": ["DELETE FROM jayrun.leases WHERE ended_at IS NOT NULL"],
    "leases_one_per_request": [
        """INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
           SELECT gen_random_uuid(), execution_id, 0, 1, 1 FROM jayrun.leases WHERE ended_at IS NULL""",
        """INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
           SELECT gen_random_uuid(), execution_id, 0, 1, 1 FROM jayrun.leases WHERE ended_at IS NOT NULL""",
    ],
    "leases_execution_id_position_fkey": [
        """INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
           SELECT gen_random_uuid(), execution_id, 1, 1, 1 FROM jayrun.leases""",
    ],
    "lease_holders_fixed": [
        "UPDATE jayrun.lease_holders SET ended_at = NULL, end_reason = NULL WHERE ended_at IS NOT NULL",
        "UPDATE jayrun.lease_holders SET end_reason = 'reclaimed' WHERE ended_at IS NOT NULL",
        "UPDATE jayrun.lease_holders SET holder_id = (SELECT max(id::text)::uuid FROM jayrun.holders)",
        "UPDATE jayrun.lease_holders SET lease_id = (SELECT max(id::text)::uuid FROM jayrun.leases)",
    ],
    "lease_holders_kept": [
        "DELETE FROM jayrun.lease_holders WHERE ended_at IS NULL",
        "DELETE FROM jayrun.lease_holders WHERE ended_at IS NOT NULL",
    ],
    "lease_holders_not_truncated": ["TRUNCATE jayrun.lease_holders", "TRUNCATE jayrun.holders CASCADE"],
    "holders_joined": [
        """INSERT INTO jayrun.lease_holders (lease_id, holder_id, ended_at, end_reason)
           SELECT l.id, o.id, clock_timestamp(), 'released' FROM jayrun.leases l, jayrun.holders o
           WHERE l.ended_at IS NULL AND o.pid = 2""",
    ],
    # who has ended has ended; recorded sequences and the log are written once
    "holders_moves": ["UPDATE jayrun.holders SET state = 'alive', ended_at = NULL, end_reason = NULL WHERE pid = 3"],
    "holders_kept": ["DELETE FROM jayrun.holders WHERE pid = 2"],
    "executions_moves": ["UPDATE jayrun.executions SET state = 'running', ended_at = NULL WHERE ended_at IS NOT NULL"],
    "placement_requests_execution_id_fkey": ["DELETE FROM jayrun.executions"],
    "requests_fixed": [
        "UPDATE jayrun.placement_requests SET per_device_bytes = 2",
        "DELETE FROM jayrun.placement_requests",
    ],
    "events_fixed": ["UPDATE jayrun.lease_events SET kind = 'left'", "DELETE FROM jayrun.lease_events"],
    "events_not_truncated": ["TRUNCATE jayrun.lease_events"],
    # one book, one row of settings
    "settings_pkey": ["INSERT INTO jayrun.settings DEFAULT VALUES"],
    "settings_only_row_check": ["INSERT INTO jayrun.settings (only_row) VALUES (false)"],
}


@pytest.mark.parametrize(
    ("constraint", "statement"),
    [(name, statement) for name, statements in STATEMENTS.items() for statement in statements],
)
def test_a_hand_in_psql_is_refused(hand: Sql, constraint: str, statement: str) -> None:
    give(hand, (1, 1, 60, False), (2, 2, 10, False), (3, 2, 10, False))
    leave(hand, 3, 1)
    fold(hand)
    leave(hand, 2, 1)
    end_holder(hand, 3)
    hand.execute(
        "UPDATE jayrun.executions SET state = 'succeeded', ended_at = clock_timestamp() WHERE id = %s", (key(3),)
    )
    with refused(constraint):
        hand.execute(statement)
    assert counters(hand, 1) == (60, 1, 0)
    assert counters(hand, 2) == (10, 1, 0)
