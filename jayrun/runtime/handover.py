"""Placements that come from another process: whoever unpickles one becomes a further holder of its lease."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from jayrun.domain.devices import Share
from jayrun.embedded import how_to_start, locate
from jayrun.errors import BookUnreachable, LeaseLost
from jayrun.runtime.holds import AnyHold, Hold
from jayrun.runtime.service import Service, own_service, services
from jayrun.settings import Settings


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
    away: list[Service] = []
    for service in asked:
        try:
            return service.join(lease_id, epoch, patience_seconds=0)
        except LeaseLost:
            if service is asked[-1] and not away:
                raise
        except BookUnreachable:
            away.append(service)
    # It is in a book that is away, or nowhere; those are waited for now that all others have been asked.
    *others, last = away
    for service in others:
        with suppress(LeaseLost):
            return service.join(lease_id, epoch)
    return last.join(lease_id, epoch)


def joined_part(lease_id: UUID, epoch: int, part_id: UUID, shares: tuple[Share, ...]) -> AnyHold:
    """The same for a part of a lease around the process that sent it. Where that is around this process too, the bytes
    count here from now on, fit or not; anywhere else this process holds the lease and nothing is counted.

    Raises what `joined` does.
    """
    for service in services() or [_own_service()]:
        if service.within is not None and service.within.names(lease_id, epoch):
            return service.within.take_over(part_id, shares)
    return joined(lease_id, epoch)


def _own_service() -> Service:
    settings = Settings.load()
    found = locate(settings)
    if not found.running and found.kind != "url":
        raise BookUnreachable(how_to_start(settings))
    return own_service(settings, url=found.url)
