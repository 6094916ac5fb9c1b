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
from jayrun.store.leases import LEASES_OF_UNIT, Lease, read_row
from jayrun.store.texts import plain_failure
from jayrun.store.transactions import Book

# Only a unit whose process shows life may be granted again; asking for news is showing life.
_WAKE = "UPDATE jayrun.executions SET dormant = false WHERE id = ANY (%s) AND dormant RETURNING host_id"
_NEWS = "SELECT id, state, failure FROM jayrun.executions WHERE id = ANY (%s) AND state <> 'waiting'"
_CLAIM = "UPDATE jayrun.executions SET state = 'running', claim = claim + 1 WHERE unit_id = %s AND state = 'admitted'"
# Those admitted with the head, at the same moment; a set-up that was done before and is still running is none of them.
_CLAIMED = """
SELECT m.id, m.invocation, m.age FROM jayrun.executions m JOIN jayrun.executions head ON head.id = m.unit_id
WHERE head.id = %s AND head.state = 'running' AND m.state = 'running' AND m.admitted_at = head.admitted_at
"""
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
FROM (SELECT x.lease_id, x.holder_id FROM jayrun.lease_holders x JOIN jayrun.leases l ON l.id = x.lease_id
      WHERE x.ended_at IS NULL AND l.execution_id = ANY (%s) AND l.ended_at IS NULL
        AND (l.execution_id, l.invocation) IN (SELECT * FROM unnest(%s::uuid[], %s::integer[]))
      ORDER BY x.lease_id, x.holder_id FOR UPDATE OF x) n
WHERE h.lease_id = n.lease_id AND h.holder_id = n.holder_id
"""
_RETURN_SLOT = """
UPDATE jayrun.lease_holders h SET ended_at = clock_timestamp(), end_reason = 'returned' FROM jayrun.leases l
WHERE l.id = h.lease_id AND h.ended_at IS NULL AND l.execution_id = %s AND l.position = %s AND l.invocation = %s
"""
_WITHDRAW = """
UPDATE jayrun.executions SET state = CASE WHEN id = unit_id THEN %s ELSE 'cancelled' END,
    ended_at = clock_timestamp(), waiting_since = NULL, failure = %s,
    waited_seconds = waited_seconds + coalesce(extract(epoch FROM clock_timestamp() - waiting_since), 0)
WHERE unit_id = %s AND state IN ('waiting', 'admitted') RETURNING id, invocation
"""
_DROP_MEMBER = """
UPDATE jayrun.executions SET
    state = CASE WHEN id = unit_id THEN state ELSE 'cancelled' END,
    ended_at = CASE WHEN id = unit_id THEN NULL ELSE clock_timestamp() END,
    waiting_since = CASE WHEN id = unit_id THEN waiting_since END,
    shape = CASE WHEN id = unit_id THEN %s ELSE shape END
WHERE id IN (%s, %s) AND state = 'waiting'
"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """An admitted unit, claimed: what each of its executions is now, and the leases of the coming invocation."""

    members: dict[UUID, tuple[int, int]]  # execution: (invocation, age)
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class News:
    """What became of a waiting execution: its state, and the failure that was stored if it ended."""

    id: UUID
    state: ExecutionState
    failure: dict[str, Any] | None


def news(book: Book, waiting: Sequence[UUID]) -> tuple[list[News], bool]:
    """Which of these executions wait no longer; and whether one was dormant and is awake now (then combine)."""

    def unit(pg: PgConnection[Any]) -> tuple[list[News], bool]:
        with pg.pipeline():  # one round trip
            woken = pg.execute(_WAKE, (list(waiting),))
            found = pg.execute(_NEWS, (list(waiting),))
        told = [News(row[0], ExecutionState(row[1]), row[2]) for row in found.fetchall()]
        return told, bool(woken.fetchall())

    return book.written(unit)


def claim(book: Book, unit_id: UUID) -> Claimed | None:
    """Take what was granted to an admitted unit; None when it is not (or no longer) admitted.

    Only the unit's own process claims it, and only while it waits for news of it. So a unit that runs already was
    claimed by that same process, whose answer was lost, and is given to it again.
    """

    def unit(pg: PgConnection[Any]) -> Claimed | None:
        with pg.pipeline():  # one round trip, one transaction
            pg.execute(_CLAIM, (unit_id,))
            claimed = pg.execute(_CLAIMED, (unit_id,))
            leases = pg.execute(LEASES_OF_UNIT, (unit_id,))
        probes.reach("claim.updated")
        members = {row[0]: (row[1], row[2]) for row in claimed.fetchall()}
        if not members:
            return None
        granted = [lease for lease in map(read_row, leases.fetchall()) if lease.execution_id in members]
        return Claimed(members, tuple(granted))

    return book.written(unit)


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


def withdraw(book: Book, unit_id: UUID, *, state: ExecutionState, failure: dict[str, Any] | None) -> bool:
    """End a unit that waits, or was admitted and not claimed; what it was granted goes back. Combine if True.

    False: it does not wait any more (it was claimed, or has ended).
    """

    def unit(pg: PgConnection[Any]) -> bool:
        with pg.transaction():
            stored = None if failure is None else Jsonb(plain_failure(failure))
            rows = pg.execute(_WITHDRAW, (state.value, stored, unit_id)).fetchall()
            _return_leases(pg, rows)
        return bool(rows)

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
