"""The picture an admission decides on: loaded behind the gate in one round trip, after folding what was released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState
from jayrun.domain.liveness import Incarnation
from jayrun.domain.queue import Waiter
from jayrun.store.requests import COLUMNS, from_row
from jayrun.store.transactions import Gate

Slot = tuple[UUID, int, int]
"""Whose request a lease answers: (execution, position, invocation)."""


@dataclass(frozen=True, slots=True)
class WaitingUnit:
    """A waiting unit: the waiter as the rules see it, its process, and whose requests its plan answers."""

    waiter: Waiter
    holder_id: UUID
    incarnation: Incarnation
    slots: tuple[Slot, ...]


@dataclass(slots=True)
class Picture:
    """One host behind the gate. `own_state` and `own_lease` answer for the slot that was asked about, if any."""

    devices: list[BookedDevice]
    uuids: dict[int, str | None]
    units: dict[UUID, WaitingUnit]
    bypass_limit: int
    batch: int
    own_state: str | None
    own_lease: list[Any] | None


_FOLD = """
UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
WHERE ended_at IS NOT NULL AND folded_at IS NULL
  AND device_id IN (SELECT id FROM jayrun.devices WHERE host_id = %s)
"""

_Q_COLUMNS = ", ".join(f"q.{column.strip()}" for column in COLUMNS.split(","))

# One row. Waiters: the first few of every shape (a loose index scan finds the shapes), since equal ones are equally
# served or not: those further behind are reached when those before them have gone.
_LOAD = f"""
WITH RECURSIVE here AS (SELECT %s::bigint AS host_id, %s::uuid AS execution_id, %s::integer AS position,
                               %s::integer AS invocation),
shapes (shape) AS (
    (SELECT w.shape FROM jayrun.executions w, here
     WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.host_id = here.host_id ORDER BY w.shape LIMIT 1)
    UNION ALL
    SELECT (SELECT w.shape FROM jayrun.executions w, here
            WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.host_id = here.host_id AND w.shape > s.shape
            ORDER BY w.shape LIMIT 1)
    FROM shapes s WHERE s.shape IS NOT NULL
)
SELECT set_config('synchronous_commit', 'off', true), s.bypass_limit, s.grants_per_batch,
    (SELECT json_agg(json_build_array(d.id, d.host_index, d.kind, d.backends, d.capacity_bytes, d.reserved_bytes,
                                      d.share_count, d.exclusive_count > 0, d.exclusive_only, d.state, d.device_uuid)
                     ORDER BY d.kind, d.host_index)
     FROM jayrun.devices d, here WHERE d.host_id = here.host_id AND d.removed_at IS NULL),
    (SELECT json_agg(json_build_array(w.id, w.priority, w.age, w.bypassed, w.shape, w.holder_id, o.boot_id,
                                      o.pid_namespace, o.pid, o.start_ticks, m.requests))
     FROM shapes
     CROSS JOIN LATERAL (
         SELECT w.* FROM jayrun.executions w, here
         WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.host_id = here.host_id AND w.shape = shapes.shape
           AND NOT w.dormant
         ORDER BY w.priority DESC, w.age LIMIT s.grants_per_batch) w
     JOIN jayrun.holders o ON o.id = w.holder_id
     CROSS JOIN LATERAL (
         SELECT json_agg(json_build_array(m.id, q.position, m.invocation, {_Q_COLUMNS})
                         ORDER BY m.id = m.unit_id, m.age, q.position) AS requests
         FROM jayrun.executions m JOIN jayrun.placement_requests q ON q.execution_id = m.id
         WHERE m.unit_id = w.id AND m.state = 'waiting') m),
    (SELECT e.state FROM jayrun.executions e, here WHERE e.id = here.execution_id),
    (SELECT json_build_array(l.id, l.epoch) FROM jayrun.leases l, here
     WHERE l.execution_id = here.execution_id AND l.position = here.position AND l.invocation = here.invocation)
FROM jayrun.settings s
"""


def load(gate: Gate, host_id: int, slot: Slot | None = None) -> Picture:
    """Fold what ended on the host, then read its devices, its queue, and what the book knows of `slot`."""
    gate.execute(_FOLD, (host_id,))
    row = gate.execute(_LOAD, (host_id, *(slot or (None, None, None)))).fetchone()
    assert row is not None
    _, bypass_limit, batch, devices, waiters, own_state, own_lease = row
    return Picture(
        devices=[booked_device(host_id, device) for device in devices or ()],
        uuids={device[0]: device[10] for device in devices or ()},
        units={UUID(unit[0]): _waiting_unit(host_id, unit) for unit in waiters or ()},
        bypass_limit=bypass_limit,
        batch=batch,
        own_state=own_state,
        own_lease=own_lease,
    )


def booked_device(host_id: int, row: list[Any]) -> BookedDevice:
    """The device of one row: id, index, kind, backends, capacity, reserved, shares, exclusive, exclusive_only, state."""
    return BookedDevice(
        id=row[0],
        host_id=host_id,
        host_index=row[1],
        kind=Device(row[2]),
        backends=frozenset(map(Backend, row[3])),
        capacity_bytes=row[4],
        reserved_bytes=row[5],
        share_count=row[6],
        exclusive=row[7],
        exclusive_only=row[8],
        state=DeviceState(row[9]),
    )


def _waiting_unit(host_id: int, row: list[Any]) -> WaitingUnit:
    members = row[10] or ()
    return WaitingUnit(
        waiter=Waiter(
            id=UUID(row[0]),
            priority=row[1],
            age=row[2],
            hosts=(host_id,),
            requests=tuple(from_row(member[3:]) for member in members),
            bypassed=row[3],
            shape=row[4],
        ),
        holder_id=UUID(row[5]),
        incarnation=Incarnation(boot_id=row[6], pid_namespace=row[7], pid=row[8], start_ticks=row[9]),
        slots=tuple((UUID(member[0]), member[1], member[2] + 1) for member in members),
    )
