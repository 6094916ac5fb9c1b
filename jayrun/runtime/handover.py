"""Placements that come from another process: whoever unpickles one becomes a further holder of its lease."""

from __future__ import annotations

from uuid import UUID

from jayrun.embedded import how_to_start, locate
from jayrun.errors import BookUnreachable, LeaseLost
from jayrun.runtime.holds import Hold
from jayrun.runtime.service import Service, own_service, services
from jayrun.settings import Settings
from jayrun.store.transactions import PATIENCE_SECONDS


def joined(lease_id: UUID, epoch: int) -> Hold:
    """This process's hold on a lease that another one has lent; pickles call this by its name.

    It asks the books of this process's Runtimes, or without any the one that the settings name, for which no server is
    started. Raises `LeaseLost` when the lease has ended, `PlacementUnavailableHere` when it is on another host, and
    `BookUnreachable`.
    """
    asked = services() or [_own_service()]
    for service in asked:
        hold = service.outbox.holds.get((lease_id, epoch))
        if hold is not None and hold.lost is None:
            return hold
    failure: LeaseLost | BookUnreachable | None = None
    for patience_seconds in (0, PATIENCE_SECONDS):  # a book that is away is waited for when all others have been asked
        away = []
        for service in asked:
            try:
                return service.join(lease_id, epoch, patience_seconds=patience_seconds)
            except LeaseLost as error:  # or perhaps it is in another book
                failure = failure if isinstance(failure, BookUnreachable) else error
            except BookUnreachable as error:
                failure = error
                away.append(service)
        if not away:
            break
        asked, failure = away, None
    assert failure is not None
    raise failure


def _own_service() -> Service:
    settings = Settings.load()
    found = locate(settings)
    if not found.running and found.kind != "url":
        raise BookUnreachable(how_to_start(settings))
    return own_service(settings, url=found.url)
