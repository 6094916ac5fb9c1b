"""What is moved out of a waiter's way: idle resources, no more than needed, and waits that could never end."""

from __future__ import annotations

import threading
from uuid import UUID

import psycopg
import pytest
from fleet import Scene, cuda, gpus, scene
from history import replay

from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.requests import Request
from jayrun.store import admission, audit, blockers, holders, leases
from jayrun.store.admission import Granted, Parked
from jayrun.store.holders import Holder
from jayrun.store.leases import Finished, Lease
from jayrun.store.transactions import Book


@pytest.fixture
def host(book: Book) -> Scene:
    return scene(book, gpus(1))


def another(host: Scene) -> Holder:
    return holders.register(host.book, host.host_id, role="runtime")


def cached(host: Scene, memory_gb: float, *, idle_seconds: float | None = 1, holder: Holder | None = None) -> Lease:
    """The lease of a resource that some process has set up and cached."""
    execution = host.execution(holder=holder)
    ask = host.ask(cuda(memory_gb), execution=execution)
    outcome = admission.reserve(host.book, ask)
    assert isinstance(outcome, Granted)
    host.book.written(
        lambda pg: pg.execute("UPDATE jayrun.executions SET kind = 'resource' WHERE id = %s", (execution.id,))
    )
    finished = [Finished(execution.id, ExecutionState.SUCCEEDED)]
    leases.settle(host.book, host.host_id, execution.holder_id, finished=finished)
    blockers.publish(host.book, {execution.id: idle_seconds})
    return outcome.lease


def waits(host: Scene, request: Request, holder: Holder | None = None) -> UUID:
    ask = host.ask(request, execution=host.execution(holder=holder))
    assert admission.reserve(host.book, ask) == Parked()
    return ask.asker.execution.id


def flagged(host: Scene, *resources: Lease) -> list[bool]:
    found = blockers.flagged(host.book, [each.execution_id for each in resources])
    return [each.execution_id in found for each in resources]


def test_nothing_is_flagged_before_somebody_waits(host: Scene) -> None:
    model = cached(host, 20)
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
    waits(host, cuda(20))
    assert blockers.make_way(host.book, host.host_id) == (1, 0)
    assert flagged(host, model) == [True]


def test_the_one_idle_for_longest_goes_and_one_in_use_stays(host: Scene) -> None:
    models = [cached(host, 8, idle_seconds=seconds, holder=another(host)) for seconds in (5, 7, None)]
    waits(host, cuda(8))
    assert blockers.make_way(host.book, host.host_id) == (1, 0)
    assert flagged(host, *models) == [False, True, False]


def test_what_is_flagged_counts_as_gone_until_its_process_had_time(host: Scene, sql: psycopg.Connection) -> None:
    models = [cached(host, 8), cached(host, 8), cached(host, 8)]
    waits(host, cuda(8))
    assert blockers.make_way(host.book, host.host_id) == (1, 0)
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
    waits(host, cuda(8))
    assert blockers.make_way(host.book, host.host_id) == (1, 0)
    assert sum(flagged(host, *models)) == 2
    sql.execute("UPDATE jayrun.settings SET claim_seconds = 0.001")
    assert blockers.make_way(host.book, host.host_id) == (1, 0)  # its process was stopped, perhaps


def test_use_takes_back_a_flag_and_it_is_decided_anew(host: Scene) -> None:
    used, other = cached(host, 8, idle_seconds=5), cached(host, 8, idle_seconds=3)
    waits(host, cuda(16))
    blockers.make_way(host.book, host.host_id)
    assert flagged(host, used, other) == [True, False]
    blockers.publish(host.book, {used.execution_id: 1})
    blockers.make_way(host.book, host.host_id)
    assert flagged(host, used, other) == [False, True]
    blockers.publish(host.book, {used.execution_id: None, other.execution_id: None})
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
    assert flagged(host, used, other) == [False, False]


def test_a_lease_that_another_process_holds_too_would_not_end(host: Scene, sql: psycopg.Connection) -> None:
    model = cached(host, 20)
    sql.execute("INSERT INTO jayrun.lease_holders (lease_id, holder_id) VALUES (%s, %s)", (model.id, another(host).id))
    waits(host, cuda(20))
    assert blockers.make_way(host.book, host.host_id) == (0, 0)


def test_the_book_refuses_flags_on_what_is_not_idle(host: Scene, sql: psycopg.Connection) -> None:
    model = cached(host, 20, idle_seconds=None)
    for column in ("idle_since", "flagged_at"):
        with pytest.raises(psycopg.errors.CheckViolation):
            sql.execute(
                f"UPDATE jayrun.executions SET {column} = clock_timestamp()"
                f", kind = CASE WHEN '{column}' = 'idle_since' THEN 'operator' ELSE kind END WHERE id = %s",
                (model.execution_id,),
            )


def test_room_that_was_freed_meanwhile_is_granted_and_nothing_is_flagged(host: Scene) -> None:
    model, blocker = cached(host, 12), host.granted(cuda(12))
    waiter = waits(host, cuda(12))
    leases.release(host.book, host.host_id, host.holder.id, [(blocker.id, blocker.epoch)])  # and then it was killed
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
    assert flagged(host, model) == [False]
    assert {each["execution_id"] for each in audit.leases(host.book)} == {model.execution_id, waiter}


def at_once(host: Scene, passes: int = 8) -> list[tuple[int, int]]:
    """So many passes that begin together; what each of them did."""
    begin, did = threading.Barrier(passes), []

    def make_way() -> None:
        mine = Book(host.book.url, role="test", patience_seconds=10)
        begin.wait()
        did.append(blockers.make_way(mine, host.host_id))
        mine.close()

    threads = [threading.Thread(target=make_way) for _ in range(passes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(did) == passes
    return did


def test_eight_passes_at_once_flag_no_more_than_needed(host: Scene, sql: psycopg.Connection) -> None:
    for _ in range(12):
        cached(host, 2, holder=another(host))
    for _ in range(2):
        waits(host, cuda(4))
    did = at_once(host)
    assert sum(flags for flags, _ in did) == 4
    assert replay(sql) == 12


def only_waits(host: Scene, holder: Holder) -> None:
    holders.beat(host.book, holder, only_waits=True)


def test_eight_passes_at_once_fail_one_of_a_circle(host: Scene, sql: psycopg.Connection) -> None:
    first, second = another(host), another(host)
    for holder in (first, second):
        ask = host.ask(cuda(10), execution=host.execution(holder=holder))
        assert isinstance(admission.reserve(host.book, ask), Granted)
        leases.settle(
            host.book,
            host.host_id,
            holder.id,
            finished=[Finished(ask.asker.execution.id, ExecutionState.SUCCEEDED)],
        )
    waits(host, cuda(14), first)
    youngest = waits(host, cuda(14), second)
    only_waits(host, first)
    assert blockers.make_way(host.book, host.host_id) == (0, 0)  # the second may still drop something
    only_waits(host, second)
    assert sum(failures for _, failures in at_once(host)) == 1
    row = sql.execute(
        "SELECT id, state FROM jayrun.executions WHERE failure ->> 'type' = 'PlacementDeadlock'"
    ).fetchall()
    assert row == [(youngest, "failed")]
    replay(sql)


def test_a_process_that_still_runs_something_is_in_no_circle(host: Scene) -> None:
    holder = another(host)
    ask = host.ask(cuda(14), execution=host.execution(holder=holder))
    assert isinstance(admission.reserve(host.book, ask), Granted)
    waits(host, cuda(14), holder)
    only_waits(host, holder)
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
    done = [Finished(ask.asker.execution.id, ExecutionState.SUCCEEDED)]
    leases.settle(host.book, host.host_id, holder.id, finished=done)
    assert blockers.make_way(host.book, host.host_id) == (0, 1)


def test_an_idle_resource_is_no_blocker_of_a_circle(host: Scene) -> None:
    holder = another(host)
    model = cached(host, 14, holder=holder)
    waits(host, cuda(14), holder)
    only_waits(host, holder)
    assert blockers.make_way(host.book, host.host_id) == (1, 0)
    assert flagged(host, model) == [True]
    assert blockers.make_way(host.book, host.host_id) == (0, 0)
