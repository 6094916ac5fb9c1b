"""Ending what the dead left behind. Every pass of any process of the host may judge; passes are idempotent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import kernel, probes
from jayrun.domain.liveness import Incarnation, Verdict, is_over
from jayrun.store import heirs, hosts, withheld
from jayrun.store.transactions import Book

# By the database's clock alone: who is silent, whether the host has been in touch through this boot for as long, and of
# whom it is time to tell that somebody sees it.
_ALIVE = """
SELECT o.id, o.boot_id, o.pid_namespace, o.pid, o.start_ticks,
       o.seen_at < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds),
       h.boot_id = %s AND h.watched_since < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds),
       o.seen_at < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds / 3)
FROM jayrun.holders o JOIN jayrun.hosts h ON h.id = o.host_id, jayrun.settings s
WHERE o.host_id = %s AND o.state = 'alive' ORDER BY o.id
"""
_IS_SILENT = """
SELECT seen_at < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds)
FROM jayrun.holders, jayrun.settings s WHERE id = %s
"""
_ATTEST = """
UPDATE jayrun.holders SET seen_at = clock_timestamp()
WHERE id IN (SELECT id FROM jayrun.holders WHERE id = ANY (%s) AND state = 'alive' ORDER BY id FOR NO KEY UPDATE)
"""

_PREDECESSORS = """
SELECT id FROM jayrun.holders
WHERE host_id = %s AND boot_id = %s AND pid_namespace = %s AND pid = %s AND start_ticks = %s AND state = 'alive'
  AND role = 'runtime' AND id <> ALL (%s::uuid[]) ORDER BY id
"""

_END_LEASES = """
UPDATE jayrun.lease_holders h SET ended_at = clock_timestamp(), end_reason = 'reclaimed'
FROM (SELECT lease_id, holder_id, hold FROM jayrun.lease_holders WHERE holder_id = %s AND ended_at IS NULL
      ORDER BY lease_id, hold FOR UPDATE) n
WHERE h.lease_id = n.lease_id AND h.holder_id = n.holder_id AND h.hold = n.hold
"""

_FATES = {
    "left": "its process ended without finishing it",
    "dead": "its process ended without finishing it",
    "declared": "its process was declared gone by an administrator",
}
_HOLDS_ANYTHING = "SELECT 1 FROM jayrun.lease_holders WHERE holder_id = %s AND ended_at IS NULL LIMIT 1"

_END_EXECUTIONS = """
UPDATE jayrun.executions SET state = 'failed', ended_at = clock_timestamp(), waiting_since = NULL,
    failure = jsonb_build_object('type', 'ProcessDied', 'message', %s::text)
WHERE id = %s AND holder_id = %s AND NOT detached AND state IN ('running', 'waiting', 'admitted')
"""
_EXECUTIONS = """
SELECT id FROM jayrun.executions
WHERE holder_id = %s AND NOT detached AND state IN ('running', 'waiting', 'admitted') ORDER BY age
"""
# What its worker did not fetch waits again at its old place; what it ran is run again, unless it was to end or has
# brought down too many workers already; set-ups end with the invocation that they belonged to.
_FREE_EXECUTIONS = """
UPDATE jayrun.executions e SET
    state = n.state, ended_at = CASE WHEN n.state IN ('failed', 'cancelled') THEN clock_timestamp() END,
    crashes = e.crashes + n.crashed::integer,
    waiting_since = CASE WHEN n.state = 'waiting' THEN clock_timestamp() END,
    holder_id = CASE WHEN n.state IN ('failed', 'cancelled') THEN e.holder_id END,
    host_id = CASE WHEN n.state IN ('failed', 'cancelled') THEN e.host_id ELSE e.pinned_host_id END,
    failure = CASE WHEN n.state = 'cancelled' THEN jsonb_build_object(
        'type', 'PlacementCancelled', 'message', 'cancelled while it ran', 'at', clock_timestamp())
        WHEN n.crashed THEN jsonb_build_object(
        'type', 'WorkerDied',
        'message', format('its worker process ended while it ran it (crash %%s of %%s)', e.crashes + 1, n.crash_limit),
        'attempt', e.attempt, 'host', h.name, 'pid', o.pid, 'at', clock_timestamp()) ELSE e.failure END
FROM (SELECT x.id, s.crash_limit, x.id = x.unit_id AND x.state = 'running' AND x.cancelled_at IS NULL AND %s AS crashed,
             CASE WHEN x.cancelled_at IS NOT NULL THEN 'cancelled'
                  WHEN x.state = 'admitted' THEN 'waiting'
                  WHEN x.id <> x.unit_id THEN 'cancelled'
                  WHEN x.crashes + %s::integer >= s.crash_limit THEN 'failed' ELSE 'ready' END AS state
      FROM jayrun.executions x, jayrun.settings s
      WHERE x.holder_id = %s AND x.detached AND x.state IN ('running', 'admitted') ORDER BY x.id FOR UPDATE OF x) n,
     jayrun.holders o JOIN jayrun.hosts h ON h.id = o.host_id
WHERE e.id = n.id AND o.id = e.holder_id RETURNING e.name, e.pinned_host_id, e.state, e.id::text, e.watched
"""
_WAKE = "SELECT jayrun.wake_workers(%s, %s)"
_TELL = "SELECT jayrun.tell(%s)"

_LOCK_HOLDER = "SELECT FROM jayrun.holders WHERE id = %s FOR UPDATE"
_END_HOLDER = """
UPDATE jayrun.holders SET state = 'ended', ended_at = clock_timestamp(), end_reason = %s
WHERE id = %s AND state = 'alive'
  AND NOT EXISTS (SELECT FROM jayrun.lease_holders WHERE holder_id = holders.id AND ended_at IS NULL)
  AND NOT EXISTS (SELECT FROM jayrun.executions
                  WHERE holder_id = holders.id AND state IN ('running', 'waiting', 'admitted'))
"""


def sweep(book: Book, host_id: int) -> int:
    """End the leases, executions and rows of every holder of the host that is dead; returns how many.

    That is by the kernel's word, or, where nobody sees it, by time. Who is seen is told to live, and so is the host.
    Quarantines whose time is over end too. The capacity is free once somebody combines (`admission.combine`).
    """

    def unit(pg: PgConnection[Any]) -> tuple[int, bool]:
        hosts.see(pg, host_id)
        found = _judged(pg.execute, host_id)
        verdicts = _over(found)
        ended = 0
        for holder_id in heirs.join_and_spare(pg, list(verdicts)):
            probes.reach("sweep.dead")
            # This process may have been stopped since it looked, and somebody may have seen the holder meanwhile.
            if verdicts[holder_id] is Verdict.UNSEEN and pg.execute(_IS_SILENT, (holder_id,)).fetchone() != (True,):
                continue
            end_holder(pg, holder_id, reason="dead")
            ended += 1
        if seen := [each.id for each in found if each.verdict is Verdict.ALIVE and each.is_due]:
            pg.execute(_ATTEST, (seen,))
        return ended, withheld.is_too_much(pg, host_id)

    ended, withholds_too_much = book.written(unit)
    if withholds_too_much:
        withheld.withhold(book, host_id)
    return ended


def find_dead(execute: Callable[..., Any], host_id: int) -> list[UUID]:
    """The holders of this host that are dead and the book does not know to be; writes nothing."""
    return list(_over(_judged(execute, host_id)))


@dataclass(frozen=True, slots=True)
class _Judged:
    """A holder that the book has as alive, and what the kernel says; `silent` and `watched` as for `is_over`, and
    whether it is due to be told that somebody sees it."""

    id: UUID
    verdict: Verdict
    silent: bool
    watched: bool
    is_due: bool


def _judged(execute: Callable[..., Any], host_id: int) -> list[_Judged]:
    rows = execute(_ALIVE, (kernel.boot_id(), host_id)).fetchall()
    verdicts = kernel.verdicts([Incarnation(*row[1:5]) for row in rows])
    return [_Judged(row[0], verdict, *row[5:]) for row, verdict in zip(rows, verdicts, strict=True)]


def _over(judged: Sequence[_Judged]) -> dict[UUID, Verdict]:
    """Those to be ended, by id, and whether by the kernel's word or by time."""
    return {each.id: each.verdict for each in judged if is_over(each.verdict, silent=each.silent, watched=each.watched)}


def end_predecessors(book: Book, host_id: int, who: Incarnation, own: Sequence[UUID]) -> int:
    """End the holders that were this very process before it executed another program (`execv`), and so forgot them.

    `own` are the holders that it knows. Returns how many were ended. Combine.
    """

    def unit(pg: PgConnection[Any]) -> int:
        values = (host_id, who.boot_id, who.pid_namespace, who.pid, who.start_ticks, list(own))
        forgotten = [row[0] for row in pg.execute(_PREDECESSORS, values).fetchall()]
        for holder_id in forgotten:
            end_holder(pg, holder_id, reason="dead")
        return len(forgotten)

    return book.written(unit)


def end_holder(pg: PgConnection[Any], holder_id: UUID, *, reason: str, only_if_free: bool = False) -> None:
    """End everything that hangs on a holder, its row last: leases never outlive their owner's row.

    `reason` is "dead", "left" or "declared". Each statement commits by itself; a pass killed in between is finished by
    the next. With `only_if_free` a holder that still holds a lease stays as it is.
    """
    if only_if_free and pg.execute(_HOLDS_ANYTHING, (holder_id,)).fetchone():
        return
    # One by one: admissions lock waiters in their order, and nobody who holds one lock waits for another in a circle.
    for (execution_id,) in pg.execute(_EXECUTIONS, (holder_id,)).fetchall():
        pg.execute(_END_EXECUTIONS, (_FATES[reason], execution_id, holder_id))
    crashed = reason == "dead"
    freed = pg.execute(_FREE_EXECUTIONS, (crashed, crashed, holder_id)).fetchall()
    for name, pinned_host_id, state, execution_id, watched in freed:
        if state == "ready":
            pg.execute(_WAKE, (name, pinned_host_id))
        elif watched:
            pg.execute(_TELL, ([execution_id],))
    probes.reach("holder.freed")
    pg.execute(_END_LEASES, (holder_id,))
    probes.reach("holder.ending")
    with pg.transaction():
        # A grant to it may be on its way: the lock waits for that, and the statement after it sees what came of it.
        # Then the row stays, and the next pass ends the rest. (Last, so that no admission waits for us in a circle.)
        pg.execute(_LOCK_HOLDER, (holder_id,))
        pg.execute(_END_HOLDER, (reason, holder_id))
