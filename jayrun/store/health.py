"""The database as a patient: what it says of itself, of this role and of this host. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import psycopg
from psycopg import Connection as PgConnection
from psycopg.rows import class_row
from sqlalchemy.exc import DBAPIError

from jayrun import kernel
from jayrun.domain.health import Access, KnownDevice, KnownHost, Server
from jayrun.domain.liveness import Incarnation
from jayrun.store import hosts, schema
from jayrun.store.engine import Connections, connect_engine, is_cut_off, is_lost, unreachable
from jayrun.store.listening import echoes, is_pooled

T = TypeVar("T")

STATEMENT_SECONDS = 5
"""So long the database may take for one answer; a lock that somebody keeps would have it wait for ever."""
_QUICK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 5.0  # at a host that speaks elsewhere

_SERVER = """
SELECT current_setting('server_version_num')::integer AS version, current_setting('server_version') AS version_text,
       pg_is_in_recovery() AS is_standby, current_setting('default_transaction_read_only') = 'on' AS is_read_only,
       (SELECT json_object_agg(name, setting) FROM pg_settings
        WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')) AS settings
"""
_ACCESS = """
SELECT n.nspname, has_schema_privilege(n.oid, 'USAGE') FROM pg_namespace n WHERE n.nspname IN ('jayrun', 'jayrun_audit')
"""
_LACKING = """
SELECT r.privilege || ' on jayrun.' || c.relname FROM unnest(%s::text[], %s::text[]) AS r (relname, privilege)
JOIN pg_class c ON c.relname = r.relname AND c.relnamespace = to_regnamespace('jayrun')
WHERE NOT has_table_privilege(c.oid, r.privilege) ORDER BY c.relname, r.privilege
"""
_UNREADABLE = """
SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname IN ('jayrun', 'jayrun_audit') AND c.relkind IN ('r', 'v')
                 AND NOT has_table_privilege(c.oid, 'SELECT'))
"""
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"
_CONNECTIONS = """
SELECT (SELECT sum(numbackends)::integer FROM pg_stat_database),
       (SELECT sum(setting::integer * CASE name WHEN 'max_connections' THEN 1 ELSE -1 END)::integer FROM pg_settings
        WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')),
       (SELECT numbackends FROM pg_stat_database WHERE datname = current_database()),
       (SELECT datconnlimit FROM pg_database WHERE datname = current_database())
"""
_LIVE_LEASES = "SELECT count(*) FROM jayrun.leases WHERE host_id = %s AND ended_at IS NULL"
_TWINS = """
SELECT h.identity FROM jayrun.hosts h WHERE h.boot_id = %(boot_id)s AND h.id <> %(id)s
  AND EXISTS (SELECT FROM jayrun.devices d WHERE d.host_id = h.id AND d.removed_at IS NULL)
  AND EXISTS (SELECT FROM jayrun.devices d WHERE d.host_id = %(id)s AND d.removed_at IS NULL) ORDER BY h.id
"""
_HOLDERS = """
SELECT o.boot_id, o.pid_namespace, o.pid, o.start_ticks,
       o.seen_at < clock_timestamp() - make_interval(secs => b.holder_ttl_seconds)
FROM jayrun.holders o, jayrun.settings b WHERE o.host_id = %s AND o.state = 'alive'
"""
_DEVICES = """
SELECT kind, host_index, backends, device_uuid AS uuid, parent_uuid, capacity_bytes, state, fault, declared,
       withheld_bytes
FROM jayrun.devices WHERE host_id = %s AND removed_at IS NULL ORDER BY kind, host_index
"""


class Patient:
    """The database at `url`, on one connection, made at once. Raises `BookUnreachable`.

    A server that takes no writes is taken too: that is for a check to say. Each look is one read-only transaction, and
    a statement that takes longer than `STATEMENT_SECONDS` is cut off.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        started = time.monotonic()
        for writable in (True, False):
            self._connections = Connections(connect_engine(url, role="doctor", writable=writable))
            try:
                self._pg = self._connections.new()
            except (psycopg.Error, DBAPIError) as error:
                # One that is there, and takes no writes, says so at once.
                if not writable or time.monotonic() - started > _QUICK_SECONDS:
                    raise unreachable(url, error) from None
            else:
                break

    def close(self) -> None:
        self._pg.close()

    @property
    def is_pooled(self) -> bool:
        """Whether somebody else than the server answered when the connection was made."""
        return self._look(is_pooled)

    def server(self) -> Server:
        def look(pg: PgConnection[Any]) -> Server:
            [server] = pg.cursor(row_factory=class_row(Server)).execute(_SERVER).fetchall()
            return server

        return self._look(look)

    def access(self) -> Access | None:
        """What this role may do; None: there is no book to do it with."""
        needed = [
            (table, right)
            for rights, tables in schema.RIGHTS.items()
            for table in tables
            for right in rights.split(", ")
        ]

        def look(pg: PgConnection[Any]) -> Access | None:
            row = pg.execute("SELECT current_user").fetchone()
            assert row is not None
            schemas = dict(pg.execute(_ACCESS).fetchall())
            if "jayrun" not in schemas:
                return None
            if not all(schemas.values()):
                return Access(row[0], False, [])
            unreadable = pg.execute(_UNREADABLE).fetchone()
            tables, rights = zip(*needed, strict=True)
            lacking = [each for (each,) in pg.execute(_LACKING, (list(tables), list(rights))).fetchall()]
            return Access(row[0], unreadable == (False,), lacking)

        return self._look(look)

    def revision(self) -> str | None:
        """The schema of the book, None where there is none."""

        def look(pg: PgConnection[Any]) -> str | None:
            if pg.execute("SELECT to_regclass('jayrun.schema_revision')").fetchone() == (None,):
                return None
            row = pg.execute("SELECT version_num FROM jayrun.schema_revision").fetchone()
            return None if row is None else str(row[0])

        return self._look(look)

    def clock(self) -> tuple[float, float]:
        """By how many seconds this host's clock is ahead of the database's, and how long a round trip takes; of the
        shortest of three."""

        def look(pg: PgConnection[Any]) -> tuple[float, float]:
            trips = []
            for _ in range(3):
                before, started = time.time(), time.monotonic()
                row = pg.execute(_CLOCK).fetchone()
                trip = time.monotonic() - started
                assert row is not None
                trips.append((trip, before + trip / 2 - row[0]))
            trip, ahead = min(trips)
            return ahead, trip

        return self._look(look)

    def connections(self) -> tuple[int, int]:
        """How many there are, and how many there may be, where it is tightest: on the server or in this database."""
        used, most, used_here, most_here = self._row(_CONNECTIONS)
        if most_here >= 0 and most_here - used_here < most - used:
            return used_here, most_here
        return used, most

    def heard_seconds(self) -> float | None:
        """How long a notification takes from one connection to another; None: it does not arrive."""
        with closing(self._connections.new()) as listening, closing(self._connections.new()) as telling:
            started = time.monotonic()
            return time.monotonic() - started if echoes(listening, telling) else None

    def host(self, explicit_identity: str | None) -> tuple[int, KnownHost] | None:
        """This host's key and what the book has of it. One that speaks through another boot is looked at for a tick."""
        found = self._look(lambda pg: hosts.entry_of(pg, explicit_identity))
        if found is None:
            return None
        mine, elsewhere = kernel.boot_id(), False
        if found.boot_id != mine and found.silent_seconds < found.ttl_seconds:
            time.sleep(min(1.5 * found.tick_seconds, _LONGEST_LOOK_SECONDS))
            later = self._look(lambda pg: hosts.entry_of(pg, explicit_identity))
            elsewhere = later is not None and later.boot_id != mine and later.seen_at != found.seen_at
        twins = self._rows(_TWINS, {"boot_id": mine, "id": found.id})
        return found.id, KnownHost(
            name=found.name,
            identity=found.identity,
            is_this_boot=found.boot_id == mine,
            silent_seconds=found.silent_seconds,
            ttl_seconds=found.ttl_seconds,
            speaks_elsewhere=elsewhere,
            live_leases=self._row(_LIVE_LEASES, (found.id,))[0],
            twins=[identity for (identity,) in twins],
        )

    def holders(self, host_id: int) -> list[tuple[Incarnation, bool]]:
        """The processes of the host that the book has as alive, and whether they were silent for the TTL."""
        return [(Incarnation(*row[:4]), row[4]) for row in self._rows(_HOLDERS, (host_id,))]

    def devices(self, host_id: int) -> list[KnownDevice]:
        """The devices of the host."""

        def look(pg: PgConnection[Any]) -> list[KnownDevice]:
            return pg.cursor(row_factory=class_row(KnownDevice)).execute(_DEVICES, (host_id,)).fetchall()

        return self._look(look)

    def _rows(self, statement: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        return self._look(lambda pg: pg.execute(statement, parameters).fetchall())

    def _row(self, statement: str, parameters: Sequence[object] = ()) -> tuple[Any, ...]:
        [row] = self._rows(statement, parameters)
        return row

    def _look(self, look: Callable[[PgConnection[Any]], T]) -> T:
        """One transaction: what is set in it does not stay with a pooler's connection. Raises `BookUnreachable`."""
        try:
            with self._pg.transaction():
                self._pg.execute(f"SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'")
                return look(self._pg)
        except psycopg.Error as error:
            if is_lost(error):
                raise unreachable(self._url, error) from None
            if is_cut_off(error):
                raise TimeoutError(
                    f"the database did not answer within {STATEMENT_SECONDS} s: somebody keeps a lock there, or it is "
                    "overloaded (see pg_stat_activity)"
                ) from None
            raise
