"""A worker process: takes executions that were submitted to the book, one at a time, and runs them.

Its supervisor (`jayrun.runtime.supervisor`) starts it with the modules whose operators it knows; nothing that the book
says can name other code. An execution that has to wait goes back to the book and leaves this process free for the next.

It ends by itself, its execution finished, on SIGTERM or when its supervisor is gone; on SIGUSR1 what runs is given
back to the book.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from jayrun import kernel, probes
from jayrun.domain.documents import to_json
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.placements import CPU_PLACEMENT
from jayrun.errors import BookBusy, BookError, BookUnreachable, PlacementCancelled
from jayrun.runtime.calls import collect_garbage, stored
from jayrun.runtime.data import Data
from jayrun.runtime.job import Job
from jayrun.runtime.operator import Operator
from jayrun.runtime.retry import RetryPolicy, allows_by_name
from jayrun.runtime.service import Service, service_for
from jayrun.settings import Settings
from jayrun.store import claims
from jayrun.store.changes import WORKERS
from jayrun.store.claims import Done, Taken
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

CANNOT_IMPORT = 3
"""Exit code of a worker whose modules could not be imported: starting it again would not help."""
FAILED_FAST = 4
"""Exit code of a worker that took no more work because an execution failed, as its failure mode says."""

END_AT_ONCE = signal.SIGUSR1
"""A second SIGTERM would be ambiguous: whoever ends a service may send the first one to the whole process group."""

FAILED_FAST_NOW = signal.SIGUSR2
"""Tells the supervisor that an execution failed, before the worker has ended."""

_OUTAGE_PAUSE_SECONDS = 1.0


class Stopped(BaseException):
    """Ends the execution that runs: the worker was told to end at once."""


class DeclaredDead(Exception):
    """The book has ended this worker as dead: it holds nothing any more, and another one may run what it ran."""


class UnknownOperator(Exception):
    """A module holds no operators, or two operators have one name."""


def load_operators(modules: Sequence[str]) -> dict[str, type[Operator]]:
    """The operators that `modules` hold, by the name of their class.

    Raises ImportError and whatever importing raises, and `UnknownOperator`.
    """
    found: dict[str, type[Operator]] = {}
    for name in modules:
        module = importlib.import_module(name)
        operators = [
            each
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, Operator) and each is not Operator
        ]
        if not operators:
            raise UnknownOperator(f"module {name} has no operators: no class there derives from jayrun.Operator")
        for each in operators:
            if found.setdefault(each.__name__, each) is not each:
                first = found[each.__name__]
                raise UnknownOperator(
                    f"two operators are named {each.__name__}: {first.__module__}.{first.__qualname__} and "
                    f"{each.__module__}.{each.__qualname__}; submitted work names operators by their class's name"
                )
    return found


class Worker:
    """The loop of one worker process."""

    def __init__(
        self, service: Service, operators: Mapping[str, type[Operator]], *, fail_fast: bool, leash: int
    ) -> None:
        self._service = service
        self._book: Book = service.book
        self._operators = operators
        self._fail_fast = fail_fast
        self._leash = leash  # readable once the supervisor is gone
        self._draining = False
        self._running = False
        self._failed = False
        self._drained = False
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)

    def run(self) -> int:
        """Work until told to drain; returns the exit code."""
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._told_to_drain)
        signal.signal(END_AT_ONCE, self._told_to_end)
        probes.reach("worker.registered")
        claims.accept(self._book, self._service.holder.id, list(self._operators))
        done: Done | None = None
        with self._book.listen(str(self._service.holder.id), WORKERS) as listener:
            while True:
                if not self._draining and kernel.readable(0, self._leash):
                    log.warning("its supervisor is gone; it ends")
                    self._draining = True
                if self._draining:
                    self._drain(before_telling=done is not None)
                idle = done is None and listener.is_open  # then it is told of what comes
                ended = done is not None
                taken, done = self._next(done), None
                if taken is None and not idle and not self._draining and (listener.open() or ended):
                    taken = self._next(None)  # what came while it was busy, or did not listen
                if taken is not None:
                    done = self._execute(taken)
                elif self._draining:
                    break
                else:
                    self._idle(listener)
        self._service.resources.tear_down_idle()
        self._service.stop()
        return FAILED_FAST if self._failed else 0

    # --- taking work -------------------------------------------------------------------------------------------------

    def _next(self, done: Done | None) -> Taken | None:
        """Tell how the last execution ended, as long as it takes, and take the next one if there is one."""
        while True:
            try:
                return self._try_next(done)
            except BookError as error:
                self._out_of_reach(error)
                if self._draining and done is None:
                    return None

    def _try_next(self, done: Done | None) -> Taken | None:
        found = claims.take(self._book, self._service.holder.id, done)
        if not found.is_alive:
            raise DeclaredDead
        if done is not None and not found.finished:
            log.warning(
                "execution %s was not finished by this worker: another one has it now, or it was ended", done.id
            )
        if found.waits:
            self._service.combine()
            found = claims.take(self._book, self._service.holder.id, before_waiting=True)
        return found.taken

    def _idle(self, listener: Any) -> None:
        """Until something may be there to take, the tick, or a signal."""
        give_up_at = time.monotonic() + self._service.tick_seconds
        probes.reach("worker.idle")
        while (left := give_up_at - time.monotonic()) > 0:
            heard = listener.wait(left, self._wake_reader, self._leash)
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake_reader, 4096):
                    pass
            if self._draining or kernel.readable(0, self._leash):
                return
            if heard or not listener.is_open:  # then it may have missed something
                probes.reach("worker.woken")
                return

    def _drain(self, *, before_telling: bool) -> None:
        """Take nothing new; what was given to this worker already goes back when it leaves.

        `before_telling` how the last execution ended: then this has to be told first, for the answer would bring new
        work.
        """
        while not self._drained:
            try:
                claims.accept(self._book.with_patience(_OUTAGE_PAUSE_SECONDS), self._service.holder.id, [])
                self._drained = True
            except BookError as error:
                if not before_telling:
                    return
                self._out_of_reach(error)

    def _out_of_reach(self, error: BookError) -> None:
        """Try again a little later; the background service says that the book is away."""
        log.debug("the book is out of reach; trying again: %s", str(error))
        kernel.readable(_OUTAGE_PAUSE_SECONDS, self._wake_reader)

    # --- running it --------------------------------------------------------------------------------------------------

    def _execute(self, taken: Taken) -> Done | None:
        """Run it until it has ended or has to wait; what is to be told of it (None: nothing, it waits)."""
        done: Done | None = None
        job: Job | None = None
        try:
            self._running = True
            probes.reach("worker.taken")
            try:
                job = Job(self._service, self._operators[taken.name], taken.inputs, retry=_ONCE, taken=taken)
                data = job.step()
            finally:
                self._running = False
            if data is not None:
                probes.reach("worker.returned")
                done = self._succeeded(taken, data)
                del data
        except (Stopped, BookUnreachable, BookBusy):  # no fault of the execution
            done = Done(id=taken.id, claim=taken.claim, state=ExecutionState.READY)
        except BaseException as error:  # whatever user code raised is how the execution ended
            done = self._judge(taken, error)
        if done is None:
            self._service.make_room()  # idle resources, of this process or others, may stand in its way
        if job is not None and job.holds_leases():
            collect_garbage()  # perhaps only a cycle of user code keeps them
        if self._service.owes:
            self._service.flush_if_reachable()
        probes.reach("worker.parked" if done is None else "worker.ended")
        return done

    def _succeeded(self, taken: Taken, data: Data) -> Done:
        """A JSON value on the CPU is stored; of anything else only its kind."""
        result, kind = None, type(data.value).__name__
        if data.placement is not CPU_PLACEMENT:
            kind += f" on {data.placement.primary.device}"
        else:
            with contextlib.suppress(TypeError):  # then it is no JSON
                result, kind = to_json(data.value, "the result"), "json"
        return Done(id=taken.id, claim=taken.claim, state=ExecutionState.SUCCEEDED, result=result, result_kind=kind)

    def _judge(self, taken: Taken, error: BaseException) -> Done:
        failure = stored(error) | {"attempt": taken.attempt, "host": kernel.host_name(), "pid": os.getpid()}
        log.warning(
            "%s %s failed in attempt %d of %d: %s: %s",
            *(taken.name, taken.id, taken.attempt, taken.max_attempts, type(error).__name__, str(error)),
        )
        again = taken.attempt < taken.max_attempts and allows_by_name(error, taken.retry_on)
        if again:
            policy = RetryPolicy(delay_seconds=taken.retry_seconds, backoff=taken.retry_backoff)
            pause_seconds = policy.pause_seconds(taken.attempt)
            return Done(
                id=taken.id, claim=taken.claim, state=ExecutionState.READY, failure=failure, pause_seconds=pause_seconds
            )
        cancelled = isinstance(error, PlacementCancelled)
        if self._fail_fast and not cancelled:
            log.error("this worker fails fast, and takes nothing new")
            self._failed = self._draining = True
            if not kernel.readable(0, self._leash):
                os.kill(os.getppid(), FAILED_FAST_NOW)
        state = ExecutionState.CANCELLED if cancelled else ExecutionState.FAILED
        return Done(id=taken.id, claim=taken.claim, state=state, failure=failure)

    def _told_to_drain(self, number: int, frame: FrameType | None) -> None:
        self._draining = True

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        self._draining = True
        if self._running:
            self._running = False  # so that a second one does not end the clean-up
            raise Stopped


_ONCE = RetryPolicy()


def main(arguments: Sequence[str]) -> int:
    """The program of a worker process: one JSON argument from its supervisor. Returns its exit code."""
    told = json.loads(arguments[0])
    logging.basicConfig(format="jayrun worker %(process)d: %(message)s", level=logging.INFO)
    settings = Settings.load()
    probes.arm_from_settings(settings.probes)
    sys.path.insert(0, os.getcwd())  # modules are found as `python -m` finds them
    try:
        operators = load_operators(told["modules"])
    except UnknownOperator as error:
        print(f"jayrun worker: {error}", file=sys.stderr)
        return CANNOT_IMPORT
    except Exception:  # the user's modules may raise anything
        traceback.print_exc()
        print(f"jayrun worker: {', '.join(told['modules'])} could not be imported", file=sys.stderr)
        return CANNOT_IMPORT
    assert settings.database_url is not None  # the supervisor says which book
    service = service_for(
        settings.database_url,
        host_identity=settings.host_id,
        label=told["label"],
        masks=settings.masks,
        role="worker",
    )
    with os.fdopen(told["ready"], "w") as ready:
        json.dump(sorted(operators), ready)
    try:
        return Worker(service, operators, fail_fast=told["fail_fast"], leash=told["leash"]).run()
    except DeclaredDead:
        print("jayrun worker: the book has ended this process as dead; it ends", file=sys.stderr)
    except BaseException:  # a mistake of ours
        traceback.print_exc()
    # Not politely: who left would not count as a crash, and what brings it down would be run for ever.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
