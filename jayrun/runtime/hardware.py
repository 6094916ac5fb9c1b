"""Looking at the hardware of this host: one reading marks its devices, and is set against the leases on them.

A driver may hang for seconds, so whoever has deadlines lets a `Lookout` look, in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

from jayrun import kernel
from jayrun.devices import nvml, pci
from jayrun.domain.discovery import View
from jayrun.domain.hardware import Reading, Seen
from jayrun.errors import BookError
from jayrun.store import admission, discovery, everywhere, hosts, observations
from jayrun.store.discovery import Outcome
from jayrun.store.observations import Card, CardProcess
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

_WITHOUT_DRIVER_SECONDS = 60.0  # how often is looked whether the driver's library has come


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was read, and what that changed in the book."""

    reading: Reading
    outcome: Outcome
    sees_all: bool


def read() -> tuple[Reading, View]:
    """What the driver shows, and how much of the machine this process sees."""
    reading, view = nvml.read(), pci.view(sees_the_host=kernel.sees_the_drivers_pids())
    if reading.problem is not None and view.drivers == {} and not nvml.is_installed():
        why = "there is no NVIDIA GPU on the PCI bus of this machine, and no driver (libnvidia-ml.so.1 is not found)"
        reading = replace(reading, problem=why)
    return reading, view


def look(book: Book, host_id: int, *, adds: bool = False) -> Look:
    """Look at this host's hardware now: mark its devices, and write down who uses them. Who waits is judged again.

    `adds`: a person asks for it; then devices are added also where none have been found before.
    """
    since = observations.instant(book)
    reading, view = read()
    outcome = discovery.enter(book, host_id, reading, view, adds=adds)
    fell = observations.observe(book, host_id, _cards(reading), since=since, problem=reading.problem)
    if outcome.written or fell:
        admission.combine(book, host_id)
        everywhere.fail_impossible(book)
    return Look(reading=reading, outcome=outcome, sees_all=view.all_cards and reading.problem is None)


def preview(book: Book | None, host_id: int | None) -> Look:
    """What a person's look would enter in the book; nothing is written. None: there is no book, or no such host."""
    reading, view = read()
    if book is None or host_id is None:
        outcome = discovery.preview(reading, view)
    else:
        outcome = discovery.enter(book, host_id, reading, view, adds=True, dry_run=True)
    return Look(reading=reading, outcome=outcome, sees_all=view.all_cards and reading.problem is None)


class Lookout:
    """Looks at the hardware of a host every `look_seconds`, however many processes there have one.

    Without the driver's library nothing is asked of the book. Who was shown only a part of the machine lets others look
    first.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._sees_all = True
        self._stopping = False

    def tick(self, host_id: int) -> None:
        """Begin to look if it is time; returns at once."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._stopping or time.monotonic() < self._next_at:
            return
        # It is named like a thread that drops nothing, which it does not.
        self._thread = threading.Thread(target=self._look, args=(host_id,), name="jayrun-service-look", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Look no more; waits so long for what has begun."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(max(seconds, 0))

    def _look(self, host_id: int) -> None:
        try:
            wait = _WITHOUT_DRIVER_SECONDS
            if nvml.is_installed():
                is_due, wait = hosts.claim_look(self._book, host_id, periods=1 if self._sees_all else 2)
                if is_due:
                    seen = look(self._book, host_id)
                    self._sees_all = seen.sees_all
                    _tell(seen.outcome)
            self._next_at = time.monotonic() + wait
        except BookError as error:  # at the next tick again
            log.debug("could not look at the hardware: %s", str(error))
        except Exception:
            log.exception("jayrun could not look at the hardware, and tries again in %g s", _WITHOUT_DRIVER_SECONDS)
            self._next_at = time.monotonic() + _WITHOUT_DRIVER_SECONDS


def _tell(outcome: Outcome) -> None:
    for change in outcome.changes:
        level = logging.WARNING if change.is_fault else logging.INFO
        log.log(level, "%s %d: %s", change.device, change.device_id, "; ".join(change.changes))


def _cards(reading: Reading) -> list[Card]:
    """What a reading shows of the use of the devices; a split card is used by its slices, which are there too."""
    return [
        Card(
            index=seen.index,
            uuid=seen.uuid,
            total_bytes=seen.total_bytes,
            reserved_bytes=seen.reserved_bytes,
            used_bytes=None if seen.is_split else seen.used_bytes,
            processes=() if seen.is_split else _processes(seen),
            problem=seen.problem,
        )
        for seen in reading.devices
    ]


def _processes(seen: Seen) -> tuple[CardProcess, ...] | None:
    if seen.processes is None:
        return None
    return tuple(CardProcess(pid=each.pid, used_bytes=each.used_bytes) for each in seen.processes)
