"""Processes that know nothing of each other make way: idle resources go, circles end, and everything else stays."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from history import replay
from processes import CONTEXT, PATIENCE, process, until

from jayrun import Data, Operator, Resource, Runtime
from jayrun.errors import PlacementDeadlock
from jayrun.runtime import reconciler
from jayrun.store import audit, holders
from jayrun.store.transactions import Book

MakeActor = Callable[[], "Actor"]


# --- in the processes ------------------------------------------------------------------------------------------------


class Model(Resource):
    """Tells its process's test when it is torn down, and then does what its `manner` says."""

    name: str
    size_gb: float
    manner: str

    def setup(self) -> Data:
        return Data(self.name, self.placement.cuda(self.size_gb))

    def teardown(self, data: Data) -> None:
        _tell("tears down", self.name)
        if self.manner == "fails":
            raise OSError("no")
        if self.manner == "hangs":
            threading.Event().wait()


class Use(Operator):
    model: Model

    def execute(self) -> Data:
        return Data(self.model.value)


class UseLong(Operator):
    """In use until the test says something."""

    model: Model

    def execute(self) -> Data:
        _tell("uses", self.model.value)
        _pipe.recv()
        return Data(self.model.value)


class Take(Operator):
    memory_gb: Data
    device_id: Data = Data(None)

    def execute(self) -> Data:
        return Data("taken", self.placement.cuda(self.memory_gb.value, device_id=self.device_id.value))


class TakeLong(Operator):
    """Holds what it asks for until the test says something."""

    memory_gb: Data
    device_id: Data

    def execute(self) -> Data:
        placement = self.placement.cuda(self.memory_gb.value, device_id=self.device_id.value)
        _tell("runs", placement.host_index)
        _pipe.recv()
        return Data("done")


_pipe: Connection
_one_at_a_time = threading.Lock()


def _tell(*what: Any) -> None:
    with _one_at_a_time:
        _pipe.send(what)


def act(url: str, pipe: Connection) -> None:
    """Do what the test says, in the main thread, and tell it what came of it."""
    global _pipe
    _pipe = pipe
    runtime = Runtime(url)
    kept: list[Any] = []
    while True:
        match pipe.recv():
            case "use", name, size_gb, manner:
                _tell("used", runtime.run(Use, model=Model(name=name, size_gb=size_gb, manner=manner)).value)
            case "use long", name, size_gb:
                _tell("used", runtime.run(UseLong, model=Model(name=name, size_gb=size_gb, manner="")).value)
            case "take", memory_gb, device_id:
                try:
                    kept.append(runtime.run(Take, memory_gb=memory_gb, device_id=device_id))
                    _tell("took", memory_gb)
                except PlacementDeadlock as error:
                    _tell("deadlock", str(error))
            case "take long", memory_gb, device_id:
                _tell(runtime.run(TakeLong, memory_gb=memory_gb, device_id=device_id).value)
            case "start", memory_gb, device_id:
                future = runtime.start(Take, memory_gb=memory_gb, device_id=device_id)
                _tell("started")
            case ("result",):
                kept.append(future.result())
                del future
                _tell("got it")
            case ("drop",):
                kept.clear()
                _tell("dropped")
            case ("end",):
                return


# --- in the test -----------------------------------------------------------------------------------------------------


class Actor:
    """A process that does what the test says."""

    def __init__(self, url: str, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe

    def says(self, *what: Any) -> tuple[Any, ...]:
        """Wait for the next thing that it tells, which begins with `what`."""
        assert self._pipe.poll(PATIENCE), f"it does not say {what}"
        said: tuple[Any, ...] = self._pipe.recv()
        assert said[: len(what)] == what
        return said

    def is_silent(self) -> bool:
        return not self._pipe.poll(0)

    def do(self, *what: Any) -> None:
        self._pipe.send(what)

    def use(self, name: str, size_gb: float, manner: str = "") -> None:
        self.do("use", name, size_gb, manner)
        self.says("used", name)

    def take(self, memory_gb: float, device_id: int | None = None) -> None:
        """Ask in its main thread, which may wait."""
        self.do("take", memory_gb, device_id)

    def drop(self) -> None:
        self.do("drop")
        self.says("dropped")


@pytest.fixture
def host(make_runtime: MakeRuntime) -> None:
    """Two devices, short ticks, and this test's own process beside the actors."""
    make_runtime(devices=gpus(2))


@pytest.fixture
def actor(host: None, url: str) -> Iterator[MakeActor]:
    with ExitStack() as stack:

        def make() -> Actor:
            here, there = CONTEXT.Pipe()
            child = stack.enter_context(process(act, url, there))
            assert child.pid is not None
            return Actor(url, child.pid, here)

        yield make


def queued(book: Book, count: int) -> None:
    until(lambda: len(audit.queue(book)) == count)


def idle(sql: psycopg.Connection, *names: str) -> None:
    """Wait until the book knows exactly these resources as idle, in the order of their last use.

    Between two processes that order is as exact as their words are quick, so each is waited for before the next use.
    """
    query = """
        SELECT m.name FROM jayrun.executions e JOIN jayrun.leases l ON l.execution_id = e.id AND l.ended_at IS NULL
        JOIN jayrun.holders o ON o.id = e.holder_id
        CROSS JOIN LATERAL (SELECT o.pid::text || ' ' || s.memory_bytes / 1000000000 AS name
                            FROM jayrun.lease_shares s WHERE s.lease_id = l.id) m
        WHERE e.idle_since IS NOT NULL ORDER BY e.idle_since
    """
    until(lambda: tuple(row[0] for row in sql.execute(query)) == names)


def only_wait(sql: psycopg.Connection, *actors: Actor) -> None:
    """Wait until these processes, and no others, say that they only wait."""
    query = "SELECT pid FROM jayrun.holders WHERE only_waits AND state = 'alive'"
    until(lambda: {row[0] for row in sql.execute(query)} == {each.pid for each in actors})


def ticked(sql: psycopg.Connection, *actors: Actor) -> None:
    """Wait until each of these processes has made two more passes."""
    for each in actors:
        for _ in range(3):
            [(then,)] = sql.execute("SELECT seen_at FROM jayrun.holders WHERE pid = %s", (each.pid,))
            until(
                lambda then=then, pid=each.pid: sql.execute(
                    "SELECT 1 FROM jayrun.holders WHERE pid = %s AND seen_at > %s", (pid, then)
                ).fetchone()
            )


def test_a_model_of_one_process_makes_room_for_another(actor: MakeActor, book: Book) -> None:
    owner, other = actor(), actor()
    owner.use("model", 20)
    other.take(24, 0)
    owner.says("tears down", "model")
    other.says("took", 24)
    owner.use("model", 20)  # set up anew, on the other device
    assert len(audit.leases(book)) == 2
    assert audit.violations(book) == []


def test_no_tick_is_needed_once_the_book_knows_that_it_is_idle(
    actor: MakeActor, book: Book, sql: psycopg.Connection
) -> None:
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")
    owner, other = actor(), actor()
    owner.use("model", 20)
    until(lambda: sql.execute("SELECT FROM pg_stat_activity WHERE query LIKE 'LISTEN%'").fetchone() is not None)
    sql.execute("UPDATE jayrun.executions SET idle_since = clock_timestamp() WHERE kind = 'resource'")
    other.take(24, 0)
    owner.says("tears down", "model")
    other.says("took", 24)


@pytest.mark.parametrize(("asked", "torn_down"), [(12, ["small"]), (15, ["large"]), (24, ["large", "small"])])
def test_the_fewest_go_and_of_these_the_least(
    actor: MakeActor, sql: psycopg.Connection, asked: int, torn_down: list[str]
) -> None:
    """3 GB are free beside idle models of 9 and 12."""
    owners, other = {"small": actor(), "large": actor()}, actor()
    other.take(24, 1)
    other.says("took", 24)
    owners["small"].use("small", 9)
    idle(sql, f"{owners['small'].pid} 9")
    owners["large"].use("large", 12)
    idle(sql, f"{owners['small'].pid} 9", f"{owners['large'].pid} 12")
    other.take(asked, 0)
    other.says("took", asked)
    for name in torn_down:
        owners.pop(name).says("tears down", name)
    assert all(owner.is_silent() for owner in owners.values())


def test_of_equals_of_two_processes_the_least_recently_used_goes(actor: MakeActor, sql: psycopg.Connection) -> None:
    first, second, other = actor(), actor(), actor()
    other.take(24, 1)
    other.says("took", 24)
    first.use("a", 12)
    idle(sql, f"{first.pid} 12")
    second.use("b", 12)
    idle(sql, f"{first.pid} 12", f"{second.pid} 12")
    first.use("a", 12)
    idle(sql, f"{second.pid} 12", f"{first.pid} 12")
    other.take(12, 0)
    second.says("tears down", "b")
    other.says("took", 12)
    assert first.is_silent()


def test_what_is_in_use_stays_and_is_handed_on_when_it_is_idle(
    actor: MakeActor, book: Book, sql: psycopg.Connection
) -> None:
    owner, other = actor(), actor()
    owner.use("model", 20)
    idle(sql, f"{owner.pid} 20")
    owner.do("use long", "model", 20)
    owner.says("uses", "model")
    other.take(24, 0)
    queued(book, 1)
    idle(sql)  # the flag was taken back
    ticked(sql, owner, other)
    assert owner.is_silent()
    owner.do("go on")
    assert {owner.says()[0], owner.says()[0]} == {"used", "tears down"}
    other.says("took", 24)


def test_a_process_killed_with_a_flag_makes_room_all_the_same(
    actor: MakeActor, book: Book, sql: psycopg.Connection
) -> None:
    owner, other = actor(), actor()
    owner.use("model", 20, "hangs")
    other.take(24, 0)
    owner.says("tears down", "model")
    queued(book, 1)
    os.kill(owner.pid, signal.SIGKILL)
    other.says("took", 24)


def test_a_teardown_that_fails_makes_room_all_the_same(actor: MakeActor) -> None:
    owner, other = actor(), actor()
    owner.use("model", 20, "fails")
    other.take(24, 0)
    owner.says("tears down", "model")
    other.says("took", 24)


def test_eight_passes_at_once_tear_down_no_more_than_needed(
    actor: MakeActor, book: Book, sql: psycopg.Connection
) -> None:
    owners, other = [actor() for _ in range(3)], actor()
    other.take(24, 1)
    other.says("took", 24)
    for place, owner in enumerate(owners, 1):
        owner.use("model", 8)
        idle(sql, *(f"{each.pid} 8" for each in owners[:place]))
    host_id, over = holders.attest_host(book, None), threading.Event()

    def passes() -> None:
        while not over.is_set():
            reconciler.run_pass(book, host_id)

    threads = [threading.Thread(target=passes) for _ in range(8)]
    for thread in threads:
        thread.start()
    other.take(14, 0)
    other.says("took", 14)
    over.set()
    for thread in threads:
        thread.join()
    owners[0].says("tears down", "model")
    owners[1].says("tears down", "model")
    assert owners[2].is_silent()
    assert replay(sql) == 1 + 3 + 1


def test_two_that_hold_and_wait_for_each_other(actor: MakeActor, book: Book, sql: psycopg.Connection) -> None:
    first, second = actor(), actor()
    for device_id, each in enumerate((first, second)):
        each.take(14, device_id)
        each.says("took", 14)
    first.take(15, 1)
    queued(book, 1)
    second.take(16, 0)
    _, message = second.says("deadlock")
    assert f"pid {first.pid} holds 14 GB of gpu 0 and waits for cuda(memory_gb=15, device_id=1)" in message
    assert f"pid {second.pid} holds 14 GB of gpu 1 and waits for cuda(memory_gb=16, device_id=0)" in message
    assert first.is_silent()
    second.drop()
    first.says("took", 15)
    second.take(1, 0)  # it goes on like any other
    second.says("took", 1)
    assert audit.violations(book) == []


def test_a_process_that_stands_in_its_own_way_is_told(actor: MakeActor) -> None:
    alone = actor()
    alone.take(14, 0)
    alone.says("took", 14)
    alone.take(15, 0)
    _, message = alone.says("deadlock")
    assert "holds 14 GB of gpu 0" in message
    alone.drop()


def test_who_can_still_drop_its_data_is_in_no_circle(actor: MakeActor, book: Book, sql: psycopg.Connection) -> None:
    free, second = actor(), actor()
    for device_id, each in enumerate((free, second)):
        each.take(14, device_id)
        each.says("took", 14)
    free.do("start", 15, 1)
    free.says("started")
    second.take(16, 0)
    queued(book, 2)
    only_wait(sql, second)
    ticked(sql, free, second)
    assert reconciler.run_pass(book, holders.attest_host(book, None)).failed == 0
    free.drop()
    second.says("took", 16)
    second.drop()
    free.do("result")
    free.says("got it")


def test_a_blocker_of_somebody_who_runs_makes_no_circle(actor: MakeActor, book: Book, sql: psycopg.Connection) -> None:
    first, second, third = actor(), actor(), actor()
    first.take(10, 0)
    first.says("took", 10)
    second.take(24, 1)
    second.says("took", 24)
    third.do("take long", 10, 0)
    third.says("runs", 0)
    first.take(1, 1)
    second.take(14, 0)
    queued(book, 2)
    only_wait(sql, first, second)
    ticked(sql, first, second, third)
    assert reconciler.run_pass(book, holders.attest_host(book, None)).failed == 0
    third.do("go on")
    third.says("done")
    second.says("took", 14)
    second.drop()
    first.says("took", 1)
