"""What people ask the book: lists and single things, read in one unchanging picture each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from jayrun.errors import UnknownId
from jayrun.store.transactions import Book

Row = dict[str, Any]

_EVENTS_OF_LEASE = """
SELECT e.at, e.kind, o.pid, e.detail
FROM (SELECT * FROM jayrun.lease_events WHERE lease_id = :id
      UNION ALL
      SELECT * FROM jayrun.lease_events d WHERE d.kind = 'declared' AND EXISTS (
          SELECT FROM jayrun.lease_holders x
          WHERE x.lease_id = :id AND x.holder_id = d.holder_id AND coalesce(x.ended_at, d.at) >= d.at)) e
LEFT JOIN jayrun.holders o ON o.id = e.holder_id ORDER BY e.id
"""
_LEASE = """
SELECT l.id, l.epoch, h.name AS host, e.name AS execution, e.kind, e.id AS execution_id, l.position, l.invocation,
       CASE WHEN l.ended_at IS NULL THEN 'live' ELSE l.end_reason END AS state, l.granted_at, l.ended_at,
       coalesce(l.ended_at, clock_timestamp()) - l.granted_at AS age,
       (SELECT json_agg(json_build_object('device', d.kind, 'device_id', d.host_index, 'device_uuid', d.device_uuid,
                                          'memory_bytes', s.memory_bytes, 'exclusive', s.exclusive)
                        ORDER BY d.host_index)
        FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id WHERE s.lease_id = l.id) AS shares,
       (SELECT json_agg(json_build_object('pid', o.pid, 'user', o.user_name, 'database_user', o.database_user,
                                          'label', o.label, 'command', o.command, 'since', x.since,
                                          'left_at', x.ended_at, 'end_reason', x.end_reason,
                                          'last_seen', o.seen_at) ORDER BY x.since)
        FROM jayrun.lease_holders x JOIN jayrun.holders o ON o.id = x.holder_id WHERE x.lease_id = l.id) AS holders
FROM jayrun.leases l JOIN jayrun.hosts h ON h.id = l.host_id JOIN jayrun.executions e ON e.id = l.execution_id
WHERE l.id = :id
"""
_LIKE = """
SELECT id FROM jayrun.{table} WHERE id::text LIKE '%' || :part || '%' LIMIT 2
"""
_SUMMARY = """
SELECT (SELECT count(*) FROM jayrun.leases) AS leases,
       (SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL) AS live,
       (SELECT count(*) FROM jayrun.leases WHERE end_reason = 'reclaimed') AS reclaimed,
       (SELECT count(*) FROM jayrun.executions) AS executions,
       (SELECT count(*) FROM jayrun.placement_requests) AS requests,
       (SELECT count(*) FROM jayrun.lease_events WHERE kind = 'parked') AS waits,
       (SELECT coalesce(max(waited_seconds), 0) FROM jayrun.executions) AS longest_wait_seconds,
       (SELECT count(*) FROM jayrun_audit.violations) AS violations
"""


def capacity(book: Book) -> list[Row]:
    """View `capacity`: every declared device."""
    return _rows(book, "SELECT * FROM jayrun_audit.capacity ORDER BY host, device, device_id")


def leases(book: Book) -> list[Row]:
    """View `leases`: every live lease, oldest first."""
    return _rows(book, "SELECT * FROM jayrun_audit.leases ORDER BY granted_at")


def executions(book: Book, *, states: Sequence[str] = (), name: str | None = None, limit: int = 1000) -> list[Row]:
    """View `executions`, the newest first: those in `states` (none: in any) of the operator `name` (None: of any)."""
    statement = """
        SELECT * FROM jayrun_audit.executions
        WHERE (cardinality(CAST(:states AS text[])) = 0 OR state = ANY (:states))
          AND (CAST(:name AS text) IS NULL OR execution = :name)
        ORDER BY submitted_at DESC LIMIT :limit
    """
    return _rows(book, statement, states=list(states), name=name, limit=limit)


def execution(book: Book, execution_id: UUID) -> Row:
    """One execution as the view `executions` has it. Raises `UnknownId`."""
    rows = _rows(book, "SELECT * FROM jayrun_audit.executions WHERE id = :id", id=execution_id)
    if not rows:
        raise UnknownId(f"no execution has the id {execution_id}: `jayrun executions list` shows them")
    return rows[0]


def queue(book: Book) -> list[Row]:
    """View `queue`: who waits, in the order of admission per host."""
    return _rows(book, "SELECT * FROM jayrun_audit.queue ORDER BY host, position")


def hosts(book: Book) -> list[Row]:
    """View `hosts`: every host, by name."""
    return _rows(book, "SELECT * FROM jayrun_audit.hosts ORDER BY host, host_id")


def holders(book: Book) -> list[Row]:
    """View `holders`: every process that the book has as alive, by host, oldest first."""
    return _rows(book, "SELECT * FROM jayrun_audit.holders ORDER BY host, since, id")


def audit(book: Book) -> list[Row]:
    """View `audit`: what was found of every device and its leases when somebody looked last, the worst first."""
    return _rows(
        book, "SELECT * FROM jayrun_audit.audit ORDER BY host, device, device_id, finding = 'ok', finding, since, pid"
    )


def violations(book: Book) -> list[Row]:
    """View `violations`: always empty."""
    return _rows(book, "SELECT * FROM jayrun_audit.violations")


def summary(book: Book) -> Row:
    """Counts over the whole book: leases, requests, waits, and the longest wait in seconds."""
    return _rows(book, _SUMMARY)[0]


def lease(book: Book, lease_id: UUID) -> Row:
    """One lease, live or ended, with shares, holders and events. Raises `UnknownId`."""

    def unit(connection: Connection) -> tuple[Row | None, list[Row]]:
        found = connection.execute(text(_LEASE), {"id": lease_id}).mappings().one_or_none()
        events = connection.execute(text(_EVENTS_OF_LEASE), {"id": lease_id}).mappings()
        return None if found is None else dict(found), [dict(event) for event in events]

    row, events = book.read(unit)
    if row is None:
        raise UnknownId(f"no lease has the id {lease_id}: `jayrun leases list` shows the live ones")
    return {**row, "events": events}


def find_lease(book: Book, wanted: str) -> UUID:
    """The id of the one lease that `wanted` means: a whole id, or a part of one.

    Raises `UnknownId`, saying what to do, when it is no such thing, or means none or several.
    """
    return _find(book, wanted, table="leases", noun="lease", listing="`jayrun leases list` shows the live ones")


def find_execution(book: Book, wanted: str) -> UUID:
    """The id of the one execution that `wanted` means, likewise."""
    hint = "`jayrun executions list` shows them"
    return _find(book, wanted, table="executions", noun="execution", listing=hint)


def find_holder(book: Book, wanted: str) -> UUID:
    """The id of the one holder that `wanted` means, likewise."""
    return _find(book, wanted, table="holders", noun="holder", listing="`jayrun holders list` shows those alive")


def _find(book: Book, wanted: str, *, table: str, noun: str, listing: str) -> UUID:
    with suppress(ValueError):
        return UUID(wanted)
    if not re.fullmatch(r"[0-9a-f-]{4,}", wanted.lower()):
        raise UnknownId(f"{wanted!r} is no {noun}'s id, nor four or more characters of one: {listing}")
    like = {"part": wanted.lower()}
    statement = text(_LIKE.format(table=table))
    found = book.read(lambda connection: connection.execute(statement, like).scalars().all())
    if len(found) == 1:
        return UUID(str(found[0]))
    if found:
        raise UnknownId(f"several {noun}s have {wanted!r} in their ids: write more of it")
    raise UnknownId(f"no {noun} has {wanted!r} in its id: {listing}")


def _rows(book: Book, statement: str, **values: object) -> list[Row]:
    return book.read(lambda connection: [dict(row) for row in connection.execute(text(statement), values).mappings()])
