"""A live process that loses its leases all the same learns it, and whatever it does late changes nothing."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import MakeRuntime, cuda, gpus
from history import replay
from processes import PATIENCE, until
from test_resources import Model, Use
from test_waiting import Probe, Take, parked

from jayrun import Data, Operator, RetryPolicy, Runtime, probes
from jayrun.errors import LeaseLost, RuntimeClosed
from jayrun.runtime.holds import Hold
from jayrun.store import admission, audit, holders, leases, reclaim
from jayrun.store.admission import Ask, Execution, Granted, Member
from jayrun.store.ids import new_id
from jayrun.store.leases import Held
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]


def declare_dead(book: Book, runtime: Runtime) -> None:
    """What an administrator does who takes this process for dead."""
    book.written(lambda pg: reclaim.end_holder(pg, runtime._service.holder.id, reason="dead"))


def noticed(runtime: Runtime, former: UUID) -> None:
    until(lambda: runtime._service.holder.id != former)


def taken_by_another(book: Book, runtime: Runtime, memory_gb: float) -> Granted:
    """Somebody else gets the capacity."""
    other = holders.register(book, runtime._service.host_id, role="runtime")
    key = new_id()
    execution = Execution(id=key, kind="operator", name="Other", host_id=other.host_id, holder_id=other.id, unit_id=key)
    member = Member(execution=execution, invocation=1, recorded=(cuda(memory_gb),))
    granted = admission.reserve(book, Ask(asker=member, position=0))
    assert isinstance(granted, Granted)
    return granted


def test_data_pickling_and_the_callback_tell_and_attributes_do_not(
    make_runtime: MakeRuntime, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[LeaseLost] = []
    runtime = make_runtime(devices=gpus(1), on_lease_lost=told.append)
    data = [runtime.run(Take, memory_gb=2) for _ in range(2)]
    text = pickle.dumps(data[0])
    with caplog.at_level(logging.ERROR, logger="jayrun"):
        declare_dead(book, runtime)
        until(lambda: len(told) == 2)
    assert {each.lease_id for each in told} == {each.placement.lease_id for each in data}
    assert {each.epoch for each in told} == {each.placement.epoch for each in data}
    assert caplog.text.count("is lost") == 2
    placement = data[0].placement
    for act in (lambda: Data("more", placement), lambda: pickle.dumps(data[0]), lambda: pickle.loads(text)):
        with pytest.raises(LeaseLost, match=r"lease .* (is lost|has ended)"):
            act()
    assert placement.primary.memory_bytes == 2 * 10**9
    assert placement.device_ids == (0,)
    assert repr(placement)
    assert data[0].value == "taken"


def test_late_words_of_the_former_holder_change_nothing(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=24)
    former = runtime._service.holder
    [held] = runtime._service.outbox.held.values()
    declare_dead(book, runtime)
    noticed(runtime, former.id)
    granted = taken_by_another(book, runtime, 24)
    before = sql.execute("SELECT count(*) FROM jayrun.lease_events").fetchone()
    del data  # the release of what is lost
    assert runtime.flush(PATIENCE)
    leases.release(book, former.host_id, former.id, [held])
    assert not holders.beat(book, former)
    holders.leave(book, former)
    assert sql.execute("SELECT count(*) FROM jayrun.lease_events").fetchone() == before
    assert [row["id"] for row in audit.leases(book)] == [granted.lease.id]
    with pytest.raises(LeaseLost):
        leases.join(book, former, Held(granted.lease.id, granted.lease.epoch, 1))
    assert audit.violations(book) == []
    assert replay(sql) == 2


def in_the_middle(runtime: Runtime, book: Book) -> tuple[Callable[[Operator], Any], list[int]]:
    """A body that is declared dead after its first request, waits until that is known, and asks once more."""
    calls: list[int] = []

    def body(self: Operator) -> Any:
        calls.append(1)
        first = self.placement.cuda(2)
        if len(calls) == 1:
            former = runtime._service.holder.id
            declare_dead(book, runtime)
            noticed(runtime, former)
        return (first, self.placement.cuda(2))

    return body, calls


def test_the_next_request_tells(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(devices=gpus(1))
    body, calls = in_the_middle(runtime, book)
    with pytest.raises(LeaseLost, match="declared dead"):
        runtime.run(Probe, body=body)
    assert runtime.run(Probe, body=body).value
    assert len(calls) == 2
    runtime.flush()
    until(lambda: not audit.leases(book))
    states = sql.execute("SELECT state FROM jayrun.executions ORDER BY submitted_at").fetchall()
    assert states == [("failed",), ("succeeded",)]


def test_a_retry_policy_may_try_again_as_the_new_holder(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    body, calls = in_the_middle(runtime, book)
    assert runtime.run(Probe, body=body, retry=RetryPolicy(max_attempts=2, retry_on=(LeaseLost,))).value
    assert len(calls) == 2


def test_before_the_process_has_noticed_a_request_is_refused_too(
    make_runtime: MakeRuntime, book: Book, sql: Sql
) -> None:
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")
    runtime = Runtime(book.url, devices=gpus(1))
    blocker = taken_by_another(book, runtime, 24)  # so that it would have to wait
    declare_dead(book, runtime)
    with pytest.raises(LeaseLost):
        runtime.run(Take, memory_gb=2)
    assert audit.queue(book) == []
    leases.release(book, runtime._service.host_id, UUID(int=0), [(blocker.lease.id, blocker.lease.epoch)])
    assert audit.violations(book) == []
    runtime.close()
    from jayrun.runtime import service

    service._services.pop(book.url).stop()


def test_finishing_tells(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))

    def body(self: Operator) -> Any:
        placement = self.placement.cuda(2)
        former = runtime._service.holder.id
        declare_dead(book, runtime)
        noticed(runtime, former)
        return placement  # and Data was made of it before

    class Early(Operator):
        def execute(self) -> Data:
            data = Data("early", self.placement.cuda(2))
            former = runtime._service.holder.id
            declare_dead(book, runtime)
            noticed(runtime, former)
            return data

    for operator, inputs in ((Early, {}), (Probe, {"body": body})):
        with pytest.raises(LeaseLost, match="is lost"):
            runtime.run(operator, **inputs)
    assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"


def test_one_hold_ended_by_hand_is_lost_alone(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    told: list[LeaseLost] = []
    runtime = make_runtime(devices=gpus(1), on_lease_lost=told.append)
    lost, kept = runtime.run(Take, memory_gb=2), runtime.run(Take, memory_gb=2)
    sql.execute(
        "UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = 'reclaimed' WHERE lease_id = %s",
        (lost.placement.lease_id,),
    )
    until(lambda: told)
    assert [each.lease_id for each in told] == [lost.placement.lease_id]
    assert Data("more", kept.placement)
    with pytest.raises(LeaseLost):
        Data("more", lost.placement)
    assert runtime.run(Take, memory_gb=2).value == "taken"


def test_who_waits_is_told_that_its_place_is_gone(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    waiting = runtime.start(Take, memory_gb=24)
    parked(book)
    former = runtime._service.holder.id
    declare_dead(book, runtime)
    with pytest.raises(LeaseLost, match="lost its place in the queue"):
        waiting.result(PATIENCE)
    noticed(runtime, former)
    assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"
    del blocker


def test_a_cached_resource_is_set_up_anew(make_runtime: MakeRuntime, book: Book) -> None:
    from test_resources import log

    log.clear()
    told = threading.Event()
    runtime = make_runtime(devices=gpus(1), on_lease_lost=lambda lost: told.set())
    assert runtime.run(Use).value == "weights of model"
    declare_dead(book, runtime)
    assert told.wait(PATIENCE)
    assert log == ["setup model", "teardown model"]
    assert runtime.run(Use).value == "weights of model"
    assert log == ["setup model", "teardown model", "setup model"]
    assert len(audit.leases(book)) == 1


def test_a_resource_lost_while_it_is_used_fails_the_run_and_is_torn_down_after_it(
    make_runtime: MakeRuntime, book: Book
) -> None:
    from test_resources import log

    log.clear()
    runtime = make_runtime(devices=gpus(1))

    class Slow(Operator):
        model: Model

        def execute(self) -> Data:
            former = runtime._service.holder.id
            declare_dead(book, runtime)
            noticed(runtime, former)
            until(lambda: runtime._service.resources._lost)
            assert log == ["setup model"]
            return Data("done")

    with pytest.raises(LeaseLost):
        runtime.run(Slow)
    assert log == ["setup model", "teardown model"]


def test_a_callback_that_fails_keeps_nobody_from_hearing(
    make_runtime: MakeRuntime, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[LeaseLost] = []

    def fail(lost: LeaseLost) -> None:
        raise ValueError("mine")

    runtime = make_runtime(devices=gpus(1), on_lease_lost=fail)
    make_runtime(on_lease_lost=heard.append)
    data = runtime.run(Take, memory_gb=2)
    declare_dead(book, runtime)
    until(lambda: heard)
    assert "on_lease_lost failed" in caplog.text
    assert data.placement.lease_id == heard[0].lease_id
    with pytest.raises(TypeError, match="on_lease_lost must be callable"):
        Runtime(book.url, on_lease_lost=1)  # type: ignore[arg-type]


def test_a_hold_that_nobody_kept_is_released_as_before(make_runtime: MakeRuntime) -> None:
    """The outbox's own look at what is held keeps nothing alive."""
    runtime = make_runtime(devices=gpus(1))
    outbox = runtime._service.outbox
    data = runtime.run(Take, memory_gb=2)
    [hold] = outbox.holds.values()
    assert isinstance(hold, Hold)
    assert list(outbox.held.values()) == [hold.held]
    del data, hold
    assert outbox.held == {}
    runtime.flush()
    assert outbox.messages == deque()


# --- between a grant and the value that user code gets ---------------------------------------------------------------


def test_what_was_claimed_while_no_thread_was_free_is_lost_too(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(devices=gpus(1), threads=1)
    blocker = runtime.run(Take, memory_gb=24)
    waiting = runtime.start(Take, memory_gb=24)
    parked(book)
    busy, go_on = threading.Event(), threading.Event()

    def body(self: Operator) -> str:
        busy.set()
        assert go_on.wait(PATIENCE)
        return "done"

    runtime.start(Probe, body=body)  # the one thread there is
    assert busy.wait(PATIENCE)
    del blocker
    running = "SELECT count(*) FROM jayrun.executions WHERE state = 'running' AND name = 'Take' AND waited_seconds > 0"
    until(lambda: sql.execute(running).fetchone() == (1,))
    former = runtime._service.holder.id
    declare_dead(book, runtime)
    noticed(runtime, former)
    taken_by_another(book, runtime, 24)
    go_on.set()
    with pytest.raises(LeaseLost, match="declared dead"):
        waiting.result(PATIENCE)
    assert replay(sql) == 3


def test_declared_dead_between_the_grant_and_the_placement(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    former = runtime._service.holder.id

    def end() -> None:
        if runtime._service.holder.id == former:
            declare_dead(book, runtime)
            noticed(runtime, former)

    with probes.arm("reserve.granted", end), pytest.raises(LeaseLost, match="declared dead"):
        runtime.run(Take, memory_gb=24)
    assert runtime._service.holder.id != former
    assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"


def test_declared_dead_while_it_joins(make_runtime: MakeRuntime, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[LeaseLost] = []
    runtime = make_runtime(devices=gpus(1), on_lease_lost=told.append)
    granted = taken_by_another(book, runtime, 24)
    former = runtime._service.holder.id
    join = leases.join

    def slowly(*arguments: Any) -> None:
        join(*arguments)
        declare_dead(book, runtime)
        noticed(runtime, former)

    monkeypatch.setattr(leases, "join", slowly)
    hold = runtime._service.join(granted.lease.id, granted.lease.epoch)
    until(lambda: told)
    with pytest.raises(LeaseLost):
        hold.check()


def test_what_ends_before_the_next_tick_is_told_too(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(devices=gpus(1))
    service = runtime._service
    service.tick_seconds = 3600
    first = service.holder.id

    def body(self: Operator) -> Data:
        data = Data("done", self.placement.cuda(2))
        declare_dead(book, runtime)
        return data

    until(lambda: runtime.run(Take, memory_gb=1, timeout=0).value)  # the tick that was due is over
    with pytest.raises(LeaseLost, match="is lost"):
        runtime.run(Probe, body=body)
    assert service.holder.id == first, "a tick came between, so nothing was shown"


def test_at_the_end_of_the_process_nothing_new_is_run(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    text = pickle.dumps(data)
    runtime._service.stop()
    for act in (lambda: runtime.run(Take, memory_gb=24, timeout=1), lambda: runtime.start(Take, memory_gb=1)):
        with pytest.raises(RuntimeClosed, match="at its end"):
            act()
    del data
    runtime._service.outbox.lent.clear()
    with pytest.raises(RuntimeClosed, match="at its end"):
        pickle.loads(text)
