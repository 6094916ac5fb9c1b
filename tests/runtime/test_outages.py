"""The book away: stopped, restarted, cut off, failed over. No lease is lost or doubled, what ended meanwhile is told
afterwards, who waits goes on by itself, and each process says once that the book went away and once that it is back."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import work_for_workers as work
from crews import Crew, Sound, crew_of
from fleet import gpus
from processes import PATIENCE, command, until
from standby import standby_of
from test_waiting import Probe, Take, parked

from jayrun import FailureMode, Runtime, probes
from jayrun.embedded import Throwaway, start_throwaway
from jayrun.errors import PlacementTimeout
from jayrun.runtime import service
from jayrun.settings import Settings
from jayrun.store import audit, schema
from jayrun.store.transactions import Book


@pytest.fixture
def own_server(tmp_path: Any) -> Iterator[Throwaway]:
    """A server that a test may stop and start."""
    with start_throwaway(tmp_path / "server", settings=Settings()) as throwaway:
        schema.upgrade(throwaway.url)
        with psycopg.connect(throwaway.url, autocommit=True) as connection:
            # Nothing may depend on a tick.
            connection.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")
        yield throwaway
        for ended in list(service._services.values()):
            ended.stop()
        service._services.clear()


def test_an_outage_holds_nothing_up_and_loses_nothing(own_server: Throwaway, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(own_server.url, devices=gpus(2))
    held = runtime.run(Take, memory_gb=24)
    dropped = runtime.run(Take, memory_gb=24)
    to_cancel = runtime.start(Take, memory_gb=24)
    to_time_out = runtime.start(Take, memory_gb=24, timeout=0.5)
    to_be_served = runtime.start(Take, memory_gb=24)
    book = Book(own_server.url, role="test")
    parked(book, 3)
    with caplog.at_level(logging.WARNING, logger="jayrun"):
        own_server.stop()
        del dropped
        assert to_cancel.cancel()
        with pytest.raises(PlacementTimeout):
            to_time_out.result(PATIENCE)
        assert not to_be_served.done()
        own_server.start()
        assert to_be_served.result(PATIENCE).value == "taken"
    assert caplog.text.count("out of reach") == 1
    until(lambda: caplog.text.count("the book is back") == 1)
    del to_be_served
    until(lambda: [row["memory_bytes"] for row in audit.leases(book)] == [24 * 10**9])
    assert audit.queue(book) == []
    assert audit.violations(book) == []
    del held
    runtime.close()
    until(lambda: not audit.leases(book))
    book.close()


def test_an_outage_right_after_a_wait_began_takes_nothing_from_its_timeout(own_server: Throwaway) -> None:
    runtime = Runtime(own_server.url, devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    stopped: list[None] = []

    def stop() -> None:
        stopped.append(None)
        own_server.stop()

    with probes.arm("reserve.parked", stop), pytest.raises(PlacementTimeout):
        runtime.run(Take, memory_gb=24, timeout=0.5)
    assert stopped
    own_server.start()
    del blocker
    runtime.close()


def test_failing_fast_during_an_outage_completes_every_future(own_server: Throwaway) -> None:
    runtime = Runtime(own_server.url, devices=gpus(1), failure_mode=FailureMode.FAIL_FAST)
    blocker = runtime.run(Take, memory_gb=24)
    waiting = runtime.start(Take, memory_gb=24)
    book = Book(own_server.url, role="test")
    parked(book)
    own_server.stop()
    failing = runtime.start(Probe, body=lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE)
    assert waiting.exception(PATIENCE) is not None
    own_server.start()
    del blocker
    runtime.close()
    assert audit.queue(book) == []
    until(lambda: not audit.leases(book))
    book.close()


# --- every kind of process, and the server killed --------------------------------------------------------------------

BEGAN = "the book is out of reach"
OVER = "the book is back"


def live(sql: psycopg.Connection) -> dict[Any, int]:
    """The leases that live, and their epochs."""
    return dict(sql.execute("SELECT id, epoch FROM jayrun.leases WHERE ended_at IS NULL").fetchall())


def said_once_by_each(words: str, processes: set[int]) -> bool:
    """Whether each of the processes of a crew, and no other, has said once that it began and once that it is over."""
    told = [
        sorted(map(int, re.findall(rf"^jayrun worker (\d+): {what}", words, re.MULTILINE))) for what in (BEGAN, OVER)
    ]
    return told == [sorted(processes)] * 2


@pytest.fixture
def folder(tmp_path: Path, own_server: Throwaway) -> Path:
    """Where processes meet; the tick is short."""
    with psycopg.connect(own_server.url, autocommit=True) as sql:
        sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.5")
    made = tmp_path / "meeting"
    made.mkdir()
    return made


class Household:
    """One process of every kind at work on one server with four devices, each taken, and somebody waiting behind."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        environment = {"JAYRUN_DATABASE_URL": url, "JAYRUN_HOST_ID": "test-host"}
        self.runtime = Runtime(url, devices=gpus(4), settings=Settings(host_id="test-host"))
        self.held = self.runtime.run(Take, memory_gb=24)
        self.dropped: Any = self.runtime.run(Take, memory_gb=24)
        self.crew: Crew = stack.enter_context(crew_of(url, folder / "crew.log", processes=2))
        self.meeting = self.runtime.submit(work.Hold, memory_gb=24, folder=str(folder))
        until(lambda: list(folder.glob("began-*")))
        script = 'until [ -e "$0/done" ]; do sleep 0.05; done'
        self.logs = [folder / "holding.log", folder / "waiting.log"]
        arguments = ("run", "--memory-gb", "24", "--", "sh", "-c")
        self.holding = stack.enter_context(command(*arguments, script, str(folder), log=self.logs[0], **environment))
        with closing(Book(url, role="test")) as book:
            until(lambda: len(audit.leases(book)) == 4)
            self.future = self.runtime.start(Take, memory_gb=24)
            parked(book, 1)
            self.submitted = self.runtime.submit(work.Tell, file=str(folder / "told"), sizes=[24])
            parked(book, 2)
            self.waiting = stack.enter_context(command(*arguments, "true", log=self.logs[1], **environment))
            parked(book, 3)
            self.processes = {self.crew.process.pid, *self.crew.workers()}

    def let_go(self) -> None:
        """What a lease hangs on ends: data of this process, an execution of a worker, a command."""
        self.dropped = None
        (self.folder / "go").touch()
        (self.folder / "done").touch()

    def knows(self, log: str) -> bool:
        """Whether all that look at every tick have noticed that the book is away."""
        told = self.crew.words().count(BEGAN)
        return BEGAN in log and told == len(self.processes) and BEGAN in self.logs[1].read_text()

    def goes_on(self) -> None:
        """Everybody is served, by itself."""
        assert self.future.result(PATIENCE).value == "taken"
        assert self.meeting.result(PATIENCE)
        assert self.submitted.result(PATIENCE)
        assert self.holding.wait(PATIENCE) == 0
        assert self.waiting.wait(PATIENCE) == 0


def lives_through(
    house: Household, before: dict[Any, int], caplog: pytest.LogCaptureFixture, sql: psycopg.Connection
) -> None:
    """After the outage: everybody goes on and says so once, and of the leases from before only that of live data
    lives."""
    house.goes_on()
    until(lambda: said_once_by_each(house.crew.words(), house.processes))
    until(lambda: OVER in caplog.text)
    assert caplog.text.count(BEGAN) == caplog.text.count(OVER) == 1
    waited = house.logs[1].read_text()
    assert waited.count(BEGAN) == waited.count(OVER) == 1
    assert house.logs[0].read_text().count(BEGAN) <= 1  # perhaps it did not beat meanwhile
    kept = {share.lease_id: share.epoch for share in house.held.placement.placements}
    assert kept.items() <= before.items()
    del house.future
    until(lambda: live(sql) == kept)
    assert sql.execute("SELECT sum(crashes) FROM jayrun.executions").fetchone() == (0,)
    ended = """
    SELECT kind, count(*) FROM jayrun.lease_events
    WHERE lease_id = ANY (%s) AND kind IN ('released', 'reclaimed', 'returned') GROUP BY 1
    """
    kinds = dict(sql.execute(ended, (list(before),)).fetchall())
    # Any process of the host may see that the command has ended, and be the first to tell.
    assert sum(kinds.values()) == 3
    assert kinds.get("released", 0) >= 2
    del house.held
    house.runtime.close()
    house.crew.drain()
    Sound(sql).check(sql)


@pytest.mark.parametrize("seconds", [4, pytest.param(35, marks=pytest.mark.slow)])
def test_the_server_is_killed_and_stays_away(
    own_server: Throwaway, folder: Path, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    """R9, R10, R22: four seconds exceed what every background thread is willing to wait for an answer, and 35 s also
    what those wait who have nothing else to do."""
    url = own_server.url
    with ExitStack() as stack:
        house = Household(url, folder, stack)
        with psycopg.connect(url, autocommit=True) as sql:
            before = live(sql)
        assert len(before) == 4
        with caplog.at_level(logging.WARNING, logger="jayrun"):
            own_server.kill()
            away_since = time.monotonic()
            until(lambda: house.knows(caplog.text))
            house.let_go()
            time.sleep(max(away_since + seconds - time.monotonic(), 0))
            assert not house.future.done()
            own_server.start()
            with psycopg.connect(url, autocommit=True) as sql:
                lives_through(house, before, caplog, sql)


def test_the_primary_is_killed_and_the_standby_promoted(
    own_server: Throwaway, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R22, R26: what was acknowledged is on the standby, since the primary waited for it at each commit."""
    with standby_of(own_server) as pair, ExitStack() as stack:
        house = Household(pair.url, folder, stack)
        with psycopg.connect(own_server.url, autocommit=True) as sql:
            before = live(sql)
        assert len(before) == 4
        with caplog.at_level(logging.WARNING, logger="jayrun"):
            own_server.kill()
            until(lambda: house.knows(caplog.text))
            house.let_go()
            pair.promote()
            with psycopg.connect(pair.standby.url, autocommit=True) as sql:
                lives_through(house, before, caplog, sql)


def test_a_primary_that_became_read_only_is_left(own_server: Throwaway) -> None:
    """R26: the old primary answers still, but refuses to write (25006)."""
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'jayrun:runtime%'"
    with standby_of(own_server) as pair, psycopg.connect(own_server.url, autocommit=True) as old:
        runtime = Runtime(pair.url, devices=gpus(1), settings=Settings(host_id="test-host"))
        held = runtime.run(Take, memory_gb=24)
        future = runtime.start(Take, memory_gb=24)
        with closing(Book(pair.url, role="test")) as book:
            parked(book)
        assert old.execute(sessions).fetchone() != (0,)
        old.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        old.execute("SELECT pg_reload_conf()")
        pair.promote()
        del held
        assert future.result(PATIENCE).value == "taken"
        del future
        runtime.close()
        with psycopg.connect(pair.standby.url, autocommit=True) as new:
            Sound(new).check(new)
            assert new.execute("SELECT count(*) FROM jayrun.leases").fetchone() == (2,)
        assert old.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL").fetchone() == (1,)
        service._services.pop(pair.url).stop()
        until(lambda: old.execute(sessions).fetchone() == (0,))
