"""Releases: the guarded update by which a holder leaves its leases, and the look whether somebody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import ClientCursor
from psycopg import Connection as PgConnection

from jayrun.store.transactions import Book


@dataclass(frozen=True, slots=True)
class LeasedShare:
    """What a lease has of one device: the device's number on the host, its UUID if known, bytes, and whether alone."""

    host_index: int
    device_uuid: str | None
    memory_bytes: int
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request: what the book gave to (execution, position) for one invocation."""

    id: UUID
    epoch: int
    execution_id: UUID
    position: int
    shares: tuple[LeasedShare, ...]


# Two transactions in one message: the look whether somebody waits needs a snapshot of its own, after the commit.
_LEAVE = "BEGIN; SELECT jayrun.leave(%s, %s, %s, %s); COMMIT; SELECT jayrun.anybody_waits(%s)"

_ANYBODY_WAITS = "SELECT jayrun.anybody_waits(%s)"
# Whoever parks looks for unfolded releases after its own commit. So of a release and a park that race, at least one
# sees the other, and that one combines.
_ANYTHING_TO_FOLD = """
SELECT EXISTS (SELECT FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id
               WHERE s.ended_at IS NOT NULL AND s.folded_at IS NULL AND d.host_id = %s)
"""

_LEASE = """
SELECT l.id, l.epoch, l.execution_id, l.position,
       array_agg(d.host_index ORDER BY d.host_index), array_agg(d.device_uuid ORDER BY d.host_index),
       array_agg(s.memory_bytes ORDER BY d.host_index), array_agg(s.exclusive ORDER BY d.host_index)
FROM jayrun.leases l JOIN jayrun.executions e ON e.id = l.execution_id
JOIN jayrun.lease_shares s ON s.lease_id = l.id JOIN jayrun.devices d ON d.id = s.device_id
WHERE {} GROUP BY l.id, e.id ORDER BY e.id = e.unit_id, e.age, l.position
"""
_LEASES_OF_UNIT = _LEASE.format("e.unit_id = %s AND l.invocation = e.invocation AND l.ended_at IS NULL")
_LEASE_BY_ID = _LEASE.format("l.id = %s")


def release(
    book: Book, host_id: int, holder_id: UUID, leases: Sequence[tuple[UUID, int]], *, reason: str = "released"
) -> bool:
    """Let the holder leave `leases` (id, epoch), durably. Returns whether somebody waits on the host: then combine.

    A second release, one after a reclaim, and one with a wrong epoch change nothing. `reason`: released or returned.
    """
    ordered = sorted(leases)
    ids = [lease_id for lease_id, _ in ordered]
    epochs = [epoch for _, epoch in ordered]

    def unit(pg: PgConnection[Any]) -> bool:
        cursor = ClientCursor(pg)
        cursor.execute(_LEAVE, (holder_id, ids, epochs, reason, host_id))
        cursor.set_result(-1)
        [(somebody_waits,)] = cursor.fetchall()
        return bool(somebody_waits)

    return book.written(unit)


def anybody_waits(book: Book, host_id: int) -> bool:
    """Whether a unit waits on the host whose process shows life."""
    return bool(book.value(_ANYBODY_WAITS, (host_id,)))


def anything_to_fold(book: Book, host_id: int) -> bool:
    """Whether leases ended on the host whose capacity no admission has seen yet."""
    return bool(book.value(_ANYTHING_TO_FOLD, (host_id,)))


def leases_of_unit(pg: PgConnection[Any], unit_id: UUID) -> list[Lease]:
    """The live leases that the unit's executions have for their present invocation, in the order of the sequence."""
    return [_lease(row) for row in pg.execute(_LEASES_OF_UNIT, (unit_id,)).fetchall()]


def read_lease(book: Book, lease_id: UUID) -> Lease:
    """The lease `lease_id`, which exists."""
    return book.written(lambda pg: _lease(pg.execute(_LEASE_BY_ID, (lease_id,)).fetchall()[0]))


def _lease(row: tuple[Any, ...]) -> Lease:
    return Lease(row[0], row[1], row[2], row[3], tuple(LeasedShare(*share) for share in zip(*row[4:], strict=True)))
