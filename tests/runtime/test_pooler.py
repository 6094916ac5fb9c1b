"""R24: behind pgbouncer everything works; where notifications do not pass, that is found out, said once, and polled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import work_for_workers as work
from crews import QUICK, Sound, crew_of
from fleet import gpus
from poolers import needs_pgbouncer, pooler
from processes import PATIENCE, command, until
from test_waiting import Probe, Take, parked

from jayrun import Operator, Runtime
from jayrun.embedded import Throwaway
from jayrun.runtime import service
from jayrun.settings import Settings
from jayrun.store import listening, schema
from jayrun.store.transactions import Book

pytestmark = needs_pgbouncer

DEAF = "a pooler in transaction mode stands before the book"


@pytest.fixture
def pooled(server: Throwaway, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the book by a pooler in transaction mode, with fewer connections than there are clients."""
    monkeypatch.setattr(listening, "_deafness_was_said", False)
    with pooler(server, mode="transaction", size=3) as pooled_url:
        yield pooled_url
        ended = service._services.pop(pooled_url, None)
        if ended is not None:
            ended.stop()


def test_everything_works_and_waits_are_polled(
    pooled: str, sql: psycopg.Connection, book: Book, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sql.execute(QUICK)
    # It is not the tick that helps.
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")
    sound = Sound(sql)
    assert schema.upgrade(pooled) == (schema.REVISION, schema.REVISION)
    runtime = Runtime(pooled, devices=gpus(1), settings=Settings(host_id="test-host"))
    log = tmp_path / "run.log"
    environment = {"JAYRUN_DATABASE_URL": pooled, "JAYRUN_HOST_ID": "test-host"}
    with caplog.at_level(logging.WARNING, logger="jayrun"), crew_of(pooled, tmp_path / "crew.log", processes=2) as crew:
        until(lambda: crew.ready() == 2)
        for turn in range(8):  # more often than a driver waits before it prepares a statement
            held = runtime.run(Take, memory_gb=24)
            future = runtime.start(Take, memory_gb=24)
            parked(book)
            del held
            assert future.result(PATIENCE).value == "taken"
            del future
            ticket = runtime.submit(work.Tell, file=str(tmp_path / f"told-{turn}"), sizes=[12, 12])
            assert ticket.result(PATIENCE)
        held = runtime.run(Take, memory_gb=24)
        ticket = runtime.submit(work.Tell, file=str(tmp_path / "told"), sizes=[24])
        parked(book, 1)
        with command("run", "--memory-gb", "24", "--", "true", log=log, **environment) as waiting:
            parked(book, 2)
            del held
            assert ticket.result(PATIENCE)
            assert waiting.wait(PATIENCE) == 0
        assert caplog.text.count(DEAF) == 1
        assert log.read_text().count(DEAF) == 1
        runtime.close()
        crew.drain()
        told = crew.words()
        assert 1 <= told.count(DEAF) <= 2  # of each worker that ever listened
    assert sql.execute("SELECT sum(crashes) FROM jayrun.executions").fetchone() == (0,)
    sound.check(sql)


def test_many_clients_on_few_connections(pooled: str, sql: psycopg.Connection, book: Book) -> None:
    """The gate is held and awaited on connections of the pool, so those who await it may use all of them up."""
    runtime = Runtime(pooled, devices=gpus(4), settings=Settings(host_id="test-host"), threads=16)
    sound = Sound(sql)

    def body(memory_gb: int) -> Callable[[Operator], int]:
        return lambda self: self.placement.cuda(memory_gb).host_index

    futures = [runtime.start(Probe, body=body(1 + number % 24)) for number in range(64)]
    assert {future.result(PATIENCE).value for future in futures} == {0, 1, 2, 3}
    runtime.close()
    sound.check(sql)
    assert sql.execute("SELECT count(*) FROM jayrun.executions WHERE state = 'succeeded'").fetchone() == (64,)


def test_no_statement_is_prepared_on_the_server(book: Book) -> None:
    def prepared(pg: psycopg.Connection) -> object:
        for _ in range(20):
            pg.execute("SELECT %s::int", (1,)).fetchall()
        return pg.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()

    assert book.written(prepared) == (0,)


def test_a_pooler_in_session_mode_passes_notifications(
    server: Throwaway, url: str, book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pooler(server, mode="session", size=10) as pooled_url,
        closing(Book(pooled_url, role="pooled")) as pooled_book,
        pooled_book.listen("somebody") as listener,
    ):
        assert listener.open()
        assert listener.is_open
        book.value("SELECT jayrun.tell(%s)", (["somebody"],))
        assert listener.wait(PATIENCE)
        assert not listener.wait(0)
    assert DEAF not in caplog.text


def test_who_cannot_hear_looks_soon_and_asks_the_pooler_again_later(pooled: str) -> None:
    with closing(Book(pooled, role="pooled")) as book, book.listen("somebody") as listener:
        assert not listener.open()
        assert not listener.is_open
        began = time.monotonic()
        assert listener.wait(PATIENCE)  # perhaps somebody called
        assert time.monotonic() - began < PATIENCE / 2
        with book.listen("another") as another:  # of the same process: it need not find out again
            began = time.monotonic()
            assert not another.open()
            assert time.monotonic() - began < listening._ECHO_SECONDS
        book._connections.deaf_until = 0.0
        listener.close()
        assert not listener.open()
        assert book._connections.deaf_until > time.monotonic()
