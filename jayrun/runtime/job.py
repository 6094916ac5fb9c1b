"""One run of an operator in this process: its attempts, its invocations, and the waits between them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, assert_never

from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.placements import PlacementLocation
from jayrun.domain.requests import Request
from jayrun.domain.sequence import check_complete, check_next
from jayrun.domain.units import format_bytes
from jayrun.errors import (
    LeaseLost,
    PlacementCancelled,
    PlacementDeadlock,
    PlacementImpossible,
    PlacementSignalSwallowed,
    PlacementTimeout,
)
from jayrun.frames import clear_frames
from jayrun.runtime.calls import called, collect_garbage, stored
from jayrun.runtime.data import Data
from jayrun.runtime.operator import Operator, Resource, bound, declared_inputs
from jayrun.runtime.placement import SWALLOWED, PlacementInterface
from jayrun.runtime.presence import DECLARED_DEAD
from jayrun.runtime.resources import Cached
from jayrun.runtime.retry import RetryPolicy
from jayrun.runtime.service import Resolution, Service, Wait
from jayrun.runtime.signal import PlacementSignal
from jayrun.runtime.work import Invocation, Work
from jayrun.store.asks import Ask, Ended, Granted, Impossible, Parked, Unavailable
from jayrun.store.claims import Taken
from jayrun.store.executions import Claimed, News
from jayrun.store.leases import Finished, Lease

log = logging.getLogger("jayrun")


class Job:
    """Advances in steps: a step runs invocations until the operator returned, failed for good, or has to wait."""

    def __init__(
        self,
        service: Service,
        operator: type[Operator],
        inputs: dict[str, Any],
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
        retry: RetryPolicy,
        taken: Taken | None = None,
    ) -> None:
        self._service = service
        self._operator = operator
        self._inputs = bound(operator, inputs)
        self._resource_inputs = {each.name for each in declared_inputs(operator) if each.resource is not None}
        self._priority = priority
        self._timeout_seconds = timeout_seconds
        self._waited_seconds = 0.0
        self._parked = False  # the book has the unit in its queue
        self._parked_at: float | None = None
        self._retry = retry
        self._attempt = 1
        self._setups: dict[Any, Work] = {}  # set-ups that are not done, by `_setup_key`; they wait with the run
        self._detached = taken is not None
        if taken is None:
            self._work = self._new_work()
        else:
            self._attempt = taken.attempt
            self._work, *setups = Work.taken(taken, service.holder)
            self._setups = {work.execution.setting_up: work for work in setups}
        self._invocation: Invocation | None = None  # the last one of the run itself
        self._cancelled = threading.Event()
        self._no_waiting: str | None = None  # why it may not wait any more

    def step(self, resolution: Resolution | None = None) -> Data | None:
        """Run until there is a result, or None when the unit is parked; `resolution` is what ended the last wait.

        Raises what the operator raised, once the retry policy is used up.
        """
        around = sys.exception()
        while True:
            try:
                if resolution is not None:
                    ended, resolution = resolution, None
                    self._resume(ended)
                return self._finished(self._invoke())
            except PlacementSignal:
                return None
            except BaseException as error:  # whatever user code raised ends the attempt, and is raised again below
                clear_frames(error, around=around)
                self._clean_up(error)
                if not self._try_again(error):
                    raise

    def park(self, resolve: Callable[[Resolution], None]) -> None:
        """Hand the wait to the service after `step` gave None; `resolve` must call `step` again with what it gets."""
        self._parked_at = time.monotonic()
        left = self._seconds_left()
        requests = tuple(request for member in self._unit() for request in member.recorded)
        give_up_at = None if left is None else self._parked_at + left
        self._service.wait_for(Wait(self._work.id, requests, resolve, self._was_set_up, give_up_at))
        if self._no_waiting is not None:  # cancelled between the last request and here
            self.cancel_waiting(self._no_waiting)
        self._service.make_room()

    def cancel(self, why: str) -> None:
        """Take it out of the queue if it waits, which resolves the wait; otherwise its next request is refused."""
        self._cancelled.set()
        self.cancel_waiting(why)

    def cancel_waiting(self, why: str) -> None:
        """Take it out of the queue if it waits; what runs may end, but not wait any more."""
        self._no_waiting = why
        failure: dict[str, object] = {"type": "PlacementCancelled", "message": why}
        wait = self._service.abandon(self._work.id, state=ExecutionState.CANCELLED, failure=failure)
        if wait is not None:
            wait.resolve(News(self._work.id, ExecutionState.CANCELLED, failure))

    def abandon(self, resolution: Resolution | None) -> None:
        """Nobody goes on with it (Ctrl-C, a cancelled Future), perhaps with a `resolution` unread: nothing stays in the
        book, wherever it was on its way."""
        failure: dict[str, object] = {"type": "PlacementCancelled", "message": "interrupted while it waited"}
        self._service.abandon(self._work.id, state=ExecutionState.CANCELLED, failure=failure)
        self._parked = False
        if isinstance(resolution, Claimed):
            self._resume(resolution)
            for work in self._unit():
                work.give_back_unused(self._service.outbox)
                self._finish(work, ExecutionState.CANCELLED)
        self._service.flush_if_reachable()

    def holds_leases(self) -> bool:
        """Whether placements of its last invocation are still reachable."""
        return self._invocation is not None and bool(self._invocation.kept_alive())

    # --- one invocation ----------------------------------------------------------------------------------------------

    def _invoke(self) -> Data:
        in_use: list[Cached] = []
        instance: Operator | None = None
        value: Any = None
        try:
            instance = self._operator.__new__(self._operator)
            for name, value in self._inputs.items():
                if name in self._resource_inputs:
                    value = self._resource(value, in_use).data
                setattr(instance, name, value if isinstance(value, Data) else Data(value))
            data = self._call(self._work, instance, instance.execute)
            for cached in in_use:
                cached.check_leases()
            return data
        finally:
            instance = value = None  # what is torn down below must be in nobody's hands
            for cached in in_use:
                self._service.resources.unuse(cached)
            if in_use and self._service.somebody_waits:
                self._service.make_room()

    def _resource(self, resource: Resource, in_use: list[Cached]) -> Cached:
        """The resource, set up if it is not cached, and in use until the invocation ends."""
        resources = self._service.resources
        key = self._setup_key(resource)
        cached = resources.use(resource)
        if cached is None:
            with resources.setting_up(key):
                cached = resources.use(resource) or self._set_up(resource, in_use)
        in_use.append(cached)
        if (spare := self._setups.pop(key, None)) is not None:  # another run has set it up meanwhile
            spare.give_back_unused(self._service.outbox)
            self._finish(spare, ExecutionState.CANCELLED)
        return cached

    def _set_up(self, resource: Resource, in_use: list[Cached]) -> Cached:
        key = self._setup_key(resource)
        work = self._setups.get(key)
        if work is None:
            described = resource._described if self._detached else None
            work = self._setups[key] = self._work.set_up_for(type(resource).__name__, described)
        instance = type(resource)(**resource._configuration)
        parts = []
        for name, value in resource._configuration.items():
            if isinstance(value, Resource):
                parts.append(self._resource(value, in_use))
                setattr(instance, name, parts[-1].data)
        invocation = Invocation(work)
        data = self._call(work, instance, instance.setup, invocation)
        cached = Cached(work.id, key, instance, data, invocation.leases, parts)
        del data
        self._service.resources.add(cached)
        del self._setups[key]
        self._finish(work, ExecutionState.SUCCEEDED)
        self._service.tell_set_up(resource._key)
        return cached

    def _setup_key(self, resource: Resource) -> Any:
        """Under which key its set-up is looked up: in another process only what can be written down is known of it."""
        return resource._described if self._detached else resource._key

    def _was_set_up(self, key: Any) -> tuple[Request, ...] | None:
        """While this job waits, another one has set up a resource that it waits for too: called by that one's thread.

        What is left to ask for, or None when it was no part of this unit.
        """
        work = self._setups.get(key)
        if work is None or not self._parked:
            return None
        left = tuple(request for each in self._unit() if each is not work for request in each.recorded)
        self._service.drop_member(work.id, self._work.id, left)
        return left

    def _call(
        self,
        work: Work,
        instance: Operator | Resource,
        function: Callable[[], Any],
        invocation: Invocation | None = None,
    ) -> Data:
        """Run user code once, with `self.placement` open, and judge how it ended."""
        around = sys.exception()
        if invocation is None:
            invocation = self._invocation = Invocation(work)
        name = f"{work.execution.name}.{function.__name__}()"
        instance._interface = PlacementInterface(invocation, self._answer)
        try:
            try:
                result = called(function, invocation)
            except PlacementSignal as signal:
                clear_frames(signal, around=around)
                self._give_up_grants(invocation, name)
                raise PlacementSignal() from None
            except BaseException as error:  # whatever user code raised in place of the signal
                if invocation.signalled and not isinstance(error, KeyboardInterrupt | SystemExit):
                    raise PlacementSignalSwallowed(SWALLOWED.format(name=name)) from error
                raise
            if invocation.signalled:
                raise PlacementSignalSwallowed(SWALLOWED.format(name=name))
            self._service.confirm(invocation.held())
            self._check_leases(invocation)
            check_complete([self._service.numbering.issued(each) for each in work.recorded], invocation.issued)
            if not isinstance(result, Data):
                raise TypeError(f"{name} must return a Data, not {result!r} ({type(result).__name__})")
            return result
        finally:
            invocation.end()
            instance._interface = None
            work.give_back_unused(self._service.outbox)

    def _answer(self, invocation: Invocation, request: Request) -> PlacementLocation:
        """A placement for the next request of an invocation, or the exception that ends the call."""
        if self._cancelled.is_set():
            raise PlacementCancelled(f"{self._work.execution.name} was cancelled")
        work = invocation.work
        self._check_leases(invocation)
        numbering = self._service.numbering
        booked = numbering.booked(request)
        check_next([numbering.issued(each) for each in work.recorded], invocation.issued, request)
        position = len(invocation.issued)
        lease = work.granted.pop(position, None)
        if lease is None:
            lease = self._reserve(invocation, position, booked, request)
        self._check_leases(invocation)
        invocation.issued.append(request)
        return invocation.place(self._service.outbox, request, lease)

    def _check_leases(self, invocation: Invocation) -> None:
        """Raises `LeaseLost` if this process has lost what the invocation holds, or was granted to it."""
        invocation.check_leases()
        work = invocation.work
        if work.booked is not None and self._is_a_former_holders(work):
            raise LeaseLost(f"{work.execution.name} has ended in the book: {DECLARED_DEAD}; run it again")

    def _reserve(self, invocation: Invocation, position: int, booked: Request, request: Request) -> Lease:
        """A lease for `request`, which is recorded as the book has it: with the numbers of the host."""
        work = invocation.work
        if position == len(work.recorded):
            work.recorded.append(booked)
        left = self._seconds_left()
        unit = self._unit()
        ask = Ask(
            asker=work.member(),
            position=position,
            companions=tuple(each.member() for each in unit if each is not work),
            age=work.age,
            wait=self._no_waiting is None and (left is None or left > 0),
        )
        try:
            outcome = self._service.reserve(ask)
            if isinstance(outcome, Unavailable):
                # What this process let go a moment ago may not be told yet, and this is the last chance.
                self._service.flush_if_reachable()
                outcome = self._service.reserve(ask)
        except BaseException:  # also Ctrl-C in the middle of it
            # Nobody knows what the book did: once it can be reached, whatever it was is taken back.
            unit_id = None if self._detached else self._work.id
            self._service.undo(unit_id, (work.id, position, work.invocation))
            raise
        match outcome:
            case Granted(lease):
                work.booked = max(work.booked or 0, position + 1)
                return lease
            case Parked():
                self._parked = True
                for each in unit:
                    each.parked()
                invocation.issued.append(request)
                invocation.signalled = True
                raise PlacementSignal()
            case _:
                self._take_back(work, position)
        match outcome:
            case Unavailable():
                if self._no_waiting is not None:
                    raise PlacementCancelled(f"{request.describe()} would have to wait, but {self._no_waiting}")
                raise PlacementTimeout(
                    f"{request.describe()} is not available now, "
                    f"and timeout={self._timeout_seconds} leaves no time to wait"
                )
            case Impossible(reason):
                raise PlacementImpossible(reason)
            case Ended("lost"):
                raise LeaseLost(
                    f"{work.execution.name} cannot ask: {DECLARED_DEAD}, or another machine has taken its host's place "
                    "(then the log says so); run it again"
                )
            case Ended(state):
                raise PlacementCancelled(f"{work.execution.name} is {state} in the book: somebody ended it")
            case _:
                assert_never(outcome)

    @staticmethod
    def _take_back(work: Work, position: int) -> None:
        """A refused request was not recorded: user code may catch the refusal and ask for something else."""
        if position == len(work.recorded) - 1 and (work.booked or 0) <= position:
            work.recorded.pop()

    def _give_up_grants(self, invocation: Invocation, name: str) -> None:
        """What a parked invocation had been granted goes back; placements that user code kept stay, with a warning."""
        for work in self._unit():
            work.give_back_unused(self._service.outbox)
        # Frames are cleared; what is left may only be a cycle, of this invocation or of older work. It would keep
        # capacity until the collector came by, perhaps from this very waiter, so the collector comes now.
        collect_garbage()
        for lease in invocation.kept_alive():
            memory = format_bytes(sum(share.memory_bytes for share in lease.shares))
            log.warning(
                "%s waits, but user code keeps a placement of its ended invocation alive: lease %s (%s on device %s) "
                "stays taken",
                name,
                lease.id,
                memory,
                ", ".join(str(share.host_index) for share in lease.shares),
            )

    # --- between invocations -----------------------------------------------------------------------------------------

    def _resume(self, resolution: Resolution) -> None:
        """Take what ended a wait: everything granted, or the reason why nothing ever will be."""
        self._parked = False
        if self._parked_at is not None:
            self._waited_seconds += time.monotonic() - self._parked_at
            self._parked_at = None
        if isinstance(resolution, Claimed):
            # A set-up that was dropped meanwhile has ended in the book; if it is needed after all, it is a new one.
            self._setups = {key: work for key, work in self._setups.items() if work.id in resolution.members}
            for work in self._unit():
                work.claimed(resolution)
            return
        for work in self._unit():
            work.booked = None  # it has ended in the book; a further attempt is a new execution
        self._service.flush_if_reachable()  # so that nothing of it is left when the caller hears of it
        if isinstance(resolution, PlacementTimeout):
            asked = ", ".join(request.describe() for work in self._unit() for request in work.recorded)
            raise PlacementTimeout(f"waited {self._timeout_seconds:g} s for {asked}; nothing of it is left")
        failure = resolution.failure or {}
        message = str(failure.get("message", "it was ended while it waited"))
        if failure.get("type") == "PlacementImpossible":
            raise PlacementImpossible(message)
        if failure.get("type") == "PlacementDeadlock":
            raise PlacementDeadlock(message)
        if failure.get("type") == "LeaseLost":  # the one around this process
            raise LeaseLost(message)
        if failure.get("type") == "ProcessDied":
            raise LeaseLost(f"{self._work.execution.name} has lost its place in the queue: {message}; run it again")
        raise PlacementCancelled(f"{self._work.execution.name} was {resolution.state.value}: {message}")

    def _finished(self, data: Data) -> Data:
        for spare in self._setups.values():  # taken with the run, and not needed here
            spare.give_back_unused(self._service.outbox)
            self._finish(spare, ExecutionState.CANCELLED)
        self._finish(self._work, ExecutionState.SUCCEEDED)
        return data

    def _clean_up(self, error: BaseException) -> None:
        """After a failed attempt: nothing waits, nothing granted is left unused."""
        if self._parked:  # it was to wait, and failed on the way: the signal was swallowed, or Ctrl-C came
            self._parked = False
            self._service.abandon(self._work.id, state=ExecutionState.FAILED, failure=stored(error))
            self._service.flush_if_reachable()
            for work in self._unit():
                work.booked = None
        for work in self._unit():
            work.give_back_unused(self._service.outbox)
            if self._is_a_former_holders(work):
                work.booked = None  # whoever declared this process dead has ended it in the book

    def _try_again(self, error: BaseException) -> bool:
        again = not self._detached and self._retry.allows(error, self._attempt)
        if again and not self._cancelled.wait(self._retry.pause_seconds(self._attempt)):
            self._attempt += 1
            self._renew(self._unit())
            return True
        for work in self._unit():
            self._finish(work, ExecutionState.FAILED, error)
        return False

    def _renew(self, unit: Iterable[Work]) -> None:
        """The next attempt is the next invocation; an execution that ended in the book is replaced by a new one."""
        for work in list(unit):
            work.invocation += 1
        if self._work.booked is None and (self._work.recorded or self._is_a_former_holders(self._work)):
            recorded = self._work.recorded
            self._work = self._new_work()
            self._work.recorded = recorded
        if any(work.booked is None for work in self._setups.values()):
            self._setups.clear()  # set-ups ask anew, as part of the run that there is now

    def _finish(self, work: Work, state: ExecutionState, error: BaseException | None = None) -> None:
        if work.booked is not None and not (self._detached and work is self._work):  # its worker tells of that
            failure = None if error is None else stored(error)
            self._service.finish(Finished(work.id, state, failure, self._attempt))

    def _is_a_former_holders(self, work: Work) -> bool:
        """Whether this process was declared dead since then, and is another holder now."""
        return work.execution.holder_id != self._service.holder.id

    def _seconds_left(self) -> float | None:
        """What is left of the timeout for waiting; None without one."""
        return None if self._timeout_seconds is None else self._timeout_seconds - self._waited_seconds

    def _unit(self) -> list[Work]:
        """The executions that wait together: set-ups that are not done, and the run."""
        return [*self._setups.values(), self._work]

    def _new_work(self) -> Work:
        return Work.new(
            kind="operator", name=self._operator.__name__, holder=self._service.holder, priority=self._priority
        )
