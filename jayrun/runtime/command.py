"""A wrapped command: a paused child becomes the holder, waits its turn, and is let go with its devices in its sight.

The child itself holds the lease, known to the book by pid and start ticks, which exec keeps. So the lease lives as long
as the command, also when this parent is killed; and a child whose parent is killed before its turn ends by itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, assert_never
from uuid import UUID

from jayrun import kernel, probes
from jayrun.domain.devices import Backend
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.requests import Request
from jayrun.errors import BookError, BookUnreachable, PlacementCancelled, PlacementImpossible, PlacementTimeout
from jayrun.runtime import reconciler
from jayrun.runtime.outage import Outage
from jayrun.settings import child_environment
from jayrun.store import admission, executions, holders, leases
from jayrun.store.admission import Ask, Ended, Execution, Granted, Impossible, Member, Parked, Unavailable
from jayrun.store.ids import new_id
from jayrun.store.leases import Finished, Lease
from jayrun.store.transactions import Book

BEAT_SECONDS = 10.0
_PATIENCE_SECONDS = 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_FOR_THE_CHILD_ALONE = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends these to both; the child answers them


class CannotExecute(Exception):
    """The command could not be executed; `number` is the errno that says why."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"{command}: {os.strerror(number)}")
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a command waits: `timeout_seconds` None means for ever, 0 not at all."""

    request: Request
    priority: int = 0
    timeout_seconds: float | None = None
    label: str = ""


class PausedChild:
    """A child of this process that waits on a pipe before it executes `command`. Fork it before anything is opened.

    Raises `CannotExecute` when there is no such command: better before it waits for its turn than after.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        if _is_unknown(command[0]):
            raise CannotExecute(command[0], errno.ENOENT)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose the exit code
        go_reader, self._go = os.pipe()
        self._failed, failed_writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            os.close(self._failed)
            _execute_when_told(self._command, go_reader, failed_writer)
        os.close(go_reader)
        os.close(failed_writer)
        self.pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None

    def execute(self, environment: dict[str, str]) -> None:
        """Let it go. Raises `CannotExecute`; after that the child is gone."""
        with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile; its status tells
            os.write(self._go, json.dumps(environment).encode())
        os.close(self._go)
        self._go = -1
        with os.fdopen(self._failed, "rb") as failed:
            number = failed.read()
        if number:
            self.wait()
            raise CannotExecute(self._command[0], int(number))

    def ended(self, timeout_seconds: float) -> bool:
        """Whether it has ended, waiting for that up to `timeout_seconds`."""
        return kernel.readable(timeout_seconds, self.pidfd)

    def wait(self) -> int:
        """Its exit code, 128 + the signal's number if a signal ended it; waits for the end."""
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self._status = 128 - code if code < 0 else code
        return self._status

    def dismiss(self) -> None:
        """End it before it was told to go."""
        if self._go >= 0:
            os.close(self._go)  # the end of the pipe is its sign to leave
            self._go = -1
        self.wait()


def run_command(
    child: PausedChild,
    book: Book,
    host_id: int,
    terms: Terms,
    *,
    command: Sequence[str],
    waiting: Callable[[UUID], None],
) -> int:
    """Give `child` its turn and stay until it has ended; returns its exit code (128 + signal).

    `waiting(execution id)` is called now and then while it waits. Raises `PlacementImpossible`, `PlacementTimeout`,
    `CannotExecute` and the book's errors; then the child is gone and nothing is left in the book.
    """
    kernel.become_subreaper()
    with _signals_for(child):
        who = kernel.incarnation(child.pid)
        text = " ".join(command)[:200]
        holder = holders.register(book, host_id, role="command", label=terms.label, command=text, incarnation=who)
        execution_id = new_id()
        execution = Execution(
            id=execution_id,
            kind="command",
            name=os.path.basename(command[0]),
            host_id=host_id,
            holder_id=holder.id,
            unit_id=execution_id,
            priority=terms.priority,
        )
        try:
            lease = _turn(child, book, execution, terms, waiting)
            if lease is not None:
                probes.reach("command.granted")
                child.execute(_environment(terms.request, lease))
                _stay(child, book, holder)
        except BaseException:  # the child goes, whatever came between
            child.dismiss()
            with contextlib.suppress(BookError):  # then any pass of the host sees that the child is gone
                holders.leave(book, holder)
                _hand_on(book, host_id)
            raise
        code = child.wait()
        _report(book, holder, execution_id, lease, code)
        return code


def _turn(
    child: PausedChild, book: Book, execution: Execution, terms: Terms, waiting: Callable[[UUID], None]
) -> Lease | None:
    """The lease, once it is there; None when the child was ended while it waited."""
    member = Member(execution=execution, invocation=1, recorded=(terms.request,))
    outcome = admission.reserve(book, Ask(asker=member, position=0, wait=terms.timeout_seconds != 0))
    match outcome:
        case Granted(lease):
            return lease
        case Parked():
            return _wait_for_turn(child, book, execution, terms, waiting)
        case Unavailable():
            raise PlacementTimeout(f"{terms.request.describe()} is not available now, and it was told not to wait")
        case Impossible(reason):
            raise PlacementImpossible(reason)
        case Ended(state):
            raise PlacementCancelled(f"the execution is {state} in the book")
        case _:
            assert_never(outcome)


def _wait_for_turn(
    child: PausedChild, book: Book, execution: Execution, terms: Terms, waiting: Callable[[UUID], None]
) -> Lease | None:
    give_up_at = None if terms.timeout_seconds is None else time.monotonic() + terms.timeout_seconds
    tick_seconds = book.tick_seconds()
    impatient = book.with_patience(_PATIENCE_SECONDS)  # the child may end meanwhile, or the time be over
    outage = Outage(_say)
    with book.listen(str(execution.holder_id)) as listener:
        while not child.ended(0):  # by Ctrl-C, or by a signal that was passed on
            listener.open()
            try:
                lease = _granted(impatient, execution)
                outage.ended()
                if lease is not None:
                    return lease
                if give_up_at is not None and time.monotonic() >= give_up_at:
                    failure: dict[str, object] = {"type": "PlacementTimeout", "message": "waited too long"}
                    if executions.withdraw(impatient, execution.id, state=ExecutionState.FAILED, failure=failure):
                        raise _timed_out(terms)
                    continue  # admitted at the last moment
                # Perhaps nobody else is there to see that who holds is dead.
                if reconciler.run_pass(impatient, execution.host_id).admitted:
                    continue
                waiting(execution.id)
            except BookUnreachable as error:  # the place in the queue is kept by the book
                outage.began(error, "the place in the queue is kept")
                if give_up_at is not None and time.monotonic() >= give_up_at:
                    raise _timed_out(terms) from error
            left = tick_seconds if give_up_at is None else min(give_up_at - time.monotonic(), tick_seconds)
            listener.wait(left, child.pidfd)
    return None


def _timed_out(terms: Terms) -> PlacementTimeout:
    return PlacementTimeout(f"waited {terms.timeout_seconds:g} s for {terms.request.describe()}")


def _granted(book: Book, execution: Execution) -> Lease | None:
    """The lease, if the execution was admitted. Raises when it was ended instead."""
    attended = executions.attend(book, [execution.id])
    if attended.woken:
        admission.combine(book, execution.host_id)
        attended = executions.attend(book, [execution.id])
    for claimed in attended.claimed.values():
        return claimed.leases[0]
    for news in attended.ended:
        failure = news.failure or {}
        if failure.get("type") == "PlacementImpossible":
            raise PlacementImpossible(str(failure.get("message")))
        if failure.get("type") == "PlacementTimeout":  # withdrawn by a try whose answer was lost
            raise PlacementTimeout(str(failure.get("message")))
        raise PlacementCancelled(f"the execution was {news.state.value} while it waited")
    return None


def _stay(child: PausedChild, book: Book, holder: holders.Holder) -> None:
    """Until the command ends, showing life for it now and then; what the book misses meanwhile does no harm."""
    impatient = book.with_patience(_PATIENCE_SECONDS)
    outage = Outage(_say)
    while not child.ended(BEAT_SECONDS):
        try:
            holders.beat(impatient, holder)
        except BookError as error:
            outage.began(error, "the command goes on and keeps its lease")
        else:
            outage.ended()
        _reap_orphans(child)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"jayrun: {line}", file=sys.stderr, flush=True)


def _reap_orphans(child: PausedChild) -> None:
    """Descendants that the command left behind became children of this process; their ends are collected."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == child.pid:
            return
        os.waitpid(ended.si_pid, 0)


def _report(book: Book, holder: holders.Holder, execution_id: UUID, lease: Lease | None, code: int) -> None:
    """Tell the book how it ended. If the book cannot be told, any pass of the host sees that the child is gone."""
    try:
        if lease is not None:
            state = ExecutionState.SUCCEEDED if code == 0 else ExecutionState.FAILED
            failure = None if code == 0 else {"type": "ExitCode", "message": f"exit code {code}"}
            finished = [Finished(execution_id, state, failure)]
            leases.settle(book, holder.host_id, holder.id, released=[(lease.id, lease.epoch)], finished=finished)
        holders.leave(book, holder)
        _hand_on(book, holder.host_id)
    except BookError as error:
        print(f"jayrun: the command has ended, but the book could not be told yet: {error}", file=sys.stderr)


def _hand_on(book: Book, host_id: int) -> None:
    if leases.anybody_waits(book, host_id):
        admission.combine(book, host_id)


def _environment(request: Request, lease: Lease) -> dict[str, str]:
    """What tells the command which devices are its own: UUIDs where all are known, else numbers in PCI order."""
    variables = {"JAYRUN_LEASE": str(lease.id)}
    if request.backend is Backend.CUDA:
        uuids = [share.device_uuid for share in lease.shares]
        names = [name for name in uuids if name is not None]
        if len(names) < len(uuids):
            names = [str(share.host_index) for share in lease.shares]
        variables |= {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return variables


@contextmanager
def _signals_for(child: PausedChild) -> Iterator[None]:
    """While the child lives: what ends a service goes on to it, what the terminal sends is left to it."""

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, number)

    # What was ignored when this process started (nohup) stays ignored, for the command too.
    before = {number: signal.signal(number, forward) for number in _FORWARDED if not _is_ignored(number)}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in _FOR_THE_CHILD_ALONE}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _is_unknown(program: str) -> bool:
    # A folder in PATH that may not be searched is no answer to whether the command exists.
    return not os.path.lexists(program) if "/" in program else shutil.which(program, os.F_OK) is None


def _execute_when_told(command: list[str], go_reader: int, failed_writer: int) -> NoReturn:
    """In the child: default signals, wait for the environment, become the command. Never returns."""
    try:
        for number in (*_FORWARDED, *_FOR_THE_CHILD_ALONE):
            if not _is_ignored(number):
                signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python itself
            signal.signal(number, signal.SIG_DFL)
        with os.fdopen(go_reader, "rb") as go:
            told = go.read()
        if told:
            os.execvpe(command[0], command, child_environment(json.loads(told)))
    except OSError as error:
        os.write(failed_writer, str(errno.ENOENT if _is_unknown(command[0]) else error.errno).encode())
    finally:
        os._exit(127)
