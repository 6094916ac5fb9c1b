"""The background service of a process: one thread per book that tells it what ended and hears what was admitted.

It outlives Runtimes: data may keep a lease long after its Runtime was closed, and the release must still be told. It
commits releases at once and again after an outage, runs a reconciler pass at each tick, and resolves the waits of the
process. It holds a LISTEN connection only while something waits or a resource is cached; what it hears is a hint,
polling is the truth.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from uuid import UUID

from jayrun import kernel
from jayrun.devices.visible import Numbering
from jayrun.domain.devices import Backend
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.requests import Request
from jayrun.domain.sequence import shape_of
from jayrun.embedded import ensure
from jayrun.errors import BookError, LeaseLost, PlacementTimeout, RuntimeClosed
from jayrun.runtime import reconciler
from jayrun.runtime.hardware import Lookout
from jayrun.runtime.holds import Hold, Message, Outbox, Release, Undo, Withdraw
from jayrun.runtime.numbering import look
from jayrun.runtime.order import cuda_is_initialised, keep_pci_order
from jayrun.runtime.outage import Outage
from jayrun.runtime.presence import Presence
from jayrun.runtime.resources import Resources
from jayrun.runtime.within import Within, surrounding
from jayrun.settings import Settings
from jayrun.store import admission, blockers, devices, executions, holders, leases, reclaim, schema
from jayrun.store.asks import Ask, Outcome
from jayrun.store.executions import Claimed, News
from jayrun.store.holders import Holder
from jayrun.store.leases import Finished, Held
from jayrun.store.transactions import PATIENCE_SECONDS, Book

log = logging.getLogger("jayrun")

AT_ITS_END = "this process is at its end, and takes no new work"
EXIT_FLUSH_SECONDS = 2.0
_OUTAGE_PAUSE_SECONDS = 1.0
_FLUSH_SECONDS = 5.0
_THREAD_PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 0.5  # how often a flush looks whether the thread is still there to do it
_SOON_SECONDS = 10.0  # a caller whose timeout lets it go on so soon does not only wait

Resolution = Claimed | News | PlacementTimeout


@dataclass(slots=True, eq=False)
class Wait:
    """A parked unit of this process and all it asks for.

    `resolve` is called once with what became of it, and must not block. `was_set_up(key)` is told of every resource
    that is set up meanwhile, and answers with what the unit still asks for if that was part of it. `give_up_at` is on
    this process's monotonic clock, or None to wait for ever.
    """

    unit_id: UUID
    requests: tuple[Request, ...]
    resolve: Callable[[Resolution], None]
    was_set_up: Callable[[Any], tuple[Request, ...] | None] = lambda key: None
    give_up_at: float | None = None


class Service:
    """The process's connection to one book; made by `service_for`, shared by its Runtimes.

    `within` is what answers this process's requests inside `jayrun run`; None: the book does.
    """

    def __init__(
        self,
        url: str,
        *,
        host_identity: str | None,
        label: str,
        role: str,
        masks: Mapping[str, str],
        lease: str | None,
    ) -> None:
        self.pid = os.getpid()
        self.book = Book(url, role=role, instance=str(self.pid))
        # The thread's own, always at hand, and impatient: it has deadlines to keep.
        self._own_book = Book(url, role=role, instance=str(self.pid), patience_seconds=_THREAD_PATIENCE_SECONDS)
        self.outbox = Outbox()
        self.masks = masks
        try:
            first = self._own_book.with_patience(0)
            first.read(schema.check_revision)
            self.host_id = holders.attest_host(first, host_identity)
            own = [service.holder.id for service in _services.values()]
            reclaim.end_predecessors(first, self.host_id, kernel.incarnation(), own)
            self.outbox.numbering = look(devices.names(first, self.host_id), masks)
            keep_pci_order(self.numbering)
            self.presence = Presence(self._own_book, self.outbox, self.host_id, role=role, label=label)
            self.tick_seconds, self._lend_seconds = first.periods()
            self.within = self._enter(first, lease)
        except BaseException:  # no connection is left behind, whatever came between
            self._own_book.close()
            self.outbox.close()
            raise
        self._waits: dict[UUID, Wait] = {}
        self._waits_lock = threading.Lock()
        self._listener = self.book.listen(str(self.holder.id))
        self._lookout = Lookout(self.book.with_patience(0))
        self._looks_again = threading.Lock()
        self._stopping = False
        self._outage = Outage(log.warning)
        self.resources = Resources()
        self.runtimes = 0
        self.jobs: set[object] = set()  # of all Runtimes, until they end
        self._host_waits = False  # somebody waited on the host when this process last looked
        self._blocked: set[threading.Thread] = set()
        self.presence.on_lease_lost.append(lambda lost: self.resources.drop_lost())
        # Runs at the end of the interpreter, and also of children of multiprocessing, which end without running atexit;
        # after it has joined its children, for until then there may be something to release.
        Finalize(None, self.stop, exitpriority=-1)
        self._thread = threading.Thread(target=self._loop, name="jayrun-service", daemon=True)
        self._thread.start()

    def _enter(self, book: Book, named: str | None) -> Within | None:
        """Hold the lease that JAYRUN_LEASE names, if there is one."""
        around = surrounding(book, self.host_id, named, self.numbering.visible)
        if around is None:
            return None
        lease_id, epoch = around.lease.id, around.lease.epoch
        within = Within(around, self.outbox, lambda: self.presence.join(self.book, lease_id, epoch))
        with contextlib.suppress(LeaseLost):  # it has ended: whoever asks is told
            within.enter()
        return within

    def reserve(self, ask: Ask) -> Outcome:
        """Answer a request of an invocation. Raises `LeaseLost` if the lease around has ended, and `BookError`."""
        return admission.reserve(self.book, ask) if self.within is None else self.within.reserve(ask)

    def undo(self, unit_id: UUID | None, slot: tuple[UUID, int, int]) -> None:
        """Take an ask back whose answer was never heard; see `Undo`."""
        if self.within is None:
            self.outbox.put(Undo(unit_id, slot))
        else:
            self.within.undo(unit_id or slot[0], slot)

    def finish(self, finished: Finished) -> None:
        """An execution that has asked for something has ended. Of those inside a lease the book never knew."""
        if self.within is None:
            self.outbox.put(finished)

    def drop_member(self, execution_id: UUID, unit_id: UUID, left: tuple[Request, ...]) -> None:
        """Let a set-up that was done by others wait no longer with its unit, which still asks for what is `left`."""
        if self.within is None:
            executions.drop_member(self.book, execution_id, unit_id, shape_of((self.host_id,), left))
            self.combine()
        else:
            self.within.drop_member(execution_id, unit_id, left)

    def wait_for(self, wait: Wait) -> None:
        """Take a parked unit into care: it is resolved when it was admitted and claimed, ended, or timed out."""
        with self._waits_lock:
            self._waits[wait.unit_id] = wait
        self.outbox.wake()

    def abandon(self, unit_id: UUID, *, state: ExecutionState, failure: dict[str, object]) -> Wait | None:
        """Take a unit out of care now, and out of the queue as soon as the book can be told; its Wait, or None when it
        was resolved already."""
        with self._waits_lock:
            wait = self._waits.pop(unit_id, None)
        if self.within is None:
            self.outbox.put(Withdraw(unit_id, state, failure))
        else:
            self.within.withdraw(unit_id)
        return wait

    def tell_set_up(self, key: Any) -> None:
        """A resource is cached now: who waits to set it up too need not wait for that."""
        with self._waits_lock:
            waits = list(self._waits.values())
        for wait in waits:
            try:
                if (left := wait.was_set_up(key)) is not None:
                    wait.requests = left
            except BookError as error:  # then it gets what it does not need, and gives it back
                log.debug("could not tell a waiter that a resource is set up: %s", str(error))

    @property
    def holder(self) -> Holder:
        """This process as the book knows it now."""
        return self.presence.holder

    @property
    def numbering(self) -> Numbering:
        """By which numbers this process uses the devices of its host."""
        return self.outbox.numbering

    def look_again(self, book: Book) -> None:
        """See what the masks mean now, if the book knows other devices than before, or one has failed or is back.

        Once CUDA is initialised it counts for good what the driver showed then.
        """
        fleet = devices.names(book, self.host_id)
        if fleet != list(self.numbering.fleet):
            shown = self.numbering.shown if cuda_is_initialised() else ()
            self.outbox.numbering = look(fleet, self.masks, shown=shown)
            holders.tell_visible(book, self.holder, self.numbering.visible)

    def _look_again_aside(self) -> None:
        """The same for the thread with the deadlines: the driver is asked in another one, for it may hang."""
        if devices.names(self._own_book, self.host_id) == list(self.numbering.fleet) or self._looks_again.locked():
            return

        def look_again() -> None:
            with self._looks_again, contextlib.suppress(BookError):
                self.look_again(self._own_book)

        threading.Thread(target=look_again, name="jayrun-service-names", daemon=True).start()

    @property
    def has_stopped(self) -> bool:
        """Whether the process is at its end: nobody is left to wait, or to tell the book."""
        return self._stopping

    def join(self, lease_id: UUID, epoch: int, *, patience_seconds: float = PATIENCE_SECONDS) -> Hold:
        """Become a further holder of a lease. Raises `LeaseLost`, `PlacementUnavailableHere`, `BookError`, and
        `RuntimeClosed` at the end of the process."""
        if self._stopping:
            raise RuntimeClosed(AT_ITS_END)
        return self.presence.join(self.book.with_patience(patience_seconds), lease_id, epoch)

    def confirm(self, held: Sequence[Held]) -> None:
        """Look whether the book has these holds too; what it has not is lost. A book that is away is believed in."""
        if held and not self._outage.lasts:
            with contextlib.suppress(BookError):
                self.presence.confirm(self.book.with_patience(0), held)

    def combine(self) -> None:
        admission.combine(self.book, self.host_id)

    def flush(self, timeout: float | None) -> bool:
        """Wait until everything enqueued so far is committed; False when `timeout` seconds were not enough."""
        marker = threading.Event()
        self.outbox.put(marker)
        give_up_at = math.inf if timeout is None else time.monotonic() + timeout
        while not marker.wait(max(min(give_up_at - time.monotonic(), _LOOK_SECONDS), 0)):
            if time.monotonic() >= give_up_at or not self._thread.is_alive():  # the interpreter is at its end
                return marker.is_set()
        return True

    @property
    def owes(self) -> bool:
        """Whether something is not told yet."""
        return bool(self.outbox.messages)

    def flush_if_reachable(self) -> None:
        """Wait a little until what was enqueued is committed, but for no book that is away: then it is told later."""
        if not self._outage.lasts and threading.current_thread() is not self._thread:
            self.flush(_FLUSH_SECONDS)

    @property
    def somebody_waits(self) -> bool:
        """Whether somebody waits on the host, as far as this process knows: its word is at most a tick old."""
        return bool(self._waits) or self._host_waits

    def make_room(self) -> None:
        """Flag which idle resources of the host stand in the way of somebody who waits, and tear down what is flagged
        here. Runs user code."""
        try:
            while not self._stopping:
                if self.within is not None:
                    torn_down = [self.resources.tear_down(each) for each in self._flagged()]
                    self.outbox.wake()
                    if not any(torn_down):
                        return
                    continue
                self.resources.publish(self._own_book)
                blockers.make_way(self._own_book, self.host_id)
                if all(self.resources.tear_down(each) for each in self._flagged()):
                    return
                # Something is in use again: the book is told, and perhaps something else is flagged instead.
        except BookError as error:  # the next tick looks again
            log.debug("could not look whether idle resources are in the way: %s", str(error))

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """While this thread waits for one of its executions, and so drops nothing."""
        thread = threading.current_thread()
        self._blocked.add(thread)
        try:
            yield
        finally:
            self._blocked.discard(thread)

    def stop(self) -> None:
        """Flush and end the thread within two seconds; the holder leaves if it holds nothing any more.

        A second call does nothing.
        """
        if self._stopping or os.getpid() != self.pid:
            return
        give_up_at = time.monotonic() + EXIT_FLUSH_SECONDS
        if self.within is not None:
            self.within.leave()
        self.flush(EXIT_FLUSH_SECONDS)
        self._stopping = True
        self.outbox.wake()
        self._thread.join(max(give_up_at - time.monotonic(), 0))
        self._lookout.stop(give_up_at - time.monotonic())
        if not self._thread.is_alive():
            with contextlib.suppress(BookError):
                holders.leave_if_free(self._own_book.with_patience(0), self.holder)
            self.book.close()
            self._own_book.close()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's is ours."""
        self._stopping = True
        self.book.forget()
        self._own_book.forget()
        self._listener.forget()
        self.outbox.close()

    def _loop(self) -> None:
        next_tick = time.monotonic() + self.tick_seconds
        while not self._stopping:
            tick = False
            try:
                named = self._sleep(next_tick)
                self._expire()
                self.presence.take_back_lent(self._lend_seconds)
                # Only an answer of the book ends an outage, so it is asked each time.
                tick = time.monotonic() >= next_tick or self._outage.lasts
                if self.within is not None:  # it needs no book
                    self._attend_within(self.within, tick=tick)
                self._commit()
                named |= self._listen(tick=tick)
                if tick:
                    self._look_again_aside()
                if tick and self.within is None:
                    self.resources.publish(self._own_book)
                if self.presence.beat(only_waits=self._waits_for_the_book, tick=tick):
                    self._listener.close()
                    self._listener = self.book.listen(str(self.holder.id))
                if tick:
                    reconciler.run_pass(self._own_book, self.host_id)
                    if any(Backend.CUDA in device.backends for device in self.numbering.fleet):
                        self._lookout.tick(self.host_id)
                    self._host_waits = leases.anybody_waits(self._own_book, self.host_id)
                    self.book.close_unused()
                    self._own_book.close_unused()  # those of threads that made room
                if (tick or named) and self._flagged():
                    threading.Thread(target=self.make_room, name="jayrun-make-room", daemon=True).start()
                if self.within is None:
                    self._attend_waits()
                self._outage.ended("releases were told")
            except BookError as error:
                self._out_of_reach(error)
            except Exception:  # the thread must live: whoever holds leases depends on it; the log says what to report
                log.exception("jayrun's background service met an unexpected error and tries again")
                time.sleep(_OUTAGE_PAUSE_SECONDS)
            if tick:
                next_tick = time.monotonic() + self.tick_seconds
        self._listener.close()

    def _sleep(self, next_tick: float) -> bool:
        """Until something is enqueued, a notification or a deadline comes, or the tick is due; whether this process was
        named."""
        with self._waits_lock:
            deadlines = [wait.give_up_at for wait in self._waits.values() if wait.give_up_at is not None]
        deadlines += self.presence.lent_until(self._lend_seconds)
        until = min([next_tick, *deadlines])
        if self._outage.lasts:
            until = min(until, time.monotonic() + _OUTAGE_PAUSE_SECONDS)
        named = False
        if not self.outbox.messages or self._outage.lasts:
            named = self._listener.wait(until - time.monotonic(), self.outbox.wake_reader)
        self.outbox.drain_wakes()
        return named

    def _expire(self) -> None:
        """Resolve the waits whose time is over; the book is told when it can be."""
        now = time.monotonic()
        with self._waits_lock:
            late = [wait for wait in self._waits.values() if wait.give_up_at is not None and wait.give_up_at <= now]
        for wait in late:
            failure: dict[str, object] = {"type": "PlacementTimeout", "message": "waited longer than its timeout"}
            if self.abandon(wait.unit_id, state=ExecutionState.FAILED, failure=failure) is not None:
                wait.resolve(PlacementTimeout())

    def _commit(self) -> None:
        """Tell the book what ended; what could not be told stays enqueued."""
        messages = self.outbox.messages
        batch = [messages.popleft() for _ in range(len(messages))]
        try:
            taken_back = False
            for message in batch:
                if isinstance(message, Undo):
                    executions.undo_ask(self._own_book, message.unit_id, message.slot)
                    taken_back = True
                elif isinstance(message, Withdraw):
                    withdrawn = executions.withdraw(
                        self._own_book, message.unit_id, state=message.state, failure=message.failure
                    )
                    taken_back |= withdrawn is not None
            self._settle(batch)
            if taken_back:
                admission.combine(self._own_book, self.host_id)
        except BaseException:  # nothing is forgotten, whatever came between
            messages.extendleft(reversed(batch))
            raise
        for message in batch:
            if isinstance(message, threading.Event):
                message.set()

    def _settle(self, batch: Sequence[Message]) -> None:
        """Commit the ends of leases and executions, and hand on what they let go of."""
        ends = [message for message in batch if isinstance(message, Release)]
        finished = [message for message in batch if isinstance(message, Finished)]
        if not ends and not finished:
            return
        settle = partial(
            self._let_go,
            released=[end.held for end in ends if end.used],
            returned=[end.held for end in ends if not end.used],
        )
        try:
            settle(finished=finished)
        except BookError:
            raise
        except Exception:  # how executions ended could not be stored; that must not keep the capacity
            log.exception("could not store how %d execution(s) ended; their leases end all the same", len(finished))
            settle(finished=[Finished(each.execution_id, each.state) for each in finished])

    def _let_go(self, **ends: Any) -> None:
        """In one transaction with the hand-over where somebody is known to wait: one flush makes both durable."""
        if self.somebody_waits:
            admission.combine(self._own_book, self.host_id, settling=leases.settling(self.holder.id, **ends))
        elif leases.settle(self._own_book, self.host_id, self.holder.id, **ends):
            self._host_waits = True
            admission.combine(self._own_book, self.host_id)

    def _waits_for_the_book(self) -> bool:
        """Whether it only waits as the book sees it, which knows nothing of those that wait inside a lease."""
        return self.within is None and self._only_waits()

    def _only_waits(self) -> bool:
        """Whether this process drops nothing, and has dropped nothing untold, before one of its executions is served.

        All of them wait, and so does every thread that might drop data, in `Runtime.run`. A thread that jayrun does not
        know might drop anything at any time.
        """
        soon = time.monotonic() + _SOON_SECONDS
        with self._waits_lock:
            waits = list(self._waits.values())
        return (
            bool(waits)
            and not self.outbox.messages
            and not self.outbox.lent
            and all(wait.give_up_at is None or wait.give_up_at > soon for wait in waits)
            and all(len(service.jobs) == len(service._waits) for service in list(_services.values()))
            and all(thread in self._blocked or _only_serves(thread) for thread in threading.enumerate())
        )

    def _flagged(self) -> list[UUID]:
        """The resources of this process that are to be torn down."""
        if self.within is not None:
            return list(self.within.in_the_way(self.resources.idle()))
        cached = self.resources.ids()
        return blockers.flagged(self._own_book, cached) if cached else []

    def _listen(self, *, tick: bool) -> bool:
        """Listen while something waits or is cached; whether that began just now: a call may have been missed."""
        if self.within is None and (self._waits or self.resources.ids()):
            return self._listener.open()
        if tick:  # else perhaps somebody waits again soon
            self._listener.close()
        return False

    def _attend_waits(self) -> None:
        with self._waits_lock:
            waits = dict(self._waits)
        if not waits:
            return
        attended = executions.attend(self._own_book, list(waits))
        resolved: list[tuple[UUID, Resolution]] = [
            *attended.claimed.items(),
            *((news.id, news) for news in attended.ended),
        ]
        for unit_id, resolution in resolved:
            self._resolve(waits[unit_id], resolution)
        if attended.woken:
            admission.combine(self._own_book, self.host_id)
            self.outbox.wake()  # to attend again

    def _attend_within(self, within: Within, *, tick: bool) -> None:
        """The same inside a lease, and at each tick whether everybody waits for ever."""
        with self._waits_lock:
            waits = dict(self._waits)
        if not waits:
            return
        resolved = within.attend(list(waits))
        if tick and not resolved and self._only_waits():
            gc.collect()  # perhaps it is only a cycle that keeps what everybody waits for
            resolved = within.attend(list(waits))
            if not resolved and not self._flagged() and self._only_waits():
                resolved = within.give_up()
        for unit_id, resolution in resolved.items():
            self._resolve(waits[unit_id], resolution)

    def _resolve(self, wait: Wait, resolution: Resolution) -> None:
        with self._waits_lock:
            mine = self._waits.pop(wait.unit_id, None)
        if mine is not None:
            wait.resolve(resolution)
        elif isinstance(resolution, Claimed):  # it was abandoned while its grant was on the way
            for lease in resolution.leases:
                self.outbox.give_back(lease)
            for execution_id in resolution.members:
                self.finish(Finished(execution_id, ExecutionState.CANCELLED))

    def _out_of_reach(self, error: Exception) -> None:
        self._outage.began(error, "leases are kept and releases will be told later")
        self._listener.close()
        time.sleep(_OUTAGE_PAUSE_SECONDS)


def _only_serves(thread: threading.Thread) -> bool:
    """Whether it is a service's thread, or one of a Runtime's, which do nothing while every execution waits."""
    return thread.name.startswith(("jayrun-service", "jayrun-run"))


_services: dict[str, Service] = {}
_services_lock = threading.Lock()


def service_for(
    url: str,
    *,
    host_identity: str | None,
    label: str,
    role: str = "runtime",
    masks: Mapping[str, str] | None = None,
    lease: str | None = None,
) -> Service:
    """The service of this process for the book at `url`, started at the first call, which decides the rest.

    `masks` limit what the process sees.

    `lease` names the one around this process, by which its requests are answered if the book knows it.
    Raises `BookUnreachable` and `SchemaMismatch`.
    """
    with _services_lock:
        service = _services.get(url)
        if service is None:
            service = _services[url] = Service(
                url, host_identity=host_identity, label=label, role=role, masks=masks or {}, lease=lease
            )
        return service


def services() -> list[Service]:
    """The services of this process."""
    with _services_lock:
        return list(_services.values())


def own_service(settings: Settings | None = None, *, url: str | None = None, label: str | None = None) -> Service:
    """The service for the book at `url`, else for the one that the settings name; jayrun's own server is started, and
    its book made, when needed."""
    settings = settings or Settings.load()
    return service_for(
        url or _own_book(settings),
        host_identity=settings.host_id,
        label=settings.label if label is None else label,
        masks=settings.masks,
        lease=settings.lease,
    )


def _own_book(settings: Settings) -> str:
    found = ensure(settings)
    if found.kind != "url":
        schema.create_if_missing(found.url)
    return found.url


def _forget_all() -> None:
    global _services_lock
    _services_lock = threading.Lock()
    for service in _services.values():
        service.forget()
    _services.clear()


os.register_at_fork(after_in_child=_forget_all)
