"""Hosts and holders: how a process introduces itself to the book, shows life, and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import kernel
from jayrun.domain.liveness import Incarnation
from jayrun.store import reclaim
from jayrun.store.ids import new_id
from jayrun.store.texts import plain
from jayrun.store.transactions import Book

# The host whose boot id is mine is mine, however it is called now; else the one with my machine id. (Where several ids
# were given to one machine, the one that was not.)
_FIND_HOST = """
SELECT id FROM jayrun.hosts
WHERE CASE WHEN %(explicit)s::text IS NULL THEN boot_id = %(boot_id)s OR identity = %(machine_id)s
           ELSE identity = %(explicit)s END
ORDER BY boot_id = %(boot_id)s DESC, identity = %(machine_id)s DESC, id LIMIT 1
"""
_ATTEST_HOST = """
UPDATE jayrun.hosts SET name = %s, boot_id = %s, seen_at = clock_timestamp() WHERE id = %s
"""
_ADD_HOST = """
INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES (%s, %s, %s)
ON CONFLICT (identity) DO UPDATE SET seen_at = clock_timestamp() RETURNING id
"""
_ADD_HOLDER = """
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, label, command, role)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING
"""
_BEAT = "UPDATE jayrun.holders SET seen_at = clock_timestamp(), only_waits = %s WHERE id = %s AND state = 'alive'"
_ATTEST = """
UPDATE jayrun.holders SET seen_at = clock_timestamp()
WHERE id IN (SELECT id FROM jayrun.holders WHERE host_id = %s AND state = 'alive' AND role = 'worker' AND boot_id = %s
             AND pid = ANY (%s) ORDER BY id FOR UPDATE)
"""
_AWAKE = "UPDATE jayrun.holders SET silent = false WHERE id = %s AND silent"
_BEAT_HOST = "UPDATE jayrun.hosts SET seen_at = clock_timestamp() WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process as the book knows it: its random instance id, and the key of its host."""

    id: UUID
    host_id: int


def find_own_host(book: Book, explicit_identity: str | None) -> int | None:
    """The key of this host, or None when the book does not know it; writes nothing."""
    facts = {"explicit": explicit_identity, "boot_id": kernel.boot_id(), "machine_id": kernel.machine_id()}
    found = book.written(lambda pg: pg.execute(_FIND_HOST, facts).fetchone())
    return None if found is None else int(found[0])


def attest_host(book: Book, explicit_identity: str | None) -> int:
    """The key of this host in the book, which is told that it lives; a new host is added.

    `explicit_identity` is the host id setting, which wins over what the kernel says.
    """
    facts = {"explicit": explicit_identity, "boot_id": kernel.boot_id(), "machine_id": kernel.machine_id()}

    def unit(pg: PgConnection[Any]) -> int:
        found = pg.execute(_FIND_HOST, facts).fetchone()
        if found is not None:
            pg.execute(_ATTEST_HOST, (kernel.host_name(), facts["boot_id"], found[0]))
            return int(found[0])
        identity = explicit_identity or facts["machine_id"]
        added = pg.execute(_ADD_HOST, (identity, kernel.host_name(), facts["boot_id"])).fetchone()
        assert added is not None
        return int(added[0])

    return book.written(unit)


def register(
    book: Book, host_id: int, *, role: str, label: str = "", command: str = "", incarnation: Incarnation | None = None
) -> Holder:
    """Make a process a holder of the book (default: this one).

    `role` is runtime, command, wrapper, worker or supervisor.
    """
    who = incarnation or kernel.incarnation()
    holder = Holder(new_id(), host_id)
    values = (holder.id, host_id, who.boot_id, who.pid_namespace, who.pid, who.start_ticks)
    described = (kernel.user_name(), plain(label), plain(command or kernel.command_line()), role)
    book.written(lambda pg: pg.execute(_ADD_HOLDER, values + described))
    return holder


def beat(book: Book, holder: Holder, *, only_waits: bool = False) -> None:
    """Show life: the holder's and its host's `seen_at`. Nothing is ever judged by it where the kernel can be asked.

    `only_waits`: the process will drop nothing before one of its executions is served, all of which wait.
    """

    def unit(pg: PgConnection[Any]) -> None:
        pg.execute(_BEAT, (only_waits, holder.id))
        pg.execute(_AWAKE, (holder.id,))
        pg.execute(_BEAT_HOST, (holder.host_id,))

    book.written(unit)


def attest(book: Book, host_id: int, pids: Sequence[int]) -> None:
    """Show life for the worker processes `pids` of this host, as their supervisor, which sees them."""
    book.written(lambda pg: pg.execute(_ATTEST, (host_id, kernel.boot_id(), list(pids))))


def leave_if_free(book: Book, holder: Holder) -> None:
    """The process is a holder no more, unless it still holds a lease: then the kernel's word ends it."""
    book.written(lambda pg: reclaim.end_holder(pg, holder.id, reason="left", only_if_free=True))


def leave(book: Book, holder: Holder) -> None:
    """The process lets go of everything and is a holder no more."""
    book.written(lambda pg: reclaim.end_holder(pg, holder.id, reason="left"))
