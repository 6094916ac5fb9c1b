"""What keeps leases alive: a `Hold` per lease, reachable from its placements, whose end only enqueues the release."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from threading import Event
from typing import TypeAlias
from uuid import UUID

from jayrun.domain.lifecycle import ExecutionState
from jayrun.store.leases import Finished


class Outbox:
    """What this process still has to tell the book. Filled from anywhere, finalizers included; emptied by the service.

    Appending and waking take no lock: a finalizer may run in any thread at any moment, also while that thread is in
    here.
    """

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.messages: deque[Message] = deque()
        self.wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def put(self, message: Message) -> None:
        """Enqueue `message`; an Event is set once everything before it was committed."""
        self.messages.append(message)
        self.wake()

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

    __slots__ = ("epoch", "lease_id", "used")

    def __init__(self, lease_id: UUID, epoch: int, *, used: bool = True) -> None:
        self.lease_id = lease_id
        self.epoch = epoch
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

    In a forked child it does nothing: the child's copies hold nothing.
    """

    __slots__ = ("__weakref__", "_outbox", "epoch", "lease_id")

    def __init__(self, outbox: Outbox, lease_id: UUID, epoch: int) -> None:
        self._outbox = outbox
        self.lease_id = lease_id
        self.epoch = epoch

    def __del__(self) -> None:
        if self._outbox.owner_pid == os.getpid():
            self._outbox.put(Release(self.lease_id, self.epoch))
