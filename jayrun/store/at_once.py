"""The ask that stands behind nobody: decided before the gate, and granted behind it if it still fits.

So the gate is held while the server writes, and not over a question to this process. An ask is never decided on older
devices than itself: they are looked at anew, or must prove unchanged behind the gate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import probes
from jayrun.domain.devices import BookedDevice
from jayrun.domain.planner import plan
from jayrun.domain.visible import EVERYTHING, Sight, Visible, asked_by
from jayrun.store.asks import Ask, Execution, introduce
from jayrun.store.changes import Changes
from jayrun.store.leases import Lease, leased
from jayrun.store.picture import booked_device, sights, uuids_of
from jayrun.store.transactions import Book

STEADY_LOOKS = 3
"""After so many looks that showed the same, a process takes it that it is alone there, and saves itself the look."""

_GLANCE = "SELECT seen, somebody_waits FROM jayrun.glance(%s, %s)"
_GRANT = "SELECT jayrun.grant_at_once(%s, %s, %s, %s, %s, %s, %s, %s, %s)"


@dataclass(frozen=True, slots=True)
class View:
    """The devices of a host as a holder saw them last, and what its mask leaves of them.

    `text` is what the book says of that, word for word, and `same` how many looks in a row showed it. `is_crowded`:
    somebody waits there, or what was free was gone a moment later; then asks are decided behind the gate.
    """

    text: str = ""
    devices: tuple[BookedDevice, ...] = ()
    uuids: tuple[tuple[int, str | None], ...] = ()
    visible: Visible | None = None
    sight: Sight = EVERYTHING
    same: int = 0
    is_crowded: bool = False


def grant(book: Book, ask: Ask) -> Lease | None:
    """The lease, if nobody waits on the host and the request fits; None: it has to be decided behind the gate."""
    asker = ask.asker.execution
    view: View = book.views.setdefault(asker.holder_id, View())
    if view.is_crowded:
        return None
    if view.same >= STEADY_LOOKS and (lease := _try(book, ask, view, unchanged=True)) is not None:
        return lease
    view, somebody_waits = _look(book, asker, view)
    lease = None if somebody_waits else _try(book, ask, view, unchanged=False)
    note(book, asker.holder_id, is_crowded=lease is None)
    return lease


def note(book: Book, holder_id: UUID, *, is_crowded: bool) -> None:
    """Whether the holder's asks should be decided behind the gate from now on."""
    view: View = book.views.setdefault(holder_id, View())
    if view.is_crowded != is_crowded:
        book.views[holder_id] = replace(view, is_crowded=is_crowded)


def _look(book: Book, asker: Execution, last: View) -> tuple[View, bool]:
    def unit(pg: PgConnection[Any]) -> tuple[str, bool]:
        row = pg.execute(_GLANCE, (asker.host_id, asker.holder_id)).fetchone()
        assert row is not None
        return row[0], row[1]

    text, somebody_waits = book.written(unit)
    if text == last.text:
        view = replace(last, same=last.same + 1)
    else:
        rows, visible = json.loads(text)
        rows = rows or []
        devices = tuple(booked_device(asker.host_id, row) for row in rows)
        view = View(text, devices, uuids_of(rows), visible, sights(rows)(visible))
    book.views[asker.holder_id] = view
    probes.reach("reserve.seen")
    return view, somebody_waits


def _try(book: Book, ask: Ask, view: View, *, unchanged: bool) -> Lease | None:
    """One transaction, which grants what the rules decide on `view`, if that still fits, or is `unchanged`."""
    if any(device.is_slice for device in view.devices):
        return None  # which of them its process may use depends on what that holds
    asker = ask.asker.execution
    request = ask.asker.recorded[ask.position]
    placed = plan(asked_by([request], view.sight), view.devices)
    if placed is None:
        return None
    [shares] = placed
    slot = (asker.id, ask.position, ask.asker.invocation)
    changes = Changes(asker.host_id)
    introduce(changes, ask.asker, upto=ask.position + 1, state="running")
    lease_id = changes.add_lease(slot, host_id=asker.host_id, holder_id=asker.holder_id, shares=shares)
    is_new = ask.asker.booked is None
    last_seen = view.text if unchanged else None
    document = {**changes.document(), "backend": request.backend, "visible": view.visible}
    values = (asker.host_id, asker.holder_id, asker.unit_id, *slot, is_new, last_seen, document)
    [(epoch,)] = book.gated(lambda gate: gate.commit(_GRANT, values))
    if epoch is None:
        return None
    return Lease(lease_id, epoch, *slot[:2], leased(shares, dict(view.uuids)))
