"""The supervisor of a host's worker processes: starts, watches and restarts them, and runs no user code itself.

It shows life for workers that cannot (their interpreter may be held for minutes), runs the reconciler, and ends what
goes on long after it was cancelled. Killed, it loses nothing: its workers finish what they run and end, and whoever
starts a supervisor next goes on from the rows of the book.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from jayrun import kernel, probes
from jayrun.errors import BookError
from jayrun.runtime import reconciler
from jayrun.runtime.hardware import Lookout
from jayrun.runtime.outage import Outage
from jayrun.runtime.worker import CANNOT_IMPORT, END_AT_ONCE, FAILED_FAST, FAILED_FAST_NOW
from jayrun.settings import child_environment
from jayrun.store import claims, holders
from jayrun.store.holders import Holder
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

GRACE_SECONDS = 5.0
"""How long a worker that was told to end at once may take before it is killed."""
_QUICK_SECONDS = 1.0  # a worker that ends sooner than this after it started is started again later and later
_MOST_PAUSE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # for a look at the hardware that has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Which workers to run: `processes` of them, knowing the operators of `modules`.

    With `fail_fast` the first execution that fails for good ends the intake. Draining takes at most `drain_seconds`
    (None: as long as what runs).
    """

    modules: tuple[str, ...]
    processes: int
    label: str = ""
    fail_fast: bool = False
    drain_seconds: float | None = None


@dataclass(slots=True, eq=False)
class _Place:
    """One worker process, and its successors."""

    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    ready: TextIO | None = None  # tells its operators once it can work
    started_at: float = 0.0
    start_at: float = 0.0
    pause_seconds: float = _FIRST_PAUSE_SECONDS


class Supervisor:
    """Runs a `Crew` on this host for `book` until it is told to end. `say` gets a line for people at each event."""

    def __init__(self, book: Book, host_id: int, crew: Crew, *, say: Callable[[str], None]) -> None:
        self._book = book
        self._host_id = host_id
        self._crew = crew
        self._tell = say
        self._places = [_Place() for _ in range(crew.processes)]
        self._terms = 0  # how often it was told to end
        self._failed: str | None = None
        self._kill_at: float | None = None
        self._outage = Outage(self._say)
        self._lookout = Lookout(book.with_patience(0))
        # Its other end closes with this process, however it ends: then the workers finish and go.
        self._leash, self._leash_writer = os.pipe()

    def run(self) -> int:
        """Returns the exit code: 0, or 1 when the workers could not go on."""
        wake_reader, wake_writer = os.pipe()
        for end in (wake_reader, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._told)
        signal.signal(FAILED_FAST_NOW, self._told_of_failure)
        holder = holders.register(self._book, self._host_id, role="supervisor", label=self._crew.label)
        tick_seconds = self._book.tick_seconds()
        patient = self._book.with_patience(0)  # it has children to look after meanwhile
        try:
            next_tick = time.monotonic()
            told = 0
            while True:
                told = self._obey(told)
                self._start_due()
                if not any(place.process for place in self._places) and self._terms:
                    return 0 if self._failed is None else 1
                now = time.monotonic()
                if now >= next_tick:
                    self._attend(patient, holder)
                    next_tick = time.monotonic() + tick_seconds
                kernel.readable(max(self._next_event(next_tick) - time.monotonic(), 0), wake_reader, *self._sources())
                with contextlib.suppress(BlockingIOError):
                    while os.read(wake_reader, 4096):
                        pass
                if self._collect():
                    next_tick = time.monotonic()  # what a dead worker held and ran is for others at once
        finally:
            os.close(self._leash_writer)  # whatever came between: workers that are left finish what they run, and go
            self._lookout.stop(_LOOK_SECONDS)
            with contextlib.suppress(BookError):
                holders.leave(patient, holder)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._tell(line)

    # --- signals -----------------------------------------------------------------------------------------------------

    def _told(self, number: int, frame: object) -> None:
        self._terms += 1

    def _told_of_failure(self, number: int, frame: object) -> None:
        self._terms = max(self._terms, 1)

    def _obey(self, told: int) -> int:
        """Pass the orders on that came since the last look: first to drain, then to end at once, then to be killed."""
        while told < self._terms:
            told += 1
            alive = [place.process for place in self._places if place.process is not None]
            if not alive:
                continue
            match told:
                case 1:
                    order, grace = signal.SIGTERM, self._crew.drain_seconds
                    self._say("draining: what runs is finished, nothing new is taken; a second signal gives it back")
                case 2:
                    order, grace = END_AT_ONCE, GRACE_SECONDS
                    self._say("ending: what runs is given back to the book")
                case _:
                    order, grace = signal.SIGKILL, None
            self._kill_at = None if grace is None else time.monotonic() + grace
            for process in alive:
                process.send_signal(order)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            if self._terms == 1:  # the drain took too long
                self._terms = 2
                return self._obey(told)
            for place in self._places:
                if place.process is not None:
                    place.process.kill()
            self._kill_at = None
        return told

    # --- workers -----------------------------------------------------------------------------------------------------

    def _start_due(self) -> None:
        for place in self._places:
            if place.process is None and not self._terms and time.monotonic() >= place.start_at:
                self._start(place)

    def _start(self, place: _Place) -> None:
        ready_reader, ready = os.pipe()
        told = {
            "modules": self._crew.modules,
            "label": self._crew.label,
            "fail_fast": self._crew.fail_fast,
            "leash": self._leash,
            "ready": ready,
        }
        place.process = subprocess.Popen(
            [sys.executable, "-m", "jayrun.runtime.worker", json.dumps(told)],
            pass_fds=(self._leash, ready),
            env=child_environment({"JAYRUN_DATABASE_URL": self._book.url}),
            stdin=subprocess.DEVNULL,
            preexec_fn=_leave_the_terminal_to_the_supervisor,
        )
        os.close(ready)
        place.pidfd = os.pidfd_open(place.process.pid)
        place.ready = os.fdopen(ready_reader)
        place.started_at = time.monotonic()

    def _collect(self) -> bool:
        """Notice which workers have ended, and when their successors start; whether any has."""
        any_ended = False
        for place in self._places:
            if place.process is None:
                continue
            if place.ready is not None and kernel.readable(0, place.ready.fileno()):
                if operators := place.ready.read():
                    self._say(f"worker {place.process.pid} is ready and knows {', '.join(json.loads(operators))}")
                place.ready.close()
                place.ready = None
            if (code := place.process.poll()) is None:
                continue
            pid, lived = place.process.pid, time.monotonic() - place.started_at
            any_ended = True
            os.close(place.pidfd)
            place.process, place.pidfd = None, -1
            if code == CANNOT_IMPORT:
                self._give_up(f"worker {pid} could not import what it should run")
            elif code == FAILED_FAST:
                self._give_up(f"an execution of worker {pid} failed, and this crew fails fast")
            elif not self._terms:
                quick = lived < _QUICK_SECONDS
                place.pause_seconds = (
                    min(place.pause_seconds * 2, _MOST_PAUSE_SECONDS) if quick else _FIRST_PAUSE_SECONDS
                )
                place.start_at = time.monotonic() + place.pause_seconds
                self._say(f"worker {pid} ended ({_described(code)}); the next one starts in {place.pause_seconds:g} s")
        return any_ended

    def _give_up(self, why: str) -> None:
        if self._failed is None:
            self._failed = why
            self._say(why)
            self._terms = max(self._terms, 1)

    def _attend(self, book: Book, holder: Holder) -> None:
        """The tick: show life, reconcile, and end workers that go on with what was cancelled long ago."""
        try:
            holders.beat(book, holder)
            # Of any supervisor: the one that started it may be gone.
            for who, execution_id in claims.overdue(book, self._host_id):
                if kernel.kill(who):
                    self._say(f"worker {who.pid} is killed: execution {execution_id} was cancelled and did not end")
            probes.reach("supervisor.attending")
            reconciler.run_pass(book, self._host_id)
            self._lookout.tick(self._host_id)
        except BookError as error:
            self._outage.began(error, "the workers go on")
        else:
            self._outage.ended()

    def _sources(self) -> list[int]:
        ready = [place.ready.fileno() for place in self._places if place.ready is not None]
        return ready + [place.pidfd for place in self._places if place.pidfd >= 0]

    def _next_event(self, next_tick: float) -> float:
        starts = [place.start_at for place in self._places if place.process is None and not self._terms]
        return min([next_tick, *starts, *([] if self._kill_at is None else [self._kill_at])])


def _leave_the_terminal_to_the_supervisor() -> None:
    """In the child, from its first moment on: Ctrl-C and the end of the terminal are told to all of the group."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _described(code: int) -> str:
    return f"exit code {code}" if code >= 0 else kernel.describe_signal(-code)
