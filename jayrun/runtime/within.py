"""Inside `jayrun run`: what this process asks for is answered here, from the lease that the command around it has.

The process is a further holder of that lease, and the book hears of no request. Who waits, waits in this process and
for its own data, by the rules of the book's queue; other processes inside count for themselves.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.ending import Endable, first_to_end
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.planner import Granted as Fits
from jayrun.domain.planner import Impossible as Never
from jayrun.domain.planner import judge
from jayrun.domain.queue import Admission, Waiter, admit
from jayrun.domain.reasons import short_id
from jayrun.domain.requests import Request
from jayrun.domain.search import book as booked
from jayrun.domain.sequence import shape_of
from jayrun.domain.visible import Sight, Visible, asked_by
from jayrun.domain.within import give_up, seen_inside, why_not_alone
from jayrun.errors import LeaseLost, PlacementImpossible
from jayrun.runtime.holds import Hold, Outbox, Part
from jayrun.store import devices, leases
from jayrun.store.asks import Ask, Granted, Impossible, Outcome, Parked, Unavailable
from jayrun.store.executions import Claimed, News
from jayrun.store.ids import new_id
from jayrun.store.leases import Lease, LeasedShare
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

_BYPASS_LIMIT = 16
_BATCH = 32
_LAST_IN_LINE = 2**62


@dataclass(frozen=True, slots=True)
class Surrounding:
    """The lease that JAYRUN_LEASE names, live or ended, and its devices as a process inside it sees them; by its masks
    it may see even less."""

    lease: Lease
    host_id: int
    devices: tuple[BookedDevice, ...]
    sight: Sight

    def choose(self, request: Request) -> tuple[LeasedShare, ...]:
        """What a nested command gets of it. Raises `PlacementImpossible`."""
        requests = self.asked([request])
        reason = self.why_never(requests)
        match None if reason else judge(requests, self.devices):
            case Fits(plan):
                return self.leased(plan[0])
            case Never(why):
                raise PlacementImpossible(self.never(why))
            case _:
                raise PlacementImpossible(self.never(reason or f"{request.describe()} cannot be placed"))

    def asked(self, requests: Iterable[Request]) -> tuple[Request, ...]:
        """`requests` for no more than what the process sees."""
        return asked_by(requests, self.sight)

    def why_never(self, requests: Sequence[Request]) -> str | None:
        """Why a request for devices without others can never be placed in it, or None."""
        return why_not_alone(requests, self.devices, _shares(self.lease))

    def never(self, reason: str) -> str:
        """`reason`, for people who may not know that they are inside."""
        return (
            f"{reason}\nThis runs inside `jayrun run`, and lease {short_id(self.lease.id)} has no more: ask that "
            "`jayrun run` for more (--gpus, --memory-gb, --exclusive), or unset JAYRUN_LEASE to ask the host"
        )

    def leased(self, shares: Sequence[Share]) -> tuple[LeasedShare, ...]:
        uuids = {share.device_key: share.device_uuid for share in self.lease.shares}
        return tuple(
            LeasedShare(share.device_id, share.host_index, uuids[share.device_id], share.memory_bytes, share.exclusive)
            for share in shares
        )

    def ended(self) -> LeaseLost:
        """What is told when the lease is no more."""
        return LeaseLost(
            f"this runs inside `jayrun run`, but lease {self.lease.id} has ended: its devices may be others' now. "
            "Start it anew with `jayrun run`, or unset JAYRUN_LEASE to ask for a lease of its own",
            self.lease.id,
            self.lease.epoch,
        )


def surrounding(book: Book, host_id: int, named: str | None, visible: Visible | None) -> Surrounding | None:
    """The lease of this host that `named`, the value of JAYRUN_LEASE, names in this book, live or ended.

    None when there is none, which is logged unless nothing was named: then the process asks like any other. `visible`:
    what the process sees by its masks.
    """
    if named is None:
        return None
    try:
        lease = leases.find(book, host_id, UUID(named))
    except ValueError:
        lease = None
    if lease is None:
        log.warning(
            "JAYRUN_LEASE is %r, which is no lease of this host in this book: this process asks for leases of its own "
            "(unset JAYRUN_LEASE, or set JAYRUN_DATABASE_URL to the book of the `jayrun run` around it)",
            named,
        )
        return None
    fleet, sights = devices.fleet(book, host_id)
    return Surrounding(lease, host_id, seen_inside(fleet, _shares(lease)), sights(visible))


@dataclass(slots=True, eq=False)
class _Unit:
    """A unit of this process that waits, or was admitted and is not attended yet.

    `slots` says whose requests it waits for: (execution, position); `invocations` what its executions come to.
    """

    waiter: Waiter
    slots: tuple[tuple[UUID, int], ...]
    invocations: dict[UUID, int]
    claimed: Claimed | None = None


class Within:
    """What this process has of the lease around it, and who waits in this process: the book's part, in small.

    `join` makes the process a holder of the lease, and raises `LeaseLost` when it has ended.
    """

    def __init__(self, around: Surrounding, outbox: Outbox, join: Callable[[], Hold]) -> None:
        self._around = around
        self._outbox = outbox
        self._join = join
        self._hold: Hold | None = None
        self._units: dict[UUID, _Unit] = {}
        self._ages = itertools.count()
        self._lock = threading.Lock()

    def enter(self) -> Hold:
        """Hold the lease; anew if the hold was lost, for the lease may have outlived it. Raises `LeaseLost`."""
        hold = self._hold
        if hold is None or hold.lost is not None:
            try:
                hold = self._hold = self._join()
            except LeaseLost as error:
                raise self._around.ended() from error
        return hold

    def leave(self) -> None:
        """The process is at its end: only its live placements keep the lease."""
        self._hold = None

    def names(self, lease_id: UUID, epoch: int) -> bool:
        """Whether that is the lease around this process."""
        return (lease_id, epoch) == (self._around.lease.id, self._around.lease.epoch)

    def take_over(self, part_id: UUID, shares: tuple[Share, ...]) -> Part:
        """A part that another process, or this one, has pickled. Raises `LeaseLost`."""
        hold = self.enter()
        with self._lock:
            part = self._outbox.parts.get(part_id)
            return Part(self._outbox, hold, part_id, shares) if part is None or part.lost is not None else part

    def reserve(self, ask: Ask) -> Outcome:
        """Answer as the book does (`admission.reserve`). Raises `LeaseLost` when the lease has ended."""
        hold = self.enter()
        asker = ask.asker.execution
        requests = self._around.asked(request for member in ask.unit for request in member.recorded)
        reason = self._around.why_never(requests)
        if reason is not None:
            return Impossible(self._around.never(reason))
        with self._lock:
            waiter = Waiter(
                id=asker.id,
                priority=asker.priority,
                age=_LAST_IN_LINE if ask.age is None else ask.age,
                hosts=(self._around.host_id,),
                requests=self._around.asked([ask.asker.recorded[ask.position]]),
                recorded=requests,
                shape="",  # no waiter has this shape
            )
            decided = self._admit(hold, waiter)
            if asker.id in decided.impossible:
                return Impossible(self._around.never(decided.impossible[asker.id]))
            plan = next((grant.plan for grant in decided.grants if grant.id == asker.id), None)
            if plan is not None:
                return Granted(self._lend(hold, (asker.id, ask.position), plan[0]))
            if not ask.wait:
                return Unavailable()
            self._units[asker.unit_id] = _Unit(
                replace(
                    waiter,
                    id=asker.unit_id,
                    age=next(self._ages) if ask.age is None else ask.age,
                    requests=requests,
                    shape=shape_of(waiter.hosts, requests),
                ),
                tuple(
                    (member.execution.id, position) for member in ask.unit for position in range(len(member.recorded))
                ),
                {member.execution.id: member.invocation + 1 for member in ask.unit},
            )
            return Parked()

    def attend(self, waiting: Sequence[UUID]) -> Mapping[UUID, Claimed | News]:
        """What became of these waiting units, after everyone who fits now was admitted."""
        with self._lock:
            hold = self._hold
            if hold is None or hold.lost is not None:
                failure = {"type": "LeaseLost", "message": str(self._around.ended() if hold is None else hold.lost)}
                ended = {unit_id: unit for unit_id in waiting if (unit := self._units.pop(unit_id, None)) is not None}
                for unit in ended.values():
                    for lease in () if unit.claimed is None else unit.claimed.leases:
                        self._outbox.give_back(lease)
                return {each: News(each, ExecutionState.FAILED, failure) for each in ended}
            self._admit(hold)
            claimed: dict[UUID, Claimed | News] = {}
            for unit_id in waiting:
                unit = self._units.get(unit_id)
                if unit is not None and unit.claimed is not None:
                    claimed[unit_id] = unit.claimed
                    del self._units[unit_id]
            return claimed

    def withdraw(self, unit_id: UUID) -> None:
        """Let a unit wait no longer (`executions.withdraw`)."""
        with self._lock:
            unit = self._units.pop(unit_id, None)
            given_back = () if unit is None or unit.claimed is None else unit.claimed.leases
        for lease in given_back:
            self._outbox.give_back(lease)
        self._outbox.wake()  # others may fit now

    def undo(self, unit_id: UUID, slot: tuple[UUID, int, int]) -> None:
        """Take an ask back whose answer was never heard (`executions.undo_ask`)."""
        self._outbox.untaken.pop(slot[:2], None)
        self.withdraw(unit_id)

    def drop_member(self, execution_id: UUID, unit_id: UUID, left: tuple[Request, ...]) -> None:
        """Let a set-up wait no longer with its unit, which still asks for what is `left` (`executions.drop_member`)."""
        with self._lock:
            unit = self._units.get(unit_id)
            if unit is None or unit.claimed is not None:
                return
            left = self._around.asked(left)
            shape = shape_of(unit.waiter.hosts, left)
            unit.slots = tuple(slot for slot in unit.slots if slot[0] != execution_id)
            unit.invocations.pop(execution_id, None)
            unit.waiter = replace(unit.waiter, requests=left, recorded=left, shape=shape, bypassed=0)
        self._outbox.wake()

    def in_the_way(self, idle: Sequence[Endable]) -> tuple[UUID, ...]:
        """Which `idle` resources of this process are to be torn down so that the first in line whom they keep out is
        served."""
        with self._lock:
            return first_to_end(self._line(), self._now(), idle, self._decide) if idle else ()

    def give_up(self) -> Mapping[UUID, Claimed | News]:
        """Everybody in this process only waits, and it has no idle resource to tear down: then the youngest fails."""
        with self._lock:
            line = self._line()
            if not line or any(unit.claimed is not None for unit in self._units.values()):
                return {}
            victim, message = give_up(line, os.getpid(), self._now())
            del self._units[victim.id]
        failure = {"type": "PlacementDeadlock", "message": message}
        return {victim.id: News(victim.id, ExecutionState.FAILED, failure)}

    def _admit(self, hold: Hold, ask: Waiter | None = None) -> Admission:
        """Let the rules decide, and note what was granted to those who wait."""
        decided = self._decide(self._now(), ask)
        for bypass in decided.bypasses:
            for unit in self._units.values():
                waiter = unit.waiter
                if waiter.shape == bypass.shape and (-waiter.priority, waiter.age) < (-bypass.priority, bypass.age):
                    unit.waiter = replace(waiter, bypassed=waiter.bypassed + 1)
        for grant in decided.grants:
            admitted = self._units.get(grant.id)
            if admitted is not None:  # else it is the ask
                granted = tuple(
                    self._lend(hold, slot, shares) for slot, shares in zip(admitted.slots, grant.plan, strict=True)
                )
                members = {each: (number, admitted.waiter.age) for each, number in admitted.invocations.items()}
                admitted.claimed = Claimed(members, granted)
                self._outbox.wake()
        return decided

    def _decide(self, now: Sequence[BookedDevice], ask: Waiter | None = None) -> Admission:
        line = self._line()
        return admit(
            line if ask is None else [*line, ask],
            {self._around.host_id: now},
            bypass_limit=_BYPASS_LIMIT,
            batch=_BATCH,
        )

    def _line(self) -> list[Waiter]:
        return [unit.waiter for unit in self._units.values() if unit.claimed is None]

    def _now(self) -> tuple[BookedDevice, ...]:
        """The devices with everything that this process has of them."""
        return booked(self._around.devices, [share for shares in list(self._outbox.taken.values()) for share in shares])

    def _lend(self, hold: Hold, slot: tuple[UUID, int], shares: tuple[Share, ...]) -> Lease:
        """A grant, as the book would give it: a part of the lease around, kept until somebody takes it."""
        self._outbox.untaken[slot] = Part(self._outbox, hold, new_id(), shares)
        return Lease(hold.held.lease_id, hold.held.epoch, *slot, self._around.leased(shares))


def _shares(lease: Lease) -> list[Share]:
    return [Share(each.device_key, each.host_index, each.memory_bytes, each.exclusive) for each in lease.shares]
