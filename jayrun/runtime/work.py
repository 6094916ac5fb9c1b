"""One execution as its process knows it, across its invocations: what it has recorded, and what it was granted."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from jayrun.domain.placements import Placement, PlacementGroup, PlacementLocation
from jayrun.domain.requests import Request
from jayrun.runtime.holds import AnyHold, Outbox
from jayrun.store.asks import Execution, Member
from jayrun.store.claims import Taken
from jayrun.store.executions import Claimed
from jayrun.store.holders import Holder
from jayrun.store.ids import new_id
from jayrun.store.leases import Held, Lease


@dataclass(slots=True, eq=False)
class Work:
    """An operator run or a resource set-up. Its requests survive invocations; its leases belong to one.

    `granted` are leases of the coming or present invocation that no request has taken yet, by position.
    """

    execution: Execution
    recorded: list[Request] = field(default_factory=list)
    booked: int | None = None
    invocation: int = 1
    age: int | None = None
    granted: dict[int, Lease] = field(default_factory=dict)

    @classmethod
    def new(cls, *, kind: str, name: str, holder: Holder, priority: int) -> Work:
        """An operator run of this process."""
        work_id = new_id()
        return cls(
            Execution(
                id=work_id,
                kind=kind,
                name=name,
                host_id=holder.host_id,
                holder_id=holder.id,
                unit_id=work_id,
                priority=priority,
            )
        )

    @classmethod
    def taken(cls, taken: Taken, holder: Holder) -> list[Work]:
        """What a worker took from the book: the run, and after it the set-ups that were admitted with it."""
        head = Execution(
            id=taken.id,
            kind="operator",
            name=taken.name,
            host_id=holder.host_id,
            holder_id=holder.id,
            unit_id=taken.id,
            priority=taken.priority,
            detached=True,
            operator=taken.name,
            pinned_host_id=taken.pinned_host_id,
        )
        unit = []
        for member in sorted(taken.members, key=lambda member: member.id != taken.id):
            setup = replace(head, id=member.id, kind="resource", name=member.name, setting_up=member.setting_up)
            work = cls(head if member.id == taken.id else setup, list(member.recorded), len(member.recorded))
            work.claimed(taken.unit)
            unit.append(work)
        return unit

    def set_up_for(self, name: str, setting_up: str | None) -> Work:
        """A set-up of the resource `name` that this run needs, admitted together with it."""
        return Work(replace(self.execution, id=new_id(), kind="resource", name=name, setting_up=setting_up))

    @property
    def id(self) -> UUID:
        return self.execution.id

    def member(self) -> Member:
        return Member(
            execution=self.execution, invocation=self.invocation, recorded=tuple(self.recorded), booked=self.booked
        )

    def parked(self) -> None:
        """The book has all of it now, waiting."""
        self.booked = len(self.recorded)

    def claimed(self, unit: Claimed) -> None:
        """Take what the book granted for the next invocation."""
        self.invocation, self.age = unit.members[self.id]
        self.granted = {lease.position: lease for lease in unit.leases if lease.execution_id == self.id}

    def give_back_unused(self, outbox: Outbox) -> None:
        """Leases of this invocation that no request took go back."""
        for lease in self.granted.values():
            outbox.give_back(lease)
        self.granted.clear()


class Invocation:
    """One call of `execute()` or `setup()`: what it has issued, what it holds, and whether it has to end."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.issued: list[Request] = []
        self.leases: list[tuple[weakref.ref[AnyHold], Lease]] = []
        self.signalled = False
        self.ended = False
        self.busy = threading.Lock()
        self.last_task: Any = None
        self.main_task: Any = None

    def place(self, outbox: Outbox, request: Request, lease: Lease) -> PlacementLocation:
        """The value that user code gets for a lease; the lease lives as long as the value is reachable."""
        hold = outbox.take(lease)
        self.leases.append((weakref.ref(hold), lease))
        members = tuple(
            Placement(
                request.device,
                request.backend,
                hold.device_id(request.device, request.backend, share.host_index, share.device_uuid),
                share.memory_bytes,
                host_index=share.host_index,
                device_uuid=share.device_uuid,
                lease_id=lease.id,
                epoch=lease.epoch,
                hold=hold,
            )
            for share in lease.shares
        )
        if not request.group:
            return members[0]
        return PlacementGroup(
            members,
            group_memory_bytes=request.group_bytes,
            per_device_memory_bytes=request.per_device_bytes,
            prefer_max_devices=request.prefer_max_devices,
        )

    def held(self) -> list[Held]:
        """What it still holds."""
        return [kept.held for hold, _ in self.leases if (kept := hold()) is not None]

    def check_leases(self) -> None:
        """Raises `LeaseLost` if this process has lost one of its leases whose placement is still reachable."""
        for hold, _ in self.leases:
            if (kept := hold()) is not None:
                kept.check()

    def end(self) -> None:
        """No more requests; a finished task would keep its result, and with it a lease."""
        self.ended = True
        self.last_task = self.main_task = None

    def kept_alive(self) -> list[Lease]:
        """The leases of this invocation whose placements are still reachable."""
        return [lease for hold, lease in self.leases if hold() is not None]
