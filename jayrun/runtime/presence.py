"""This process as a holder in the book: it shows life, joins leases that come from others, and learns what it lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from jayrun.errors import LeaseLost, PlacementUnavailableHere
from jayrun.runtime.holds import Hold, Outbox, Release
from jayrun.store import holders, leases
from jayrun.store.holders import Holder
from jayrun.store.leases import Held
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

DECLARED_DEAD = "this process was declared dead in the book, or was silent for too long where nobody saw it"


class Presence:
    """One process in one book. `holder` is another one after the book has ended the first though the process lives.

    A worker is never another one: it ends, for the book gives what it ran to others.
    """

    def __init__(self, book: Book, outbox: Outbox, host_id: int, *, role: str, label: str) -> None:
        self._book = book
        self._outbox = outbox
        self._role = role
        self._label = label
        self._only_waited = False  # as the book was told
        self.holder = self._register(book.with_patience(0), host_id)
        self.on_lease_lost: list[Callable[[LeaseLost], object]] = []

    def _register(self, book: Book, host_id: int) -> Holder:
        visible = self._outbox.numbering.visible
        return holders.register(book, host_id, role=self._role, label=self._label, visible=visible)

    def join(self, book: Book, lease_id: UUID, epoch: int) -> Hold:
        """Become a further holder of a lease. Raises `LeaseLost`, `PlacementUnavailableHere`, `BookError`."""
        held = Held(lease_id, epoch, next(self._outbox.numbers))
        try:
            leases.join(book, self.holder, held)
        except (LeaseLost, PlacementUnavailableHere):
            raise
        except BaseException:  # nobody knows whether the book did it, so it is taken back
            self._outbox.put(Release(held))
            raise
        return Hold(self._outbox, held)

    def beat(self, *, only_waits: Callable[[], bool], tick: bool) -> bool:
        """Show life at each tick, and at once that this process no longer only waits; learn what was lost.

        Whether it is another holder from now on.
        """
        if not tick and not self._only_waited:
            return False
        waits = only_waits()
        if not tick and waits:
            return False
        is_alive = holders.beat(self._book, self.holder, only_waits=waits)
        self._only_waited = waits
        held = list(self._outbox.held.values())
        if not is_alive:
            return self._declared_dead(held)
        if held:
            self.confirm(self._book, held)
        return False

    def confirm(self, book: Book, held: Sequence[Held]) -> None:
        """Lose what the book does not have: somebody ended it, or the former holder got it just before it was ended."""
        gone = leases.gone(book, self.holder, held)
        self._tell(self._lose(gone, "this process's hold on it was ended by others"))

    def lent_until(self, lend_seconds: float) -> list[float]:
        """When what was lent is to be taken back, on this process's monotonic clock."""
        return [since + lend_seconds for since, _ in list(self._outbox.lent.values())]

    def take_back_lent(self, lend_seconds: float) -> None:
        """Keep no longer for others what nobody has pickled for so long."""
        over = time.monotonic() - lend_seconds
        lent = self._outbox.lent
        for lease, entry in list(lent.items()):
            if entry[0] <= over and (taken := lent.pop(lease, entry)) is not entry:
                lent.setdefault(lease, taken)  # it was pickled again just now

    def _declared_dead(self, held: Sequence[Held]) -> bool:
        lost = self._lose(held, DECLARED_DEAD)
        try:
            if self._role == "worker":
                return False
            former = self.holder
            self.holder = self._register(self._book, former.host_id)
            log.error("the book has ended holder %s though its process lives: now it is %s", former.id, self.holder.id)
            return True
        finally:
            self._tell(lost)

    def _lose(self, gone: Sequence[Held], why: str) -> list[LeaseLost]:
        """Mark these holds; what is to be told of them."""
        lost = []
        for held in gone:
            hold = self._outbox.holds.get(held[:2])
            if hold is not None and hold.lost is None:
                hold.lost = f"lease {held.lease_id} is lost: {why}; stop using the device, drop the data, and ask anew"
                lost.append(LeaseLost(hold.lost, *held[:2]))
                self._outbox.lent.pop(held[:2], None)
                self._outbox.held.pop(held[:2], None)
        return lost

    def _tell(self, lost: Sequence[LeaseLost]) -> None:
        """Tell whoever wants to know; the user's code runs in a thread of its own."""
        for each in lost:
            log.error("%s", str(each))
        if lost:
            threading.Thread(target=self._call_back, args=(lost,), name="jayrun-lease-lost", daemon=True).start()

    def _call_back(self, lost: Sequence[LeaseLost]) -> None:
        for tell in list(self.on_lease_lost):
            for each in lost:
                try:
                    tell(each)
                except Exception:  # user code; the others are told all the same
                    log.exception("on_lease_lost failed")
