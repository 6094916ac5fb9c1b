"""How many executions a second from submission to end, against procrastinate, a task queue on PostgreSQL.

    pip install -e '.[bench]'
    python -m benchmarks.executions [--tasks 2000] [--repeats 5] [--processes 4]

Both run an empty operator (task) on one throwaway server with fsync on, each in a database of its own, by so many
worker processes that run one at a time; one client submits one after the other. The clock runs from the first
submission to the last end, and the two take turns. procrastinate as its documentation says: `procrastinate worker
--concurrency 1` with PsycopgConnector, SyncPsycopgConnector for the client, all else (pool, LISTEN/NOTIFY, polling,
jobs kept) as it comes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from benchmarks.admission import HOST, facts, opened
from benchmarks.work import Empty
from jayrun import Runtime
from jayrun.embedded import start_throwaway
from jayrun.runtime.service import service_for
from jayrun.settings import Settings, child_environment
from jayrun.store import schema

try:
    from procrastinate import SyncPsycopgConnector

    from benchmarks.rival import app, empty
except ImportError:
    sys.exit("this benchmark compares with procrastinate: pip install -e '.[bench]'")

ROOT = Path(__file__).parents[1]
GUARANTEES = """
both: a submission is durable before it is answered, a task runs at least once, and how it ended is durable.
jayrun: a worker that dies is judged by the kernel, and its execution runs again within two ticks (4 s); only the newest
    claim may finish an execution; results are stored; who waits for capacity comes before what is ready, in its order.
procrastinate: a job of a dead worker stays "doing" until code of the application looks for stalled jobs (heartbeat of
    10 s, stalled after 30 s) and retries them; results are not stored; each change of a job is a row of a log.
"""


@dataclass(slots=True)
class Side:
    """One of the two: its database, how a client submits, how its workers start, and what its rows tell.

    `counts` gives how many tasks have ended and when the last one did; `crew` how many workers are ready. `backlog`
    lets so many tasks appear at once.
    """

    name: str
    url: str
    submit: Callable[[], object]
    commands: list[list[str]]
    counts: str
    crew: str
    backlog: Callable[[int], object]

    def ended(self) -> tuple[int, float]:
        number, at = self._row(self.counts)
        return number, at

    def ready(self) -> int:
        return int(self._row(self.crew)[0])

    def commits(self) -> int:
        """Transactions so far; every session but this one has ended and told its number."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            while connection.execute(others + " AND backend_type = 'client backend'").fetchone():
                time.sleep(0.01)
        return int(self._row("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")[0])

    def _row(self, statement: str) -> Any:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(statement).fetchone()


@dataclass(slots=True)
class Turn:
    """Tasks a second: submitted, from the first submission to the last end, and of a backlog that was there at once."""

    submitted: float
    finished: float
    drained: float


def jayrun_side(url: str, processes: int, stack: ExitStack) -> Side:
    stack.callback(lambda: service_for(url, host_identity=HOST, label="").stop())
    runtime = stack.enter_context(Runtime(url, settings=Settings(host_id=HOST)))
    worker = [sys.executable, "-c", "from jayrun.cli.app import main; main()"]
    return Side(
        name="jayrun",
        url=url,
        submit=lambda: runtime.submit(Empty),
        commands=[[*worker, "worker", "benchmarks.work", "--processes", str(processes)]],
        counts="SELECT count(ended_at), extract(epoch FROM max(ended_at))::float FROM jayrun.executions",
        crew="SELECT count(*) FROM jayrun.holders WHERE state = 'alive' AND operators <> '{}'",
        backlog=partial(_insert, url),
    )


def procrastinate_side(url: str, processes: int, stack: ExitStack) -> Side:
    client = stack.enter_context(app.replace_connector(SyncPsycopgConnector(conninfo=url)))
    stack.enter_context(client.open())
    client.schema_manager.apply_schema()
    worker = [sys.executable, "-m", "procrastinate", "--app", "benchmarks.rival.app", "worker"]
    return Side(
        name="procrastinate",
        url=url,
        submit=empty.defer,
        commands=[[*worker, "--concurrency", "1"]] * processes,
        counts="SELECT count(*), extract(epoch FROM max(at))::float FROM procrastinate_events WHERE type = 'succeeded'",
        crew="SELECT count(*) FROM procrastinate_workers",
        backlog=lambda tasks: empty.batch_defer(*[{}] * tasks),
    )


def _insert(url: str, tasks: int) -> None:
    """The rows of so many submissions in one transaction, for which there is no call."""
    with psycopg.connect(url) as connection:
        connection.execute(
            """
            INSERT INTO jayrun.executions (id, kind, detached, name, unit_id, state)
            SELECT id, 'operator', true, 'Empty', id, 'ready'
            FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, %s)) new
            """,
            (tasks,),
        )
        connection.commit()
        connection.execute("SELECT jayrun.wake_workers('Empty', NULL)")


@contextmanager
def working(side: Side, processes: int) -> Iterator[None]:
    """The workers of `side` run within the block."""
    environment = child_environment({"JAYRUN_DATABASE_URL": side.url, "JAYRUN_HOST_ID": HOST})
    started = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL) for command in side.commands
    ]
    try:
        while side.ready() < processes:
            assert all(process.poll() is None for process in started), f"a worker of {side.name} did not start"
            time.sleep(0.1)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def take_turn(side: Side, tasks: int) -> Turn:
    submitted, finished = _timed(side, tasks, lambda: [side.submit() for _ in range(tasks)])
    _, drained = _timed(side, tasks, lambda: side.backlog(tasks))
    return Turn(tasks / submitted, tasks / finished, tasks / drained)


def _timed(side: Side, tasks: int, submit: Callable[[], object]) -> tuple[float, float]:
    """Seconds until so many tasks were submitted, and until they had ended."""
    before, _ = side.ended()
    began_at = time.time()  # the server's clock too
    submit()
    submitted_at = time.time()
    while (found := side.ended())[0] < before + tasks:
        time.sleep(0.1)
    return submitted_at - began_at, found[1] - began_at


def submitting(side: Side, tasks: int) -> float:
    """Submissions a second while no worker runs."""
    began_at = time.perf_counter()
    for _ in range(tasks):
        side.submit()
    return tasks / (time.perf_counter() - began_at)


def line(name: str, ours: list[float], theirs: list[float]) -> str:
    ratio = median(our / their for our, their in zip(ours, theirs, strict=True))
    both = (f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})" for rates in (ours, theirs))
    return f"{name:<26}  {next(both):>18}  {next(both):>18}  {ratio:>5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executions")
    parser.add_argument("--tasks", type=int, default=2000, help="tasks in a turn of each side")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side, after one that does not count")
    parser.add_argument("--processes", type=int, default=4, help="worker processes of each side")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jayrun-benchmark-")))
        server = stack.enter_context(
            start_throwaway(
                opened(folder),
                settings=Settings.load(),
                configuration={"fsync": "on", "synchronous_commit": "on"},
            )
        )
        schema.upgrade(server.url)
        print(*(f"{name}: {value}" for name, value in facts(server.url).items()), sep="\n")
        print(f"procrastinate: {version('procrastinate')}\njayrun: {version('jayrun-leases')}")
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE procrastinate")
        other = server.url.replace("/jayrun?", "/procrastinate?")
        commits, counts = [], []
        with ExitStack() as clients:
            sides = (
                jayrun_side(server.url, options.processes, clients),
                procrastinate_side(other, options.processes, clients),
            )
            alone = [[submitting(side, options.tasks) for side in sides] for _ in range(options.repeats)]
            with working(sides[0], options.processes), working(sides[1], options.processes):
                for side in sides:  # what was submitted above is done first
                    while side.ended()[0] < options.tasks * options.repeats:
                        time.sleep(0.1)
                turns = [[take_turn(side, options.tasks) for side in sides] for _ in range(options.repeats + 1)][1:]
        for side in sides:
            counts.append(side.ended()[0])
            commits.append(side.commits())
    print(f"\ntasks a second, median (lowest-highest)   {options.processes} worker processes each")
    print(f"{'':<26}  {'jayrun':>18}  {'procrastinate':>18}  ratio")
    ours, theirs = zip(*turns, strict=True)
    print(line("submit to finished", [turn.finished for turn in ours], [turn.finished for turn in theirs]))
    print(line("drain of a backlog", [turn.drained for turn in ours], [turn.drained for turn in theirs]))
    print(line("submit, workers beside it", [turn.submitted for turn in ours], [turn.submitted for turn in theirs]))
    print(line("submit, no workers", *([rates[number] for rates in alone] for number in (0, 1))))
    each = (number / count for number, count in zip(commits, counts, strict=True))
    print(f"{'commits an execution':<26}  {next(each):>18.2f}  {next(each):>18.2f}")
    print(f"   wanted: submit to finished at least 2\n{GUARANTEES}")


if __name__ == "__main__":
    main()
