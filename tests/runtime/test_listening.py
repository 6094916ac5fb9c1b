"""R23, R25: who waits holds no connection but the one that listens, and needs not even that."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime, Scene, cuda, gpus, scene
from processes import PATIENCE, until
from proxy import Message, Proxy
from test_waiting import Probe, Take, parked

from jayrun import Runtime
from jayrun.runtime import service
from jayrun.settings import Settings
from jayrun.store import admission, audit, engine, leases, listening
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

LISTENERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' ORDER BY backend_start"


def listens(message: Message) -> bool:
    return message.sender == "server" and message.kind == b"C" and message.body == b"LISTEN\0"


def listeners(sql: psycopg.Connection) -> list[int]:
    return [row[0] for row in sql.execute(LISTENERS)]


def let_go(here: Scene, lease: Lease) -> None:
    """As another process of the host would."""
    leases.release(here.book, here.host_id, here.holder.id, [(lease.id, lease.epoch)])
    admission.combine(here.book, here.host_id)


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with closing(Proxy(url)) as made:
        yield made


@pytest.fixture
def make(sql: psycopg.Connection) -> Iterator[MakeRuntime]:
    """Make Runtimes on another URL of the same host."""
    made: list[Runtime] = []

    def start(url: str, *, tick_seconds: float, **options: Any) -> Runtime:
        sql.execute(
            "UPDATE jayrun.settings SET tick_seconds = %s, holder_ttl_seconds = greatest(30, %s)",
            (tick_seconds, 10 * tick_seconds),
        )
        made.append(Runtime(url, settings=Settings(host_id="test-host"), **options))
        return made[-1]

    yield start
    for each in made:
        each.close()
        service._services.pop(each._service.book.url).stop()


def test_a_listener_that_is_killed_listens_again_at_once(
    make: MakeRuntime, url: str, book: Book, sql: psycopg.Connection
) -> None:
    runtime = make(url, tick_seconds=3600)
    here = scene(book, gpus(1))
    blocker = here.granted(cuda(24))
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    until(lambda: listeners(sql))
    (killed,) = listeners(sql)
    assert sql.execute("SELECT pg_terminate_backend(%s)", (killed,)).fetchone() == (True,)
    until(lambda: [pid for pid in listeners(sql) if pid != killed])
    let_go(here, blocker)
    assert future.result(PATIENCE).value == "taken"


def test_a_listener_that_fell_silent_is_missed_by_nobody(
    make: MakeRuntime, proxy: Proxy, book: Book, sql: psycopg.Connection
) -> None:
    """Its connection stays open and passes nothing on: the tick looks at the book all the same."""
    proxy.silence(listens)
    runtime = make(proxy.url, tick_seconds=0.5)
    here = scene(book, gpus(1))
    blocker = here.granted(cuda(24))
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    until(lambda: proxy.fired)
    let_go(here, blocker)
    assert future.result(PATIENCE).value == "taken"


def test_a_listener_that_fell_silent_is_renewed(
    make: MakeRuntime,
    proxy: Proxy,
    book: Book,
    sql: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "RENEW_SECONDS", 0.5)
    proxy.silence(listens)
    runtime = make(proxy.url, tick_seconds=0.2)
    here = scene(book, gpus(1))
    blocker = here.granted(cuda(24))
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    until(lambda: proxy.fired)
    silent = listeners(sql)
    assert len(silent) == 1
    until(lambda: set(listeners(sql)) - set(silent))
    let_go(here, blocker)
    assert future.result(PATIENCE).value == "taken"


def test_the_network_is_asked_whether_the_server_is_there(proxy: Proxy) -> None:
    """A statement whose answer never comes ends when the kernel finds the other host gone."""

    def options(pg: psycopg.Connection) -> list[int]:
        with socket.socket(fileno=os.dup(pg.fileno())) as tcp:
            at_tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
            return [
                tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                *(tcp.getsockopt(socket.IPPROTO_TCP, option) for option in at_tcp),
            ]

    with closing(Book(proxy.url, role="test")) as book:
        assert book.written(options) == [1, 10, 5, 3, 15_000]
        with book.listen("somebody") as listener:
            assert listener.open()
            assert listener._connection is not None
            assert options(listener._connection) == [1, 10, 5, 3, 15_000]


@pytest.mark.parametrize("allowed", [1, 3])
def test_fifty_wait_where_few_connections_are_allowed(
    make: MakeRuntime,
    url: str,
    book: Book,
    sql: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    allowed: int,
) -> None:
    """R23: the role may have so few connections; a wait holds none, and the process beats and releases all the same."""
    crowded: dict[str, float] = {}
    monkeypatch.setattr(engine, "_crowded_until", crowded)
    sql.execute(f"ALTER ROLE jayrun_worker CONNECTION LIMIT {allowed}")
    mine = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'jayrun_worker'"
    seen = "SELECT seen_at FROM jayrun.holders WHERE role = 'runtime' AND id <> %s"
    try:
        runtime = make(url.replace("jayrun@", "jayrun_worker@", 1), tick_seconds=0.2, threads=4)
        here = scene(book, gpus(1))
        blocker = here.granted(cuda(24))
        futures = [runtime.start(Probe, body=lambda self: self.placement.cuda(24).host_index) for _ in range(50)]
        until(lambda: len(audit.queue(book)) == 50 or any(f.done() for f in futures))
        assert not [f.exception() for f in futures if f.done()]
        until(lambda: sql.execute(mine).fetchone()[0] <= 1)  # the background thread's own
        assert crowded, "nothing was refused, so nothing was shown"
        first = sql.execute(seen, (here.holder.id,)).fetchone()
        until(lambda: sql.execute(seen, (here.holder.id,)).fetchone() != first)
        let_go(here, blocker)
        assert {future.result(PATIENCE).value for future in futures} == {0}
    finally:
        sql.execute("ALTER ROLE jayrun_worker CONNECTION LIMIT -1")
