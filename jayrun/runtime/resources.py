"""Resources of a process: set up once, shared, and torn down when they stand idle in the way of somebody who waits."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from jayrun.domain.devices import Share
from jayrun.domain.queue import Endable, fewest_to_end
from jayrun.domain.requests import Request
from jayrun.runtime.data import Data
from jayrun.runtime.holds import Hold
from jayrun.runtime.operator import Resource
from jayrun.runtime.signal import clear_frames
from jayrun.store import devices
from jayrun.store.ids import new_id
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")


@dataclass(slots=True, eq=False)
class Cached:
    """A resource that is set up: its data, the leases that it keeps alive, and who uses it now."""

    resource: Resource
    data: Data
    leases: list[tuple[weakref.ref[Hold], Lease]]
    id: UUID = field(default_factory=new_id)
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)


class Resources:
    """The cache of one process and book."""

    def __init__(self) -> None:
        self._cached: dict[Any, Cached] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()
        self._making_room = threading.Lock()

    def setting_up(self, resource: Resource) -> threading.Lock:
        """The lock under which this resource, and no equal one at the same time, is set up."""
        with self._lock:
            return self._locks.setdefault(resource._key, threading.Lock())

    def use(self, resource: Resource) -> Cached | None:
        """The cached set-up, now in use and safe from teardown until `unuse`; None when it is not cached."""
        with self._lock:
            cached = self._cached.get(resource._key)
            if cached is not None:
                cached.users += 1
            return cached

    def unuse(self, cached: Cached) -> None:
        with self._lock:
            cached.users -= 1
            cached.last_used = time.monotonic()

    def add(self, cached: Cached) -> None:
        """Cache a set-up, in use by its first user."""
        with self._lock:
            cached.users = 1
            self._cached[cached.resource._key] = cached

    def make_room(
        self, book: Book, host_id: int, wanted: Sequence[tuple[Request, ...]], flush: Callable[[], object]
    ) -> int:
        """Tear down the fewest idle resources whose end would admit one of the waiting units; returns how many.

        `wanted`: the sequences that units of this process wait for, in their order. `flush` waits until the releases
        are told, so that the next look does not end more for the same waiter.
        """
        if not self._making_room.acquire(blocking=False):
            return 0  # another thread is at it, and what it frees is looked at again
        try:
            idle = self._idle()
            if not any(cached.leases for cached in idle):
                return 0
            fleet = devices.fleet(book, host_id)
            candidates = [
                Endable(
                    cached.id,
                    tuple(
                        Share(share.device_key, share.host_index, share.memory_bytes, share.exclusive)
                        for hold, lease in cached.leases
                        if hold() is not None
                        for share in lease.shares
                    ),
                    cached.last_used,
                )
                for cached in idle
            ]
            for requests in wanted:
                chosen = fewest_to_end(requests, fleet, candidates)
                if chosen:
                    ended = sum(self._tear_down(cached) for cached in idle if cached.id in chosen)
                    flush()
                    return ended
            return 0
        finally:
            self._making_room.release()

    def anything_idle(self) -> bool:
        return bool(self._idle())

    def tear_down_idle(self) -> None:
        """Tear down everything that nobody uses."""
        for cached in self._idle():
            self._tear_down(cached)

    def _idle(self) -> list[Cached]:
        with self._lock:
            return [cached for cached in self._cached.values() if cached.users == 0]

    def _tear_down(self, cached: Cached) -> bool:
        with self.setting_up(cached.resource):  # a new set-up of it begins when this teardown has ended
            return self._tear_down_alone(cached)

    def _tear_down_alone(self, cached: Cached) -> bool:
        with self._lock:
            key = cached.resource._key
            if cached.users or self._cached.get(key) is not cached:
                return False  # somebody took it meanwhile
            del self._cached[key]
        try:
            cached.resource.teardown(cached.data)
        except (
            Exception
        ) as error:  # user code; the lease has to go all the same, and the log says whose teardown it was
            log.exception("teardown of %s failed", type(cached.resource).__name__)
            clear_frames(error)  # whoever keeps the log record does not keep the data
        del cached.data  # the last reference that jayrun has: the lease ends unless user code kept one
        return True
