"""`Runtime`: runs operators in this process, lets them wait without holding anything, and starts them again."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any
from uuid import UUID

from jayrun import probes
from jayrun.domain.checks import member, whole_number
from jayrun.domain.devices import RuntimeDevice
from jayrun.domain.units import format_bytes
from jayrun.errors import LeaseLost, PlacementUnavailableHere, RuntimeClosed
from jayrun.runtime.data import Data
from jayrun.runtime.job import Job
from jayrun.runtime.operator import Operator, check_inputs
from jayrun.runtime.order import changed_masks, keep_pci_order
from jayrun.runtime.retry import FailureMode, RetryPolicy
from jayrun.runtime.service import AT_ITS_END, Resolution, own_service
from jayrun.runtime.ticket import Ticket
from jayrun.settings import Settings
from jayrun.store import devices as booked_devices
from jayrun.store import submissions
from jayrun.store.submissions import submission

log = logging.getLogger("jayrun")

_ONE_ATTEMPT = RetryPolicy()


class Runtime:
    """Runs operators here and now, against the book at `url`.

    `url`: a PostgreSQL URL; default JAYRUN_DATABASE_URL, else jayrun's own server, which is started when needed.
    `devices`: declarations to add to this host's (none is altered). `failure_mode`: whether the first execution that
    fails for good cancels those that wait. `label`: free text shown beside everything this process holds (the first
    Runtime of a process decides). `threads`: how many started executions run at once; one that waits uses none.
    `on_lease_lost`: called, in a thread of its own and until the process ends, with a `LeaseLost` for each lease that
    this process loses though it is alive.

    A context manager: leaving the block waits for what was started, then closes; after an exception what waits is
    cancelled first. Raises `BookUnreachable` and `SchemaMismatch` when the book cannot be used.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        devices: Iterable[RuntimeDevice] = (),
        failure_mode: FailureMode = FailureMode.CONTINUE,
        label: str | None = None,
        threads: int = 32,
        on_lease_lost: Callable[[LeaseLost], object] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if not isinstance(devices, Iterable):
            raise TypeError(f"devices must be RuntimeDevices, not {devices!r} ({type(devices).__name__})")
        declared = list(devices)
        for each in declared:
            if not isinstance(each, RuntimeDevice):
                raise TypeError(f"devices must be RuntimeDevice, not {each!r} ({type(each).__name__})")
        self._failure_mode = member(failure_mode, "failure_mode", FailureMode)
        threads = whole_number(threads, "threads", minimum=1)
        if on_lease_lost is not None and not callable(on_lease_lost):
            raise TypeError(f"on_lease_lost must be callable, not {on_lease_lost!r} ({type(on_lease_lost).__name__})")
        is_told = settings is not None
        settings = settings or Settings.load()
        self._label = settings.label if label is None else label
        probes.arm_from_settings(settings.probes)
        self._service = own_service(settings, url=url, label=self._label)
        if on_lease_lost is not None and on_lease_lost not in self._service.presence.on_lease_lost:
            self._service.presence.on_lease_lost.append(on_lease_lost)
        if declared:
            self._add_devices(declared)
        if not is_told and settings.masks != self._service.masks:
            log.warning("%s", changed_masks(self._service.masks, settings.masks))
        self._service.runtimes += 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="jayrun-run")
        self._jobs: set[Job] = set()
        self._idle = threading.Condition()
        self._refusal: str | None = None
        self._closed = False

    def run(
        self,
        operator: type[Operator],
        /,
        *,
        priority: int = 0,
        timeout: float | None = None,
        retry: RetryPolicy = _ONE_ATTEMPT,
        **inputs: Any,
    ) -> Data:
        """Run `operator` in this thread and return its Data; blocks while it has to wait for capacity.

        `priority`: higher is served first. `timeout`: seconds that all waits together may take, 0 for none at all,
        None for ever. `retry`: what is tried again. Raises what the operator raised, `PlacementTimeout` (nothing is
        left in the book), `PlacementImpossible`, and TypeError for inputs that it does not declare.
        """
        job = self._job(operator, inputs, priority, timeout, retry)
        try:
            self._enter(job)
            data = job.step()
            while data is None:
                data = job.step(self._wait(job))
            return data
        except Exception as error:  # whatever the operator raised; it is raised again
            self._failed(error)
            raise
        except BaseException:  # Ctrl-C may come between any two lines, also when it has just been parked
            job.abandon(None)
            raise
        finally:
            self._done(job)

    def start(
        self,
        operator: type[Operator],
        /,
        *,
        priority: int = 0,
        timeout: float | None = None,
        retry: RetryPolicy = _ONE_ATTEMPT,
        **inputs: Any,
    ) -> Future[Data]:
        """Like `run`, in a thread of the Runtime; returns a Future at once.

        While it waits for capacity it occupies no thread. Cancelling the Future takes it out of the queue.
        """
        job = self._job(operator, inputs, priority, timeout, retry)
        future: Future[Data] = Future()
        future.add_done_callback(lambda done: job.cancel("its Future was cancelled") if done.cancelled() else None)
        self._enter(job)
        try:
            self._threads.submit(self._advance, job, future, None)
        except RuntimeError as error:  # the interpreter is shutting down
            self._done(job)
            raise RuntimeClosed(f"no more work can be started: {error}") from error
        return future

    def submit(
        self,
        operator: type[Operator] | str,
        /,
        *,
        priority: int = 0,
        key: str | None = None,
        retry: RetryPolicy = _ONE_ATTEMPT,
        host: str | None = None,
        **inputs: Any,
    ) -> Ticket:
        """Write an execution of `operator` (a class, or the name of one) into the book, for any worker that knows it.

        It survives this process. `inputs` are JSON values, 1 MB in all. `key` makes it idempotent: submitting again
        with the same key gives the first one's ticket, and raises `KeyTaken` when anything else about it differs.
        `host` (name or identity) pins it to a host. At least once: a worker that dies running it is followed by
        another. Raises TypeError and ValueError for bad arguments, `UnknownHost`.
        """
        self._check(retry)
        if self._refusal is not None:
            raise RuntimeClosed(self._refusal)
        if isinstance(operator, type) and issubclass(operator, Operator) and operator is not Operator:
            check_inputs(operator, inputs)
        elif not isinstance(operator, str):
            raise TypeError(f"operator must be a subclass of Operator or the name of one, not {operator!r}")
        book = self._service.book
        wanted = submission(
            operator if isinstance(operator, str) else operator.__name__,
            inputs,
            priority=priority,
            key=key,
            max_attempts=retry.max_attempts,
            retry_on=retry.names(),
            retry_seconds=retry.delay_seconds,
            retry_backoff=retry.backoff,
            host_id=None if host is None else booked_devices.find_host(book, host),
            label=self._label,
        )
        return self.ticket(submissions.submit(book, wanted))

    def ticket(self, execution_id: UUID | str) -> Ticket:
        """The ticket of an execution that was submitted, by whomever. Raises ValueError for what is no whole id."""
        try:
            whole = UUID(str(execution_id))
        except ValueError:
            raise ValueError(f"execution_id must be a whole id, as Ticket.id is, not {execution_id!r}") from None
        return Ticket(self._service.book, whole)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every release and finish of this process so far is committed; False after `timeout` seconds."""
        return self._is_mine() and self._service.flush(timeout)

    def close(self) -> None:
        """Take no new work, wait for what was started, tear down idle resources, and flush.

        Data that is still alive keeps its lease. A second close does nothing.
        """
        if not self._is_mine():
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._refusal = self._refusal or "this Runtime is closed"
            self._idle.wait_for(lambda: not self._jobs)
        self._threads.shutdown()
        self._service.runtimes -= 1
        if self._service.runtimes == 0:
            self._service.resources.tear_down_idle()
        self.flush()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._is_mine():
            self._cancel_waiting(f"its Runtime was left with {type(error).__name__}")
        self.close()

    def _add_devices(self, declared: list[RuntimeDevice]) -> None:
        book, host_id = self._service.book, self._service.host_id
        booked_devices.add(book, host_id, declared)
        self._service.look_again(book)
        keep_pci_order(self._service.numbering)
        booked = {(device.kind, device.host_index): device for device in booked_devices.fleet(book, host_id)[0]}
        for each in declared:
            found = booked[each.device, each.device_id]
            if found.capacity_bytes != each.memory_bytes:
                log.warning(
                    "%s %s is declared with %s already; the %s given here are ignored (`jayrun devices declare`)",
                    each.device,
                    each.device_id,
                    format_bytes(found.capacity_bytes),
                    format_bytes(each.memory_bytes),
                )
        self._service.combine()

    def _is_mine(self) -> bool:
        """False in a forked child, which owns nothing of its parent."""
        return os.getpid() == self._service.pid

    def _enter(self, job: Job) -> None:
        """Count the job in, unless this Runtime takes no more."""
        with self._idle:
            if self._refusal is not None or self._service.has_stopped:
                raise RuntimeClosed(self._refusal or AT_ITS_END)
            self._jobs.add(job)
            self._service.jobs.add(job)

    def _job(
        self,
        operator: type[Operator],
        inputs: dict[str, Any],
        priority: object,
        timeout: object,
        retry: object,
    ) -> Job:
        """Check the arguments, before any lock is touched: in a forked child another thread may have held it."""
        checked = self._check(retry)
        if not (isinstance(operator, type) and issubclass(operator, Operator)):
            raise TypeError(f"operator must be a subclass of Operator, not {operator!r}")
        return Job(
            self._service,
            operator,
            inputs,
            priority=whole_number(priority, "priority", minimum=-(2**31), maximum=2**31 - 1),
            timeout_seconds=_seconds(timeout),
            retry=checked,
        )

    def _check(self, retry: object) -> RetryPolicy:
        """Refuse a forked child, and what is no policy."""
        if not self._is_mine():
            raise PlacementUnavailableHere("a forked child owns nothing of its parent; make a new Runtime in the child")
        if not isinstance(retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy, not {retry!r} ({type(retry).__name__})")
        return retry

    def _wait(self, job: Job) -> Resolution:
        """Block this thread until the job's wait is resolved; an interrupt leaves nothing in the queue."""
        resolved = threading.Event()
        resolutions: list[Resolution] = []

        def resolve(resolution: Resolution) -> None:
            resolutions.append(resolution)
            resolved.set()

        try:
            job.park(resolve)
            with self._service.blocked():
                resolved.wait()
        except BaseException:  # Ctrl-C above all; it is raised again
            job.abandon(resolutions[0] if resolutions else None)
            raise
        return resolutions[0]

    def _advance(self, job: Job, future: Future[Data], resolution: Resolution | None) -> None:
        """One step of a started job, in a thread of the pool."""
        if future.cancelled():
            job.abandon(resolution)  # perhaps it was admitted meanwhile
            self._done(job)
            return
        try:
            data = job.step(resolution)
            if data is None:
                job.park(partial(self._resubmit, job, future))
                return
        except BaseException as error:  # it belongs to the Future, as in every executor
            self._done(job)
            self._failed(error)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._done(job)
        if future.set_running_or_notify_cancel():
            future.set_result(data)

    def _resubmit(self, job: Job, future: Future[Data], resolution: Resolution) -> None:
        try:
            self._threads.submit(self._advance, job, future, resolution)
        except RuntimeError:  # the interpreter is shutting down
            job.abandon(resolution)
            self._done(job)
            future.cancel()

    def _failed(self, error: BaseException) -> None:
        if self._failure_mode is FailureMode.FAIL_FAST and self._refusal is None:
            self._refusal = f"this Runtime fails fast, and an execution failed: {type(error).__name__}: {error}"
            self._cancel_waiting(self._refusal)

    def _cancel_waiting(self, why: str) -> None:
        with self._idle:
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel_waiting(why)

    def _done(self, job: Job) -> None:
        with self._idle:
            self._jobs.discard(job)
            self._service.jobs.discard(job)
            self._idle.notify_all()


def _seconds(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds or None, not {timeout!r} ({type(timeout).__name__})")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"timeout must be 0 or more seconds, but is {timeout!r}")
    return None if math.isinf(timeout) else float(timeout)
