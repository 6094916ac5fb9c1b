"""Nobody who waits is forgotten: what becomes of calls that cross, are lost, or concern somebody else."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import Scene, cuda, gpus, scene
from history import replay
from processes import PATIENCE, until

from jayrun import kernel, probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.errors import BookBusy, BookUnreachable
from jayrun.runtime.ticket import Ticket
from jayrun.store import admission, audit, claims, devices, holders, leases, reclaim, submissions
from jayrun.store.admission import Ask, Execution, Granted, Member, Parked
from jayrun.store.claims import Done, Taken
from jayrun.store.engine import MAX_CONNECTIONS
from jayrun.store.holders import Holder
from jayrun.store.submissions import submission
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def no_tick(sql: Sql) -> None:
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")


@pytest.fixture
def other_book(url: str) -> Iterator[Book]:
    book = Book(url, role="other")
    yield book
    book.close()


def a_worker(stage: Scene, incarnation: Any = None) -> Holder:
    worker = holders.register(stage.book, stage.host_id, role="worker", incarnation=incarnation)
    claims.accept(stage.book, worker.id, ["Op"])
    return worker


def taken(book: Book, worker: Holder, **terms: Any) -> Taken:
    submissions.submit(book, submission("Op", {}, **terms))
    found = claims.take(book, worker.id).taken
    assert found is not None
    return found


def parked(stage: Scene, worker: Holder, of: Taken, memory_gb: float) -> None:
    """The taken execution asks, and waits for any host."""
    execution = Execution(
        id=of.id,
        kind="operator",
        name="Op",
        host_id=stage.host_id,
        holder_id=worker.id,
        unit_id=of.id,
        detached=True,
        operator="Op",
    )
    member = Member(execution=execution, invocation=1, recorded=(cuda(memory_gb),), booked=0)
    assert admission.reserve(stage.book, Ask(asker=member, position=0)) == Parked()


def state(sql: Sql, execution_id: UUID) -> str:
    [(found,)] = sql.execute("SELECT state FROM jayrun.executions WHERE id = %s", (execution_id,)).fetchall()
    return str(found)


def blocked(sql: Sql) -> bool:
    return sql.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None


@pytest.fixture
def dying() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


def test_more_threads_than_connections_cancel(book: Book, sql: Sql) -> None:
    stage = scene(book, gpus(1))
    stage.granted(cuda(24))
    waiting = [stage.reserve(cuda(24))[0] for _ in range(MAX_CONNECTIONS + 6)]
    together = threading.Barrier(len(waiting))

    def cancel(execution_id: UUID) -> ExecutionState:
        together.wait(PATIENCE)
        return submissions.cancel(book, execution_id, who="me").state

    with ThreadPoolExecutor(len(waiting)) as pool:
        assert set(pool.map(cancel, waiting, timeout=PATIENCE)) == {ExecutionState.CANCELLED}
    assert replay(sql) == 1


def test_connections_of_a_burst_are_closed_while_one_goes_on(book: Book, sql: Sql) -> None:
    together = threading.Barrier(9)

    def use(pg: psycopg.Connection[Any]) -> None:
        together.wait(PATIENCE)

    with ThreadPoolExecutor(9) as pool:
        list(pool.map(book.written, [use] * 9))
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'jayrun:test'"
    for left in (9, 1):
        book.close_unused()
        until(lambda left=left: book.value(mine) == left)  # type: ignore[misc]


def test_a_worker_that_passed_a_watched_one_over_is_woken(book: Book, sql: Sql, other_book: Book) -> None:
    stage = scene(book, gpus(1))
    worker = a_worker(stage)
    execution_id = submissions.submit(book, submission("Op", {}))
    with sql.transaction():
        sql.execute("SELECT FROM jayrun.executions WHERE id = %s FOR UPDATE", (execution_id,))
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(submissions.watch, other_book, execution_id)
            until(lambda: blocked(sql))
            assert claims.take(book, worker.id).taken is None
            with book.listen(str(worker.id)) as listener:
                assert listener.open()
                sql.execute("COMMIT; BEGIN")
                watching.result(PATIENCE)
                assert listener.wait(PATIENCE)


def test_cancelling_what_is_to_be_tried_again_cancels_it(book: Book, sql: Sql, other_book: Book) -> None:
    stage = scene(book, gpus(1))
    worker = a_worker(stage)
    run = taken(book, worker, max_attempts=3, retry_on=("Exception",))
    again = Done(id=run.id, claim=run.claim, state=ExecutionState.READY, failure={"type": "X"}, pause_seconds=0)
    with ThreadPoolExecutor(1) as pool:
        with sql.transaction():
            sql.execute(submissions._CANCEL_RUNNING, (run.id,))
            telling = pool.submit(claims.take, other_book, worker.id, again)
            until(lambda: blocked(sql))
        assert telling.result(PATIENCE).taken is None
    assert state(sql, run.id) == "cancelled"
    assert claims.take(book, worker.id, again).finished  # told once more, since the answer was lost


def test_a_ticket_whose_connection_is_cut_hears_of_the_end(book: Book, sql: Sql, other_book: Book) -> None:
    stage = scene(book, gpus(1))
    worker = a_worker(stage)
    run = taken(book, worker)
    listening = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND state = 'idle'"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ticket(other_book, run.id).wait)
        until(lambda: sql.execute(listening).fetchone())
        [(cut,)] = sql.execute(listening).fetchall()
        sql.execute("SELECT pg_terminate_backend(%s)", (cut,))
        until(lambda: [row for row in sql.execute(listening).fetchall() if row != (cut,)])
        done = Done(id=run.id, claim=run.claim, state=ExecutionState.SUCCEEDED, result="1", result_kind="json")
        claims.take(book, worker.id, done)
        assert waiting.result(PATIENCE).state is ExecutionState.SUCCEEDED


def test_a_watched_execution_that_the_book_ends_is_told(book: Book, sql: Sql, dying: subprocess.Popen[bytes]) -> None:
    sql.execute("UPDATE jayrun.settings SET crash_limit = 1")
    stage = scene(book, gpus(1))
    run = taken(book, a_worker(stage, kernel.incarnation(dying.pid)))
    submissions.watch(book, run.id)
    with book.listen(str(run.id)) as listener:
        listener.open()
        dying.kill()
        dying.wait()
        assert reclaim.sweep(book, stage.host_id) == 1
        assert listener.wait(PATIENCE)
    assert state(sql, run.id) == "failed"


def test_one_that_is_impossible_and_to_be_tried_again_wakes_a_worker(book: Book, sql: Sql) -> None:
    stage = scene(book, gpus(1))
    worker = a_worker(stage)
    run = taken(book, worker, max_attempts=3, retry_on=("PlacementImpossible",))
    stage.granted(cuda(1))
    parked(stage, worker, run, 24)
    with book.listen("workers") as listener:
        listener.open()
        devices.declare(book, stage.host_id, gpus(1, 20))
        admission.combine(book, stage.host_id)
        assert state(sql, run.id) == "ready"
        assert listener.wait(PATIENCE)


def test_what_was_kept_for_a_cancelled_one_of_any_host_is_handed_on(book: Book, sql: Sql) -> None:
    sql.execute("UPDATE jayrun.settings SET bypass_limit = 0")
    stage = scene(book, gpus(1))
    worker = a_worker(stage)
    stage.granted(cuda(12))
    run = taken(book, worker)
    parked(stage, worker, run, 24)
    behind, outcome = stage.reserve(cuda(12))
    assert outcome == Parked()
    assert submissions.cancel(book, run.id, who="me").state is ExecutionState.CANCELLED
    assert state(sql, behind) == "admitted"


def test_a_park_that_loses_its_connection_still_looks_for_a_release(book: Book, sql: Sql, other_book: Book) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    cut: list[Any] = []

    def cross() -> None:
        # The releaser looked before the park had committed, and so does not combine.
        leases.release(other_book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
        mine = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'jayrun:test'"
        cut.extend(sql.execute(mine).fetchall())

    with probes.arm("reserve.parked", cross):
        waiting, outcome = stage.reserve(cuda(24))
    assert cut
    assert outcome == Parked()
    assert state(sql, waiting) == "admitted"


@pytest.mark.parametrize("limit", ["lock_timeout", "statement_timeout", "pg_cancel_backend"])
def test_an_admission_that_the_database_cuts_off_is_replayed(book: Book, sql: Sql, url: str, limit: str) -> None:
    here = scene(book, gpus(1))
    waiting = "SELECT pid FROM pg_locks WHERE relation = 'jayrun.gate'::regclass AND NOT granted"
    with ExitStack() as stack:
        if limit != "pg_cancel_backend":
            sql.execute(f"ALTER DATABASE {sql.info.dbname} SET {limit} = '200ms'")
            stack.callback(sql.execute, f"ALTER DATABASE {sql.info.dbname} RESET {limit}")
        patience_seconds = 0 if limit == "pg_cancel_backend" else PATIENCE  # one is borne by who has none
        hand = Book(url, role="hand", patience_seconds=patience_seconds)  # all of its connections have the limit
        stack.callback(hand.close)
        slow = stack.enter_context(psycopg.connect(url))
        slow.execute("SET statement_timeout = 0")
        slow.execute("LOCK TABLE jayrun.gate IN SHARE UPDATE EXCLUSIVE MODE")
        pool = stack.enter_context(ThreadPoolExecutor(1))
        asking = pool.submit(Scene(hand, here.host_id, here.holder).granted, cuda(24))
        seen: set[int] = set()  # each attempt on a connection of its own

        def attempts() -> int:
            seen.update(row[0] for row in sql.execute(waiting))
            return len(seen)

        until(lambda: attempts() >= 1)
        if limit == "pg_cancel_backend":
            sql.execute("SELECT pg_cancel_backend(%s)", tuple(seen))
        until(lambda: attempts() >= 2 or asking.done())
        slow.rollback()
        lease = asking.result(PATIENCE)
    assert [row["id"] for row in audit.leases(book)] == [lease.id]


@pytest.mark.parametrize(
    ("limit", "said"), [("lock_timeout", "due to lock timeout"), ("statement_timeout", "due to statement timeout")]
)
def test_an_admission_that_is_cut_off_all_the_time_says_by_what(
    book: Book, sql: Sql, url: str, limit: str, said: str
) -> None:
    here = scene(book, gpus(1))
    with ExitStack() as stack:
        sql.execute(f"ALTER DATABASE {sql.info.dbname} SET {limit} = '100ms'")
        stack.callback(sql.execute, f"ALTER DATABASE {sql.info.dbname} RESET {limit}")
        hand = Book(url, role="hand", patience_seconds=1)
        stack.callback(hand.close)
        slow = stack.enter_context(psycopg.connect(url))
        slow.execute("SET statement_timeout = 0")
        slow.execute("LOCK TABLE jayrun.gate IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(BookBusy, match=rf"(?s){said}.*lock_timeout or statement_timeout"):
            Scene(hand, here.host_id, here.holder).granted(cuda(24))
    assert audit.leases(book) == []


def test_a_sweep_and_an_admission_that_passes_the_dead_do_not_wait_in_a_circle(
    book: Book, sql: Sql, other_book: Book, url: str, dying: subprocess.Popen[bytes]
) -> None:
    sql.execute("UPDATE jayrun.settings SET bypass_limit = 1000000")
    stage = scene(book, gpus(1))
    stage.granted(cuda(4))
    doomed = holders.register(book, stage.host_id, role="runtime", incarnation=kernel.incarnation(dying.pid))
    waiting = [stage.execution(priority=priority, holder=doomed) for priority in range(3)]
    for execution in waiting:
        assert admission.reserve(book, stage.ask(cuda(24), execution=execution)) == Parked()
    dying.kill()
    dying.wait()
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = sql.execute(deadlocks).fetchone()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(url) as middle, ThreadPoolExecutor(2) as pool:
        middle.execute("SELECT FROM jayrun.executions WHERE id = %s FOR UPDATE", (waiting[1].id,))
        sweeping = pool.submit(reclaim.sweep, other_book, stage.host_id)
        until(lambda: sql.execute(waits).fetchone() == (1,))
        reserving = pool.submit(stage.reserve, cuda(1))
        until(lambda: sql.execute(waits).fetchone() == (2,))
        middle.commit()
        assert sweeping.result(PATIENCE) == 1
        assert isinstance(reserving.result(PATIENCE)[1], Granted)
    assert sql.execute(deadlocks).fetchone() == before


def test_errors_that_the_caller_handles_keep_what_is_theirs() -> None:
    """What jayrun forgets of its own failed connections is not what a user still has."""
    nobody = Book("postgresql://127.0.0.1:1/x", role="test", patience_seconds=0)

    def fail() -> None:
        secret = "kept"  # noqa: F841
        raise ValueError("a user's")

    def kept_by(error: ValueError) -> dict[str, object]:
        error.__cause__ = RuntimeError("and round about")
        error.__cause__.__cause__ = error
        with pytest.raises(BookUnreachable):
            nobody.tick_seconds()
        error.__cause__ = None
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        return {} if last is None else last.tb_frame.f_locals

    try:
        fail()
    except ValueError as error:
        kept = kept_by(error)
    assert kept == {"secret": "kept"}
