"""Executions after their first request: claimed when admitted, given back when nobody claims, withdrawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection
from psycopg.types.json import Jsonb

from jayrun import probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.store.leases import Lease, read_row
from jayrun.store.texts import plain_failure
from jayrun.store.transactions import Book

_ATTEND = "SELECT * FROM jayrun.attend(%s)"
# Grants that nobody fetched go back: the leases end, the unit waits again at its old place, and sleeps until its
# process shows life, so that a stopped process does not freeze devices again and again.
_UNCLAIMED = """
SELECT e.id FROM jayrun.executions e, jayrun.settings s
WHERE e.state = 'admitted' AND e.id = e.unit_id AND e.host_id = %s
  AND e.admitted_at < clock_timestamp() - make_interval(secs => s.claim_seconds) ORDER BY e.id
"""
# A detached unit is open to other workers instead, and it is the worker that sleeps.
_SILENCE_WORKER = """
UPDATE jayrun.holders SET silent = true
WHERE id = (SELECT holder_id FROM jayrun.executions WHERE id = %s AND detached AND state = 'admitted')
"""
_PARK_AGAIN = """
UPDATE jayrun.executions SET state = 'waiting', waiting_since = clock_timestamp(), dormant = NOT detached,
    holder_id = CASE WHEN NOT detached THEN holder_id END,
    host_id = CASE WHEN detached THEN pinned_host_id ELSE host_id END
WHERE unit_id = %s AND state = 'admitted' RETURNING id, invocation
"""
_RETURN_LEASES = """
UPDATE jayrun.lease_holders h SET ended_at = clock_timestamp(), end_reason = 'returned'
FROM (SELECT x.lease_id, x.holder_id, x.hold FROM jayrun.lease_holders x JOIN jayrun.leases l ON l.id = x.lease_id
      WHERE x.ended_at IS NULL AND l.execution_id = ANY (%s) AND l.ended_at IS NULL
        AND (l.execution_id, l.invocation) IN (SELECT * FROM unnest(%s::uuid[], %s::integer[]))
      ORDER BY x.lease_id, x.holder_id, x.hold FOR UPDATE OF x) n
WHERE h.lease_id = n.lease_id AND h.holder_id = n.holder_id AND h.hold = n.hold
"""
_RETURN_SLOT = """
UPDATE jayrun.lease_holders h SET ended_at = clock_timestamp(), end_reason = 'returned' FROM jayrun.leases l
WHERE l.id = h.lease_id AND h.ended_at IS NULL AND l.execution_id = %s AND l.position = %s AND l.invocation = %s
"""
_WITHDRAW = """
UPDATE jayrun.executions e SET state = CASE WHEN e.id = e.unit_id THEN %s ELSE 'cancelled' END,
    ended_at = clock_timestamp(), waiting_since = NULL, failure = %s,
    waited_seconds = e.waited_seconds + coalesce(extract(epoch FROM clock_timestamp() - e.waiting_since), 0)
FROM (SELECT id, state FROM jayrun.executions
      WHERE unit_id = %s AND state IN ('waiting', 'admitted') ORDER BY id FOR UPDATE) was
WHERE e.id = was.id RETURNING e.host_id, e.holder_id, was.state, e.id, e.invocation
"""
_DROP_MEMBER = """
UPDATE jayrun.executions SET
    state = CASE WHEN id = unit_id THEN state ELSE 'cancelled' END,
    ended_at = CASE WHEN id = unit_id THEN NULL ELSE clock_timestamp() END,
    waiting_since = CASE WHEN id = unit_id THEN waiting_since END,
    shape = CASE WHEN id = unit_id THEN %s ELSE shape END
WHERE id IN (%s, %s) AND state = 'waiting'
"""

WAKE_FOR = """
SELECT jayrun.wake_workers(name, pinned_host_id) FROM jayrun.executions
WHERE id = %s AND state = 'ready' AND (not_before IS NULL OR not_before <= clock_timestamp())
"""
"""Wakes an idle worker for an execution that is ready and due."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """An admitted unit, claimed: what each of its executions is now, and the leases of the coming invocation."""

    members: dict[UUID, tuple[int, int]]  # execution: (invocation, age)
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class News:
    """What became of a waiting execution that will not run: its state, and the failure that was stored."""

    id: UUID
    state: ExecutionState
    failure: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Attended:
    """What became of waiting units: those admitted, claimed now; those that ended; and whether one of the others was
    dormant and is awake now (then combine and attend again)."""

    claimed: dict[UUID, Claimed]
    ended: list[News]
    woken: bool


def attend(book: Book, waiting: Sequence[UUID]) -> Attended:
    """Show life for these units, claim what was granted to those admitted, and hear which of them ended.

    Only the units' own process attends them, and only while it waits for news of them. So a unit that runs already was
    claimed by that same process, whose answer was lost, and is given to it again.
    """

    def unit(pg: PgConnection[Any]) -> Attended:
        [(woken, ended, claimed)] = pg.execute(_ATTEND, (list(waiting),)).fetchall()
        if claimed:
            probes.reach("claim.updated")
        return Attended(
            {UUID(id_): claimed_unit(unit) for id_, unit in claimed or ()},
            [News(UUID(id_), ExecutionState(state), failure) for id_, state, failure in ended or ()],
            woken,
        )

    return book.written(unit)


def claimed_unit(members: Sequence[Sequence[Any]]) -> Claimed:
    """The unit as `jayrun.unit_of` gives it."""
    return Claimed(
        {UUID(id_): (invocation, age) for id_, _, invocation, age, *_ in members},
        tuple(read_row(lease) for *_, leases in members for lease in leases or ()),
    )


def return_unclaimed(book: Book, host_id: int) -> int:
    """Give back what was granted and not claimed within the book's `claim_seconds`; returns how many units. Combine."""

    def unit(pg: PgConnection[Any]) -> int:
        overdue = [row[0] for row in pg.execute(_UNCLAIMED, (host_id,)).fetchall()]
        for unit_id in overdue:
            with pg.transaction():
                pg.execute(_SILENCE_WORKER, (unit_id,))
                probes.reach("unclaimed.returning")
                _return_leases(pg, pg.execute(_PARK_AGAIN, (unit_id,)).fetchall())
        return len(overdue)

    return book.written(unit)


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Where a unit was that was withdrawn, and who was to go on with it: None when that was open."""

    host_id: int | None
    holder_id: UUID | None


def withdraw(book: Book, unit_id: UUID, *, state: ExecutionState, failure: dict[str, Any] | None) -> Withdrawn | None:
    """End a unit that waits, or was admitted and not claimed; what it was granted goes back. Combine there.

    None: it does not wait any more (it was claimed, or has ended).
    """

    def unit(pg: PgConnection[Any]) -> Withdrawn | None:
        with pg.transaction():
            stored = None if failure is None else Jsonb(plain_failure(failure))
            rows = pg.execute(_WITHDRAW, (state.value, stored, unit_id)).fetchall()
            # Of one that waits, the invocation has ended; what is left of it somebody keeps, and lets go.
            _return_leases(pg, [row[3:] for row in rows if row[2] == ExecutionState.ADMITTED])
        return Withdrawn(*rows[0][:2]) if rows else None

    return book.written(unit)


def undo_ask(book: Book, unit_id: UUID | None, slot: tuple[UUID, int, int]) -> None:
    """Take an ask back whose answer was never heard: a granted lease goes back, and the unit, if it is given, waits no
    longer. Combine."""
    if unit_id is not None:
        withdraw(book, unit_id, state=ExecutionState.CANCELLED, failure=None)
    book.written(lambda pg: pg.execute(_RETURN_SLOT, slot))


def drop_member(book: Book, execution_id: UUID, unit_id: UUID, shape: str) -> None:
    """Let a set-up that is no longer needed wait no longer with its unit, which now has that `shape`. Combine."""
    book.written(lambda pg: pg.execute(_DROP_MEMBER, (shape, execution_id, unit_id)))


def _return_leases(pg: PgConnection[Any], rows: list[Any]) -> None:
    ids, invocations = [row[0] for row in rows], [row[1] for row in rows]
    pg.execute(_RETURN_LEASES, (ids, ids, invocations))
