"""Waiting: an invocation that has to wait ends, and starts from the beginning with everything granted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from history import replay
from processes import PATIENCE, until

from jayrun import Data, FailureMode, Operator, RetryPolicy, Runtime
from jayrun.errors import (
    ConcurrentRequests,
    PlacementCancelled,
    PlacementImpossible,
    PlacementSignalSwallowed,
    PlacementTimeout,
    PlacementUnavailableHere,
    RequestSequenceChanged,
    RuntimeClosed,
)
from jayrun.placement import Placement, PlacementGroup
from jayrun.store import audit, submissions
from jayrun.store.transactions import Book


class Take(Operator):
    """Holds what it asks for as long as its Data lives."""

    memory_gb: Data

    def execute(self) -> Data:
        return Data("taken", self.placement.cuda(self.memory_gb.value))


class Probe(Operator):
    """Runs a test's own body as its execute()."""

    body: Data

    def execute(self) -> Data:
        result = self.body.value(self)
        return result if isinstance(result, Data) else Data(result)


def parked(book: Book, count: int = 1) -> None:
    """Wait until that many units, or none, are in the queue."""
    deadline = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        waiting = len(audit.queue(book))
        if waiting >= count and (count or not waiting):
            return
        deadline.wait(0.02)
    raise AssertionError(f"nobody waits: {audit.queue(book)}")


def test_an_invocation_that_waits_is_started_again_from_the_beginning(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    calls: list[int] = []

    def body(self: Operator) -> Placement:
        calls.append(1)
        return self.placement.cuda(20)

    future = runtime.start(Probe, body=body)
    parked(book)
    assert len(calls) == 1
    del blocker
    assert future.result(PATIENCE).value.memory_bytes == 20 * 10**9
    assert len(calls) == 2


def test_a_started_execution_that_waits_occupies_no_thread(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1), threads=1)
    blocker = runtime.run(Take, memory_gb=24)
    waiting = [runtime.start(Take, memory_gb=24) for _ in range(5)]
    parked(book, 5)
    assert runtime.start(Probe, body=lambda self: "ran").result(PATIENCE).value == "ran"
    del blocker
    for future in waiting:
        future.result(PATIENCE)
        del future
        waiting[0] = None  # type: ignore[call-overload]
        waiting.pop(0)
        break
    for future in waiting:
        future.cancel()


def test_what_was_granted_is_given_up_and_all_is_granted_together(make_runtime: MakeRuntime, book: Book) -> None:
    """Between two waits nothing is held: two executions that need each other's first half both finish."""
    runtime = make_runtime(devices=gpus(2))
    meet = threading.Barrier(2)
    first_time = threading.local()
    met: set[int] = set()

    def body(first: int) -> Callable[[Operator], Any]:
        def crosswise(self: Operator) -> Any:
            one = self.placement.cuda(24, device_id=first)
            if first not in met:
                met.add(first)
                meet.wait(PATIENCE)  # both hold one and now ask for the other's
            two = self.placement.cuda(24, device_id=1 - first)
            return (one.device_id, two.device_id)

        return crosswise

    del first_time
    futures = [runtime.start(Probe, body=body(first)) for first in (0, 1)]
    assert [future.result(PATIENCE).value for future in futures] == [(0, 1), (1, 0)]


def test_async_execute_waits_like_any_other(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))

    class Async(Operator):
        async def execute(self) -> Data:
            placement = self.placement.cuda(24)
            await asyncio.sleep(0)
            return Data("async", placement)

    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Async)
    parked(book)
    del blocker
    assert future.result(PATIENCE).value == "async"

    async def inside_a_loop() -> Any:
        return runtime.run(Async).value

    del future
    assert asyncio.run(inside_a_loop()) == "async"


def test_the_wait_lasts_until_every_hold_on_the_blocker_is_gone(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(2))

    class Pair(Operator):
        def execute(self) -> Data:
            return Data("pair", self.placement.cuda_group(per_device_memory_gb=24, min_devices=2, max_devices=2))

    data = runtime.run(Pair)
    assert isinstance(data.placement, PlacementGroup)
    member = data.placement[1]
    del data  # the group is gone, a member keeps the whole lease
    future = runtime.start(Take, memory_gb=1)
    parked(book)
    assert len(audit.leases(book)) == 1
    del member
    assert future.result(PATIENCE).value == "taken"


# --- R44: user code in the way of the signal -------------------------------------------------------------------------


def _except_exception(self: Operator) -> Any:
    try:
        return self.placement.cuda(24)
    except Exception:
        return "swallowed"


def _reraise(self: Operator) -> Any:
    try:
        return self.placement.cuda(24)
    except BaseException:
        raise


def _finally(self: Operator) -> Any:
    try:
        return self.placement.cuda(24)
    finally:
        str(self)


def _suppress_exception(self: Operator) -> Any:
    with contextlib.suppress(Exception):
        return self.placement.cuda(24)


def _retry_decorator(self: Operator) -> Any:
    for _ in range(3):
        try:
            return self.placement.cuda(24)
        except Exception:
            continue
    return None


def _generator(self: Operator) -> Any:
    def asks() -> Iterator[Any]:
        yield self.placement.cuda(24)

    return next(asks())


@pytest.mark.parametrize(
    "body", [_except_exception, _reraise, _finally, _suppress_exception, _retry_decorator, _generator]
)
def test_the_wait_works_through(make_runtime: MakeRuntime, book: Book, body: Callable[[Operator], Any]) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Probe, body=body)
    parked(book)
    del blocker
    assert future.result(PATIENCE).value.memory_bytes == 24 * 10**9


def _except_base(self: Operator) -> Any:
    try:
        self.placement.cuda(24)
    except BaseException:
        return "swallowed"


def _bare_except_then_ask(self: Operator) -> Any:
    with contextlib.suppress(BaseException):
        self.placement.cuda(24)
    return self.placement.cuda(1)


def _finally_return(self: Operator) -> Any:
    try:
        self.placement.cuda(24)
    finally:
        return "swallowed"  # noqa: B012


def _raise_another(self: Operator) -> Any:
    try:
        self.placement.cuda(24)
    except BaseException:
        raise ValueError("mine") from None


def _in_a_thread(self: Operator) -> Any:
    def ask() -> None:
        with contextlib.suppress(BaseException):
            self.placement.cuda(24)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return "swallowed"


@pytest.mark.parametrize("body", [_except_base, _bare_except_then_ask, _finally_return, _raise_another, _in_a_thread])
def test_a_swallowed_signal_fails_loudly_and_leaves_nothing(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection, body: Callable[[Operator], Any]
) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    with pytest.raises(PlacementSignalSwallowed, match="Probe"):
        runtime.run(Probe, body=body, retry=RetryPolicy(max_attempts=3))
    assert audit.queue(book) == []
    row = sql.execute("SELECT state, failure ->> 'type' FROM jayrun.executions WHERE name = 'Probe'").fetchall()
    assert row == [("failed", "PlacementSignalSwallowed")]
    del blocker


def test_saved_exceptions_of_a_parked_invocation_keep_no_capacity(make_runtime: MakeRuntime, book: Book) -> None:
    """R45: the first request was granted, its placement is a local of the frames that the signal went through."""
    runtime = make_runtime(devices=gpus(2))
    blocker = runtime.run(Take, memory_gb=24)
    saved: list[BaseException] = []

    def body(self: Operator) -> Any:
        first = self.placement.cuda(24)
        try:
            second = self.placement.cuda(24)
        except BaseException as signal:
            saved.append(signal)
            raise
        return (first.device_id, second.device_id)

    future = runtime.start(Probe, body=body)
    parked(book)
    runtime.flush()
    assert saved
    assert len(audit.leases(book)) == 1  # the blocker's alone
    del blocker
    assert sorted(future.result(PATIENCE).value) == [0, 1]


def test_exceptions_of_a_failed_execution_keep_no_capacity(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))

    def body(self: Operator) -> None:
        placement = self.placement.cuda(24)
        raise ValueError(f"on {placement.device_id}")

    with pytest.raises(ValueError, match="on 0") as caught:
        runtime.run(Probe, body=body)
    runtime.flush()
    assert caught.value.__traceback__ is not None
    assert audit.leases(book) == []


def test_a_placement_that_user_code_keeps_stays_taken_and_is_named(
    make_runtime: MakeRuntime, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = make_runtime(devices=gpus(2))
    blocker = runtime.run(Take, memory_gb=24)
    kept: list[Placement] = []

    def body(self: Operator) -> Any:
        kept.append(self.placement.cuda(10))
        kept.append(self.placement.cuda(20))
        return "done"

    with caplog.at_level(logging.WARNING, logger="jayrun"):
        future = runtime.start(Probe, body=body)
        parked(book)
        runtime.flush()
    assert len(audit.leases(book)) == 2
    assert "keeps a placement of its ended invocation alive" in caplog.text
    assert "10 GB" in caplog.text
    kept.clear()
    del blocker
    assert future.result(PATIENCE).value == "done"


# --- R47: the sequence -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(lambda p: (p.cuda(20), p.cuda(2)), id="another order"),
        pytest.param(lambda p: (p.cuda(2), p.cuda(21)), id="other arguments"),
        pytest.param(lambda p: (p.cuda(2, exclusive=True), p.cuda(20)), id="another kind"),
        pytest.param(lambda p: (p.cuda(2),), id="one less"),
        pytest.param(lambda p: (), id="none"),
    ],
)
def test_another_sequence_on_the_next_invocation_is_refused(
    make_runtime: MakeRuntime, book: Book, again: Callable[[Any], Any]
) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=20)
    calls: list[int] = []

    def body(self: Operator) -> Any:
        calls.append(1)
        if len(calls) == 1:
            return self.placement.cuda(2), self.placement.cuda(20)
        return again(self.placement)

    future = runtime.start(Probe, body=body, retry=RetryPolicy(max_attempts=5))
    parked(book)
    del blocker
    with pytest.raises(RequestSequenceChanged, match=r"cuda\(memory_gb=20\)"):
        future.result(PATIENCE)
    assert len(calls) == 2
    runtime.flush()
    assert audit.leases(book) == []


def test_one_more_request_is_recorded_too(make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=20)
    calls: list[int] = []

    def body(self: Operator) -> Any:
        calls.append(1)
        first = self.placement.cuda(20)
        if len(calls) == 1:
            return first
        return first, self.placement.cuda(3), self.placement.placement_requests

    future = runtime.start(Probe, body=body)
    parked(book)
    del blocker
    *_, requests = future.result(PATIENCE).value
    assert [request.per_device_bytes for request in requests] == [20 * 10**9, 3 * 10**9]


def test_an_invocation_that_raises_early_keeps_its_own_exception(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=20)
    calls: list[int] = []

    def body(self: Operator) -> Any:
        calls.append(1)
        self.placement.cuda(2)
        if len(calls) > 1:
            raise KeyError("mine")
        return self.placement.cuda(20)

    future = runtime.start(Probe, body=body)
    parked(book)
    del blocker
    with pytest.raises(KeyError, match="mine"):
        future.result(PATIENCE)
    runtime.flush()
    assert audit.leases(book) == []


# --- ends of a wait --------------------------------------------------------------------------------------------------


def test_timeout_leaves_nothing_behind(make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    for timeout in (0, 0.05):
        with pytest.raises(PlacementTimeout):
            runtime.run(Take, memory_gb=1, timeout=timeout)
        with pytest.raises(PlacementTimeout):
            runtime.start(Take, memory_gb=1, timeout=timeout).result(PATIENCE)
    assert audit.queue(book) == []
    del blocker
    runtime.flush()
    assert audit.leases(book) == []


def test_impossible_is_told_at_once_and_can_be_caught(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    with pytest.raises(PlacementImpossible, match="24 GB"):
        runtime.run(Take, memory_gb=25)

    def body(self: Operator) -> Any:
        try:
            return self.placement.cuda(48)
        except PlacementImpossible:
            return self.placement.cuda(24)

    assert runtime.run(Probe, body=body).value.memory_bytes == 24 * 10**9


def test_a_waiter_that_becomes_impossible_is_told(make_runtime: MakeRuntime, book: Book) -> None:
    from jayrun.store import admission, devices, holders

    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    host_id = holders.attest_host(book, None)
    devices.declare(book, host_id, gpus(1, 12))
    admission.combine(book, host_id)
    with pytest.raises(PlacementImpossible, match="12 GB"):
        future.result(PATIENCE)
    del blocker


def test_cancelling_the_future_takes_it_out_of_the_queue(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    assert future.cancel()
    parked(book, 0)
    del blocker


def test_a_person_cancels_one_that_waits(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=1, retry=RetryPolicy(max_attempts=3))
    parked(book)
    [waiting] = audit.queue(book)
    submissions.cancel(book, waiting["execution_id"], who="somebody")
    with pytest.raises(PlacementCancelled, match="Take was cancelled: cancelled by somebody"):
        future.result(PATIENCE)
    parked(book, 0)
    del blocker


def test_a_person_cancels_one_that_runs_and_its_next_request_is_refused(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection
) -> None:
    runtime = make_runtime(devices=gpus(1))

    def body(self: Operator) -> Any:
        first = self.placement.cuda(1)
        row = sql.execute("SELECT id FROM jayrun.executions WHERE name = 'Probe'").fetchone()
        assert row is not None
        assert submissions.cancel(book, row[0], who="somebody").cancelling
        return first, self.placement.cuda(1)

    with pytest.raises(PlacementCancelled, match="Probe is cancelled in the book"):
        runtime.run(Probe, body=body)
    runtime.flush()
    assert sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL").fetchone() == (0,)
    assert audit.violations(book) == []


def test_retries_pause_and_a_cancelled_one_does_not_go_on(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    at: list[float] = []

    def fails(self: Operator) -> None:
        at.append(time.monotonic())
        raise OSError("always")

    with pytest.raises(OSError, match="always"):
        runtime.run(Probe, body=fails, retry=RetryPolicy(3, (OSError,), delay_seconds=0.05, backoff=4))
    assert at[1] - at[0] >= 0.05
    assert at[2] - at[1] >= 0.2
    at.clear()
    future = runtime.start(Probe, body=fails, retry=RetryPolicy(2, (OSError,), delay_seconds=2 * PATIENCE))
    until(lambda: at)
    future.cancel()
    runtime.close()  # waits for what was started, and that has ended
    assert len(at) == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"delay_seconds": -1}, ValueError, "delay_seconds must be from 0 to 2.592e\\+06, but is -1"),
        ({"delay_seconds": float("inf")}, ValueError, "but is inf"),
        ({"delay_seconds": "1"}, TypeError, "delay_seconds must be a number, not '1'"),
        ({"backoff": 0.5}, ValueError, "backoff must be from 1 to 1000, but is 0.5"),
        ({"delay_seconds": 1e300}, ValueError, "but is 1e\\+300"),
        ({"backoff": 1e200}, ValueError, "but is 1e\\+200"),
        ({"backoff": True}, TypeError, "backoff must be a number, not True"),
    ],
)
def test_a_bad_pause_is_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        RetryPolicy(**arguments)


def test_fail_fast_cancels_who_waits_and_refuses_new_work(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1), failure_mode=FailureMode.FAIL_FAST)
    blocker = runtime.run(Take, memory_gb=24)
    running, go_on = threading.Event(), threading.Event()

    def body(self: Operator) -> str:
        running.set()
        assert go_on.wait(PATIENCE)
        return "ran to its end"

    ends = runtime.start(Probe, body=body)
    assert running.wait(PATIENCE)
    waits = runtime.start(Take, memory_gb=24)
    parked(book)
    with pytest.raises(ZeroDivisionError):
        runtime.run(Probe, body=lambda self: 1 / 0)
    with pytest.raises(PlacementCancelled, match="fails fast"):
        waits.result(PATIENCE)
    with pytest.raises(RuntimeClosed, match="ZeroDivisionError"):
        runtime.run(Take, memory_gb=1)
    go_on.set()
    assert ends.result(PATIENCE).value == "ran to its end"
    assert audit.queue(book) == []
    del blocker


def test_leaving_the_block_with_an_exception_cancels_who_waits(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    with contextlib.suppress(ZeroDivisionError), runtime:
        raise ZeroDivisionError
    with pytest.raises(PlacementCancelled):
        future.result(PATIENCE)
    assert audit.queue(book) == []
    del blocker


# --- retry -----------------------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_retried_and_waiting_is_none(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection
) -> None:
    """R48: the second attempt waits, uses no retry for it, and is still the second."""
    runtime = make_runtime(devices=gpus(1))
    blockers: list[Data] = []
    calls: list[str] = []

    def body(self: Operator) -> Any:
        placement = self.placement.cuda(24)
        calls.append("granted")
        if len(calls) == 1:
            del placement
            raise OSError("first attempt")
        return placement

    def block(self: Operator) -> Any:
        return self.placement.cuda(1)

    class Blocking(RetryPolicy):
        def allows(self, error: BaseException, attempt: int) -> bool:
            runtime.flush()
            blockers.append(runtime.run(Take, memory_gb=20))  # so that the second attempt has to wait
            return super().allows(error, attempt)

    future = runtime.start(Probe, body=body, retry=Blocking(max_attempts=2, retry_on=(OSError,)))
    parked(book)
    blockers.clear()
    assert future.result(PATIENCE).value.memory_bytes == 24 * 10**9
    assert calls == ["granted", "granted"]
    runtime.flush()
    rows = sql.execute("SELECT state, attempt, invocation FROM jayrun.executions WHERE name = 'Probe'").fetchall()
    assert rows == [("succeeded", 2, 3)]
    assert replay(sql) == 3


def test_retry_ends_with_max_attempts_and_only_named_errors_count(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    calls: list[int] = []

    def fails(self: Operator) -> None:
        calls.append(1)
        raise OSError("always")

    with pytest.raises(OSError, match="always"):
        runtime.run(Probe, body=fails, retry=RetryPolicy(max_attempts=3, retry_on=(OSError,)))
    assert len(calls) == 3
    with pytest.raises(OSError, match="always"):
        runtime.run(Probe, body=fails, retry=RetryPolicy(max_attempts=3, retry_on=(ValueError,)))
    assert len(calls) == 4


def test_impossible_is_retried_only_when_named(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    calls: list[int] = []

    def body(self: Operator) -> Any:
        calls.append(1)
        return self.placement.cuda(99)

    for policy, expected in ((RetryPolicy(max_attempts=3), 1), (RetryPolicy(3, (PlacementImpossible,)), 3)):
        calls.clear()
        with pytest.raises(PlacementImpossible):
            runtime.run(Probe, body=body, retry=policy)
        assert len(calls) == expected


# --- who may ask -----------------------------------------------------------------------------------------------------


def test_two_threads_at_once_are_refused(make_runtime: MakeRuntime, book: Book) -> None:
    from jayrun import probes

    runtime = make_runtime(devices=gpus(1))
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    def body(self: Operator) -> Any:
        thread = threading.Thread(target=lambda: self.placement.cuda(1))
        thread.start()
        assert inside.wait(PATIENCE)
        try:
            return self.placement.cuda(1)
        finally:
            go_on.set()
            thread.join()

    with probes.arm("reserve.seen", hold), pytest.raises(ConcurrentRequests, match="two threads"):
        runtime.run(Probe, body=body)


def test_two_tasks_at_once_are_refused(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))

    class Gathered(Operator):
        async def execute(self) -> Data:
            async def ask() -> int | None:
                placement = self.placement.cuda(1)
                await asyncio.sleep(0)
                return placement.device_id

            return Data(await asyncio.gather(ask(), ask()))

    with pytest.raises(ConcurrentRequests, match="two asyncio tasks"):
        runtime.run(Gathered)

    class InTurn(Operator):
        async def execute(self) -> Data:
            async def ask() -> int | None:
                return self.placement.cuda(1).device_id

            return Data([await asyncio.create_task(ask()), self.placement.cuda(1).device_id])

    assert runtime.run(InTurn).value == [0, 0]


def test_the_door_is_closed_outside_an_invocation(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    saved: ClassVar[list[Any]] = []  # type: ignore[misc]

    def body(self: Operator) -> str:
        saved.extend((self, self.placement))
        return "done"

    runtime.run(Probe, body=body)
    operator, interface = saved
    with pytest.raises(PlacementUnavailableHere):
        _ = operator.placement
    with pytest.raises(PlacementUnavailableHere, match="after its invocation had ended"):
        interface.cuda(1)
    with pytest.raises(PlacementUnavailableHere):
        _ = Take().placement


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda p: p.cuda("2"), TypeError),
        (lambda p: p.cuda(True), TypeError),
        (lambda p: p.cuda(-1), ValueError),
        (lambda p: p.cuda(float("nan")), ValueError),
        (lambda p: p.cuda(0), ValueError),
        (lambda p: p.cuda(1, device_id=-1), ValueError),
        (lambda p: p.cuda_group(group_memory_gb=1, min_devices=3, max_devices=2), ValueError),
        (lambda p: p.reserve(device="gpu!", backend="cuda", memory_gb=1), TypeError),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    make_runtime: MakeRuntime, sql: psycopg.Connection, ask: Callable[[Any], Any], error: type[Exception]
) -> None:
    runtime = make_runtime(devices=gpus(1))
    with pytest.raises(error):
        runtime.run(Probe, body=lambda self: ask(self.placement))
    assert sql.execute("SELECT count(*) FROM jayrun.executions").fetchone() == (0,)


def test_bad_runs_are_refused(make_runtime: MakeRuntime) -> None:
    runtime: Runtime = make_runtime(devices=gpus(1))
    with pytest.raises(TypeError, match="operator"):
        runtime.run(Data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="memory_gb"):
        runtime.run(Take)
    with pytest.raises(TypeError, match="'memory'"):
        runtime.run(Take, memory=1, memory_gb=1)
    with pytest.raises(ValueError, match="timeout"):
        runtime.run(Take, memory_gb=1, timeout=-1)
    with pytest.raises(TypeError, match="timeout"):
        runtime.run(Take, memory_gb=1, timeout="soon")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="priority"):
        runtime.run(Take, memory_gb=1, priority=1.5)  # type: ignore[arg-type]

    class Wrong(Operator):
        def execute(self) -> int:
            return 1

    with pytest.raises(TypeError, match="must return a Data"):
        runtime.run(Wrong)
    runtime.close()
    with pytest.raises(RuntimeClosed):
        runtime.run(Take, memory_gb=1)
