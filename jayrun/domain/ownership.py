"""Whose memory is it: the leases that a process on a device counts to, by what the kernel shows of its descent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from jayrun.domain.liveness import Incarnation, Inhabitant, is_same


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A process as seen by one that looks: what it is, and where it comes from.

    `itself` is None when there is no such process any more. `kin` are its parent, the parent's parent and so on, and
    then the leaders of its process group and its session, as far as they are there; `gone` the pids, in the observer's
    namespace, of the leaders that are not: nobody else gets their numbers while the group or the session lives.
    `lease` is that of the wrapped command that it was started under (JAYRUN_LEASE), where its environment can be read.
    """

    pid: int
    itself: Inhabitant | None = None
    kin: tuple[Inhabitant, ...] = ()
    gone: tuple[int, ...] = ()
    lease: UUID | None = None
    name: str = ""
    command: str = ""
    user_name: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """A lease that a holder holds or held.

    `is_live`: the lease has not ended; `since` rises with time; `is_attended`: who holds or held it is alive.
    """

    lease_id: UUID
    is_live: bool
    since: float
    is_attended: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A holder of the book, alive or ended, and its leases with a share on one device."""

    who: Incarnation
    holds: tuple[Hold, ...]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The live leases that a process counts to; else the ended ones that it comes from, the last first; else none.

    `is_attended`: one who held one of those is alive, and may have it again.
    """

    leases: frozenset[UUID] = frozenset()
    former: tuple[UUID, ...] = ()
    is_attended: bool = False


def own(lineage: Lineage, known: Sequence[Known], *, named: Iterable[Hold], pid_namespace: int) -> Ownership:
    """Whose a process on a device is.

    `known` are holders with leases on this device, `named` those leases there that the process bears in its environment
    or that an earlier look found it to count to, `pid_namespace` the observer's. The nearest holder of a live lease
    counts, the process itself first; a lease that a holder has left counts as long as it lives.
    """
    holders = [list(holds) for holds in _nearest_first(lineage, known, pid_namespace)]
    named = list(named)
    for holds in [*holders, named]:
        if live := frozenset(hold.lease_id for hold in holds if hold.is_live):
            return Ownership(leases=live)
    ended = sorted((hold for holds in [*holders, named] for hold in holds), key=lambda hold: -hold.since)
    return Ownership(
        former=tuple(dict.fromkeys(hold.lease_id for hold in ended)),
        is_attended=any(hold.is_attended for hold in ended),
    )


def _nearest_first(lineage: Lineage, known: Sequence[Known], pid_namespace: int) -> Iterator[tuple[Hold, ...]]:
    for each in lineage.kin if lineage.itself is None else (lineage.itself, *lineage.kin):
        yield tuple(hold for holder in known if is_same(holder.who, each) for hold in holder.holds)
    for pid in lineage.gone if lineage.itself is not None else (lineage.pid, *lineage.gone):
        number = (pid_namespace, pid)
        yield tuple(
            hold for holder in known if (holder.who.pid_namespace, holder.who.pid) == number for hold in holder.holds
        )
