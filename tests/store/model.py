"""The book as the contract tells it, in plain Python: who holds what, who waits, and what each act makes of it.

Who is granted what, kept for and bypassed is asked of the rules (`jayrun.domain.queue.admit`), which know no database;
everything else is a few dictionaries. There is one host, and every unit is one execution.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from uuid import UUID

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, Share
from jayrun.domain.lifecycle import EXECUTION_MOVES, EndReason, ExecutionState
from jayrun.domain.planner import Plan
from jayrun.domain.queue import Admission, Waiter, Worker, admit
from jayrun.domain.requests import Request
from jayrun.domain.sequence import shape_of

READY, RUNNING, WAITING, ADMITTED, SUCCEEDED, FAILED, CANCELLED = ExecutionState
HOST = 1
NEWEST = 2**62
"""The age of an execution that has not been written yet: younger than all."""

Slot = tuple[UUID, int, int]
"""Whose request a lease answers: execution, position, invocation."""


@dataclass
class Process:
    """A holder: `gone` is what the kernel says, `ended` what the book knows."""

    id: UUID
    is_worker: bool = False
    operators: tuple[str, ...] = ()
    silent: bool = False
    gone: bool = False
    ended: bool = False


@dataclass
class Work:
    """An execution. `position` is the request that its invocation issues next."""

    id: UUID
    process: Process | None
    priority: int
    operator: str | None = None
    age: int = NEWEST
    state: ExecutionState = RUNNING
    recorded: list[Request] = field(default_factory=list)
    position: int = 0
    invocation: int = 1
    claim: int = 0
    crashes: int = 0
    bypassed: int = 0
    dormant: bool = False
    cancelling: bool = False

    @property
    def detached(self) -> bool:
        return self.operator is not None

    def becomes(self, state: ExecutionState) -> None:
        assert state in EXECUTION_MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    @property
    def shape(self) -> str:
        return shape_of((HOST,), self.recorded, self.operator)

    def waiter(self) -> Waiter:
        return Waiter(
            id=self.id,
            priority=self.priority,
            age=self.age,
            hosts=(HOST,),
            requests=tuple(self.recorded),
            bypassed=self.bypassed,
            operator=self.operator,
            shape=self.shape,
        )


@dataclass
class Lease:
    """A live lease, and who holds it, by which hold."""

    slot: Slot
    shares: tuple[Share, ...]
    holds: list[tuple[UUID, int]]


class Model:
    def __init__(self, host_id: int, *, bypass_limit: int, crash_limit: int) -> None:
        self.host_id = host_id
        self.bypass_limit = bypass_limit
        self.crash_limit = crash_limit
        self.devices: dict[int, BookedDevice] = {}
        self.processes: dict[UUID, Process] = {}
        self.works: dict[UUID, Work] = {}
        self.leases: dict[Slot, Lease] = {}
        self.ended: dict[Slot, EndReason] = {}

    # --- what there is -------------------------------------------------------------------------------------------

    def fleet(self) -> list[BookedDevice]:
        """The devices with what the live leases have of them."""
        devices = {device.id: device for device in self.devices.values()}
        for lease in self.leases.values():
            for share in lease.shares:
                devices[share.device_id] = devices[share.device_id].with_share(share)
        return [devices[self.devices[index].id] for index in sorted(self.devices)]

    def in_state(self, *states: ExecutionState) -> list[Work]:
        return [work for work in self.works.values() if work.state in states]

    def line(self) -> list[Work]:
        """Who waits, in order: higher priority first, then who asked first."""
        return sorted(self.in_state(WAITING), key=lambda work: (-work.priority, work.age))

    def anybody_waits(self) -> bool:
        return any(not work.dormant for work in self.line())

    def idle_workers(self) -> list[Worker]:
        busy = {work.process.id for work in self.in_state(RUNNING, ADMITTED) if work.detached and work.process}
        return [
            Worker(each.id, frozenset(each.operators))
            for each in self.processes.values()
            if each.operators and not each.silent and not each.ended and each.id not in busy
        ]

    def held_by(self, process: Process) -> list[Lease]:
        return [lease for lease in self.leases.values() if process.id in {holder for holder, _ in lease.holds}]

    def of_invocation(self, work: Work) -> list[Lease]:
        """The leases of the invocation that runs, or is to run, by position."""
        mine = [lease for lease in self.leases.values() if (lease.slot[0], lease.slot[2]) == (work.id, work.invocation)]
        return sorted(mine, key=lambda lease: lease.slot[1])

    def declare(self, device_id: int, index: int, capacity_bytes: int, *, exclusive_only: bool) -> None:
        """Declared anew, a device keeps its state; one that is new or was removed is online."""
        self.devices[index] = BookedDevice(
            id=device_id,
            host_id=self.host_id,
            host_index=index,
            kind=Device.GPU,
            backends=frozenset({Backend.CUDA}),
            capacity_bytes=capacity_bytes,
            exclusive_only=exclusive_only,
            state=self.devices[index].state if index in self.devices else DeviceState.ONLINE,
        )

    def set_state(self, index: int, state: DeviceState) -> None:
        self.devices[index] = replace(self.devices[index], state=state)

    # --- admission -----------------------------------------------------------------------------------------------

    def combine(self) -> None:
        self._apply(self._decide())

    def _decide(self, asking: Waiter | None = None) -> Admission:
        """What the rules say. The dead are never granted anything, known to be dead or not."""
        line = [work.waiter() for work in self.line() if not work.dormant]
        workers = self.idle_workers()
        while True:
            waiters = line if asking is None else [*line, asking]
            decided = admit(
                waiters,
                {HOST: self.fleet()},
                workers={HOST: workers},
                bypass_limit=self.bypass_limit,
                batch=1000,
            )
            waiting = {work.id: work.process for work in self.line()}
            takers = {grant.id: grant.worker for grant in decided.grants}
            dead = {key for key in takers if (process := waiting.get(key)) is not None and process.gone}
            dead |= {worker for worker in takers.values() if worker is not None and self.processes[worker].gone}
            if not dead:
                return decided
            line = [each for each in line if each.id not in dead]
            workers = [each for each in workers if each.id not in dead]

    def _apply(self, decided: Admission) -> None:
        for grant in decided.grants:
            work = self.works.get(grant.id)
            if work is None or work.state is not WAITING:
                continue  # the asking one
            work.becomes(ADMITTED)
            work.invocation += 1
            work.process = self.processes[grant.worker] if grant.worker else work.process
            self.grant(work, 0, grant.plan)
        for bypass in decided.bypasses:
            for work in self.line():
                behind = (-work.priority, work.age) < (-bypass.priority, bypass.age)
                if not work.dormant and behind and work.shape == bypass.shape:
                    work.bypassed = min(work.bypassed + 1, self.bypass_limit)
        for key in decided.impossible:
            if key in self.works and self.works[key].state is WAITING:
                self.works[key].becomes(FAILED)

    def grant(self, work: Work, first: int, plan: Plan) -> None:
        assert work.process is not None
        for position, shares in enumerate(plan, first):
            slot = (work.id, position, work.invocation)
            assert slot not in self.leases
            assert slot not in self.ended
            self.leases[slot] = Lease(slot, shares, [(work.process.id, 0)])

    def reserve(self, work: Work, request: Request, age: int, *, wait: bool) -> str:
        """A running invocation asks; what it is told. `age`: the number that is drawn if it has to be written."""
        if work.cancelling:
            self.combine()
            return "Ended"
        recorded = work.recorded if work.position < len(work.recorded) else [*work.recorded, request]
        # It has its process, and is counted among its equals only once it waits.
        asking = Waiter(
            id=work.id,
            priority=work.priority,
            age=work.age,
            hosts=(HOST,),
            requests=(request,),
            recorded=tuple(recorded),
            shape="",
        )
        for judged in (False, True):
            decided = self._decide(asking)
            own = next((grant for grant in decided.grants if grant.id == work.id), None)
            if own is not None:
                self._write(work, recorded, age)
                self.grant(work, work.position, own.plan)
                work.position += 1
                self._apply(decided)
                return "Granted"
            if work.id in decided.impossible:
                self._apply(decided)
                return "Impossible"
            if judged and wait:
                self._write(work, recorded, age)
                work.becomes(WAITING)
                work.bypassed = 0
                work.process = None if work.detached else work.process
            self._apply(decided)
            if not judged:
                self.bury()
        return "Parked" if wait else "Unavailable"

    def _write(self, work: Work, recorded: list[Request], age: int) -> None:
        work.recorded = list(recorded)
        work.age = min(work.age, age)
        self.works[work.id] = work

    # --- what ends -----------------------------------------------------------------------------------------------

    def leave(self, lease: Lease, hold: tuple[UUID, int], reason: EndReason = EndReason.RELEASED) -> None:
        lease.holds.remove(hold)
        if not lease.holds:
            del self.leases[lease.slot]
            self.ended[lease.slot] = reason

    def give_back(self, work: Work) -> None:
        """What was granted and not used ends, whoever holds it."""
        for lease in self.of_invocation(work):
            for hold in list(lease.holds):
                self.leave(lease, hold, EndReason.RETURNED)

    def withdraw(self, work: Work, state: ExecutionState) -> None:
        if work.state is ADMITTED:
            self.give_back(work)
        work.becomes(state)

    def return_unclaimed(self) -> int:
        """All that is granted and not claimed goes back; who did not answer sleeps until it shows life."""
        overdue = self.in_state(ADMITTED)
        for work in overdue:
            self.give_back(work)
            self._wait_again(work, asleep=True)
        return len(overdue)

    def _wait_again(self, work: Work, *, asleep: bool = False) -> None:
        work.becomes(WAITING)
        if not work.detached:
            work.dormant = work.dormant or asleep
            return
        if asleep and work.process is not None:
            work.process.silent = True
        work.process = None

    def bury(self) -> int:
        """End what the dead left behind; returns how many there were."""
        dead = [process for process in self.processes.values() if process.gone and not process.ended]
        for process in dead:
            self.end(process, crashed=True)
        return len(dead)

    def end(self, process: Process, *, crashed: bool) -> None:
        for work in self.in_state(RUNNING, WAITING, ADMITTED):
            if work.process is not process:
                continue
            if not work.detached:
                work.becomes(FAILED)
            elif work.state is ADMITTED:
                self._wait_again(work)
            elif work.cancelling:
                work.becomes(CANCELLED)
            else:
                work.crashes += crashed
                if work.crashes >= self.crash_limit:
                    work.becomes(FAILED)
                else:
                    self.ready_again(work)
        for lease in self.held_by(process):
            for hold in [hold for hold in lease.holds if hold[0] == process.id]:
                self.leave(lease, hold, EndReason.RECLAIMED)
        process.ended = True

    def ready_again(self, work: Work) -> None:
        work.becomes(READY)
        work.process = None

    # --- workers -------------------------------------------------------------------------------------------------

    def take(self, worker: Process, *, before_waiting: bool) -> Work | str | None:
        """What the worker takes: what it was given, else the first that is ready; "waits" if somebody comes before."""
        given = [work for work in self.in_state(ADMITTED) if work.detached and work.process is worker]
        if given and worker.operators:
            [work] = given
            work.position = len(work.recorded)
            return self._taken(work, worker)

        def first(*states: ExecutionState) -> list[Work]:
            known = [each for each in self.in_state(*states) if each.operator in worker.operators and not each.dormant]
            return sorted(known, key=lambda each: (-each.priority, each.age))[:1]

        if not before_waiting and any(each.state is WAITING for each in first(READY, WAITING)):
            return "waits"
        for work in first(READY):
            work.invocation += work.claim > 0
            work.position = 0
            return self._taken(work, worker)
        return None

    def _taken(self, work: Work, worker: Process) -> Work:
        work.becomes(RUNNING)
        work.claim += 1
        work.process = worker
        return work
