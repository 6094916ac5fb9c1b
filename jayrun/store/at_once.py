"""The ask that stands behind nobody: decided before the gate, and granted behind it if it still fits.

So the gate is held while the server writes, and not over a question to this process. An ask is never decided on older
devices than itself: they are looked at anew, or must prove unchanged behind the gate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection as PgConnection

from jayrun import probes
from jayrun.domain.devices import BookedDevice
from jayrun.domain.planner import Granted, judge
from jayrun.store.asks import Ask, introduce
from jayrun.store.changes import Changes
from jayrun.store.leases import Lease, leased
from jayrun.store.picture import booked_device
from jayrun.store.transactions import Book

STEADY_LOOKS = 3
"""After so many looks that showed the same, a process takes it that it is alone there, and saves itself the look."""

_GLANCE = "SELECT devices, somebody_waits FROM jayrun.glance(%s)"
_GRANT = "SELECT jayrun.grant_at_once(%s, %s, %s, %s, %s, %s, %s, %s, %s)"


@dataclass(frozen=True, slots=True)
class Sight:
    """The devices of a host as this process saw them last.

    `text` is what the book says of them, word for word, and `same` how many looks in a row showed that. `is_crowded`:
    somebody waits there, or what was free was gone a moment later; then asks are decided behind the gate.
    """

    text: str = "[]"
    devices: tuple[BookedDevice, ...] = ()
    uuids: tuple[tuple[int, str | None], ...] = ()
    same: int = 0
    is_crowded: bool = False


def grant(book: Book, ask: Ask) -> Lease | None:
    """The lease, if nobody waits on the host and the request fits; None: it has to be decided behind the gate."""
    host_id = ask.asker.execution.host_id
    sight: Sight = book.sights.setdefault(host_id, Sight())
    if sight.is_crowded:
        return None
    if sight.same >= STEADY_LOOKS and (lease := _try(book, ask, sight, unchanged=True)) is not None:
        return lease
    sight, somebody_waits = _look(book, host_id, sight)
    lease = None if somebody_waits else _try(book, ask, sight, unchanged=False)
    note(book, host_id, is_crowded=lease is None)
    return lease


def note(book: Book, host_id: int, *, is_crowded: bool) -> None:
    """Whether asks should be decided behind the gate from now on."""
    sight: Sight = book.sights.setdefault(host_id, Sight())
    if sight.is_crowded != is_crowded:
        book.sights[host_id] = replace(sight, is_crowded=is_crowded)


def _look(book: Book, host_id: int, last: Sight) -> tuple[Sight, bool]:
    def unit(pg: PgConnection[Any]) -> tuple[str | None, bool]:
        row = pg.execute(_GLANCE, (host_id,)).fetchone()
        assert row is not None
        return row[0], row[1]

    found, somebody_waits = book.written(unit)
    text = found or "[]"
    if text == last.text:
        sight = replace(last, same=last.same + 1)
    else:
        rows: list[list[Any]] = json.loads(text)
        devices = tuple(booked_device(host_id, row) for row in rows)
        sight = Sight(text, devices, tuple((row[0], row[10]) for row in rows))
    book.sights[host_id] = sight
    probes.reach("reserve.seen")
    return sight, somebody_waits


def _try(book: Book, ask: Ask, sight: Sight, *, unchanged: bool) -> Lease | None:
    """One transaction, which grants what the rules decide on `sight`, if that still fits, or is `unchanged`."""
    asker = ask.asker.execution
    verdict = judge((ask.asker.recorded[ask.position],), sight.devices)
    if not isinstance(verdict, Granted):
        return None
    [shares] = verdict.plan
    slot = (asker.id, ask.position, ask.asker.invocation)
    changes = Changes(asker.host_id)
    introduce(changes, ask.asker, upto=ask.position + 1, state="running")
    lease_id = changes.add_lease(slot, host_id=asker.host_id, holder_id=asker.holder_id, shares=shares)
    is_new = ask.asker.booked is None
    seen = sight.text if unchanged else None
    values = (asker.host_id, asker.holder_id, asker.unit_id, *slot, is_new, seen, changes.document())
    [(epoch,)] = book.gated(lambda gate: gate.commit(_GRANT, values))
    if epoch is None:
        return None
    return Lease(lease_id, epoch, *slot[:2], leased(shares, dict(sight.uuids)))
