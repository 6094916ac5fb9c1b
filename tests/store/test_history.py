"""The history check refuses what is illegal: each rule, broken by a hand that has switched the book's triggers off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import Scene, cuda, cuda_group, gpus, scene
from history import Declared, last_event, replay

from jayrun.store import admission, devices, executions, holders, leases
from jayrun.store.admission import Ask, Granted, Member, Parked
from jayrun.store.leases import Held, Lease
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Names = dict[str, Any]


def ask(stage: Scene, member: Member, position: int) -> Lease | None:
    outcome = admission.reserve(stage.book, Ask(asker=member, position=position))
    assert isinstance(outcome, Granted | Parked)
    return outcome.lease if isinstance(outcome, Granted) else None


@pytest.fixture
def told(book: Book, sql: Sql) -> Names:
    """A legal history of a host with three devices, and what its actors are called."""
    stage = scene(book, gpus(3))
    elsewhere = holders.attest_host(book, "other-host")
    devices.declare(book, elsewhere, gpus(1))
    friend = holders.register(book, stage.host_id, role="runtime")

    kept = stage.granted(cuda(10))  # on device 0, and handed on to a friend
    leases.join(book, friend, Held(kept.id, kept.epoch, 1))
    leases.release(book, stage.host_id, stage.holder.id, [(kept.id, kept.epoch)])
    group = stage.granted(cuda_group(2, 4))  # on devices 0 and 1
    leases.release(book, stage.host_id, stage.holder.id, [(group.id, group.epoch)])

    pair = stage.execution()  # gets its first request, must wait with the second, and then gets both again
    blocker = stage.granted(cuda(24, device_id=1))
    first, second = cuda(20, device_id=2), cuda(20, device_id=1)
    early = ask(stage, Member(execution=pair, invocation=1, recorded=(first,)), 0)
    assert early is not None
    assert ask(stage, Member(execution=pair, invocation=1, recorded=(first, second), booked=1), 1) is None
    for lease in (early, blocker):
        leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    assert admission.combine(book, stage.host_id) == 1
    again, and_more = executions.attend(book, [pair.id]).claimed[pair.id].leases

    steps = stage.execution()  # two requests, one after the other
    one = ask(stage, Member(execution=steps, invocation=1, recorded=(cuda(1),)), 0)
    two = ask(stage, Member(execution=steps, invocation=1, recorded=(cuda(1), cuda(2)), booked=1), 1)
    assert one is not None
    assert two is not None
    assert replay(sql) == 8
    [other_device] = sql.execute("SELECT id FROM jayrun.devices WHERE host_id = %s", (elsewhere,)).fetchone() or ()
    return {
        **{name: lease.id for name, lease in locals().items() if isinstance(lease, Lease)},
        "holder": stage.holder.id,
        "friend": friend.id,
        "pair": pair.id,
        "kept_execution": kept.execution_id,
        "device": kept.shares[0].device_key,
        "next_device": group.shares[1].device_key,
        "other_device": other_device,
        "nobody": UUID(int=1),
    }


def forge(sql: Sql, statements: str, names: Names) -> None:
    with sql.transaction():
        sql.execute("SET LOCAL session_replication_role = replica")
        for statement in statements.split(";"):
            sql.execute(statement, names)


def lost(lease: str) -> str:
    """A lease that the book has forgotten."""
    return "; ".join(
        f"DELETE FROM jayrun.{table} WHERE {column} = %({lease})s"
        for table, column in (
            *(("lease_events", "lease_id"), ("lease_holders", "lease_id"), ("lease_shares", "lease_id")),
            ("leases", "id"),
        )
    )


def line(kind: str, lease: str, holder: str | None = None) -> str:
    """One more line at the end of the log."""
    who = f"%({holder})s::uuid" if holder else "NULL::uuid"
    return (
        "INSERT INTO jayrun.lease_events (kind, execution_id, lease_id, holder_id, epoch)"
        f" SELECT '{kind}', execution_id, id, {who}, epoch FROM jayrun.leases WHERE id = %({lease})s"
    )


PARKED = "INSERT INTO jayrun.lease_events (kind, execution_id) VALUES ('parked', %(pair)s)"
ALONE_REQUEST = """
UPDATE jayrun.placement_requests SET exclusive = true
WHERE execution_id = (SELECT execution_id FROM jayrun.leases WHERE id = %({})s)
"""
ALONE_SHARES = "UPDATE jayrun.lease_shares SET exclusive = true WHERE lease_id = %({})s"
ENDED_HOLDER = "UPDATE jayrun.holders SET state = 'ended', end_reason = 'dead', ended_at = {} WHERE id = %(friend)s"
ENDED_EXECUTION = "UPDATE jayrun.executions SET state = 'failed', ended_at = '2000-01-01' WHERE id IN ({})"

ILLEGAL = {
    # granted once, with rising epochs, told as it is
    "was granted twice": line("granted", "kept"),
    "came after 1000000000": """
        UPDATE jayrun.leases SET epoch = 1000000000 WHERE id = %(kept)s;
        UPDATE jayrun.lease_events SET epoch = 1000000000 WHERE lease_id = %(kept)s""",
    "another execution or epoch": "UPDATE jayrun.lease_events SET epoch = epoch + 1 WHERE lease_id = %(kept)s",
    "which is none": "INSERT INTO jayrun.lease_events (kind, lease_id) VALUES ('released', %(nobody)s)",
    "never granted": "DELETE FROM jayrun.lease_events WHERE lease_id = %(two)s",
    # ended once
    "released before it was granted": "DELETE FROM jayrun.lease_events WHERE lease_id = %(group)s AND kind = 'granted'",
    "released after it had ended": line("released", "group"),
    "was released, and is reclaimed": "UPDATE jayrun.leases SET end_reason = 'reclaimed' WHERE id = %(group)s",
    "other leases live": """
        UPDATE jayrun.leases SET ended_at = now(), end_reason = 'released', holder_count = 0
        WHERE id = %(kept)s""",
    "did not end with it": """
        UPDATE jayrun.lease_shares SET ended_at = NULL, folded_at = NULL WHERE lease_id = %(group)s""",
    "did not end with ": "UPDATE jayrun.lease_shares SET ended_at = now() WHERE lease_id = %(kept)s",
    # what was asked for, whole
    "has 1 shares of 2 to 2": """
        DELETE FROM jayrun.lease_shares WHERE lease_id = %(group)s AND device_id = %(next_device)s""",
    "not 10000000000 divided": "UPDATE jayrun.lease_shares SET memory_bytes = 1 WHERE lease_id = %(kept)s",
    "not 8000000000 divided": """
        UPDATE jayrun.lease_shares SET memory_bytes = memory_bytes - 1 WHERE lease_id = %(group)s
            AND device_id = %(device)s;
        UPDATE jayrun.lease_shares SET memory_bytes = memory_bytes + 1 WHERE lease_id = %(group)s
            AND device_id <> %(device)s""",
    "on another host": "UPDATE jayrun.lease_shares SET device_id = %(other_device)s WHERE lease_id = %(kept)s",
    "asked for tpu": "UPDATE jayrun.placement_requests SET device = 'tpu' WHERE execution_id = %(kept_execution)s",
    "asked for 2": "UPDATE jayrun.placement_requests SET device_id = 2 WHERE execution_id = %(kept_execution)s",
    "must be True": ALONE_REQUEST.format("kept"),
    "must be False": ALONE_SHARES.format("kept"),
    "answers no request": "UPDATE jayrun.leases SET position = 7 WHERE id = %(kept)s",
    # capacity and exclusivity
    "came beside an exclusive one": ALONE_REQUEST.format("kept") + ";" + ALONE_SHARES.format("kept"),
    "is exclusive beside others": ALONE_REQUEST.format("group") + ";" + ALONE_SHARES.format("group"),
    "over-books device": "UPDATE jayrun.devices SET capacity_bytes = 13 * 10::bigint ^ 9 WHERE id = %(device)s",
    "counts ": "UPDATE jayrun.devices SET reserved_bytes = reserved_bytes + 1 WHERE id = %(device)s",
    "and by the log it is": "UPDATE jayrun.devices SET share_count = 0 WHERE id = %(device)s",
    # holders
    "than whom it was granted": "DELETE FROM jayrun.lease_holders WHERE holder_id = %(holder)s AND lease_id = %(kept)s",
    "whom it was granted and who joined": """
        DELETE FROM jayrun.lease_events WHERE lease_id = %(kept)s AND kind = 'joined'""",
    "joined after its end": ENDED_HOLDER.format("'2000-01-01'"),
    "has ended and holds": ENDED_HOLDER.format("now()"),
    "joined after it had ended": line("joined", "group", "friend")
    + "; INSERT INTO jayrun.lease_holders (lease_id, holder_id, hold) VALUES (%(group)s, %(friend)s, 1)",
    "and did not hold it": "UPDATE jayrun.lease_events SET holder_id = %(nobody)s WHERE kind = 'left'",
    "and it did not end": line("left", "kept", "friend"),
    "held by others than by the log": """
        UPDATE jayrun.lease_holders SET ended_at = now(), end_reason = 'released' WHERE holder_id = %(friend)s""",
    "miscounts its holders": "UPDATE jayrun.leases SET holder_count = 2 WHERE id = %(kept)s",
    # executions
    "was parked twice": f"{PARKED}; {PARKED}",
    "waits unparked": """
        UPDATE jayrun.executions SET state = 'waiting', waiting_since = now(), shape = 'x'
        WHERE id = %(kept_execution)s""",
    "had ended in a wait": lost("again") + "; UPDATE jayrun.leases SET invocation = 1 WHERE id = %(and_more)s",
    "was re-admitted with \\[0\\]": lost("and_more"),
    "was re-admitted with \\[1\\]": lost("again"),
    "answers request 1 before request 0": lost("one"),
    "after \\(9, 0\\)": "UPDATE jayrun.leases SET invocation = 9 WHERE id = %(one)s",
    "and was not taken back": ENDED_EXECUTION.format("%(kept_execution)s"),
}


@pytest.mark.parametrize("refusal", ILLEGAL)
def test_an_illegal_history_is_refused(told: Names, sql: Sql, refusal: str) -> None:
    forge(sql, ILLEGAL[refusal], told)
    with pytest.raises(AssertionError, match=refusal):
        replay(sql)


def test_each_half_of_a_unit_alone_is_refused(book: Book, sql: Sql) -> None:
    """A run and the set-up of its resource wait together, and are granted together."""
    stage = scene(book, gpus(1))
    blocker = stage.granted(cuda(24))
    run = stage.execution()
    set_up = replace(stage.execution(), unit_id=run.id, kind="resource")
    members = [Member(execution=each, invocation=1, recorded=(cuda(4),)) for each in (set_up, run)]
    assert admission.reserve(book, Ask(asker=members[0], position=0, companions=(members[1],))) == Parked()
    leases.release(book, stage.host_id, stage.holder.id, [(blocker.id, blocker.epoch)])
    admission.combine(book, stage.host_id)
    of_set_up, of_run = executions.attend(book, [run.id]).claimed[run.id].leases
    assert replay(sql) == 3
    forge(sql, lost("lease"), {"lease": of_set_up.id})
    with pytest.raises(AssertionError, match=f"{set_up.id} had recorded 1 requests, and was re-admitted with"):
        replay(sql)
    assert of_run.execution_id == run.id


def test_a_grant_on_its_way_to_the_dead_is_legal_once_it_was_taken_back(told: Names, sql: Sql) -> None:
    of_group = "SELECT execution_id FROM jayrun.leases WHERE id = %(group)s"
    taken_back = """
        UPDATE jayrun.leases SET end_reason = 'reclaimed' WHERE id = %(group)s;
        UPDATE jayrun.lease_events SET kind = 'reclaimed' WHERE lease_id = %(group)s AND kind = 'released'"""
    forge(sql, ENDED_EXECUTION.format(of_group), told)
    with pytest.raises(AssertionError, match="and was not taken back"):
        replay(sql)
    forge(sql, taken_back, told)
    assert replay(sql) == 8


def test_a_device_is_judged_by_what_it_was_declared_as_then(book: Book, sql: Sql) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    device_id = lease.shares[0].device_key
    devices.declare(book, stage.host_id, gpus(1, 12))  # below what is in use
    now = last_event(sql)
    with pytest.raises(AssertionError, match="over-books"):
        replay(sql)
    assert replay(sql, [Declared(0, device_id, 24 * 10**9, False), Declared(now, device_id, 12 * 10**9, False)]) == 1
    with pytest.raises(AssertionError, match="over-books"):
        replay(sql, [Declared(0, device_id, 12 * 10**9, False), Declared(now, device_id, 24 * 10**9, False)])
    with pytest.raises(AssertionError, match="must be True"):
        replay(sql, [Declared(0, device_id, 24 * 10**9, True)])
