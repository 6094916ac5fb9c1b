"""Hosts: which one this is, how it is told to live, and that no two machines pass for one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from psycopg import Connection as PgConnection

from jayrun import kernel
from jayrun.domain.units import format_seconds
from jayrun.errors import HostClash
from jayrun.store.transactions import Book

log = logging.getLogger("jayrun")

# The host whose boot id is mine is mine, however it is called now; else the one with my machine id. (Where several ids
# were given to one machine, the one that was not.)
_FIND = """
SELECT h.id, h.name, h.identity, h.boot_id,
       extract(epoch FROM clock_timestamp() - greatest(h.seen_at, jayrun.in_reach_since(h.id)))::float8,
       h.seen_at::text, s.holder_ttl_seconds, s.tick_seconds
FROM jayrun.hosts h, jayrun.settings s
WHERE CASE WHEN %(explicit)s::text IS NULL THEN h.boot_id = %(boot_id)s OR h.identity = %(machine_id)s
           ELSE h.identity = %(explicit)s END
ORDER BY h.boot_id = %(boot_id)s DESC, h.identity = %(machine_id)s DESC, h.id LIMIT 1
"""
_ADD = """
INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES (%s, %s, %s) ON CONFLICT (identity) DO NOTHING
"""
_TAKE_OVER = """
UPDATE jayrun.hosts SET boot_id = %s, seen_at = clock_timestamp(), watched_since = clock_timestamp(),
    forgotten_at = NULL
WHERE id = %s AND boot_id = %s AND seen_at = %s::timestamptz
"""
_RENAME = "UPDATE jayrun.hosts SET name = %s WHERE id = %s AND name <> %s"
# A few times in a tick at most, however many processes there are. When nobody was heard of for half a TTL, all of the
# host may have been kept from it: from now on they have the time to show life again.
_SEE = """
WITH seen AS (
    UPDATE jayrun.hosts h SET seen_at = clock_timestamp(), forgotten_at = NULL,
        watched_since = CASE WHEN h.seen_at < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds / 2)
                             THEN clock_timestamp() ELSE h.watched_since END
    FROM jayrun.settings s
    WHERE h.id = %(host_id)s AND h.boot_id = %(boot_id)s
      AND (h.forgotten_at IS NOT NULL OR h.seen_at < clock_timestamp() - make_interval(secs => s.tick_seconds / 4)))
SELECT name, identity, boot_id FROM jayrun.hosts WHERE id = %(host_id)s AND boot_id <> %(boot_id)s
"""
# Whose update it is that looks; `h` is the row of before. Where there is nothing that a driver could be asked of, none.
_CLAIM_LOOK = """
WITH mine AS (
    UPDATE jayrun.hosts h SET looked_at = clock_timestamp() FROM jayrun.settings s
    WHERE h.id = %(host_id)s
      AND coalesce(h.looked_at < clock_timestamp() - make_interval(secs => s.look_seconds * %(periods)s), true)
      AND EXISTS (SELECT FROM jayrun.devices d
                  WHERE d.host_id = h.id AND d.removed_at IS NULL AND 'cuda' = ANY (d.backends))
    RETURNING h.id)
SELECT EXISTS (SELECT FROM mine),
       CASE WHEN EXISTS (SELECT FROM mine) THEN s.look_seconds * %(periods)s
            ELSE greatest(s.look_seconds * %(periods)s - coalesce(
                extract(epoch FROM clock_timestamp() - h.looked_at)::float8, 0), s.tick_seconds) END
FROM jayrun.hosts h, jayrun.settings s WHERE h.id = %(host_id)s
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A host as the book has it; `seen_at` only to tell whether it was seen again. `silent_seconds`: since the book is
    in reach."""

    id: int
    name: str
    identity: str
    boot_id: str
    silent_seconds: float
    seen_at: str
    ttl_seconds: float
    tick_seconds: float


def entry_of(pg: PgConnection[Any], explicit_identity: str | None) -> Entry | None:
    """What the book has of this host."""
    facts = {"explicit": explicit_identity, "boot_id": kernel.boot_id(), "machine_id": kernel.machine_id()}
    row = pg.execute(_FIND, facts).fetchone()
    return None if row is None else Entry(*row)


def find_own_host(book: Book, explicit_identity: str | None) -> int | None:
    """The key of this host, or None when the book does not know it; writes nothing."""
    found = book.written(lambda pg: entry_of(pg, explicit_identity))
    return None if found is None else found.id


def attest_host(book: Book, explicit_identity: str | None) -> int:
    """The key of this host in the book, which is told that it lives; a new host is added.

    `explicit_identity` is the host id setting, which wins over what the kernel says. Where the host spoke of late
    through another boot, this waits for that to have been silent for the book's `holder_ttl_seconds`: the machine has
    restarted. Raises `HostClash` when it speaks again: then two machines pass for one.
    """
    other: Entry | None = None
    while True:
        found = book.written(lambda pg: _attested(pg, explicit_identity))
        if isinstance(found, int):
            return found
        if found is not None:
            if other is None:
                log.warning(
                    "host %s (%s) was heard of %s ago from another boot of it: waiting until that has been silent for "
                    "%s, at most %s more",
                    found.name,
                    found.identity,
                    format_seconds(found.silent_seconds),
                    format_seconds(found.ttl_seconds),
                    format_seconds(found.ttl_seconds - found.silent_seconds),
                )
                other = found
            elif (found.boot_id, found.seen_at) != (other.boot_id, other.seen_at):
                raise HostClash(_clash(found.name, found.identity, found.boot_id))
            time.sleep(min(found.tick_seconds, max(found.ttl_seconds - found.silent_seconds, 0)))


def see(pg: PgConnection[Any], host_id: int) -> None:
    """Tell that somebody of this host is in touch with the book, unless it speaks through another boot than this."""
    for name, identity, boot_id in pg.execute(_SEE, {"host_id": host_id, "boot_id": kernel.boot_id()}).fetchall():
        _complain(name, identity, boot_id)


def claim_look(book: Book, host_id: int, *, periods: int) -> tuple[bool, float]:
    """Whether it is time that the caller looks at the host's hardware, after so many `look_seconds` in which nobody
    did; who is told so does it for all. And in how many seconds to ask again."""
    values = {"host_id": host_id, "periods": periods}
    row = book.written(lambda pg: pg.execute(_CLAIM_LOOK, values).fetchone())
    return (False, 60.0) if row is None else (bool(row[0]), float(row[1]))


def _attested(pg: PgConnection[Any], explicit_identity: str | None) -> int | Entry | None:
    """The key of this host, or the entry that speaks through another boot; None: look again."""
    mine = kernel.boot_id()
    found = entry_of(pg, explicit_identity)
    if found is None:
        pg.execute(_ADD, (explicit_identity or kernel.machine_id(), kernel.host_name(), mine))
        return None
    if found.boot_id != mine:
        if found.silent_seconds >= found.ttl_seconds:
            pg.execute(_TAKE_OVER, (mine, found.id, found.boot_id, found.seen_at))
            return None
        return found
    see(pg, found.id)
    pg.execute(_RENAME, (kernel.host_name(), found.id, kernel.host_name()))
    return found.id


@cache
def _complain(name: str, identity: str, boot_id: str) -> None:
    """Once in this process."""
    log.error("%s", _clash(name, identity, boot_id))


def _clash(name: str, identity: str, boot_id: str) -> str:
    return (
        f"two machines pass for one host: {name} (boot {boot_id}) and this one, {kernel.host_name()} (boot "
        f"{kernel.boot_id()}), are both {identity!r} in the book and are both running. Set JAYRUN_HOST_ID to something "
        "unique on one of them, or give it an /etc/machine-id of its own, and start its programs again"
    )
