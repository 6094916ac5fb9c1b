"""Asks that stand behind nobody are decided before the gate; whatever happens in between, they get what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from fleet import Scene, cuda, cuda_group, gpus, scene
from history import replay

from jayrun import probes
from jayrun.domain.devices import DeviceState
from jayrun.store import admission, at_once, audit, devices, leases
from jayrun.store.admission import Granted, Parked, Unavailable
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book


@contextmanager
def looks(point: str = "reserve.seen") -> Iterator[list[None]]:
    """How often `point` is reached within the block."""
    seen: list[None] = []
    with probes.arm(point, lambda: seen.append(None)):
        yield seen


def let_go(stage: Scene, lease: Lease) -> None:
    leases.release(stage.book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])


def index_of(lease: Lease) -> int:
    [share] = lease.shares
    return share.host_index


def made_steady(stage: Scene) -> None:
    """This process has been alone on the host for a while."""
    for _ in range(at_once.STEADY_LOOKS + 2):
        let_go(stage, stage.granted(cuda(1)))
    with looks() as seen:
        let_go(stage, stage.granted(cuda(1)))
    assert not seen


def test_the_gate_is_not_held_over_a_question(book: Book) -> None:
    stage = scene(book, gpus(1))
    with looks() as seen, looks("reserve.loaded") as loaded:
        stage.granted(cuda(2))
    assert (len(seen), len(loaded)) == (1, 0)


def test_a_full_device_is_decided_behind_the_gate_until_it_is_quiet_again(book: Book) -> None:
    stage = scene(book, gpus(1))
    first = stage.granted(cuda(24))
    with looks() as seen, looks("reserve.loaded") as loaded:
        assert isinstance(stage.reserve(cuda(2), wait=False)[1], Unavailable)
        assert isinstance(stage.reserve(cuda(2), wait=False)[1], Unavailable)
        assert len(seen) <= 2
        assert len(loaded) == 4
        let_go(stage, first)
        stage.granted(cuda(2))
        loaded.clear()
        stage.granted(cuda(2))
    assert not loaded


Between = Callable[[Scene, psycopg.Connection], object]


def fill(stage: Scene, sql: psycopg.Connection) -> None:
    other = Book(stage.book.url, role="test")
    Scene(other, stage.host_id, stage.holder).granted(cuda(20, device_id=0))
    other.close()


def fill_alone(stage: Scene, sql: psycopg.Connection) -> None:
    other = Book(stage.book.url, role="test")
    Scene(other, stage.host_id, stage.holder).granted(cuda(0, exclusive=True, device_id=0))
    other.close()


def drain(stage: Scene, sql: psycopg.Connection) -> None:
    devices.set_state(stage.book, stage.host_id, kind="gpu", host_indexes=[0], state=DeviceState.DRAINING)


def shrink(stage: Scene, sql: psycopg.Connection) -> None:
    devices.declare(stage.book, stage.host_id, gpus(1, memory_gb=1))


def remove(stage: Scene, sql: psycopg.Connection) -> None:
    devices.remove(stage.book, stage.host_id, kind="gpu", host_indexes=[0])


def spoil(stage: Scene, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.devices SET fault = 'lost' WHERE host_index = 0")


def withhold(stage: Scene, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.devices SET withheld_bytes = 20000000000 WHERE host_index = 0")


def hide(stage: Scene, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.holders SET visible = %s", ('{"cuda": ["1"]}',))


def rename(stage: Scene, sql: psycopg.Connection) -> None:
    """Discovery found another card before the two: the first one is number 1 now."""
    for index in ("host_index + 10", "abs(host_index - 11)"):
        sql.execute(f"UPDATE jayrun.devices SET host_index = {index}")
    sql.execute("UPDATE jayrun.devices SET capacity_bytes = 1000000000 WHERE host_index = 0")


def convert(stage: Scene, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.devices SET backends = '{rocm}' WHERE host_index = 0")


BETWEEN = [fill, fill_alone, drain, shrink, remove, spoil, withhold, hide, rename, convert]


@pytest.mark.parametrize("steady", [False, True], ids=["looked at", "steady"])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_no_longer_fits_goes_elsewhere(
    book: Book, sql: psycopg.Connection, between: Between, steady: bool
) -> None:
    """The device that was seen free is taken, or gone, before the gate is reached: the other one serves."""
    stage = scene(book, gpus(2))
    if steady:
        made_steady(stage)
        between(stage, sql)
        lease = stage.granted(cuda(8))
    else:
        done: list[None] = []

        def once() -> None:
            if not done:
                done.append(None)
                between(stage, sql)

        with probes.arm("reserve.seen", once):
            lease = stage.granted(cuda(8))
        assert done
    assert index_of(lease) == 1
    if between in (fill, fill_alone):
        assert replay(sql) >= 2
    assert audit.violations(book) == []


def test_a_process_that_thinks_itself_alone_still_takes_the_tightest_device(book: Book) -> None:
    """Another process made the second device the better fit: the contract's choice, and not a remembered one."""
    stage = scene(book, gpus(2))
    made_steady(stage)
    other = Book(book.url, role="test")
    Scene(other, stage.host_id, stage.holder).granted(cuda(10, device_id=1))
    other.close()
    assert index_of(stage.granted(cuda(8))) == 1


def test_who_came_to_wait_in_between_stands_before(book: Book, sql: psycopg.Connection) -> None:
    """A big one parks after the look: the small one goes past it by the rules, which count that."""
    stage = scene(book, gpus(2))
    stage.granted(cuda(8, device_id=0))
    done: list[object] = []

    def park() -> None:
        if not done:
            done.append(None)  # the ask of the other comes by here too
            other = Book(book.url, role="test")
            done.append(Scene(other, stage.host_id, stage.holder).reserve(cuda_group(2, 24))[1])
            other.close()

    with probes.arm("reserve.seen", park), looks("reserve.loaded") as loaded:
        stage.granted(cuda(2))
    assert done == [None, Parked()]
    assert loaded
    assert [row["bypassed"] for row in audit.queue(book)] == [1]


def test_an_execution_that_was_ended_in_between_gets_nothing(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    execution = stage.execution()
    first = stage.ask(cuda(2), execution=execution)
    assert isinstance(admission.reserve(book, first), Granted)
    member = admission.Member(execution=execution, invocation=1, recorded=(cuda(2), cuda(3)), booked=1)

    def end_it() -> None:
        sql.execute(
            "UPDATE jayrun.executions SET state = 'cancelled', ended_at = clock_timestamp() WHERE id = %s",
            (execution.id,),
        )

    with probes.arm("reserve.seen", end_it):
        outcome = admission.reserve(book, admission.Ask(asker=member, position=1))
    assert outcome == admission.Ended("cancelled")
    assert len(audit.leases(book)) == 1


def test_further_requests_of_one_invocation_are_granted_at_once_too(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    execution = stage.execution()
    recorded = (cuda(2), cuda(3), cuda(4))
    with looks("reserve.loaded") as loaded:
        for position in range(3):
            member = admission.Member(
                execution=execution, invocation=1, recorded=recorded[: position + 1], booked=position or None
            )
            assert isinstance(admission.reserve(book, admission.Ask(asker=member, position=position)), Granted)
    assert not loaded
    assert sql.execute("SELECT count(*) FROM jayrun.placement_requests").fetchone() == (3,)
    assert audit.capacity(book)[0]["reserved_bytes"] == 9 * 10**9


def test_threads_of_one_process_share_what_they_saw(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(4))
    made_steady(stage)

    def cycles(_: int) -> int:
        for _ in range(25):
            let_go(stage, stage.granted(cuda(6)))
        return 25

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(cycles, range(8))) == 200
    admission.combine(book, stage.host_id)
    assert [row["reserved_bytes"] for row in audit.capacity(book)] == [0] * 4
    assert audit.violations(book) == []
    replay(sql)
