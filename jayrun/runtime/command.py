"""A wrapped command: a paused child becomes the holder, waits its turn, and is let go with its devices in its sight.

The child itself holds the lease, known to the book by pid and start ticks, which exec keeps. So the lease lives as long
as the command, also when this parent is killed; and a child whose parent is killed before its turn ends by itself. The
parent is a further holder, for what the command leaves running.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from jayrun import kernel, probes
from jayrun.devices.visible import Mask, Numbering
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.reasons import short_id
from jayrun.domain.requests import Request
from jayrun.errors import (
    BookError,
    BookUnreachable,
    LeaseLost,
    PlacementCancelled,
    PlacementImpossible,
    PlacementTimeout,
)
from jayrun.runtime import reconciler
from jayrun.runtime.exported import DOCKER_VARIABLE, docker_flags, environment
from jayrun.runtime.hardware import Lookout
from jayrun.runtime.leftovers import Leftovers, OnExit, collect_orphans
from jayrun.runtime.outage import Outage
from jayrun.runtime.paused import PausedChild
from jayrun.runtime.saying import say
from jayrun.runtime.within import Surrounding
from jayrun.store import admission, executions, holders, leases
from jayrun.store.asks import Ask, Ended, Execution, Granted, Impossible, Member, Parked, Unavailable
from jayrun.store.holders import Holder
from jayrun.store.ids import new_id
from jayrun.store.leases import Finished, Held, Lease
from jayrun.store.transactions import Book

BEAT_SECONDS = 2.0
_PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 1.0  # for a look at the hardware that has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a command waits (`timeout_seconds` None means for ever, 0 not at all), runs, and ends.

    `mask` are the names by which it is told its devices; `docker`: it is also told the options for `docker run`.
    """

    request: Request
    priority: int = 0
    timeout_seconds: float | None = None
    label: str = ""
    on_exit: OnExit = OnExit.WAIT
    mask: Mask = Mask.UUID
    docker: bool = False


def run_command(
    child: PausedChild,
    book: Book,
    host_id: int,
    terms: Terms,
    *,
    numbering: Numbering,
    command: Sequence[str],
    waiting: Callable[[UUID], None],
    around: Surrounding | None = None,
) -> int:
    """Give `child` its turn, and stay until all that it started has ended; returns its exit code (128 + signal).

    Only devices that `numbering` shows, by the masks that this process inherited, are given to it.

    `waiting(execution id)` is called now and then while it waits. Inside the lease `around` there is no waiting: it
    gets devices of that one, or none. Raises `PlacementImpossible`, `PlacementTimeout`, `CannotExecute` and the book's
    errors; then the child is gone and nothing is left in the book.
    """
    kernel.become_subreaper()
    child.take_signals()
    who = kernel.incarnation(child.pid)
    text = " ".join(command)[:200]
    holder = holders.register(
        book,
        host_id,
        role="command",
        label=terms.label,
        command=text,
        incarnation=who,
        visible=numbering.visible,
    )
    leftovers = Leftovers(child, since_ticks=who.start_ticks)
    wrapped = _Wrapped(child, leftovers, book, holder, terms, numbering, around, name=os.path.basename(command[0]))
    probes.reach("command.registered")
    try:
        if wrapped.take_turn(waiting):
            probes.reach("command.granted")
            wrapped.execute()
            wrapped.stay()
    except BaseException:  # the child goes, whatever came between
        child.dismiss()
        with contextlib.suppress(BookError):  # then any pass of the host sees that the child is gone
            wrapped.leave()
        raise
    finally:
        wrapped.stop_looking()
    return wrapped.conclude()


class _Wrapped:
    """A command, and what the book knows of it: its execution, its lease, and the two processes that hold it."""

    def __init__(
        self,
        child: PausedChild,
        leftovers: Leftovers,
        book: Book,
        holder: Holder,
        terms: Terms,
        numbering: Numbering,
        around: Surrounding | None,
        *,
        name: str,
    ) -> None:
        self._child = child
        self._leftovers = leftovers
        self._book = book
        self._impatient = book.with_patience(_PATIENCE_SECONDS)
        self._lookout = Lookout(book.with_patience(0))
        self._outage = Outage(lambda line: say(f"jayrun: {line}"))
        self._holder = holder
        self._terms = terms
        self._numbering = numbering
        self._around = around
        self._lease: Lease | None = None
        self._own: Holder | None = None  # this process, once it holds the lease too
        self._holders = [holder]
        self._lost = False
        key = new_id()
        self._execution = Execution(
            id=key,
            kind="command",
            name=name,
            host_id=holder.host_id,
            holder_id=holder.id,
            unit_id=key,
            priority=terms.priority,
        )

    def take_turn(self, waiting: Callable[[UUID], None]) -> bool:
        """Ask, and wait if need be; whether the lease is there. It is not when the child was ended meanwhile."""
        try:
            if self._around is None:
                self._ask(waiting)
            else:
                self._take_part(self._around)
        except (PlacementCancelled, LeaseLost):
            if not self._child.ended(0):  # else somebody found it dead before we did
                raise
        return self._lease is not None

    def _ask(self, waiting: Callable[[UUID], None]) -> None:
        member = Member(execution=self._execution, invocation=1, recorded=(self._terms.request,))
        asked = Ask(asker=member, position=0, wait=self._terms.timeout_seconds != 0)
        match admission.reserve(self._book, asked):
            case Granted(lease):
                self._hold_too(lease)
            case Parked():
                self._wait_for_turn(waiting)
            case Unavailable():
                asks = self._terms.request.describe()
                raise PlacementTimeout(
                    f"{asks} is not available now, and it was told not to wait; "
                    "`jayrun can` with the same options says why"
                )
            case Impossible(reason):
                raise PlacementImpossible(reason)
            case Ended(state):
                raise PlacementCancelled(f"the execution is {state} in the book")
            case unknown:
                assert_never(unknown)

    def _take_part(self, around: Surrounding) -> None:
        """Inside another `jayrun run` both processes become further holders of its lease: an ask for one beside it
        might wait for itself."""
        shares = around.choose(self._terms.request)
        lease = Lease(around.lease.id, around.lease.epoch, self._execution.id, 0, shares)
        try:
            leases.join(self._book, self._holder, Held(lease.id, lease.epoch))
            self._hold_too(lease)
        except LeaseLost as error:
            raise around.ended() from error
        names = ", ".join(str(share.host_index) for share in shares)
        say(
            f"jayrun: this is inside `jayrun run`: the command gets {self._terms.request.device} {names} of lease "
            f"{short_id(lease.id)}, and shares it with whatever else runs inside"
        )

    def _hold_too(self, lease: Lease) -> None:
        """Make this process a further holder, before the command runs: so whoever finds the command dead finds that
        the lease is still held, and this process sees what the command left running."""
        if self._own is None:
            # A wrapper is who knows how the command that the lease was granted to ends; inside, that is another one.
            role = "wrapper" if self._around is None else "command"
            self._own = holders.register(self._book, self._holder.host_id, role=role, label=self._terms.label)
            self._holders.append(self._own)
        leases.join(self._book, self._own, Held(lease.id, lease.epoch))
        self._lease = lease

    def _wait_for_turn(self, waiting: Callable[[UUID], None]) -> None:
        book, seconds = self._impatient, self._terms.timeout_seconds  # the child may end meanwhile, or the time be over
        give_up_at = None if seconds is None else time.monotonic() + seconds
        tick_seconds = self._book.tick_seconds()
        with book.listen(str(self._holder.id)) as listener:
            while not self._child.ended(0):  # by Ctrl-C, or by a signal that was passed on
                listener.open()
                try:
                    lease = _granted(book, self._execution)
                    self._outage.ended()
                    if lease is not None:
                        self._hold_too(lease)
                        return
                    if give_up_at is not None and time.monotonic() >= give_up_at:
                        failure: dict[str, object] = {"type": "PlacementTimeout", "message": "waited too long"}
                        if executions.withdraw(book, self._execution.id, state=ExecutionState.FAILED, failure=failure):
                            raise _timed_out(self._terms)
                        continue  # admitted at the last moment
                    # Perhaps nobody else is there to see that who holds is dead.
                    if reconciler.run_pass(book, self._holder.host_id).admitted:
                        continue
                    self._lookout.tick(self._holder.host_id)
                    waiting(self._execution.id)
                except BookUnreachable as error:  # the place in the queue is kept by the book
                    self._outage.began(error, "the place in the queue is kept")
                    if give_up_at is not None and time.monotonic() >= give_up_at:
                        raise _timed_out(self._terms) from error
                left = tick_seconds if give_up_at is None else min(give_up_at - time.monotonic(), tick_seconds)
                listener.wait(left, self._child.pidfd)

    def execute(self) -> None:
        """Let the command run. Raises `CannotExecute`."""
        assert self._lease is not None
        request, shares = self._terms.request, self._lease.shares
        told = environment(request.device, request.backend, self._lease, self._numbering, self._terms.mask)
        if self._terms.docker:
            told[DOCKER_VARIABLE] = docker_flags(request.backend, shares, told)
            say(f"jayrun: {DOCKER_VARIABLE}: {told[DOCKER_VARIABLE]}")
        self._child.execute(told)

    def stay(self) -> None:
        """Until the command ends, showing life for it now and then; what the book misses meanwhile does no harm."""
        while not self._child.ended(BEAT_SECONDS):
            self._show_life()
            self._lookout.tick(self._holder.host_id)
            collect_orphans(self._child)

    def stop_looking(self) -> None:
        """Look at the hardware no more, whatever the driver does."""
        self._lookout.stop(_LOOK_SECONDS)

    def _show_life(self) -> None:
        try:
            self._beat(
                f"goes on without a lease, on devices that may be given to others; kill {self._child.pid} ends it"
            )
            self._outage.ended()
        except BookError as error:
            self._outage.began(error, "the command goes on and keeps its lease")

    def _beat(self, fate: str) -> None:
        """Show life for its processes, and say once if the book has ended the command; `fate` is what became of it."""
        is_alive, *_ = [holders.beat(self._impatient, holder) for holder in self._holders]
        if is_alive or self._lost:
            return
        self._lost = True
        assert self._lease is not None
        say(
            f"jayrun: lease {self._lease.id} was taken away: an administrator ended its holder, or had this host "
            f"forgotten; the command {fate}"
        )
        self.leave()  # the other process held it for the same command

    def conclude(self) -> int:
        """The command has ended: tell the book, and leave the lease once nothing of it runs. Returns its exit code."""
        code = self._child.wait()
        probes.reach("command.ended")
        if self._lease is not None:
            with contextlib.suppress(BookError):
                self._beat("has ended without it, perhaps beside others on its devices")
        lingering = self._lease is not None and self._leftovers.exist()
        self._tell(code, gone=not lingering)
        if lingering:
            self._leftovers.see_out(self._terms.on_exit, show_life=self._show_life, beat_seconds=BEAT_SECONDS)
            self._tell(code, gone=True)
        return code

    def _tell(self, code: int, *, gone: bool) -> None:
        """How the command ended, and whether all it started is gone. Told already, it changes nothing. If the book
        cannot be told, any pass of the host sees who is dead."""
        try:
            if self._lease is None:  # it was ended, by Ctrl-C or another signal, while it waited
                failure: dict[str, object] = {"type": "PlacementCancelled", "message": "interrupted while it waited"}
                executions.withdraw(self._book, self._execution.id, state=ExecutionState.CANCELLED, failure=failure)
            else:
                state = ExecutionState.SUCCEEDED if code == 0 else ExecutionState.FAILED
                why = None if code == 0 else {"type": "ExitCode", "message": f"exit code {code}"}
                self._release(self._holder, self._lease, [Finished(self._execution.id, state, why)])
            holders.leave(self._book, self._holder)
            self._holders = [self._own] if self._own is not None else []
            probes.reach("command.told")
            if gone:
                if self._own is not None and self._lease is not None:
                    self._release(self._own, self._lease)
                self.leave()
        except BookError as error:
            say(f"jayrun: the command has ended, but the book could not be told yet: {error}")

    def _release(self, holder: Holder, lease: Lease, finished: Sequence[Finished] = ()) -> None:
        held = Held(lease.id, lease.epoch)
        leases.settle(self._book, holder.host_id, holder.id, released=[held], finished=finished)

    def leave(self) -> None:
        """Its processes are holders no more; whoever waits is served."""
        for holder in self._holders:
            holders.leave(self._book, holder)
        if leases.anybody_waits(self._book, self._holder.host_id):
            admission.combine(self._book, self._holder.host_id)


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
        message = failure.get("message", "somebody ended it; run it again")
        raise PlacementCancelled(f"the execution was {news.state.value} while it waited: {message}")
    return None
