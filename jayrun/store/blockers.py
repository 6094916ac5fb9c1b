"""What stands in the way of those who wait and can be moved: idle cached resources of any process, and circles.

Idle resources are flagged, and their process tears down what is flagged. Decided behind the gate, so that any number of
passes at once flag no more than needed; what is flagged counts as gone until its process had time to answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from jayrun import probes
from jayrun.domain.deadlock import Held, Party, find_deadlock
from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.ending import Endable, first_to_end, without
from jayrun.domain.queue import Admission
from jayrun.store import admission
from jayrun.store.picture import Picture, load
from jayrun.store.transactions import Book, Gate

# Only seconds are told, never a time: no clock of a process is compared with another. What was flagged before was
# decided without this word, and is decided anew.
_PUBLISH = """
UPDATE jayrun.executions e SET idle_since = now() - make_interval(secs => x.seconds), flagged_at = NULL
FROM unnest(%s::uuid[], %s::double precision[]) AS x (id, seconds) WHERE e.id = x.id
"""
_FLAGGED = "SELECT id FROM jayrun.executions WHERE id = ANY (%s) AND flagged_at IS NOT NULL"
_ANYTHING_TO_MOVE = """
SELECT EXISTS (SELECT FROM jayrun.devices d JOIN jayrun.lease_shares s ON s.device_id = d.id AND s.folded_at IS NULL
               JOIN jayrun.leases l ON l.id = s.lease_id JOIN jayrun.executions e ON e.id = l.execution_id
               WHERE d.host_id = %s AND l.ended_at IS NULL AND e.idle_since IS NOT NULL AND e.flagged_at IS NULL)
    OR EXISTS (SELECT FROM jayrun.holders o JOIN jayrun.lease_holders x ON x.holder_id = o.id AND x.ended_at IS NULL
               WHERE o.host_id = %s AND o.state = 'alive' AND o.only_waits)
"""
# A lease that other processes hold too does not end with the teardown.
_LEASES = """
SELECT x.holders, s.shares, e.holder_id,
       CASE WHEN e.idle_since IS NOT NULL AND l.holder_count = 1 THEN e.id END,
       extract(epoch FROM e.idle_since)::float8,
       e.flagged_at IS NOT NULL, e.flagged_at > clock_timestamp() - make_interval(secs => b.claim_seconds)
FROM jayrun.settings b, jayrun.leases l JOIN jayrun.executions e ON e.id = l.execution_id
CROSS JOIN LATERAL (
    SELECT json_agg(json_build_array(d.id, d.host_index, s.memory_bytes, s.exclusive)) AS shares
    FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id WHERE s.lease_id = l.id) s
CROSS JOIN LATERAL (
    SELECT array_agg(h.holder_id) AS holders FROM jayrun.lease_holders h
    WHERE h.lease_id = l.id AND h.ended_at IS NULL) x
WHERE l.ended_at IS NULL AND l.id IN (
    SELECT s.lease_id FROM jayrun.devices d JOIN jayrun.lease_shares s ON s.device_id = d.id AND s.folded_at IS NULL
    WHERE d.host_id = %s)
ORDER BY l.id
"""
_ONLY_WAITING = """
SELECT o.id, o.pid FROM jayrun.holders o
WHERE o.host_id = %s AND o.state = 'alive' AND o.role = 'runtime' AND o.only_waits
  AND NOT EXISTS (SELECT FROM jayrun.executions WHERE holder_id = o.id AND state IN ('running', 'admitted'))
ORDER BY o.id
"""
_FLAG = """
UPDATE jayrun.executions SET flagged_at = clock_timestamp() WHERE id = ANY (%s::uuid[]) AND idle_since IS NOT NULL
RETURNING id
"""
# What it drops in answer is not known before its process has spoken again: until then nobody else of it has to fail.
_FAIL = """
UPDATE jayrun.holders SET only_waits = false WHERE id = %s;
SELECT jayrun.fail_waiting(%s, jsonb_build_object('type', 'PlacementDeadlock', 'message', %s))
"""


def publish(book: Book, idle_seconds: Mapping[UUID, float | None]) -> None:
    """Tell for how long cached resources, named by the executions that set them up, have been idle; None: they are not.

    Only resources told together are ordered exactly, others up to the time that telling takes. This takes back their
    flags: make way.
    """
    values = (list(idle_seconds), list(idle_seconds.values()))
    book.written(lambda pg: pg.execute(_PUBLISH, values))


def flagged(book: Book, resources: Sequence[UUID]) -> list[UUID]:
    """Which of these cached resources are to be torn down."""
    return [row[0] for row in book.written(lambda pg: pg.execute(_FLAGGED, (list(resources),)).fetchall())]


def make_way(book: Book, host_id: int) -> tuple[int, int]:
    """Flag the idle resources of the host that stand in the way of somebody who waits, and break circles; returns how
    many resources were flagged and how many waiters failed with `PlacementDeadlock`.

    Their processes are notified.
    """
    flags = failures = 0
    while book.value(_ANYTHING_TO_MOVE, (host_id, host_id)):
        moved = book.gated(lambda gate: _Blockers(gate, host_id).move())
        if moved is None:  # capacity was free: whoever gets it needs no room
            admission.combine(book, host_id)
            continue
        probes.reach("way.made")
        flags, failures = flags + moved[0], failures + moved[1]
        if not any(moved):
            break
    return flags, failures


class _Blockers:
    """One transaction behind the gate, which serves one waiter: the picture of the host, and the leases on it."""

    def __init__(self, gate: Gate, host_id: int) -> None:
        self._gate = gate
        self._host_id = host_id
        self._picture: Picture = load(gate, host_id)
        self._leases = gate.execute(_LEASES, (host_id,))

    def move(self) -> tuple[int, int] | None:
        """How many were flagged and how many failed; None: nothing before those who fit now are admitted."""
        decided = self._decide(self._picture.devices)
        if decided.grants or decided.impossible:
            self._gate.leave()
            return None
        owners, idle, gone, held = self._sorted()
        waiters = [unit.waiter for unit in self._picture.units.values()]
        chosen = first_to_end(waiters, without(self._picture.devices, gone), idle, self._decide)
        if chosen:
            self._gate.commit(_FLAG, (list(chosen),), tell={str(owners[each]) for each in chosen})
            return len(chosen), 0
        deadlock = find_deadlock(self._parties(), self._picture.devices, held)
        if deadlock is None:
            self._gate.leave()
            return 0, 0
        holder_id = self._picture.units[deadlock.victim.id].holder_id
        self._gate.commit(_FAIL, (holder_id, deadlock.victim.id, deadlock.message), tell=[str(holder_id)])
        return 0, 1

    def _decide(self, devices: Sequence[BookedDevice]) -> Admission:
        return admission.decide(replace(self._picture, devices=list(devices)), self._host_id)

    def _sorted(self) -> tuple[dict[UUID, UUID], list[Endable], list[Endable], list[Held]]:
        """Whose each idle resource is; those that can be flagged; those that are as good as gone; and all other leases.

        A flag that was not answered in time is no promise, and neither is it set again.
        """
        owners: dict[UUID, UUID] = {}
        shares: dict[UUID, list[Share]] = defaultdict(list)
        facts: dict[UUID, tuple[float, bool, bool]] = {}
        held = []
        for holders, taken, owner, resource, idle_since, is_flagged, in_time in self._leases:
            lies = [Share(*share) for share in taken]
            if resource is None:
                held.append(Held(frozenset(holders), tuple(lies)))
                continue
            owners[resource] = owner
            shares[resource] += lies
            facts[resource] = (idle_since, is_flagged, in_time)
        idle = [Endable(each, tuple(shares[each]), at) for each, (at, is_flagged, _) in facts.items() if not is_flagged]
        gone = [Endable(each, tuple(shares[each]), at) for each, (at, _, in_time) in facts.items() if in_time]
        return owners, idle, gone, held

    def _parties(self) -> list[Party]:
        waiters: dict[Any, list[Any]] = defaultdict(list)
        for unit in self._picture.units.values():
            if unit.incarnation is not None and not admission.is_dead(unit.incarnation):
                waiters[unit.holder_id].append(unit.waiter)
        rows = self._gate.execute(_ONLY_WAITING, (self._host_id,))
        return [Party(row[0], row[1], tuple(waiters[row[0]])) for row in rows if row[0] in waiters]
