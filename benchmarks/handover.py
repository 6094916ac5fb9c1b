"""How long capacity takes from one process to the next, in durable commits of the same server.

    python -m benchmarks.handover [--rounds 200] [--waiters 1,100,10000] [--sizes 20] [--kills 5] [--flush-ms 0]
                                  [--json FILE]

This process holds the only device, and a live waiter in another process waits for it: an attached one (`Runtime.run`),
or a detached one and an idle worker. Behind it others wait that are only rows of the book, for the same or for one of
so many other sizes, which never fit. The clock starts when the Data is dropped. *granted*: the admission that follows
is durable, and the waiter's process was notified. *first line*: `execute()` of the waiter runs again. Then the holder
waits for the device, with the highest priority, and gets it back.

Before each hand-over both processes rest for 20 ms. A machine that has rested is slower for a moment, so the unit is a
commit after the same rest; the commit of a machine at work is told beside it. `--flush-ms` lets each flush take so much
longer (`commit_delay`), as on a slower disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count, product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg

from benchmarks.admission import HOST, durable_commit_ms, facts, opened
from benchmarks.work import WHOLE_GB, Handed, Keep, Killed
from jayrun import Runtime, probes
from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.embedded import start_throwaway
from jayrun.runtime.service import service_for
from jayrun.settings import Settings, child_environment
from jayrun.store import schema

ROOT = Path(__file__).parents[1]
DEVICE = RuntimeDevice(Device.GPU, [Backend.CUDA], 0, memory_limit_gb=WHOLE_GB)
HOLDER, LIVE_WAITER, OTHERS = 10, 5, 0  # priorities
WARM_ROUNDS = 5
REST_SECONDS = 0.02

Sql = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Result:
    """One case; times in milliseconds, all from the release of the device."""

    kind: str
    waiters: int
    others: str
    durable_commit: float
    granted_p10: float
    granted: float
    granted_p99: float
    first_line_p10: float
    first_line: float
    first_line_p99: float


@dataclass(slots=True)
class Waiter:
    """A live waiter: `ask` lets it ask for the device; `began` waits until its `execute()` ran again, and tells when;
    `let_go` lets it end."""

    kind: str
    ask: Callable[[], object]
    began: Callable[[], float]
    let_go: Callable[[], object]


# --- the live waiters ------------------------------------------------------------------------------------------------


def _wait_attached(url: str, told: Connection) -> None:
    """The process of an attached waiter: runs once for every message, and ends its Data at the next."""
    with Runtime(url, settings=Settings(host_id=HOST)) as runtime:
        while told.recv():
            data = runtime.run(Keep, priority=LIVE_WAITER)
            told.send(data.value)
            told.recv()
            del data


@contextmanager
def attached(url: str, runtime: Runtime, folder: Path) -> Iterator[Waiter]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_wait_attached, args=(url, theirs), daemon=True)
    process.start()
    try:
        yield Waiter("attached", lambda: ours.send(True), ours.recv, lambda: ours.send(True))
        ours.send(False)
        process.join(10)
    finally:
        process.kill()


@contextmanager
def detached(url: str, runtime: Runtime, folder: Path) -> Iterator[Waiter]:
    numbers = count()
    place = folder

    def ask() -> None:
        nonlocal place
        place = folder / str(next(numbers))
        place.mkdir()
        runtime.submit(Handed, folder=str(place), priority=LIVE_WAITER)

    def began() -> float:
        while not (place / "began").exists():
            time.sleep(0.002)
        return float((place / "began").read_text())

    with crew(url, processes=1):
        yield Waiter("detached", ask, began, lambda: (place / "go").touch())


@contextmanager
def crew(url: str, *, processes: int) -> Iterator[None]:
    command = [sys.executable, "-c", "from jayrun.cli.app import main; main()", "worker", "benchmarks.work"]
    environment = child_environment({"JAYRUN_DATABASE_URL": url, "JAYRUN_HOST_ID": HOST})
    supervisor = subprocess.Popen(
        [*command, "--processes", str(processes)], env=environment, cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        with psycopg.connect(url, autocommit=True) as sql:
            ready = "SELECT count(*) = {} FROM jayrun.holders WHERE state = 'alive' AND operators <> '{{}}'"
            _until(sql, ready.format(processes))
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGTERM):  # the second one ends what still runs
            supervisor.send_signal(number)
            time.sleep(0.1)
        supervisor.wait()


# --- one case --------------------------------------------------------------------------------------------------------


def measure(sql: Sql, url: str, runtime: Runtime, waiter: Waiter, waiters: int, sizes: int, rounds: int) -> Result:
    """Hand the device over `rounds` times, while `waiters` wait: for the same, or for one of `sizes` others."""
    data = runtime.run(Keep, priority=HOLDER)
    granted, lines, commits = [], [], []
    committed: list[float] = []
    with probes.arm("gate.committed", lambda: committed.append(time.monotonic())):
        for number in range(-WARM_ROUNDS, rounds):
            waiter.ask()
            _until_waiting(sql, LIVE_WAITER)
            if number == -WARM_ROUNDS and waiters > 1:
                _put_behind(sql, waiters - 1, sizes)
            if number % 20 == 0:
                commits.append(durable_commit_ms(url, commits=10, rest_seconds=REST_SECONDS))
            time.sleep(REST_SECONDS)  # both processes have come to rest
            committed.clear()
            released_at = time.monotonic()
            del data
            line_at = waiter.began()
            runtime.flush()  # the waiter may have been quicker than the thread that let it in
            if number >= 0:
                lines.append((line_at - released_at) * 1e3)
                granted.append((next(at for at in committed if at > released_at) - released_at) * 1e3)
            mine = runtime.start(Keep, priority=HOLDER)
            _until_waiting(sql, HOLDER)
            waiter.let_go()
            data = mine.result()
            del mine
    sql.execute(_END_WAITERS)
    del data
    runtime.flush()
    return Result(
        kind=waiter.kind,
        waiters=waiters,
        others=f"{sizes} sizes" if sizes else "the same",
        durable_commit=median(commits),
        granted_p10=quantiles(granted, n=100)[9],
        granted=median(granted),
        granted_p99=quantiles(granted, n=100)[98],
        first_line_p10=quantiles(lines, n=100)[9],
        first_line=median(lines),
        first_line_p99=quantiles(lines, n=100)[98],
    )


def _put_behind(sql: Sql, number: int, sizes: int) -> None:
    """`number` rows that wait as the live one does, behind it: for what it asks for, or (`sizes`) for one of so many
    other amounts of memory."""
    sql.execute(_BEHIND, {"number": number, "sizes": sizes, "live": LIVE_WAITER, "others": OTHERS})


_BEHIND = """
WITH live AS (SELECT * FROM jayrun.executions WHERE state = 'waiting' AND priority = %(live)s),
new AS (SELECT gen_random_uuid() AS id, n, n %% greatest(%(sizes)s, 1) AS size FROM generate_series(1, %(number)s) n),
waiting AS (
    INSERT INTO jayrun.executions (id, kind, detached, name, unit_id, host_id, holder_id, state, priority, shape,
                                   waiting_since)
    SELECT new.id, kind, detached, name, new.id, host_id, holder_id, state, %(others)s,
           CASE WHEN %(sizes)s > 0 THEN 'size ' || size ELSE shape END, waiting_since
    FROM live CROSS JOIN new ORDER BY n)
INSERT INTO jayrun.placement_requests
SELECT new.id, position, device, backend, is_group, min_devices, max_devices, prefer_max_devices, group_bytes,
       CASE WHEN %(sizes)s > 0 THEN (1 + size)::bigint * 1000000000 ELSE per_device_bytes END, exclusive,
       device_id
FROM live JOIN jayrun.placement_requests q ON q.execution_id = live.id CROSS JOIN new
"""
_END_WAITERS = """
UPDATE jayrun.executions SET state = 'cancelled', waiting_since = NULL, ended_at = clock_timestamp()
WHERE state = 'waiting'
"""


def _recycle_log_files(url: str) -> None:
    """A server that has run for a while writes its log into old files; filling a new one takes some 80 ms."""
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(24):
            connection.execute("SELECT pg_logical_emit_message(false, 'benchmark', ''), pg_switch_wal()")
        connection.execute("CHECKPOINT")


def _until(sql: Sql, statement: str) -> None:
    while sql.execute(statement).fetchone() != (True,):
        time.sleep(0.01)


def _until_waiting(sql: Sql, priority: int) -> None:
    _until(sql, f"SELECT count(*) = 1 FROM jayrun.executions WHERE state = 'waiting' AND priority = {priority}")


# --- a killed worker -------------------------------------------------------------------------------------------------


def killed(sql: Sql, url: str, runtime: Runtime, folder: Path, kills: int) -> list[float]:
    """Seconds from SIGKILL of a worker to the first line of its execution in another."""
    took = []
    with crew(url, processes=2):
        for number in range(kills):
            log = folder / f"killed-{number}"
            ticket = runtime.submit(Killed, log=str(log))
            while not log.exists() or not log.read_text().endswith("\n"):
                time.sleep(0.01)
            [[pid]] = sql.execute(
                "SELECT o.pid FROM jayrun.executions e JOIN jayrun.holders o ON o.id = e.holder_id WHERE e.id = %s",
                (ticket.id,),
            ).fetchall()
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            ticket.result()
            took.append(float(log.read_text().split()[1]) - killed_at)
    return took


def line(result: Result, first: dict[tuple[str, str], Result]) -> str:
    one = first.setdefault((result.kind, result.others), result)
    commits = (
        f"{milliseconds:>7.2f} {milliseconds / result.durable_commit:>5.1f}"
        for milliseconds in (
            *(result.granted_p10, result.granted, result.granted_p99),
            *(result.first_line_p10, result.first_line, result.first_line_p99),
        )
    )
    return (
        f"{result.kind:<9} {result.waiters:>7}  {result.others:<10} {result.durable_commit:>7.3f}  "
        + "  ".join(commits)
        + f"  {result.first_line / one.first_line:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handover")
    parser.add_argument("--rounds", type=int, default=200, help="hand-overs of each case")
    parser.add_argument("--waiters", default="1,100,10000", help="how many wait, separated by commas")
    parser.add_argument("--sizes", type=int, default=20, help="how many other sizes the others wait for")
    parser.add_argument("--kills", type=int, default=5, help="how often a worker is killed")
    parser.add_argument("--flush-ms", type=float, default=0, help="let each flush take so much longer")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jayrun-benchmark-")))
        server = stack.enter_context(
            start_throwaway(
                opened(folder),
                settings=Settings.load(),
                configuration={
                    "fsync": "on",
                    "synchronous_commit": "on",
                    "commit_delay": str(round(options.flush_ms * 1000)),
                    "commit_siblings": "0",
                    "min_wal_size": "1GB",
                },
            )
        )
        url = server.url
        schema.upgrade(url)
        _recycle_log_files(url)
        where = {**facts(url), "flush_ms": options.flush_ms}
        print(*(f"{name}: {value}" for name, value in where.items()), sep="\n")
        sql = stack.enter_context(psycopg.connect(url, autocommit=True))
        stack.callback(lambda: service_for(url, host_identity=HOST, label="").stop())
        runtime = stack.enter_context(Runtime(url, devices=[DEVICE], settings=Settings(host_id=HOST)))
        print("\nmilliseconds from the release, and in durable commits; growth over the first number of waiters")
        print("(the commits of the table are those of a machine that rested; above is one at work)")
        print(
            "waiter    waiting  others wait for   commit    granted p10         median            p99"
            "     1st line p10         median            p99    growth"
        )
        results: list[Result] = []
        first: dict[tuple[str, str], Result] = {}
        for kind in (attached, detached):
            with kind(url, runtime, folder) as waiter:
                for sizes, waiters in product((0, options.sizes), map(int, options.waiters.split(","))):
                    results.append(measure(sql, url, runtime, waiter, waiters, sizes, options.rounds))
                    print(line(results[-1], first), flush=True)
        print("   wanted: granted at most 5, first line at most 10, p99 at most 30 durable commits; growth below 2")
        tick_seconds = sql.execute("SELECT tick_seconds FROM jayrun.settings").fetchone()[0]  # type: ignore[index]
        took = [seconds / tick_seconds for seconds in killed(sql, url, runtime, folder, options.kills)]
        print(f"\nSIGKILL of a worker to the first line of its execution in another, in ticks of {tick_seconds} s")
        print(f"median {median(took):.2f}, most {max(took):.2f}   wanted: at most 2")
    if options.json:
        found = {**where, "results": [asdict(each) for each in results], "killed_ticks": took}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
