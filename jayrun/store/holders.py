"""Holders: how a process introduces itself to the book, shows life, and leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection
from psycopg.types.json import Jsonb

from jayrun import kernel
from jayrun.domain.liveness import Incarnation
from jayrun.store import hosts, reclaim
from jayrun.store.hosts import attest_host, find_own_host
from jayrun.store.ids import new_id
from jayrun.store.texts import plain
from jayrun.store.transactions import Book

__all__ = ["Holder", "attest_host", "beat", "find_own_host", "leave", "leave_if_free", "register", "tell_visible"]

_ADD_HOLDER = """
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, label, command, role,
                            visible)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING
"""
_BEAT = "UPDATE jayrun.holders SET seen_at = clock_timestamp(), only_waits = %s WHERE id = %s AND state = 'alive'"
_SEES = "UPDATE jayrun.holders SET visible = %s WHERE id = %s AND visible IS DISTINCT FROM %s"
_AWAKE = "UPDATE jayrun.holders SET silent = false WHERE id = %s AND silent AND state = 'alive'"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process as the book knows it: its random instance id, and the key of its host."""

    id: UUID
    host_id: int


def register(
    book: Book,
    host_id: int,
    *,
    role: str,
    label: str = "",
    command: str = "",
    incarnation: Incarnation | None = None,
    visible: Mapping[str, list[str]] | None = None,
) -> Holder:
    """Make a process a holder of the book (default: this one).

    `role` is runtime, command, wrapper, worker or supervisor. `visible`: by backend, the names of the devices that it
    can see, in its own order; None, or a backend that is missing: all.
    """
    who = incarnation or kernel.incarnation()
    holder = Holder(new_id(), host_id)
    values = (holder.id, host_id, who.boot_id, who.pid_namespace, who.pid, who.start_ticks)
    described = (kernel.user_name(), plain(label), plain(command or kernel.command_line()), role, _json(visible))
    book.written(lambda pg: pg.execute(_ADD_HOLDER, values + described))
    return holder


def tell_visible(book: Book, holder: Holder, visible: Mapping[str, list[str]] | None) -> None:
    """What the holder can see now; unchanged, nothing is written."""
    told = _json(visible)
    book.written(lambda pg: pg.execute(_SEES, (told, holder.id, told)))


def _json(visible: Mapping[str, list[str]] | None) -> Jsonb | None:
    """`visible` for the book; a mask may be made of any characters."""
    return (
        None
        if visible is None
        else Jsonb({backend: [plain(name) for name in each] for backend, each in visible.items()})
    )


def beat(book: Book, holder: Holder, *, only_waits: bool = False) -> bool:
    """Show life: the holder's and its host's. Returns whether the book still has the holder as alive.

    Not: it was ended, its leases with it, because it was declared gone or nobody could see it for too long. Nothing is
    ever judged by a heartbeat where the kernel can be asked. `only_waits`: the process will drop nothing before one of
    its executions is served, all of which wait.
    """

    def unit(pg: PgConnection[Any]) -> bool:
        is_alive = pg.execute(_BEAT, (only_waits, holder.id)).rowcount == 1
        pg.execute(_AWAKE, (holder.id,))
        hosts.see(pg, holder.host_id)
        return is_alive

    return book.written(unit)


def leave_if_free(book: Book, holder: Holder) -> None:
    """The process is a holder no more, unless it still holds a lease: then the kernel's word ends it."""
    book.written(lambda pg: reclaim.end_holder(pg, holder.id, reason="left", only_if_free=True))


def leave(book: Book, holder: Holder) -> None:
    """The process lets go of everything and is a holder no more."""
    book.written(lambda pg: reclaim.end_holder(pg, holder.id, reason="left"))
