"""`jayrun demo`: many processes on a few GPUs that are only declared, one of them killed, and nothing lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Annotated
from uuid import UUID

import typer

from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.domain.units import format_bytes
from jayrun.embedded import start_throwaway
from jayrun.errors import ServerError
from jayrun.runtime.reconciler import run_pass
from jayrun.settings import Settings
from jayrun.store import admission, audit, devices, holders, schema
from jayrun.store.transactions import Book

from . import demo_work
from .demo_screen import Moment, Screen, screen
from .exits import FAILED
from .render import ranges, to_json, to_lines

READY_SECONDS = 60.0
DRAIN_SECONDS = 20.0
LOOK_SECONDS = 0.2
WATCH_SECONDS = 0.01  # between looks while a killed worker's leases are about to end
KILL_AFTER = 0.4  # of the time


@dataclass(slots=True)
class Summary:
    """How the demo went; `ok` says whether the book kept its promises."""

    seed: int
    workers: int
    seconds: float
    requests: int = 0
    waits: int = 0
    longest_wait_seconds: float = 0.0
    leases: int = 0
    live_leases: int = 0
    reclaimed_leases: int = 0
    reclaim_seconds: float | None = None
    violations: int = 0
    reserved_bytes: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.complaints


class Killing:
    """A worker that is killed with SIGKILL while it holds a lease, and how long the lease outlives it."""

    def __init__(self) -> None:
        self.reclaim_seconds: float | None = None
        self._victim: Worker | None = None
        self._lease_ids: set[UUID] = set()
        self._killed_at = 0.0

    @property
    def watching(self) -> bool:
        """Whether somebody was killed and his leases are not known to be reclaimed yet."""
        return self._victim is not None and self.reclaim_seconds is None

    def due(self, passed_seconds: float, seconds: float) -> bool:
        """Whether it is time to kill, and nobody was."""
        return self._victim is None and passed_seconds > KILL_AFTER * seconds

    def kill(self, book: Book, workers: list[Worker]) -> str | None:
        """Kill a worker that holds a lease; says which. None when nobody is found holding one.

        It is stopped first, so that it holds what the view shows until it is dead.
        """
        by_pid = {worker.process.pid: worker for worker in workers}
        for row in reversed(audit.leases(book)):  # the youngest has most of its time before it
            if row["pid"] not in by_pid:
                continue
            try:
                os.kill(row["pid"], signal.SIGSTOP)
            except ProcessLookupError:  # it failed; the summary will say so
                continue
            held = [each for each in audit.leases(book) if each["pid"] == row["pid"]]
            if not held:
                os.kill(row["pid"], signal.SIGCONT)
                continue
            self._victim = by_pid[row["pid"]]
            self._victim.killed = True
            self._lease_ids = {each["id"] for each in held}
            self._killed_at = time.monotonic()
            os.kill(row["pid"], signal.SIGKILL)
            who = f"worker {self._victim.number} (pid {row['pid']})"
            return f"killed {who} with SIGKILL: its {held[0]['execution']} held gpu {ranges(held[0]['device_ids'])}"
        return None

    def look(self, book: Book, live: set[UUID]) -> str | None:
        """Whether the killed one's leases have ended; says so once. Whoever had just released is not counted."""
        if not self.watching or self._lease_ids & live:
            return None
        seconds = time.monotonic() - self._killed_at
        states = {audit.lease(book, lease_id)["state"] for lease_id in self._lease_ids}
        if "reclaimed" not in states:  # its release was on the way when it was stopped
            self._victim = None
            return "its release had been on the way: killing another one"
        self.reclaim_seconds = seconds
        return f"its lease was reclaimed {seconds:.3f} s later"


@dataclass(slots=True)
class Worker:
    """A worker process; it ends when `orders` is closed."""

    number: int
    process: BaseProcess
    orders: Connection
    killed: bool = False


def demo(
    seconds: Annotated[float, typer.Option(min=2, max=600, help="How long the workers work.")] = 10.0,
    workers: Annotated[int, typer.Option(min=2, max=64, help="How many processes there are.")] = 12,
    seed: Annotated[int, typer.Option(help="Another seed gives another mix of requests.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Watch many processes share a few GPUs, one of them killed.

    The four GPUs of 24 GB are only declared; the database is made for the demo and removed. One process is killed with
    SIGKILL while it holds a lease. Ends with a summary. Exit code 1 if a rule was broken, the killed worker's lease was
    not reclaimed, or bytes were left.
    """
    signal.signal(signal.SIGTERM, _end)
    summary = Summary(seed, workers, seconds)
    try:
        with screen(stderr=as_json) as shown, _throwaway_book(shown) as (book, host_id):
            _run(book, summary, shown)
            _account(book, host_id, summary)
    except KeyboardInterrupt:
        typer.echo("stopped; the demo's database is removed", err=True)
        raise
    typer.echo(to_json({**asdict(summary), "ok": summary.ok}) if as_json else _text(summary))
    if not summary.ok:
        raise typer.Exit(FAILED)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _throwaway_book(shown: Screen) -> Iterator[tuple[Book, int]]:
    """A book of its own with four GPUs, and the key of this host in it."""
    settings = Settings.load()
    with tempfile.TemporaryDirectory(prefix="jayrun-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # as root the server's account must get in
        shown.say("starting PostgreSQL for the demo ...")
        with start_throwaway(folder, settings=settings) as server:
            schema.upgrade(server.url)
            book = Book(server.url, role="demo")
            try:
                host_id = holders.attest_host(book, settings.host_id)
                gpus = [
                    RuntimeDevice(Device.GPU, [Backend.CUDA], number, demo_work.DEVICE_GB)
                    for number in range(demo_work.DEVICES)
                ]
                devices.declare(book, host_id, gpus)
                yield book, host_id
            finally:
                book.close()


def _run(book: Book, summary: Summary, shown: Screen) -> None:
    """Let the workers work for the time given, kill one of them on the way, and let the others finish."""
    shown.say(f"starting {summary.workers} workers ...")
    killing = Killing()
    with _workers(book.url, summary) as workers:
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < summary.seconds or killing.watching:
            if passed > summary.seconds + DRAIN_SECONDS:
                break
            moment = _moment(book, passed)
            summary.violations = max(summary.violations, moment.violations)
            shown.show(moment)
            if killing.due(passed, summary.seconds):
                told = killing.kill(book, workers)
            else:
                told = killing.look(book, {row["id"] for row in moment.leases})
            if told is not None:
                shown.say(told)
            time.sleep(WATCH_SECONDS if killing.watching else LOOK_SECONDS)
        _finish(workers, summary)
    summary.reclaim_seconds = killing.reclaim_seconds


def _moment(book: Book, seconds: float) -> Moment:
    return Moment(seconds, audit.capacity(book), audit.leases(book), audit.queue(book), len(audit.violations(book)))


@contextmanager
def _workers(url: str, summary: Summary) -> Iterator[list[Worker]]:
    """The worker processes, all of them ready; those that are left at the end are killed."""
    context = multiprocessing.get_context("forkserver")  # imports once, for all of them
    context.set_forkserver_preload([demo_work.__name__, f"{__package__}.app"])
    workers: list[Worker] = []
    try:
        for number in range(1, summary.workers + 1):
            orders, theirs = context.Pipe()
            process = context.Process(
                target=demo_work.work, args=(url, number, summary.seed, theirs), name=f"worker {number}", daemon=True
            )
            process.start()
            theirs.close()
            workers.append(Worker(number, process, orders))
        deadline = time.monotonic() + READY_SECONDS
        for worker in workers:
            if not wait([worker.orders], max(deadline - time.monotonic(), 0)):
                raise ServerError(f"worker {worker.number} of the demo was not ready after {READY_SECONDS:.0f} s")
            try:
                worker.orders.recv()
            except EOFError:
                raise ServerError(f"worker {worker.number} of the demo did not start; its error is above") from None
        yield workers
    finally:
        for worker in workers:
            worker.orders.close()
            worker.process.kill()
            worker.process.join()


def _finish(workers: list[Worker], summary: Summary) -> None:
    """Tell the workers to end after what they are at, and wait until they have."""
    for worker in workers:
        worker.orders.close()
    deadline = time.monotonic() + DRAIN_SECONDS
    for worker in workers:
        worker.process.join(max(deadline - time.monotonic(), 0))
        code = worker.process.exitcode
        if code is None:
            summary.complaints.append(f"worker {worker.number} did not end within {DRAIN_SECONDS:.0f} s")
        elif code != 0 and not worker.killed:
            summary.complaints.append(f"worker {worker.number} ended with code {code}")


def _account(book: Book, host_id: int, summary: Summary) -> None:
    """Fold what was released last, and hold the book to what it promises."""
    run_pass(book, host_id)
    admission.combine(book, host_id)
    counts = audit.summary(book)
    summary.requests = counts["requests"]
    summary.waits = counts["waits"]
    summary.longest_wait_seconds = counts["longest_wait_seconds"]
    summary.leases = counts["leases"]
    summary.live_leases = counts["live"]
    summary.reclaimed_leases = counts["reclaimed"]
    summary.violations = max(summary.violations, counts["violations"])
    summary.reserved_bytes = sum(row["reserved_bytes"] for row in audit.capacity(book))
    promises = {
        f"{summary.violations} violations were seen": summary.violations,
        f"{format_bytes(summary.reserved_bytes)} are still reserved": summary.reserved_bytes,
        f"{summary.live_leases} leases are still live": summary.live_leases,
        "no killed worker's lease was reclaimed": summary.reclaim_seconds is None,
    }
    summary.complaints += [complaint for complaint, broken in promises.items() if broken]


def _text(summary: Summary) -> str:
    later = "" if summary.reclaim_seconds is None else f", {summary.reclaim_seconds:.3f} s after the SIGKILL"
    facts = to_lines(
        [
            ("workers", str(summary.workers)),
            ("requests", str(summary.requests)),
            ("waits", str(summary.waits)),
            ("longest wait", f"{summary.longest_wait_seconds:.2f} s"),
            ("leases", str(summary.leases)),
            ("reclaimed leases", f"{summary.reclaimed_leases}{later}"),
            ("still reserved", format_bytes(summary.reserved_bytes)),
        ]
    )
    complaints = [f"error: {complaint}" for complaint in summary.complaints]
    return "\n".join([facts, f"violations: {summary.violations}", *complaints])
