"""Resources of a process: set up once, shared, and torn down when they stand idle in the way of somebody who waits."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from jayrun.domain.ending import Endable
from jayrun.errors import LeaseLost
from jayrun.frames import clear_frames
from jayrun.runtime.data import Data
from jayrun.runtime.holds import AnyHold, Part
from jayrun.runtime.operator import Resource
from jayrun.store import blockers
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")


@dataclass(slots=True, eq=False)
class Cached:
    """A resource that is set up: its data, the leases that it keeps alive, the resources it is made of, and how many
    use it now. `id` is the execution that set it up; resources of equal `key` share one set-up.

    `published` is since when it has been idle as far as the book knows, on this process's monotonic clock; None: it is
    not idle.
    """

    id: UUID
    key: Any
    resource: Resource
    data: Data
    leases: list[tuple[weakref.ref[AnyHold], Lease]]
    parts: list[Cached]
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    published: float | None = None

    @property
    def idle_since(self) -> float | None:
        return None if self.users else self.last_used

    @property
    def is_lost(self) -> bool:
        """Whether this process has lost a lease of it, or of what it is made of."""
        try:
            self.check_leases()
        except LeaseLost:
            return True
        return False

    def check_leases(self) -> None:
        """Raises `LeaseLost` if this process has lost a lease of it, or of what it is made of."""
        for hold, _ in self.leases:
            if (kept := hold()) is not None:
                kept.check()
        for part in self.parts:
            part.check_leases()

    def count(self, users: int) -> None:
        """So many more users: they use what it is made of too."""
        self.users += users
        self.last_used = time.monotonic()
        for part in self.parts:
            part.count(users)


class Resources:
    """The cache of one process and book."""

    def __init__(self) -> None:
        self._cached: dict[Any, Cached] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._lost: list[Cached] = []  # not cached any more, and perhaps still in use
        self._outlived: list[Cached] = []  # torn down, but user code keeps a placement; the book is to be told

    def setting_up(self, key: Any) -> threading.Lock:
        """The lock under which a resource of that key, and no other at the same time, is set up."""
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def use(self, resource: Resource) -> Cached | None:
        """The cached set-up, now in use and safe from teardown until `unuse`; None when it is not cached."""
        with self._lock:
            cached = self._cached.get(resource._key)
            if cached is not None:
                cached.count(+1)
            return cached

    def unuse(self, cached: Cached) -> None:
        with self._lock:
            cached.count(-1)
            is_over = cached.users == 0 and cached in self._lost
        if is_over:
            self._end_lost()

    def add(self, cached: Cached) -> None:
        """Cache a set-up, in use by its first user."""
        with self._lock:
            cached.count(+1)
            self._cached[cached.key] = cached

    def drop_lost(self) -> None:
        """Forget what lost a lease, so that whoever needs it sets it up anew; torn down once nobody uses it."""
        with self._lock:
            for cached in [each for each in self._cached.values() if each.is_lost]:
                del self._cached[cached.key]
                self._lost.append(cached)
        self._end_lost()

    def _end_lost(self) -> None:
        with self._lock:
            over = [cached for cached in self._lost if cached.users == 0]
            self._lost = [cached for cached in self._lost if cached.users]
        for cached in over:
            self._end(cached)

    def ids(self) -> list[UUID]:
        """The cached resources that have leases, by the executions that set them up."""
        with self._lock:
            return [cached.id for cached in self._cached.values() if cached.leases]

    def idle(self) -> list[Endable]:
        """The cached resources that nobody uses, by the executions that set them up, and what they have of the lease
        around this process."""
        with self._lock:
            cached = [each for each in self._cached.values() if each.users == 0 and each.leases]
        return [
            Endable(
                each.id,
                tuple(share for hold, _ in each.leases if isinstance(kept := hold(), Part) for share in kept.shares),
                each.last_used,
            )
            for each in cached
        ]

    def publish(self, book: Book) -> None:
        """Tell the book which resources have become idle, or are so no more, since it was told last."""
        with self._publishing:
            now = time.monotonic()
            with self._lock:
                states = {cached: cached.idle_since for cached in self._cached.values()} | dict.fromkeys(self._outlived)
            told = {cached: at for cached, at in states.items() if cached.leases}
            if all(at == cached.published for cached, at in told.items()):
                return
            for cached in told:
                cached.published = math.nan  # until the book has answered, nobody knows what it knows
            blockers.publish(book, {cached.id: None if at is None else now - at for cached, at in told.items()})
            for cached, at in told.items():
                cached.published = at
            with self._lock:
                self._outlived = [cached for cached in self._outlived if cached not in told]

    def tear_down(self, resource: UUID) -> bool:
        """Tear down one of `ids()` unless it is in use: then False."""
        with self._lock:
            cached = next((each for each in self._cached.values() if each.id == resource), None)
        return cached is None or self._tear_down(cached)

    def tear_down_idle(self) -> None:
        """Tear down everything that nobody uses."""
        with self._lock:
            idle = [cached for cached in self._cached.values() if cached.users == 0]
        for cached in idle:
            self._tear_down(cached)

    def _tear_down(self, cached: Cached) -> bool:
        with self._lock:
            made_of_it = [each for each in self._cached.values() if cached in each.parts]
        for each in made_of_it:
            self._tear_down(each)
        with self.setting_up(cached.key):  # a new set-up of it begins when this teardown has ended
            return self._tear_down_alone(cached)

    def _tear_down_alone(self, cached: Cached) -> bool:
        with self._lock:
            if cached.users or self._cached.get(cached.key) is not cached:
                return False  # somebody took it meanwhile
            del self._cached[cached.key]
        self._end(cached)
        return True

    def _end(self, cached: Cached) -> None:
        """Call its teardown, and let go of it."""
        name = type(cached.resource).__name__
        around = sys.exception()
        try:
            cached.resource.teardown(cached.data)
        except (
            Exception
        ) as error:  # user code; the lease has to go all the same, and the log says whose teardown it was
            log.exception("teardown of %s failed", name)
            clear_frames(error, around=around)  # whoever keeps the log record does not keep the data
        # The last references that jayrun has: the leases end unless user code kept one.
        del cached.data, cached.resource
        if any(hold() is not None for hold, _ in cached.leases):
            log.warning("%s is torn down, but user code keeps a placement of it alive: its lease stays taken", name)
            with self._lock:
                self._outlived.append(cached)
