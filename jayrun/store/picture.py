"""The picture an admission decides on: loaded behind the gate in one round trip, after folding what was released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState
from jayrun.domain.liveness import Incarnation
from jayrun.domain.queue import Waiter, Worker
from jayrun.domain.visible import EVERYTHING, Sight, Visible, asked_by, names_of, sight_of
from jayrun.store.requests import from_row
from jayrun.store.transactions import Gate

Slot = tuple[UUID, int, int]
"""Whose request a lease answers: (execution, position, invocation)."""


@dataclass(frozen=True, slots=True)
class WaitingUnit:
    """A waiting unit: the waiter as the rules see it, its process (None: any worker), and whose requests its plan
    answers."""

    waiter: Waiter
    holder_id: UUID | None
    incarnation: Incarnation | None
    slots: tuple[Slot, ...]


@dataclass(slots=True)
class Picture:
    """One host behind the gate; `hosts` are those that a unit without a host may run on, 0 for all others together.

    `units` are the first waiters of every shape; of the shapes in `cut` perhaps not all that an admission may serve,
    and it says how often any of them was bypassed at most. `own_state` and `own_lease` answer for the slot
    that was asked about, `own_unit` for its unit: state, holder, and whether it was cancelled. `is_alive`: the book
    has the holder that asks as alive, and of the boot that its host is of; `own_visible` is what its mask names.
    """

    devices: list[BookedDevice]
    uuids: dict[int, str | None]
    hosts: tuple[int, ...]
    units: dict[UUID, WaitingUnit]
    cut: dict[str, int]
    workers: dict[UUID, tuple[Worker, Incarnation]]
    bypass_limit: int
    batch: int
    own_state: str | None
    own_unit: list[Any] | None
    own_lease: list[Any] | None
    is_alive: bool | None
    own_visible: Visible | None
    own_sight: Sight


_ELSEWHERE = 0  # a host without devices to show, so nobody is told that it could never serve them

# This runs in the gate, for every device of the host: looking a word up is several times quicker than making an enum.
_DEVICES = {str(device): device for device in Device}
_STATES = {str(state): state for state in DeviceState}

_LOAD = "SELECT * FROM jayrun.picture(%s, %s, %s, %s, %s, %s, %s)"


def load(
    gate: Gate,
    host_id: int,
    slot: Slot | None = None,
    unit_id: UUID | None = None,
    holder_id: UUID | None = None,
    *,
    of_each: int | None = None,
) -> Picture:
    """Fold what ended on the host, then read its devices, its queue, and what the book knows of `slot`, its unit and
    the holder that asks.

    Of every shape at most `of_each` waiters are read (None: as many as one admission may serve).
    """
    [row] = gate.execute(_LOAD, (host_id, of_each, unit_id, *(slot or (None, None, None)), holder_id))
    bypass_limit, batch, devices, elsewhere, waiters, workers, own_state, own_unit, own_lease, is_alive, visible = row
    hosts = (host_id, _ELSEWHERE) if elsewhere else (host_id,)
    shapes = Counter(unit[4] for unit in waiters or ())
    sight = sights(devices or ())
    return Picture(
        devices=[booked_device(host_id, device) for device in devices or ()],
        uuids=dict(uuids_of(devices or ())),
        hosts=hosts,
        units={UUID(unit[0]): _waiting_unit(hosts, unit, sight) for unit in waiters or ()},
        cut={unit[4]: unit[14] for unit in waiters or () if shapes[unit[4]] == of_each},
        workers={
            UUID(each[0]): (Worker(UUID(each[0]), frozenset(each[1]), sight(each[6])), Incarnation(*each[2:6]))
            for each in workers or ()
        },
        bypass_limit=bypass_limit,
        batch=batch,
        own_state=own_state,
        own_unit=own_unit,
        own_lease=own_lease,
        is_alive=is_alive,
        own_visible=visible,
        own_sight=sight(visible),
    )


def sights(rows: Iterable[Sequence[Any]]) -> Callable[[Visible | None], Sight]:
    """What a holder of the host sees of the devices of these rows, by what its mask names."""
    names: dict[str, list[int]] = {}

    def sight(visible: Visible | None) -> Sight:
        if visible is None:  # as it mostly is, so nobody looks for names
            return EVERYTHING
        if not names:
            names.update(names_of((row[0], row[1], row[14], row[11]) for row in rows))
        return sight_of(visible, names)

    return sight


def uuids_of(rows: Iterable[Sequence[Any]]) -> tuple[tuple[int, str | None], ...]:
    """The key and UUID of the device of each row."""
    return tuple((row[0], row[14]) for row in rows)


def booked_device(host_id: int, row: Sequence[Any]) -> BookedDevice:
    """The device of a row (id, index, kind, backends, capacity, reserved, shares, exclusive, exclusive_only, state,
    withheld, is_slice, island, fault, UUID)."""
    return BookedDevice(
        id=row[0],
        host_id=host_id,
        host_index=row[1],
        kind=_DEVICES[row[2]],
        backends=_backends(tuple(row[3])),
        capacity_bytes=row[4],
        reserved_bytes=row[5],
        share_count=row[6],
        exclusive=row[7],
        exclusive_only=row[8],
        state=_STATES[row[9]],
        withheld_bytes=row[10],
        is_slice=row[11],
        island=row[12],
        fault=row[13],
    )


@cache
def _backends(names: tuple[str, ...]) -> frozenset[Backend]:
    return frozenset(map(Backend, names))


def _waiting_unit(hosts: tuple[int, ...], row: list[Any], sight: Callable[[Visible | None], Sight]) -> WaitingUnit:
    members = row[12] or ()
    return WaitingUnit(
        waiter=Waiter(
            id=UUID(row[0]),
            priority=row[1],
            age=row[2],
            hosts=hosts if row[6] is None else (row[6],),
            requests=asked_by((from_row(member[3:]) for member in members), sight(row[13])),
            bypassed=row[3],
            shape=row[4],
            operator=row[5],
        ),
        holder_id=None if row[7] is None else UUID(row[7]),
        incarnation=None if row[7] is None else Incarnation(*row[8:12]),
        slots=tuple((UUID(member[0]), member[1], member[2] + 1) for member in members),
    )
