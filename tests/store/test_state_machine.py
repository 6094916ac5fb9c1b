"""Everything that may happen to a book, in any order, against the rules: after each step it is what the model says.

A crash is a real process that is killed; whether it is dead is asked of the kernel, by whoever comes to judge.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest
from chance import SEED
from fleet import EMPTY, cuda, cuda_group
from history import Declared, last_event, replay
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    initialize,
    invariant,
    rule,
)
from model import ADMITTED, CANCELLED, FAILED, READY, RUNNING, SUCCEEDED, WAITING, Lease, Model, Process, Work

from jayrun import kernel
from jayrun.domain.devices import Backend, Device, DeviceState, RuntimeDevice
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.requests import Request
from jayrun.errors import DeviceInUse, LeaseLost
from jayrun.store import admission, audit, claims, devices, executions, holders, leases, reclaim, submissions
from jayrun.store.admission import Ask, Execution, Granted, Member
from jayrun.store.claims import Done, Taken
from jayrun.store.holders import Holder
from jayrun.store.leases import Finished, Held
from jayrun.store.submissions import submission
from jayrun.store.transactions import Book

T = TypeVar("T")
Sql = psycopg.Connection[tuple[Any, ...]]

GB = 10**9
BYPASS_LIMIT, CRASH_LIMIT = 2, 3
OPERATORS = ("Embed", "Train")
MOST_OPEN = 7

requests = st.one_of(
    st.builds(cuda, st.sampled_from([4, 12])),
    st.builds(cuda, st.just(12), device_id=st.sampled_from([0, 1])),
    st.builds(cuda, st.just(0), exclusive=st.just(True)),
    st.builds(cuda_group, st.just(2), st.sampled_from([4, 8])),
)
often = st.sampled_from([True, True, True, False])
priorities = st.sampled_from([0, 0, 0, 1])


def same(found: Sequence[tuple[Any, ...]], meant: Sequence[tuple[Any, ...]]) -> None:
    """Both have the same rows; only those that differ are shown."""
    assert sorted(set(found) - set(meant), key=str) == sorted(set(meant) - set(found), key=str)
    assert len(found) == len(meant)


# What happens, and how often.
ACTS = (
    "ask_first " * 5 + "ask_for_more " * 3 + "attend " * 5 + "release " * 5 + "finish " * 3 + "join " * 2 + "too_late "
    "submit submit submit submit accept "
    + "go_on "
    * 12
    + "crash depart sweep cancel time_out nobody_claims nobody_claims "
    "declare set_state set_state remove"
).split()


class BookMachine(RuleBasedStateMachine):
    book: Book
    sql: Sql
    spare: list[subprocess.Popen[bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[UUID, subprocess.Popen[bytes]] = {}
        self.declared: list[Declared] = []
        self.ages = 0
        self.holds = 0

    # --- the scene -----------------------------------------------------------------------------------------------

    @initialize()
    def a_host_with_two_devices(self) -> None:
        self.sql.execute(EMPTY)
        self.sql.execute("UPDATE jayrun.settings SET bypass_limit = %s, crash_limit = %s", (BYPASS_LIMIT, CRASH_LIMIT))
        self.host_id = holders.attest_host(self.book, "test-host")
        self.model = Model(self.host_id, bypass_limit=BYPASS_LIMIT, crash_limit=CRASH_LIMIT)
        self._declare(0, 16)
        self._declare(1, 16)
        for role in ("runtime", "runtime", "worker", "worker"):
            self.arrive(role)

    @rule(what=st.sampled_from(ACTS), data=st.data())
    def happens(self, what: str, data: st.DataObject) -> None:
        """One rule for all: rules of a machine are switched off in turn, and here little goes without the others."""
        self.draw = data.draw
        getattr(self, what)()

    def pick(self, of: Sequence[T]) -> T:
        return of[self.draw(st.integers(0, len(of) - 1))]

    def arrive(self, role: str) -> None:
        child = self.spare.pop() if self.spare else subprocess.Popen(["sleep", "1000"])
        who = kernel.incarnation(child.pid)
        holder = holders.register(self.book, self.host_id, role=role, incarnation=who)
        self.children[holder.id] = child
        self.model.processes[holder.id] = Process(holder.id, is_worker=role == "worker")
        if role == "worker":
            self._accept(self.model.processes[holder.id], OPERATORS)

    def acting(self, *, workers: bool | None = None) -> list[Process]:
        """The processes that may still do something."""
        return [
            each
            for each in self.model.processes.values()
            if not each.gone and not each.ended and workers in (None, each.is_worker)
        ]

    def programs(self) -> list[Process]:
        return self.acting(workers=False)

    def workers(self) -> list[Process]:
        return self.acting(workers=True)

    def works(self, *states: ExecutionState, detached: bool | None = None) -> list[Work]:
        """Those of them whose process, if they have one, can act."""
        return [
            work
            for work in self.model.in_state(*states)
            if detached in (None, work.detached) and (work.process is None or work.process in self.acting())
        ]

    def open(self, *, detached: bool) -> list[Work]:
        return [work for work in self.model.in_state(READY, RUNNING, WAITING, ADMITTED) if work.detached is detached]

    def holds_in_use(self) -> list[tuple[Lease, tuple[UUID, int]]]:
        acting = {process.id for process in self.acting()}
        return [
            (lease, hold)
            for lease in self.model.leases.values()
            if self.model.works[lease.slot[0]].state is not ADMITTED
            for hold in lease.holds
            if hold[0] in acting
        ]

    # --- asking --------------------------------------------------------------------------------------------------

    def ask_first(self) -> None:
        """One or several executions of one shape come."""
        request, priority, wait = self.draw(requests), self.draw(priorities), self.draw(often)
        for _ in range(self.draw(st.integers(1, 3))):
            if len(self.open(detached=False)) < MOST_OPEN:
                self._ask(Work(uuid4(), self.pick(self.programs()), priority), request, wait=wait)

    def ask_for_more(self) -> None:
        if running := self.works(RUNNING):
            self._ask(self.pick(running), self.draw(requests), wait=True)

    def _ask(self, work: Work, request: Request, *, wait: bool) -> None:
        process = work.process
        assert process is not None
        is_booked = work.detached or work.id in self.model.works
        execution = Execution(
            id=work.id,
            kind="operator",
            name=work.operator or "Test",
            host_id=self.host_id,
            holder_id=process.id,
            unit_id=work.id,
            priority=work.priority,
            detached=work.detached,
            operator=work.operator,
        )
        again = work.position < len(work.recorded)  # it was tried before, and asks the same
        request = work.recorded[work.position] if again else request
        ask = Ask(
            asker=Member(
                execution=execution,
                invocation=work.invocation,
                recorded=tuple(work.recorded if again else [*work.recorded, request]),
                booked=len(work.recorded) if is_booked else None,
            ),
            position=work.position,
            age=self._age_in_book(work) if is_booked else None,
            wait=wait,
        )
        before = self.model.of_invocation(work)
        outcome = admission.reserve(self.book, ask)
        expected = self.model.reserve(work, request, self._next_age(), wait=wait)
        assert type(outcome).__name__ == expected
        if isinstance(outcome, Granted):
            [mine] = [lease for lease in self.model.of_invocation(work) if lease not in before]
            assert [share.device_key for share in outcome.lease.shares] == [share.device_id for share in mine.shares]
        elif expected == "Parked":
            # The invocation has ended: what it had goes back, whoever is served by that.
            self._leave(process, [(lease, (process.id, 0)) for lease in before if (process.id, 0) in lease.holds])

    def _next_age(self) -> int:
        self.ages += 1
        return self.ages

    def _age_in_book(self, work: Work) -> int:
        [(age,)] = self.sql.execute("SELECT age FROM jayrun.executions WHERE id = %s", (work.id,)).fetchall()
        return int(age)

    def attend(self) -> None:
        """The process of one that waits shows life; it claims what was granted."""
        waiting = self.works(WAITING, ADMITTED, detached=False)
        if waiting := [work for work in waiting if work.state is ADMITTED or work.dormant] or waiting:
            self._attend(self.pick(waiting))

    def _attend(self, work: Work) -> None:
        attended = executions.attend(self.book, [work.id])
        woken, work.dormant = work.dormant, False
        assert attended.woken == woken
        assert attended.ended == []
        assert list(attended.claimed) == ([work.id] if work.state is ADMITTED else [])
        if work.state is ADMITTED:
            work.becomes(RUNNING)
            work.claim += 1
            work.position = len(work.recorded)
            self._same_leases(work, attended.claimed[work.id].leases)
        if woken:
            self._combine()

    def _same_leases(self, work: Work, told: Sequence[leases.Lease]) -> None:
        got = [(lease.position, [share.device_key for share in lease.shares]) for lease in told]
        mine = self.model.of_invocation(work)
        assert got == [(lease.slot[1], [share.device_id for share in lease.shares]) for lease in mine]

    def _combine(self) -> None:
        admission.combine(self.book, self.host_id)
        self.model.combine()

    # --- letting go ----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Or its author dies before it has handed the capacity on, and whoever comes next does."""
        if holds := self.holds_in_use():
            lease, hold = self.pick(holds)
            self._leave(self.model.processes[hold[0]], [(lease, hold)], combines=self.draw(often))

    def _leave(
        self,
        process: Process,
        holds: Sequence[tuple[Lease, tuple[UUID, int]]],
        *,
        finished: Work | None = None,
        combines: bool = True,
    ) -> None:
        somebody_waits = leases.settle(
            self.book,
            self.host_id,
            process.id,
            released=[self._held(lease, number) for lease, (_, number) in holds],
            finished=[] if finished is None else [Finished(finished.id, SUCCEEDED)],
        )
        for lease, hold in holds:
            self.model.leave(lease, hold)
        if finished is not None:
            finished.becomes(SUCCEEDED)
        assert somebody_waits == self.model.anybody_waits()
        if somebody_waits and combines:
            self._combine()

    def _held(self, lease: Lease, hold: int = 0) -> Held:
        row = self.sql.execute(
            "SELECT id, epoch FROM jayrun.leases WHERE (execution_id, position, invocation) = (%s, %s, %s)", lease.slot
        ).fetchone()
        assert row is not None
        return Held(row[0], row[1], hold)

    def finish(self) -> None:
        if not (running := self.works(RUNNING, detached=False)):
            return
        work = self.pick(running)
        process = work.process
        assert process is not None
        keeps_its_data = self.draw(st.booleans())
        mine = [] if keeps_its_data else [(each, (process.id, 0)) for each in self.model.of_invocation(work)]
        self._leave(process, [(lease, hold) for lease, hold in mine if hold in lease.holds], finished=work)

    def join(self) -> None:
        if holds := self.holds_in_use():
            lease, _ = self.pick(holds)
            process = self.pick(self.acting())
            self.holds += 1
            leases.join(self.book, Holder(process.id, self.host_id), self._held(lease, self.holds))
            lease.holds.append((process.id, self.holds))

    def too_late(self) -> None:
        """A lease that has ended is joined by nobody, and a late release of it changes nothing."""
        if self.model.ended:
            held = self._held(Lease(self.pick(list(self.model.ended)), (), []))
            process = self.pick(self.acting())
            with pytest.raises(LeaseLost):
                leases.join(self.book, Holder(process.id, self.host_id), held)
            leases.release(self.book, self.host_id, process.id, [held])

    # --- those who are gone --------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Whoever asks next may be the first to notice, or a pass, or an admission that comes before either."""
        busy = {work.process.id for work in self.model.in_state(RUNNING, WAITING, ADMITTED) if work.process}
        process = self.pick([each for each in self.acting() if each.id in busy] or self.acting())
        child = self.children.pop(process.id)
        child.kill()
        child.wait()
        process.gone = True
        if self.draw(often):
            self.release()
        self.arrive("worker" if process.is_worker else "runtime")

    def sweep(self) -> None:
        assert reclaim.sweep(self.book, self.host_id) == self.model.bury()
        self._combine()

    def depart(self) -> None:
        process = self.pick(self.acting())
        holders.leave(self.book, Holder(process.id, self.host_id))
        self.model.end(process, crashed=False)
        self._combine()
        self.arrive("worker" if process.is_worker else "runtime")

    def nobody_claims(self) -> None:
        """Nothing that is granted is claimed in time."""
        self.sql.execute("UPDATE jayrun.settings SET claim_seconds = 0.000001")
        assert executions.return_unclaimed(self.book, self.host_id) == self.model.return_unclaimed()
        self.sql.execute("UPDATE jayrun.settings SET claim_seconds = DEFAULT")
        self._combine()

    # --- administrators ------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        if not self.model.works:
            return
        work = self.pick(list(self.model.works.values()))
        look = submissions.cancel(self.book, work.id, who="me")
        if work.state in (WAITING, ADMITTED):
            self.model.withdraw(work, CANCELLED)
        elif work.state is READY:
            work.becomes(CANCELLED)
        elif work.state is RUNNING:
            work.cancelling = True
        else:
            return
        self.model.combine()
        assert look.state is work.state

    def time_out(self) -> None:
        if waiting := self.works(WAITING, ADMITTED, detached=False):
            work = self.pick(waiting)
            assert executions.withdraw(self.book, work.id, state=FAILED, failure={"type": "PlacementTimeout"})
            self.model.withdraw(work, FAILED)
            self._combine()

    def declare(self) -> None:
        index, memory_gb = self.draw(st.integers(0, 2)), self.draw(st.sampled_from([8, 16, 16, 24]))
        self._declare(index, memory_gb, exclusive_only=not self.draw(often))

    def _declare(self, index: int, memory_gb: int, *, exclusive_only: bool = False) -> None:
        told = RuntimeDevice(Device.GPU, [Backend.CUDA], index, memory_gb, exclusive_only)
        devices.declare(self.book, self.host_id, [told])
        [(device_id,)] = self.sql.execute("SELECT id FROM jayrun.devices WHERE host_index = %s", (index,)).fetchall()
        self.declared.append(Declared(last_event(self.sql), device_id, memory_gb * GB, exclusive_only))
        self.model.declare(device_id, index, memory_gb * GB, exclusive_only=exclusive_only)
        self._combine()

    def set_state(self) -> None:
        """Devices drain, go offline, and come back."""
        if self.model.devices:
            index = self.pick(sorted(self.model.devices))
            state = self.draw(st.sampled_from([*DeviceState, *[DeviceState.ONLINE] * 3]))
            devices.set_state(self.book, self.host_id, kind="gpu", host_indexes=[index], state=state)
            self.model.set_state(index, state)
            self._combine()

    def remove(self) -> None:
        if not self.model.devices:
            return
        index = self.pick(sorted(self.model.devices))
        [device] = [each for each in self.model.fleet() if each.host_index == index]
        if device.share_count:
            with pytest.raises(DeviceInUse):
                devices.remove(self.book, self.host_id, kind="gpu", host_indexes=[index])
            return
        devices.remove(self.book, self.host_id, kind="gpu", host_indexes=[index])
        del self.model.devices[index]
        self._combine()

    # --- submitted work ------------------------------------------------------------------------------------------

    def submit(self) -> None:
        for operator in self.draw(st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=2)):
            if len(self.open(detached=True)) < MOST_OPEN:
                priority = self.draw(priorities)
                key = submissions.submit(self.book, submission(operator, {}, priority=priority))
                self.model.works[key] = Work(key, None, priority, operator, age=self._next_age(), state=READY)

    def accept(self) -> None:
        """A worker gets ready, or drains."""
        self._accept(self.pick(self.workers()), self.draw(st.sampled_from([(), OPERATORS[:1], OPERATORS, OPERATORS])))

    def _accept(self, worker: Process, operators: Sequence[str]) -> None:
        claims.accept(self.book, worker.id, operators)
        worker.operators, worker.silent = tuple(operators), False

    def go_on(self) -> None:
        """A worker ends what it runs, if it runs something, and takes the next, which asks."""
        worker = self.pick(self.workers())
        done = None
        for work in [each for each in self.works(RUNNING, detached=True) if each.process is worker]:
            mine = [(each, (worker.id, 0)) for each in self.model.of_invocation(work)]
            self._leave(worker, [(lease, hold) for lease, hold in mine if hold in lease.holds])
            state = self.draw(st.sampled_from([SUCCEEDED, FAILED, READY]))
            done = Done(id=work.id, claim=work.claim, state=state)
            if state is READY and not work.cancelling:
                self.model.ready_again(work)
            else:
                work.becomes(CANCELLED if state is READY else state)
        found = claims.take(self.book, worker.id, done)
        taken = self.model.take(worker, before_waiting=False)
        assert (found.is_alive, found.finished, found.waits) == (True, None if done is None else True, taken == "waits")
        if taken == "waits":
            self._combine()
            found = claims.take(self.book, worker.id, before_waiting=True)
            taken = self.model.take(worker, before_waiting=True)
        assert isinstance(taken, Work | None)
        self._same_taken(found.taken, taken)
        if taken is not None:
            self._ask(taken, self.draw(requests), wait=True)

    def _same_taken(self, found: Taken | None, work: Work | None) -> None:
        assert (None if found is None else found.id) == (None if work is None else work.id)
        if found is not None and work is not None:
            assert found.claim == work.claim
            assert found.unit.members[work.id][0] == work.invocation
            self._same_leases(work, found.unit.leases)

    # --- what must be the same -----------------------------------------------------------------------------------

    @invariant()
    def the_book_is_what_the_model_says(self) -> None:
        same(
            self.sql.execute(
                "SELECT id, state, holder_id, invocation, claim, crashes, bypassed, dormant,"
                " state = 'running' AND cancelled_at IS NOT NULL FROM jayrun.executions"
            ).fetchall(),
            [
                (
                    *(each.id, each.state.value, each.process and each.process.id, each.invocation, each.claim),
                    *(each.crashes, each.bypassed, each.dormant, each.cancelling and each.state is RUNNING),
                )
                for each in self.model.works.values()
            ],
        )

    @invariant()
    def who_waits_waits_in_order(self) -> None:
        queue = self.sql.execute(
            "SELECT host_id IS NULL, execution_id FROM jayrun_audit.queue ORDER BY position"
        ).fetchall()
        for detached in (False, True):
            meant = [work.id for work in self.model.line() if work.detached is detached]
            assert [key for anywhere, key in queue if anywhere is detached] == meant

    @invariant()
    def who_holds_holds_the_same(self) -> None:
        live, slot = self.model.leases.values(), "l.execution_id, l.position, l.invocation"
        same(
            self.sql.execute(
                f"SELECT {slot}, s.device_id, s.memory_bytes, s.exclusive"
                " FROM jayrun.leases l JOIN jayrun.lease_shares s ON s.lease_id = l.id WHERE l.ended_at IS NULL"
            ).fetchall(),
            [(*e.slot, s.device_id, s.memory_bytes, s.exclusive) for e in live for s in e.shares],
        )
        same(
            self.sql.execute(
                f"SELECT {slot}, x.holder_id, x.hold"
                " FROM jayrun.leases l JOIN jayrun.lease_holders x ON x.lease_id = l.id WHERE x.ended_at IS NULL"
            ).fetchall(),
            [(*lease.slot, *hold) for lease in live for hold in lease.holds],
        )
        same(
            self.sql.execute(f"SELECT {slot}, end_reason FROM jayrun.leases l WHERE ended_at IS NOT NULL").fetchall(),
            [(*slot, reason.value) for slot, reason in self.model.ended.items()],
        )

    @invariant()
    def devices_and_processes_are_the_same(self) -> None:
        assert devices.fleet(self.book, self.host_id)[0] == self.model.fleet()
        same(
            self.sql.execute("SELECT id, state = 'ended', silent FROM jayrun.holders").fetchall(),
            [(each.id, each.ended, each.silent) for each in self.model.processes.values()],
        )
        assert audit.violations(self.book) == []

    def teardown(self) -> None:
        self.spare += self.children.values()
        if hasattr(self, "model"):
            replay(self.sql, self.declared)


@contextmanager
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that outlived their part, for the next that is needed."""
    spare: list[subprocess.Popen[bytes]] = []
    try:
        yield spare
    finally:
        for child in spare:
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("histories", "steps"), [(20, 60), pytest.param(60, 80, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_book_does_what_the_rules_say(book: Book, sql: Sql, histories: int, steps: int) -> None:
    with children() as spare:
        machine = type("Machine", (BookMachine,), {"book": book, "sql": sql, "spare": spare})
        chosen = settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        seed(SEED)(get_state_machine_test(machine, settings=chosen))()
