"""What keeps leases alive: a `Hold` per lease, reachable from its placements, whose end only enqueues the release.

Inside `jayrun run` a placement is a `Part` of the lease around the process, whose end gives bytes back in this process.

A placement that is pickled is lent: this process holds on to it for a while, though its own copy may go, so that
whoever unpickles it can become a further holder (`jayrun.runtime.handover`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from threading import Event
from typing import TypeAlias
from uuid import UUID
from weakref import WeakValueDictionary

from jayrun.devices.visible import Numbering
from jayrun.domain.devices import Backend, Device, Share
from jayrun.domain.lifecycle import ExecutionState
from jayrun.errors import LeaseLost
from jayrun.store.leases import Finished, Held, Lease

log = logging.getLogger("jayrun")


class Outbox:
    """What this process still has to tell the book. Filled from anywhere, finalizers included; emptied by the service.

    Appending and waking take no lock: a finalizer may run in any thread at any moment, also while that thread is in
    here.
    """

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.messages: deque[Message] = deque()
        self.holds: WeakValueDictionary[tuple[UUID, int], Hold] = WeakValueDictionary()
        self.held: dict[tuple[UUID, int], Held] = {}  # the same without touching them: who looks must not keep them
        self.lent: dict[tuple[UUID, int], tuple[float, AnyHold]] = {}  # since when, on this process's monotonic clock
        self.parts: WeakValueDictionary[UUID, Part] = WeakValueDictionary()
        self.taken: dict[UUID, tuple[Share, ...]] = {}  # what the parts have, without touching them
        self.untaken: dict[tuple[UUID, int], Part] = {}  # by (execution, position) of the request that gets it
        self.numbers = itertools.count(1)  # of holds that are none of a grant
        self.numbering = Numbering()  # by which numbers this process uses the devices of its host
        self.wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def put(self, message: Message) -> None:
        """Enqueue `message`; an Event is set once everything before it was committed."""
        self.messages.append(message)
        self.wake()

    def take(self, lease: Lease) -> AnyHold:
        """What keeps a lease alive that was granted, for the placement that is made of it."""
        part = self.untaken.pop((lease.execution_id, lease.position), None)
        return Hold(self, Held(lease.id, lease.epoch)) if part is None else part

    def give_back(self, lease: Lease) -> None:
        """A lease that was granted will not be used."""
        if self.untaken.pop((lease.execution_id, lease.position), None) is None:
            self.put(Release(Held(lease.id, lease.epoch), used=False))

    def wake(self) -> None:
        """Let the service look at once."""
        # A full pipe means that it will; a closed one that the process is at its end.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b"\0")

    def drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_reader, 4096):
                pass

    def close(self) -> None:
        os.close(self.wake_reader)
        os.close(self._wake_writer)


class Release:
    """This process lets go of a lease, or gives it back because nothing ever used it."""

    __slots__ = ("held", "used")

    def __init__(self, held: Held, *, used: bool = True) -> None:
        self.held = held
        self.used = used


class Undo:
    """An ask whose answer was never heard: what it was granted is taken back, and the unit (None: a detached one, which
    may wait without its process) leaves the queue."""

    __slots__ = ("slot", "unit_id")

    def __init__(self, unit_id: UUID | None, slot: tuple[UUID, int, int]) -> None:
        self.unit_id = unit_id
        self.slot = slot


class Withdraw:
    """A unit of this process waits no longer: take it out of the queue, with the state and failure to store."""

    __slots__ = ("failure", "state", "unit_id")

    def __init__(self, unit_id: UUID, state: ExecutionState, failure: dict[str, object]) -> None:
        self.unit_id = unit_id
        self.state = state
        self.failure = failure


Message: TypeAlias = "Release | Finished | Undo | Withdraw | Event"


class Hold:
    """Lives as long as a placement of its lease is reachable in this process; then the lease is released.

    `lost` says why the lease is this process's no more, or is None. In a forked child it does nothing: the child's
    copies hold nothing.
    """

    __slots__ = ("__weakref__", "_outbox", "held", "lost")

    def __init__(self, outbox: Outbox, held: Held) -> None:
        self._outbox = outbox
        self.held = held
        self.lost: str | None = None
        outbox.held[held[:2]] = held
        outbox.holds[held[:2]] = self

    def check(self) -> None:
        """Raises `LeaseLost` if the lease is this process's no more."""
        if self.lost is not None:
            raise LeaseLost(self.lost, *self.held[:2])

    def device_id(self, kind: Device, backend: Backend | None, host_index: int, uuid: str | None) -> int | None:
        """The number by which this process uses a device of its host; None, and a warning, when it cannot see it."""
        numbering = self._outbox.numbering
        ordinal = numbering.ordinal(kind, backend, host_index, uuid)
        if ordinal is None and backend is not None:
            log.warning(
                "lease %s is on %s %d (%s), which this process cannot see (%s): device_id is None here",
                *(self.held.lease_id, kind, host_index, uuid or "no UUID is known", numbering.told(backend)),
            )
        return ordinal

    def __deepcopy__(self, memo: object) -> Hold:
        return self  # also for `dataclasses.asdict`

    def __reduce__(self) -> tuple[Callable[[UUID, int], Hold], tuple[UUID, int]]:
        """Pickled, it is lent, and unpickled another holder's. No I/O. Raises `LeaseLost`."""
        from jayrun.runtime.handover import joined  # it needs all that stands on holds

        self.check()
        if self._outbox.owner_pid == os.getpid():
            self._outbox.lent[self.held[:2]] = (time.monotonic(), self)
        return joined, self.held[:2]

    def __del__(self) -> None:
        if self._outbox.owner_pid == os.getpid():
            if self._outbox.held.get(self.held[:2]) is self.held:
                self._outbox.held.pop(self.held[:2], None)
            self._outbox.put(Release(self.held))


class Part:
    """Some bytes of the lease around this process, as long as a placement of them is reachable in it.

    Like a `Hold` on that lease, which it keeps alive, but the book hears nothing of its end: what waits in this process
    is looked at again. Pickled, it stays counted here while it is lent.
    """

    __slots__ = ("__weakref__", "_outbox", "_outer", "id", "shares")

    def __init__(self, outbox: Outbox, outer: Hold, part_id: UUID, shares: tuple[Share, ...]) -> None:
        self._outbox = outbox
        self._outer = outer
        self.id = part_id
        self.shares = shares
        outbox.taken[part_id] = shares
        outbox.parts[part_id] = self

    @property
    def held(self) -> Held:
        return self._outer.held

    @property
    def lost(self) -> str | None:
        return self._outer.lost

    def check(self) -> None:
        """Raises `LeaseLost` if the lease is this process's no more."""
        self._outer.check()

    def device_id(self, kind: Device, backend: Backend | None, host_index: int, uuid: str | None) -> int | None:
        """As of a `Hold`."""
        return self._outer.device_id(kind, backend, host_index, uuid)

    def __deepcopy__(self, memo: object) -> Part:
        return self

    def __reduce__(self) -> tuple[Callable[..., AnyHold], tuple[UUID, int, UUID, tuple[Share, ...]]]:
        """As for a `Hold`."""
        from jayrun.runtime.handover import joined_part

        self.check()
        if self._outbox.owner_pid == os.getpid():
            self._outbox.lent[self.id, self.held.epoch] = (time.monotonic(), self)
        return joined_part, (*self.held[:2], self.id, self.shares)

    def __del__(self) -> None:
        if self._outbox.owner_pid == os.getpid():
            if self._outbox.taken.get(self.id) is self.shares:
                self._outbox.taken.pop(self.id, None)
            self._outbox.wake()


AnyHold: TypeAlias = "Hold | Part"
