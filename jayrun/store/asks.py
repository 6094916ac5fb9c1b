"""What a process asks of the book, what it may be answered, and how an execution is introduced with it."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from jayrun.domain.requests import Request
from jayrun.store.changes import Changes
from jayrun.store.leases import Lease
from jayrun.store.texts import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An execution as its process introduces it to the book with its first request.

    `unit_id` is the execution that it is admitted together with: itself, or the operator run that it sets a resource up
    for. `host_id` and `holder_id` are keys of the book. `detached`: when it waits it leaves its process, and any worker
    of `pinned_host_id` (None: of any host) that knows the operator `operator` may go on. `setting_up` tells such a
    worker which resource the execution sets up.
    """

    id: UUID
    kind: str
    name: str
    host_id: int
    holder_id: UUID
    unit_id: UUID
    priority: int = 0
    detached: bool = False
    operator: str | None = None
    pinned_host_id: int | None = None
    setting_up: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether any host may go on with it when it waits."""
        return self.detached and self.pinned_host_id is None

    @property
    def queue_id(self) -> int:
        """The queue that it waits in: its host's, or 0 where any host may take it."""
        return (self.pinned_host_id or 0) if self.detached else self.host_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One execution of a unit, in its invocation of that number, with the sequence it has recorded.

    `booked` is how many requests of it the book has, or None when the book does not have the execution.
    """

    execution: Execution
    invocation: int
    recorded: tuple[Request, ...]
    booked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A running invocation asks for the request at `position` of `asker.recorded`.

    `companions` are the other executions of the unit that would wait with it (the operator run that a resource is set
    up for, with what earlier invocations of it recorded). `age` is its place in the queue when it has one. With `wait`
    off nothing is written unless it is granted.
    """

    asker: Member
    position: int
    companions: tuple[Member, ...] = ()
    age: int | None = None
    wait: bool = True

    @property
    def unit(self) -> tuple[Member, ...]:
        """Everyone who would be admitted together, in the order of the sequence: set-ups first, their run last."""
        members = (self.asker, *self.companions)
        return tuple(sorted(members, key=lambda member: member.execution.id == member.execution.unit_id))


@dataclass(frozen=True, slots=True)
class Granted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Parked:
    """The unit waits in the book and will be admitted with all it has recorded."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Not now, and the ask did not want to wait; nothing was written."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """Never with the declared devices; nothing was written."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The execution was ended by somebody else, in this state, or the lease of this very ask has ended meanwhile, for
    this reason, or the holder that asks was ended, or another machine has taken its host's place ("lost"); nothing
    was written."""

    state: str


Outcome = Granted | Parked | Unavailable | Impossible | Ended


def introduce(changes: Changes, member: Member, *, upto: int, state: str, shape: str | None = None) -> None:
    """Write what the book does not have yet: the execution, and its recorded requests up to there."""
    execution = member.execution
    leaves = execution.detached and state == "waiting"
    if member.booked is None:
        changes.add_execution(
            {
                "id": str(execution.id),
                "kind": execution.kind,
                "detached": execution.detached,
                "name": plain(execution.name),
                "unit_id": str(execution.unit_id),
                "host_id": execution.pinned_host_id if leaves else execution.host_id,
                "pinned_host_id": execution.pinned_host_id,
                "holder_id": None if leaves else str(execution.holder_id),
                "state": state,
                "priority": execution.priority,
                "inputs": execution.setting_up,
                "shape": shape,
                "invocation": member.invocation,
            }
        )
    for position in range(member.booked or 0, upto):
        changes.add_request(execution.id, position, member.recorded[position])
