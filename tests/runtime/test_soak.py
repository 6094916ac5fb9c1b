"""A soak: work of every kind on two hosts, while workers, supervisors, sessions and the server are ended by chance.

`make soak` runs it for an hour; SEED and SOAK_SECONDS say otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import work_for_workers as work
from chance import SEED, SOAK_SECONDS
from crews import QUICK, Crew, Sound, crew_of
from fleet import gpus
from processes import CONTEXT, PATIENCE, finished, process, until

from jayrun import RetryPolicy, Runtime
from jayrun.embedded import Throwaway, start_throwaway
from jayrun.runtime import reconciler
from jayrun.settings import Settings
from jayrun.store import devices, holders, schema
from jayrun.store.transactions import Book

HOSTS = {"host-a": gpus(2, 24), "host-b": [*gpus(1, 24), *gpus(2, 40)[1:]]}
BACKLOG = 20  # per submitter


def submit(url: str, folder: Path, number: int, connection: Any) -> None:
    """Submit for a while, cancel some, and write down what was submitted: id, and the states that it may end in."""
    chance = random.Random(f"{SEED} submitter {number}")
    runtime = Runtime(url, settings=Settings(host_id="host-a"))
    connection.send("ready")
    stop_at = connection.recv()
    waiting: deque[UUID] = deque()
    count = 0
    with (folder / f"submitted-{number}").open("w") as written:
        while time.time() < stop_at:
            count += 1
            own = folder / f"{number}-{count}"
            terms: dict[str, Any] = {"priority": chance.randrange(3), "key": f"{number}-{count}"}
            may = "succeeded"
            match chance.choice(["one", "one", "two", "group", "quick", "infer", "retried", "failing", "impossible"]):
                case "one":
                    sizes = [chance.choice([1, 6, 12, 24])]
                    ticket = runtime.submit(work.Tell, file=str(own), sizes=sizes, seconds=0.05, **terms)
                case "two":
                    sizes = [chance.choice([4, 20]), chance.choice([4, 20])]
                    ticket = runtime.submit(work.Tell, file=str(own), sizes=sizes, seconds=0.05, **terms)
                case "group":
                    host = chance.choice([None, *HOSTS])
                    ticket = runtime.submit(work.Pair, memory_gb=chance.choice([2, 20]), host=host, **terms)
                case "quick":
                    ticket = runtime.submit(work.Add, a=number, b=count, **terms)
                case "infer":  # its model stays with the worker, and makes way
                    ticket = runtime.submit(work.Infer, **terms)
                case "retried":
                    own.mkdir()
                    policy = RetryPolicy(max_attempts=3, delay_seconds=0.05)
                    ticket = runtime.submit(work.Fail, folder=str(own), times=2, retry=policy, **terms)
                case "failing":
                    own.mkdir()
                    ticket = runtime.submit(work.Fail, folder=str(own), **terms)
                    may = "failed"
                case _:
                    ticket = runtime.submit(work.Tell, file=str(own), sizes=[60], **terms)
                    may = "failed"
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0, 0.1))
                ticket.cancel()
                may += " cancelled"
            written.write(f"{ticket.id} {may}\n")
            waiting.append(ticket.id)
            while len(waiting) > BACKLOG and time.time() < stop_at:  # a few of the newest may be done before the oldest
                if runtime.ticket(waiting[0]).look().has_ended:
                    waiting.popleft()
                else:
                    time.sleep(0.02)
    runtime.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Any:
    with start_throwaway(tmp_path / "server", settings=Settings()) as throwaway:
        schema.upgrade(throwaway.url)
        yield throwaway


class Chaos:
    """Ends what can be ended, by chance, and counts what it did."""

    def __init__(self, server: Throwaway, folder: Path, stack: ExitStack, chance: random.Random) -> None:
        self._server = server
        self._folder = folder
        self._stack = stack
        self._chance = chance
        self._started = 0
        self.crews = {host: self._start(host) for host in HOSTS}
        self.done = dict.fromkeys(("worker", "session", "supervisor", "server"), 0)

    def _start(self, host: str) -> Crew:
        self._started += 1
        log = self._folder / f"crew-{self._started}.log"
        return self._stack.enter_context(crew_of(self._server.url, log, processes=2, host=host))

    def kill_worker(self) -> None:
        """One that runs something, if there is one."""
        workers = sorted(pid for crew in self.crews.values() for pid in crew.workers())
        with psycopg.connect(self._server.url, autocommit=True) as sql:
            rows = sql.execute(
                "SELECT o.pid FROM jayrun.executions e JOIN jayrun.holders o ON o.id = e.holder_id "
                "WHERE e.state = 'running' AND o.pid = ANY (%s) ORDER BY o.pid",
                (workers,),
            ).fetchall()
        if victims := [row[0] for row in rows] or workers:
            os.kill(self._chance.choice(victims), signal.SIGKILL)
            self.done["worker"] += 1

    def end_sessions(self) -> None:
        with psycopg.connect(self._server.url, autocommit=True) as sql:
            rows = sql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name LIKE 'jayrun:%%' AND random() < %s",
                (self._chance.random(),),
            ).fetchall()
        self.done["session"] += len(rows)

    def kill_supervisor(self) -> None:
        """Its workers finish what they run and go; or all of them are killed."""
        host = self._chance.choice(list(HOSTS))
        old = self.crews[host]
        if self._chance.random() < 0.5:
            old.kill()
        else:
            os.kill(old.process.pid, signal.SIGKILL)
            old.process.wait(PATIENCE)
        self.crews[host] = self._start(host)
        self.done["supervisor"] += 1

    def restart_server(self) -> None:
        self._server.restart()
        self.done["server"] += 1


def test_soak(own_server: Throwaway, tmp_path: Path) -> None:
    print(f"\nSEED={SEED} SOAK_SECONDS={SOAK_SECONDS:g}")
    url = own_server.url
    chance = random.Random(SEED)
    with psycopg.connect(url, autocommit=True) as sql, closing(Book(url, role="test")) as book:
        sql.execute(QUICK)
        sql.execute("UPDATE jayrun.settings SET tick_seconds = 1")  # so many processes pass at each
        for host, declared in HOSTS.items():
            devices.declare(book, holders.attest_host(book, host), declared)
    with ExitStack() as stack:
        chaos = Chaos(own_server, tmp_path, stack, chance)
        until(lambda: all(crew.ready() == 2 for crew in chaos.crews.values()))
        pipes = [CONTEXT.Pipe() for _ in range(3)]
        submitters = [
            stack.enter_context(process(submit, url, tmp_path, number, theirs))
            for number, (_, theirs) in enumerate(pipes)
        ]
        assert [ours.recv() for ours, _ in pipes] == ["ready"] * 3
        begun = time.time()
        for ours, _ in pipes:
            ours.send(begun + SOAK_SECONDS)
        # What is rare comes at fixed shares of the time, in an hour once a minute; the rest at any moment.
        rounds = max(1, round(SOAK_SECONDS / 60))
        rare = [
            (begun + SOAK_SECONDS * (turn + share) / rounds, act)
            for turn in range(rounds)
            for share, act in ((0.3, chaos.kill_supervisor), (0.6, chaos.restart_server))
        ]
        while any(child.is_alive() for child in submitters) and time.time() < begun + SOAK_SECONDS + PATIENCE:
            time.sleep(chance.uniform(0.2, 1.5))
            with psycopg.connect(url, autocommit=True) as sql:
                assert sql.execute("SELECT * FROM jayrun_audit.violations").fetchall() == []
            if rare and time.time() >= rare[0][0]:
                rare.pop(0)[1]()
            elif time.time() < begun + SOAK_SECONDS:
                chance.choice([chaos.kill_worker, chaos.end_sessions])()
        for child in submitters:
            finished(child)
        assert all(chaos.done.values()), chaos.done

        expected = dict(
            line.split(" ", 1) for path in tmp_path.glob("submitted-*") for line in path.read_text().splitlines()
        )
        with psycopg.connect(url, autocommit=True) as sql, closing(Book(url, role="test")) as book:
            left = "SELECT count(*) FROM jayrun.executions WHERE detached AND ended_at IS NULL"
            until(lambda: sql.execute(left).fetchone() == (0,))
            for crew in chaos.crews.values():
                crew.drain()
            for host in HOSTS:
                reconciler.run_pass(book, holders.attest_host(book, host))
            rows = sql.execute("SELECT id, state, failure FROM jayrun.executions WHERE detached AND id = unit_id")
            ended = {str(row[0]): row[1:] for row in rows}
            assert ended.keys() == expected.keys()
            wrong = {key: ended[key] for key, may in expected.items() if ended[key][0] not in may.split()}
            assert not wrong
            Sound(sql).check(sql)
            row = sql.execute(
                "SELECT count(*), sum(claim), sum(crashes) FROM jayrun.executions WHERE detached"
            ).fetchone()
            print(f"{len(expected)} submitted and ended; {row}; {chaos.done}")
    _, deadlock, who = own_server.log_file.read_text().partition("deadlock detected")
    assert not deadlock, who[:4000]
