"""Admission, the heart: load the picture behind the gate, let the rules decide, write what they decided.

Everyone who needs something from the gate serves all who wait on that host: a new ask is decided in its place of the
queue, together with the waiters that fit now. Releases that were committed meanwhile are folded first, so whoever
releases and then combines hands the capacity on in the same breath.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from jayrun import kernel, probes
from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, Share
from jayrun.domain.liveness import Incarnation, Verdict
from jayrun.domain.planner import Plan
from jayrun.domain.queue import Admission, Grant, Waiter, admit
from jayrun.domain.requests import Request
from jayrun.domain.sequence import shape_of
from jayrun.store import reclaim
from jayrun.store.ids import new_id
from jayrun.store.requests import COLUMNS, RECORD, from_row, to_record
from jayrun.store.transactions import Book, Gate

_LAST_IN_LINE = 2**62  # the age of an ask whose number is not drawn yet: younger than everyone in the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An execution as its process introduces it to the book with its first request.

    `unit_id` is the execution that it is admitted together with: itself, or the operator run that it sets a resource up
    for. `host_id` and `holder_id` are keys of the book.
    """

    id: UUID
    kind: str
    name: str
    host_id: int
    holder_id: UUID
    unit_id: UUID
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One execution of a unit and the sequence it has recorded; `booked` says that the book has the execution."""

    execution: Execution
    recorded: tuple[Request, ...]
    booked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The newest request of a running invocation: the last of `asker.recorded`.

    `companions` are the other executions of the unit that would wait with it (the operator run that a resource is set
    up for, with what earlier invocations of it recorded). `age` is its place in the queue when it has one. With `wait`
    off nothing is written unless it is granted.
    """

    asker: Member
    invocation: int
    companions: tuple[Member, ...] = ()
    age: int | None = None
    wait: bool = True

    @property
    def unit(self) -> tuple[Member, ...]:
        """Everyone who would be admitted together, in the order of the sequence: set-ups first, their run last."""
        members = (self.asker, *self.companions)
        return tuple(sorted(members, key=lambda member: member.execution.id == member.execution.unit_id))


@dataclass(frozen=True, slots=True)
class LeasedShare:
    """What a lease has of one device: its number on the host, its UUID if known, and bytes."""

    host_index: int
    device_uuid: str | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request: what the book gave to (execution, position) for one invocation."""

    id: UUID
    epoch: int
    execution_id: UUID
    position: int
    shares: tuple[LeasedShare, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Parked:
    """The unit waits in the book and will be admitted with all it has recorded."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Not now, and the ask did not want to wait; nothing is left in the book."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """Never with the declared devices; nothing was written."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The execution was ended by somebody else (its state); nothing was written."""

    state: str


Outcome = Granted | Parked | Unavailable | Impossible | Ended


@dataclass(slots=True)
class _Unit:
    """A waiting unit as loaded: the waiter for the rules, and whose requests its plan answers."""

    waiter: Waiter
    holder_id: UUID
    incarnation: Incarnation
    slots: list[tuple[UUID, int, int]]  # (execution, position, invocation to come) of each request


@dataclass(slots=True)
class _Picture:
    devices: list[BookedDevice]
    uuids: dict[int, str | None]
    units: dict[UUID, _Unit]
    bypass_limit: int
    batch: int
    own_state: str | None
    own_lease: list[Any] | None


@dataclass(slots=True)
class _Changes:
    """What one pass writes, as the document of `_APPLY`."""

    executions: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)
    parked: list[dict[str, Any]] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    told: set[UUID] = field(default_factory=set)

    def add_lease(
        self, *, slot: tuple[UUID, int, int], host_id: int, holder_id: UUID, shares: tuple[Share, ...]
    ) -> UUID:
        lease_id = new_id()
        key = str(lease_id)
        self.leases.append(
            {
                "id": key,
                "execution_id": str(slot[0]),
                "position": slot[1],
                "invocation": slot[2],
                "host_id": host_id,
                "holder_id": str(holder_id),
            }
        )
        for share in shares:
            self.shares.append(
                {
                    "lease_id": key,
                    "device_id": share.device_id,
                    "memory_bytes": share.memory_bytes,
                    "exclusive": share.exclusive,
                }
            )
        return lease_id

    def document(self) -> dict[str, Any]:
        names = ("executions", "requests", "leases", "shares", "parked", "admitted")
        return {name: value for name in names if (value := getattr(self, name))}


_FOLD = """
UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
WHERE ended_at IS NOT NULL AND folded_at IS NULL
  AND device_id IN (SELECT id FROM jayrun.devices WHERE host_id = %s)
"""

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
         SELECT json_agg(json_build_array(m.id, q.position, m.invocation, {", ".join("q." + c.strip() for c in COLUMNS.split(","))})
                         ORDER BY m.id = m.unit_id, m.age, q.position) AS requests
         FROM jayrun.executions m JOIN jayrun.placement_requests q ON q.execution_id = m.id
         WHERE m.unit_id = w.id AND m.state = 'waiting') m),
    (SELECT e.state FROM jayrun.executions e, here WHERE e.id = here.execution_id),
    (SELECT json_build_array(l.id, l.epoch) FROM jayrun.leases l, here
     WHERE l.execution_id = here.execution_id AND l.position = here.position AND l.invocation = here.invocation)
FROM jayrun.settings s
"""

# One statement writes one pass. Constraints and triggers see it whole, so the order within it does not matter.
_APPLY = f"""
WITH doc AS (SELECT %s::jsonb AS d),
new_executions AS (
    INSERT INTO jayrun.executions (id, kind, name, unit_id, host_id, holder_id, state, priority, shape, waiting_since)
    SELECT x.id, x.kind, x.name, x.unit_id, x.host_id, x.holder_id, x.state, x.priority, x.shape,
           CASE WHEN x.state = 'waiting' THEN clock_timestamp() END
    FROM doc, jsonb_to_recordset(doc.d -> 'executions') AS x (
        id uuid, kind text, name text, unit_id uuid, host_id bigint, holder_id uuid, state text, priority integer,
        shape text)),
new_requests AS (
    INSERT INTO jayrun.placement_requests (execution_id, position, {COLUMNS})
    SELECT x.* FROM doc, jsonb_to_recordset(doc.d -> 'requests') AS x (execution_id uuid, position integer, {RECORD})),
parked AS (
    UPDATE jayrun.executions e SET state = 'waiting', shape = x.shape, waiting_since = clock_timestamp(), bypassed = 0
    FROM doc, jsonb_to_recordset(doc.d -> 'parked') AS x (id uuid, shape text) WHERE e.id = x.id),
admitted AS (
    UPDATE jayrun.executions e SET state = 'admitted', invocation = e.invocation + 1, admitted_at = clock_timestamp(),
        waited_seconds = e.waited_seconds + extract(epoch FROM clock_timestamp() - e.waiting_since),
        waiting_since = NULL
    FROM doc WHERE doc.d ? 'admitted' AND e.state = 'waiting'
      AND e.unit_id IN (SELECT a::uuid FROM jsonb_array_elements_text(doc.d -> 'admitted') a)),
new_leases AS (
    INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
    SELECT x.id, x.execution_id, x.position, x.invocation, x.host_id
    FROM doc, jsonb_to_recordset(doc.d -> 'leases') AS x (
        id uuid, execution_id uuid, position integer, invocation integer, host_id bigint)
    RETURNING id, epoch),
new_shares AS (
    INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive)
    SELECT x.* FROM doc, jsonb_to_recordset(doc.d -> 'shares') AS x (
        lease_id uuid, device_id bigint, memory_bytes bigint, exclusive boolean)),
new_holders AS (
    INSERT INTO jayrun.lease_holders (lease_id, holder_id)
    SELECT x.id, x.holder_id FROM doc, jsonb_to_recordset(doc.d -> 'leases') AS x (id uuid, holder_id uuid))
SELECT id, epoch FROM new_leases
"""

_BYPASS = """
UPDATE jayrun.executions e SET bypassed = e.bypassed + x.times
FROM (SELECT e.id, count(*) AS times
      FROM jsonb_to_recordset(%s::jsonb) AS x (shape text, priority integer, age bigint)
      JOIN jayrun.executions e ON e.shape = x.shape AND e.host_id = %s AND e.state = 'waiting' AND e.id = e.unit_id
           AND NOT e.dormant AND (e.priority > x.priority OR (e.priority = x.priority AND e.age < x.age))
      GROUP BY e.id ORDER BY e.id) x
WHERE e.id = x.id AND e.bypassed < %s
"""

_FAIL_IMPOSSIBLE = """
UPDATE jayrun.executions e SET
    state = CASE WHEN e.id = e.unit_id THEN 'failed' ELSE 'cancelled' END, waiting_since = NULL,
    ended_at = clock_timestamp(), failure = jsonb_build_object('type', 'PlacementImpossible', 'message', x.message)
FROM jsonb_to_recordset(%s::jsonb) AS x (id uuid, message text)
WHERE e.unit_id = x.id AND e.state = 'waiting'
"""


def reserve(book: Book, ask: Ask) -> Outcome:
    """Decide `ask` in its place of the queue, and with it everyone on the host who can be served now.

    Idempotent by (execution, position, invocation): asking again after a lost answer returns the first lease. Before it
    answers that nothing is free, the dead of the host are reclaimed. Raises `BookUnreachable` and `BookBusy`.
    """
    outcome = _try_reserve(book, ask, judged=False)
    if outcome is None:
        reclaim.sweep(book, ask.asker.execution.host_id)
        outcome = _try_reserve(book, ask, judged=True)
    assert outcome is not None
    return outcome


def combine(book: Book, host_id: int) -> int:
    """Fold what was released on the host and admit everyone who fits now; returns how many units were admitted."""

    def unit(gate: Gate) -> int:
        picture = _load(gate, host_id)
        probes.reach("combine.loaded")
        decided = _decide(picture, host_id, None)
        changes = _Changes()
        _admit_units(changes, picture, decided, host_id)
        _write(gate, host_id, picture, decided, changes)
        return len(decided.grants)

    return book.gated(unit)


def enlist(book: Book, unit: tuple[Member, ...]) -> None:
    """Let further executions wait with a unit that waits already (set-ups of resources that were torn down for it)."""
    head = unit[-1].execution

    def write(gate: Gate) -> None:
        picture = _load(gate, head.host_id, head.id)
        if picture.own_state != "waiting":  # admitted meanwhile, or ended: the set-up will ask for itself
            gate.rollback()
            return
        changes = _Changes()
        _park(changes, unit, booked_positions={}, skip=head.id)
        changes.parked.append({"id": str(head.id), "shape": _unit_shape(unit)})
        _write(gate, head.host_id, picture, Admission((), (), {}), changes)

    book.gated(write)


def _try_reserve(book: Book, ask: Ask, *, judged: bool) -> Outcome | None:
    """One transaction; None when it found nothing free and the dead were not looked at yet."""
    asker = ask.asker.execution
    position = len(ask.asker.recorded) - 1
    slot = (asker.id, position, ask.invocation)
    request = ask.asker.recorded[-1]
    whole = tuple(each for member in ask.unit for each in member.recorded)

    def unit(gate: Gate) -> Outcome | None:
        picture = _load(gate, asker.host_id, asker.id, position, ask.invocation)
        probes.reach("reserve.loaded")
        if picture.own_lease is not None:  # the first answer was lost
            lease_id, epoch = picture.own_lease
            gate.rollback()
            return Granted(_read_lease(book, UUID(lease_id), epoch, slot))
        if picture.own_state in ("waiting", "admitted"):
            gate.rollback()
            return Parked()
        if picture.own_state not in (None, "running"):
            gate.rollback()
            return Ended(picture.own_state)
        waiter = Waiter(
            id=asker.id,
            priority=asker.priority,
            age=_LAST_IN_LINE if ask.age is None else ask.age,
            hosts=(asker.host_id,),
            requests=(request,),
            recorded=whole,
            shape="",  # no waiter has this shape: the ask is judged by itself
        )
        decided = _decide(picture, asker.host_id, waiter)
        if asker.id in decided.impossible:
            gate.rollback()
            return Impossible(decided.impossible[asker.id])
        own = next((grant for grant in decided.grants if grant.id == asker.id), None)
        if own is None and not judged:
            gate.rollback()
            return None
        if own is None and not ask.wait:
            gate.rollback()
            return Unavailable()
        changes = _Changes()
        booked_positions = {asker.id: position} if ask.asker.booked else {}
        lease_id = None
        if own is None:
            _park(changes, ask.unit, booked_positions=booked_positions)
        else:
            lease_id = _give(changes, ask, slot, own.plan[0])
        _admit_units(changes, picture, decided, asker.host_id)
        epochs = _write(gate, asker.host_id, picture, decided, changes)
        if own is None or lease_id is None:
            return Parked()
        return Granted(Lease(lease_id, epochs[lease_id], asker.id, position, _leased(own.plan[0], picture.uuids)))

    return book.gated(unit)


def _load(
    gate: Gate, host_id: int, execution_id: UUID | None = None, position: int | None = None, invocation: int | None = None
) -> _Picture:
    gate.execute(_FOLD, (host_id,))
    row = gate.execute(_LOAD, (host_id, execution_id, position, invocation)).fetchone()
    assert row is not None
    _, bypass_limit, batch, devices, waiters, own_state, own_lease = row
    units = {}
    for w in waiters or ():
        members = w[10] or ()
        unit_id = UUID(w[0])
        units[unit_id] = _Unit(
            waiter=Waiter(
                id=unit_id,
                priority=w[1],
                age=w[2],
                hosts=(host_id,),
                requests=tuple(from_row(m[3:]) for m in members),
                bypassed=w[3],
                shape=w[4],
            ),
            holder_id=UUID(w[5]),
            incarnation=Incarnation(boot_id=w[6], pid_namespace=w[7], pid=w[8], start_ticks=w[9]),
            slots=[(UUID(m[0]), m[1], m[2] + 1) for m in members],
        )
    return _Picture(
        devices=[
            BookedDevice(
                id=d[0],
                host_id=host_id,
                host_index=d[1],
                kind=Device(d[2]),
                backends=frozenset(map(Backend, d[3])),
                capacity_bytes=d[4],
                reserved_bytes=d[5],
                share_count=d[6],
                exclusive=d[7],
                exclusive_only=d[8],
                state=DeviceState(d[9]),
            )
            for d in devices or ()
        ],
        uuids={d[0]: d[10] for d in devices or ()},
        units=units,
        bypass_limit=bypass_limit,
        batch=batch,
        own_state=own_state,
        own_lease=own_lease,
    )


def _decide(picture: _Picture, host_id: int, ask: Waiter | None) -> Admission:
    """Let the rules decide; a waiter whose process is dead is left out (the next sweep ends it)."""
    while True:
        waiters = [unit.waiter for unit in picture.units.values()]
        decided = admit(
            waiters if ask is None else [*waiters, ask],
            {host_id: picture.devices},
            bypass_limit=picture.bypass_limit,
            batch=picture.batch,
        )
        dead = [
            grant.id
            for grant in decided.grants
            if (unit := picture.units.get(grant.id)) is not None and kernel.verdict(unit.incarnation) is Verdict.DEAD
        ]
        if not dead:
            return decided
        for unit_id in dead:
            del picture.units[unit_id]


def _give(changes: _Changes, ask: Ask, slot: tuple[UUID, int, int], shares: tuple[Share, ...]) -> UUID:
    """A lease for the newest request of the ask."""
    for member in ask.companions:  # the run that a resource is set up for must be there to refer to it
        if not member.booked:
            changes.executions.append(_execution_record(member.execution, state="running"))
    if not ask.asker.booked:
        changes.executions.append(_execution_record(ask.asker.execution, state="running"))
    changes.requests.append(_request_record(slot[0], slot[1], ask.asker.recorded[-1]))
    asker = ask.asker.execution
    return changes.add_lease(slot=slot, host_id=asker.host_id, holder_id=asker.holder_id, shares=shares)


def _park(
    changes: _Changes, unit: tuple[Member, ...], *, booked_positions: dict[UUID, int], skip: UUID | None = None
) -> None:
    """Everyone of the unit waits; requests that the book has already are not written again."""
    shape = _unit_shape(unit)
    for member in unit:
        execution = member.execution
        if execution.id == skip:
            continue
        if member.booked:
            changes.parked.append({"id": str(execution.id), "shape": shape})
            first = booked_positions.get(execution.id, len(member.recorded))
        else:
            changes.executions.append(_execution_record(execution, state="waiting", shape=shape))
            first = 0
        for position in range(first, len(member.recorded)):
            changes.requests.append(_request_record(execution.id, position, member.recorded[position]))


def _admit_units(changes: _Changes, picture: _Picture, decided: Admission, host_id: int) -> None:
    for grant in decided.grants:
        unit = picture.units.get(grant.id)
        if unit is None:  # the ask itself
            continue
        changes.admitted.append(str(grant.id))
        changes.told.add(unit.holder_id)
        for slot, shares in zip(unit.slots, grant.plan, strict=True):
            changes.add_lease(slot=slot, host_id=host_id, holder_id=unit.holder_id, shares=shares)
    for unit_id in decided.impossible:
        changes.told.add(picture.units[unit_id].holder_id)


def _write(gate: Gate, host_id: int, picture: _Picture, decided: Admission, changes: _Changes) -> dict[UUID, int]:
    """Write everything, commit, and make it durable; returns the epoch of each new lease."""
    document = changes.document()
    applied = gate.execute(_APPLY, (Jsonb(document),)) if document else None
    if decided.bypasses:
        rows = [{"shape": b.shape, "priority": b.priority, "age": b.age} for b in decided.bypasses]
        gate.execute(_BYPASS, (json.dumps(rows), host_id, max(picture.bypass_limit, 1)))
    if decided.impossible:
        reasons = [{"id": str(unit_id), "message": reason} for unit_id, reason in decided.impossible.items()]
        gate.execute(_FAIL_IMPOSSIBLE, (json.dumps(reasons),))
    gate.commit(durable=bool(document), notify=_payload(changes.told) if changes.told else None)
    return dict(applied.fetchall()) if applied is not None else {}


def _payload(holders: set[UUID]) -> str:
    """The holders to wake; `*` for everyone when they are more than a notification holds."""
    names = " ".join(sorted(map(str, holders)))
    return names if len(names) < 7_900 else "*"


def _execution_record(execution: Execution, *, state: str, shape: str | None = None) -> dict[str, Any]:
    return {
        "id": str(execution.id),
        "kind": execution.kind,
        "name": execution.name,
        "unit_id": str(execution.unit_id),
        "host_id": execution.host_id,
        "holder_id": str(execution.holder_id),
        "state": state,
        "priority": execution.priority,
        "shape": shape,
    }


def _request_record(execution_id: UUID, position: int, request: Request) -> dict[str, Any]:
    return {"execution_id": str(execution_id), "position": position, **to_record(request)}


def _unit_shape(unit: tuple[Member, ...]) -> str:
    requests = [request for member in unit for request in member.recorded]
    return shape_of((unit[-1].execution.host_id,), requests)


def _leased(shares: tuple[Share, ...], uuids: dict[int, str | None]) -> tuple[LeasedShare, ...]:
    return tuple(LeasedShare(share.host_index, uuids[share.device_id], share.memory_bytes) for share in shares)
