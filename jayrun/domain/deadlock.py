"""Circles of processes that wait for each other: whether there is one that would never end, and who must give up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.planner import can_never_fit
from jayrun.domain.queue import Waiter
from jayrun.domain.search import book
from jayrun.domain.units import format_bytes


@dataclass(frozen=True, slots=True)
class Party:
    """A process that drops nothing before one of its `waiters`, at least one, is served; `id` is its holder's."""

    id: UUID
    pid: int
    waiters: tuple[Waiter, ...]

    @property
    def youngest(self) -> Waiter:
        """Of its waiters with the lowest priority the one that asked last."""
        return max(self.waiters, key=lambda waiter: (-waiter.priority, waiter.age))


@dataclass(frozen=True, slots=True)
class Held:
    """A live lease, which ends when all its holders have let go."""

    holders: frozenset[UUID]
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Deadlock:
    """None of `circle` can be served before another one of them is; `victim` is the waiter to fail."""

    circle: tuple[Party, ...]
    victim: Waiter
    message: str


def find_deadlock(parties: Iterable[Party], devices: Sequence[BookedDevice], leases: Sequence[Held]) -> Deadlock | None:
    """A circle of `parties` that would never end, or None. Who fails is the youngest that lets somebody in by it.

    `leases` are those on `devices`, all of one host, that nobody can be made to give up. Whoever holds one and is no
    party is sure to let go one day, and a device that takes no leases now may be brought back: neither makes a circle.
    """
    empty = [device.as_declared() for device in devices]

    def servable(among: Iterable[Party], stuck: Iterable[Party]) -> list[Party]:
        """Who of `among` can perhaps be served when only the `stuck` still hold what they hold."""
        holders = {party.id for party in stuck}
        booked = book(empty, [share for each in leases if each.holders & holders for share in each.shares])
        return [party for party in among if not all(can_never_fit(each.requests, booked) for each in party.waiters)]

    stuck = list(parties)
    while moving := servable(stuck, stuck):  # these go on one day, and let go of everything in the end
        stuck = [party for party in stuck if party not in moving]
    circle = [party for party in stuck if any(party.id in lease.holders for lease in leases)]
    if not circle:
        return None
    helping = [party for party in circle if servable(stuck, [each for each in stuck if each is not party])]
    giving_up = max(helping or circle, key=lambda party: (-party.youngest.priority, party.youngest.age))
    return Deadlock(tuple(circle), giving_up.youngest, _message(circle, giving_up, devices, leases))


def _message(circle: Sequence[Party], giving_up: Party, devices: Sequence[BookedDevice], leases: Sequence[Held]) -> str:
    names = {device.id: f"{device.kind} {device.host_index}" for device in devices}
    lines = []
    for party in circle:
        held = [share for lease in leases if party.id in lease.holders for share in lease.shares]
        holds = ", ".join(f"{format_bytes(share.memory_bytes)} of {names[share.device_id]}" for share in held)
        asks = " and for ".join(" + ".join(each.describe() for each in waiter.requests) for waiter in party.waiters)
        lines.append(f"pid {party.pid} holds {holds} and waits for {asks}")
    return (
        f"nobody can be served before another one is: {'; '.join(lines)}. "
        f"The wait of pid {giving_up.pid}, the youngest, ends. "
        "Drop data before asking for more, or ask for everything in one execution"
    )
