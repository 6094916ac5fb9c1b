"""Inside the lease of a `jayrun run`, seen from one process: who is served, who waits, and who is refused."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import MakeRuntime, Scene, cuda, cuda_group, gpus, scene
from processes import PATIENCE, until
from test_resources import Model, Use, log
from test_waiting import Probe, Take

from jayrun import Data, Operator, Resource, Runtime
from jayrun.domain.requests import Request
from jayrun.errors import (
    LeaseLost,
    PlacementDeadlock,
    PlacementImpossible,
    PlacementSignalSwallowed,
    PlacementTimeout,
    RequestSequenceChanged,
)
from jayrun.placement import Placement
from jayrun.settings import Settings
from jayrun.store import admission, audit, holders, reclaim
from jayrun.store.admission import Ask, Execution, Granted, Member
from jayrun.store.ids import new_id
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

GB = 10**9
Sql = psycopg.Connection[tuple[Any, ...]]
Inside = Callable[..., Runtime]


@pytest.fixture
def outer(book: Book) -> Scene:
    """A host with two GPUs of 24 GB, and a holder that takes what `jayrun run` would."""
    found = scene(book, gpus(2))
    return Scene(book, found.host_id, holders.register(book, found.host_id, role="command"))


def command_lease(outer: Scene, request: Request) -> Lease:
    key = new_id()
    host_id, holder_id = outer.host_id, outer.holder.id
    execution = Execution(id=key, kind="command", name="x", host_id=host_id, holder_id=holder_id, unit_id=key)
    member = Member(execution=execution, invocation=1, recorded=(request,))
    granted = admission.reserve(outer.book, Ask(asker=member, position=0, wait=False))
    assert isinstance(granted, Granted), granted
    return granted.lease


@pytest.fixture
def inside(make_runtime: MakeRuntime, outer: Scene) -> Inside:
    """`inside(request)` makes a Runtime whose process was started with the lease of `request`."""

    def enter(request: Request, **arguments: Any) -> Runtime:
        return named(str(command_lease(outer, request).id), **arguments)

    def named(lease: str, **arguments: Any) -> Runtime:
        return make_runtime(settings=Settings(lease=lease, host_id="test-host"), **arguments)

    return enter


def waits(runtime: Runtime, count: int = 1) -> None:
    until(lambda: len(runtime._service._waits) == count)


def writes(sql: Sql) -> tuple[object, ...]:
    """What every request outside would have written."""
    row = sql.execute(
        "SELECT (SELECT count(*) FROM jayrun.executions), (SELECT count(*) FROM jayrun.placement_requests), "
        "(SELECT count(*) FROM jayrun.leases), (SELECT count(*) FROM jayrun.lease_events)"
    ).fetchone()
    assert row is not None
    return row


def test_requests_are_answered_from_the_lease_and_the_book_hears_of_none(
    inside: Inside, outer: Scene, book: Book, sql: Sql
) -> None:
    runtime = inside(cuda(10))
    [lease] = audit.leases(book)
    assert lease["holders"] == 2
    before = writes(sql)
    data = [runtime.run(Take, memory_gb=5) for _ in range(2)]
    for each in data:
        placement = each.placement
        assert isinstance(placement, Placement)
        assert (placement.lease_id, placement.epoch) == (lease["id"], lease["epoch"])
        assert (placement.memory_bytes, placement.device_ids, placement.host_index) == (5 * GB, (0,), 0)
    del data, each, placement
    for _ in range(3):  # each time all of it again
        assert runtime.run(Take, memory_gb=10).value == "taken"
    assert runtime.flush(PATIENCE)
    assert writes(sql) == before
    assert audit.capacity(book)[0]["reserved_bytes"] == 10 * GB


def test_an_exclusive_lease_has_the_whole_device_and_lets_it_be_had_alone(inside: Inside) -> None:
    runtime = inside(cuda_group(2, 0, exclusive=True))

    def body(self: Operator) -> Any:
        group = self.placement.cuda_group(per_device_memory_gb=20, max_devices=2, min_devices=2)
        return [group.device_ids, group.reserved_memory_bytes]

    assert runtime.run(Probe, body=body).value == [(0, 1), 40 * GB]
    alone = runtime.run(Probe, body=lambda self: Data("alone", self.placement.cuda(0, exclusive=True, device_id=1)))
    beside = runtime.run(Take, memory_gb=24)
    assert beside.placement.device_ids == (0,)
    with pytest.raises(PlacementTimeout):
        runtime.run(Take, timeout=0, memory_gb=1)
    del alone
    assert runtime.run(Take, timeout=0, memory_gb=1).placement.device_ids == (1,)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda self: self.placement.cuda(11), r"gpu 0: 10 GB, cuda: too small\n.*inside `jayrun run`.*JAYRUN_LEASE"),
        (lambda self: self.placement.cuda(1, device_id=1), r"gpu 0: 10 GB, cuda: not device_id 1"),
        (lambda self: self.placement.cuda(1, exclusive=True), r"its lease shares gpu 0 with others\nThis runs inside"),
        (lambda self: (self.placement.cuda(6), self.placement.cuda(6)), r"together, although each could be alone"),
    ],
)
def test_what_does_not_fit_in_the_lease_is_impossible_at_once(inside: Inside, body: Any, message: str) -> None:
    runtime = inside(cuda(10))
    with pytest.raises(PlacementImpossible, match=r"(?s)" + message):
        runtime.run(Probe, body=body)
    assert runtime.run(Take, timeout=0, memory_gb=10).value == "taken"


def test_it_waits_for_its_own_data_and_is_started_again_with_all_it_recorded(inside: Inside, book: Book) -> None:
    runtime = inside(cuda(10))
    blocker = runtime.run(Take, memory_gb=6)
    calls: list[int] = []

    def body(self: Operator) -> int:
        calls.append(1)
        return len([self.placement.cuda(2) for _ in range(4)])

    future = runtime.start(Probe, body=body)
    waits(runtime)
    assert runtime.run(Take, timeout=0, memory_gb=4).value == "taken"  # it holds nothing while it waits
    assert audit.queue(book) == []
    del blocker
    assert future.result(PATIENCE).value == 4
    assert len(calls) == 2


def test_higher_priority_and_then_who_asked_first_is_served_first(inside: Inside) -> None:
    runtime = inside(cuda(10))
    blocker = runtime.run(Take, memory_gb=10)
    order: list[str] = []

    def body(name: str) -> Callable[[Operator], Any]:
        def take(self: Operator) -> None:
            kept = self.placement.cuda(10)  # until it is written down: what nobody keeps is others' at once
            order.append(name)
            del kept

        return take

    futures = []
    for number, (name, priority) in enumerate((("second", 0), ("third", 0), ("first", 5))):
        futures.append(runtime.start(Probe, priority=priority, body=body(name)))
        waits(runtime, number + 1)
    del blocker
    for future in futures:
        future.result(PATIENCE)
    assert order == ["first", "second", "third"]


def test_timeouts_cancelled_futures_and_ctrl_c_leave_nothing(inside: Inside) -> None:
    runtime = inside(cuda(10))
    blocker = runtime.run(Take, memory_gb=10)
    with pytest.raises(PlacementTimeout, match="not available now"):
        runtime.run(Take, timeout=0, memory_gb=1)
    with pytest.raises(PlacementTimeout, match=r"waited 0\.05 s"):
        runtime.run(Take, timeout=0.05, memory_gb=1)
    future = runtime.start(Take, memory_gb=1)
    waits(runtime)
    assert future.cancel()
    waits(runtime, 0)

    def interrupt(self: Operator) -> None:
        self.placement.cuda(1)

    def press_ctrl_c() -> None:
        waits(runtime)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # who waits there must wake

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        runtime.run(Probe, body=interrupt)
    presser.join(PATIENCE)
    within = runtime._service.within
    assert within is not None
    assert (within._units, runtime._service._waits) == ({}, {})
    del blocker
    assert runtime.run(Take, timeout=0, memory_gb=10).value == "taken"


def test_a_changed_sequence_and_a_swallowed_signal_are_told(inside: Inside) -> None:
    runtime = inside(cuda(10))
    blocker: list[Data] = [runtime.run(Take, memory_gb=10)]
    sizes = iter((2, 3))

    def changing(self: Operator) -> None:
        self.placement.cuda(next(sizes))

    future = runtime.start(Probe, body=changing)
    waits(runtime)
    blocker.clear()
    with pytest.raises(RequestSequenceChanged, match="<-- differs"):
        future.result(PATIENCE)
    blocker.append(runtime.run(Take, timeout=0, memory_gb=10))

    def swallowing(self: Operator) -> None:
        with contextlib.suppress(BaseException):
            self.placement.cuda(1)

    with pytest.raises(PlacementSignalSwallowed):
        runtime.run(Probe, body=swallowing)
    blocker.clear()
    assert runtime.run(Take, timeout=0, memory_gb=10).value == "taken"


def test_who_can_only_wait_for_itself_fails(inside: Inside) -> None:
    runtime = inside(cuda(10))
    data = runtime.run(Take, memory_gb=6)
    with pytest.raises(PlacementDeadlock, match=r"6 GB of gpu 0, and waits for cuda\(memory_gb=5\)"):
        runtime.run(Take, memory_gb=5)
    assert data.value == "taken"
    del data
    assert runtime.run(Take, timeout=0, memory_gb=10).value == "taken"


def test_data_in_a_cycle_is_no_reason_to_fail(inside: Inside) -> None:
    runtime = inside(cuda(10))

    class Cycle:
        def __init__(self, data: Data) -> None:
            self.data, self.me = data, self

    Cycle(runtime.run(Take, memory_gb=6))
    assert runtime.run(Take, memory_gb=5).value == "taken"


def test_idle_resources_in_the_way_are_torn_down(inside: Inside) -> None:
    runtime = inside(cuda(10))
    log.clear()
    for _ in range(2):
        assert runtime.run(Use, model=Model(size_gb=6)).value == "weights of model"
    assert runtime.run(Take, memory_gb=4).value == "taken"
    assert log == ["setup model"]
    assert runtime.run(Take, memory_gb=5).value == "taken"
    assert log == ["setup model", "teardown model"]


class Slow(Resource):
    """Set up by the first that gets that far."""

    def setup(self) -> Data:
        return Data("slow", self.placement.cuda(4))


class UseSlow(Operator):
    slow: Slow

    def execute(self) -> Data:
        return Data(self.slow.value)


def test_a_resource_that_one_run_sets_up_is_there_for_the_others_that_wait(inside: Inside) -> None:
    runtime = inside(cuda(10))
    blocker = runtime.run(Take, memory_gb=10)
    futures = [runtime.start(UseSlow, slow=Slow()) for _ in range(4)]
    until(lambda: runtime._service._waits)
    del blocker
    assert [future.result(PATIENCE).value for future in futures] == ["slow"] * 4
    assert runtime.run(Take, timeout=0, memory_gb=6).value == "taken"


def test_without_the_lease_every_request_tells(make_runtime: MakeRuntime, outer: Scene, sql: Sql) -> None:
    lease = command_lease(outer, cuda(10))
    outer.book.written(lambda pg: reclaim.end_holder(pg, outer.holder.id, reason="declared"))
    runtime = make_runtime(settings=Settings(lease=str(lease.id), host_id="test-host"))
    for _ in range(2):
        with pytest.raises(LeaseLost, match=r"has ended.*Start it anew with `jayrun run`, or unset JAYRUN_LEASE"):
            runtime.run(Take, memory_gb=1)


def test_a_lease_that_is_ended_from_outside_is_told(inside: Inside, outer: Scene, book: Book) -> None:
    told: list[LeaseLost] = []
    runtime = inside(cuda(10), on_lease_lost=told.append)
    data = runtime.run(Take, memory_gb=10)
    future = runtime.start(Take, memory_gb=5)
    waits(runtime)
    for holder_id in (outer.holder.id, runtime._service.holder.id):
        book.written(lambda pg, holder_id=holder_id: reclaim.end_holder(pg, holder_id, reason="declared"))
    until(lambda: told)
    with pytest.raises(LeaseLost):
        future.result(PATIENCE)
    with pytest.raises(LeaseLost):
        Data("more", data.placement)
    with pytest.raises(LeaseLost, match="has ended"):
        runtime.run(Take, memory_gb=1)
    assert audit.leases(book) == []


def test_what_was_granted_of_a_lost_lease_but_never_taken_is_free_again(
    inside: Inside, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = inside(cuda(10))
    within = runtime._service.within
    assert within is not None
    attend, holder_id = within.attend, runtime._service.holder.id
    blocker = runtime.run(Take, memory_gb=10)
    future = runtime.start(Take, memory_gb=6)
    waits(runtime)
    monkeypatch.setattr(within, "attend", lambda waiting: {})  # it comes too late
    del blocker
    with pytest.raises(PlacementTimeout):  # behind the one who waits
        runtime.run(Take, timeout=0, memory_gb=5)
    book.written(lambda pg: reclaim.end_holder(pg, holder_id, reason="declared"))
    until(lambda: runtime._service.holder.id != holder_id)
    monkeypatch.setattr(within, "attend", attend)
    with pytest.raises(LeaseLost):
        future.result(PATIENCE)
    assert runtime.run(Take, timeout=0, memory_gb=10).value == "taken"


def test_a_process_that_was_declared_dead_joins_anew_while_the_lease_lives(inside: Inside, book: Book) -> None:
    runtime = inside(cuda(10))
    data = runtime.run(Take, memory_gb=4)
    former = runtime._service.holder.id
    book.written(lambda pg: reclaim.end_holder(pg, former, reason="declared"))
    until(lambda: runtime._service.holder.id != former)
    with pytest.raises(LeaseLost):
        Data("more", data.placement)
    assert runtime.run(Take, memory_gb=6).value == "taken"
    assert audit.leases(book)[0]["holders"] == 2


@pytest.mark.parametrize("named", ["nonsense", "0197f6a0-0000-7000-8000-000000000000"])
def test_a_lease_that_this_book_does_not_know_is_said_and_changes_nothing(
    make_runtime: MakeRuntime, outer: Scene, book: Book, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="jayrun"):
        runtime = make_runtime(settings=Settings(lease=named, host_id="test-host"))
        make_runtime(settings=Settings(lease=named, host_id="test-host"))
    assert caplog.text.count("no lease of this host in this book") == 1
    assert runtime.run(Take, memory_gb=20).placement.device_ids == (0,)
    until(lambda: not audit.leases(book))


def test_the_end_of_the_process_lets_go_of_the_lease(inside: Inside, book: Book) -> None:
    runtime = inside(cuda(10))
    runtime.close()
    runtime._service.stop()
    assert [row["holders"] for row in audit.leases(book)] == [1]
    assert audit.violations(book) == []


def test_a_pickled_placement_is_counted_once_in_one_process_and_while_it_is_lent(inside: Inside, sql: Sql) -> None:
    sql.execute("UPDATE jayrun.settings SET lend_seconds = 1")
    runtime = inside(cuda(10))
    data = runtime.run(Take, memory_gb=6)
    text = pickle.dumps(data)
    copy = pickle.loads(text)
    assert copy.placement.hold is data.placement.hold
    del data, copy
    with pytest.raises(PlacementTimeout):
        runtime.run(Take, timeout=0, memory_gb=5)
    assert runtime.run(Take, memory_gb=5).value == "taken"  # it waits until nothing is lent any more
    late = pickle.loads(text)  # the lease lives as long as this process does
    with pytest.raises(PlacementTimeout):
        runtime.run(Take, timeout=0, memory_gb=5)
    assert late.value == "taken"


def test_submitted_work_is_none_of_it(inside: Inside, outer: Scene, book: Book) -> None:
    runtime = inside(cuda(10))
    ticket = runtime.submit("Somewhere", number=30)
    assert isinstance(ticket.id, UUID)
    [row] = audit.executions(book, limit=1)
    assert (row["id"], row["state"]) == (ticket.id, "ready")
