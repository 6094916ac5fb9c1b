"""The one door to the database: how each kind of transaction begins, is made durable, and is replayed.

`Book.gated` is for admission: SERIALIZABLE, and the first statement locks `jayrun.gate`, so that admissions queue
instead of aborting each other. The gate is not held through the flush: the admission commits with `synchronous_commit =
off`, and a second, empty commit, synchronous, follows before anything is handed out. The log is a prefix, so that flush
covers the admission too, and a crash before it loses both together.

`Book.written` is for short guarded updates (release, finish, heartbeat): READ COMMITTED, a statement each. `Book.read`
is for lists: one REPEATABLE READ, READ ONLY picture.

Each kind of failure has one budget, and nothing above this file replays again: a serialization failure or deadlock is
replayed at once, the whole unit with fresh reads; a lost connection, and a statement that a limit of the database cut
off, are replayed on a new connection, after a pause, until `patience_seconds` are over. A unit must therefore be safe
to run again after its commit was done but not heard of.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import ClientCursor
from psycopg import Connection as PgConnection
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from jayrun import probes
from jayrun.errors import BookBusy
from jayrun.store.engine import (
    Connections,
    busy,
    connect_engine,
    denied,
    disentangled,
    is_cut_off,
    is_denied,
    is_lost,
    is_refused,
    unreachable,
)
from jayrun.store.listening import Listener
from jayrun.store.texts import rendered

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""How long a transaction is replayed over lost connections, and over statements that the database cut off, before the
caller is told (seconds of this process)."""
REPLAYS = 100
"""How often a refused transaction is replayed; few are ever refused, and those once."""
CUT_OFFS = 3
"""So many cut-off statements are borne even by who has no patience for lost connections."""

# A client that stops inside the gate would stop everyone; the server ends its transaction after this.
_OPEN = """
BEGIN ISOLATION LEVEL SERIALIZABLE;
SET LOCAL idle_in_transaction_session_timeout = '5s';
SET LOCAL synchronous_commit = off;
LOCK TABLE jayrun.gate IN SHARE UPDATE EXCLUSIVE MODE;
"""
_FLUSH = "SELECT pg_logical_emit_message(true, 'jayrun', '')"
_TELL = ", jayrun.tell(%s)"


class Gate:
    """An admission transaction. It opens with its first statement and in the same message, so that an admission costs
    two round trips; and it needs no prepared statement, so that a pooler may stand in between."""

    def __init__(self, pg: PgConnection[Any]) -> None:
        self._cursor = ClientCursor(pg)
        self._opening = _OPEN
        self.left = False

    def first(self, statements: str) -> None:
        """Run `statements` before all else behind the gate, in the same message as what follows."""
        self._opening += f"{statements};"

    def execute(self, statement: str, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one statement behind the gate; returns its rows."""
        opening, self._opening = self._opening, ""
        self._cursor.execute(opening + rendered(statement, parameters))
        self._cursor.set_result(-1)
        return self._cursor.fetchall() if self._cursor.description is not None else []

    def commit(
        self, statement: str = "SELECT", parameters: tuple[object, ...] = (), *, tell: Iterable[str] = ()
    ) -> list[tuple[Any, ...]]:
        """Run a last statement, commit, let the gate go, and only then make it durable and `tell` those who listen
        under these names; all in one message. Returns the rows of the statement."""
        names = sorted(tell)
        flush = _FLUSH + rendered(_TELL, (names,)) if names else _FLUSH
        self._cursor.execute(f"{self._opening}{rendered(statement, parameters)}; COMMIT; {flush}")
        self.left = True
        self._cursor.set_result(-3)
        return self._cursor.fetchall()

    def leave(self) -> None:
        """Let the gate go with nothing written but the fold, which is true whatever was decided."""
        self._cursor.execute(f"{self._opening}COMMIT")
        self.left = True

    def undo(self) -> None:
        """Let the gate go with nothing written at all."""
        self._cursor.execute("ROLLBACK")
        self.left = True


class Book:
    """The database of one URL: an engine, and the three ways in. Connects at first use; safe to share among threads."""

    def __init__(self, url: str, *, role: str, instance: str = "", patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.url = url
        self.patience_seconds = patience_seconds
        self._engine = connect_engine(url, role=role, instance=instance)
        self._connections = Connections(self._engine)
        self.views: dict[UUID, Any] = {}
        """What `store/at_once.py` saw last, by the keys of holders."""

    def with_patience(self, seconds: float) -> Book:
        """The same Book, on the same connections, that replays lost connections for so long."""
        other = copy.copy(self)
        other.patience_seconds = seconds
        return other

    def close(self) -> None:
        """Close the idle connections. The Book opens new ones if it is used again."""
        self._connections.close()

    def close_unused(self) -> None:
        """Close the connections that nobody has needed since the last call of this."""
        self._connections.close_unused()

    def forget(self) -> None:
        """In a forked child: drop the parent's connections without a word to the server."""
        self._connections.forget()

    def gated(self, unit: Callable[[Gate], T]) -> T:
        """Run `unit` behind the gate; it must end with `commit` or `leave`. Returns what it returns, once durable.

        Raises `BookUnreachable` when the database stayed away, `BookBusy` when the replays were used up or the
        database's limits cut it off all the time.
        """

        def attempt() -> T:
            with self._connections.one() as pg:
                gate = Gate(pg)
                result = unit(gate)
                if not gate.left:
                    raise AssertionError("an admission unit ended without commit or leave")
            probes.reach("gate.committed")
            return result

        return self._replayed(attempt)

    def written(self, unit: Callable[[PgConnection[Any]], T]) -> T:
        """Run `unit` on a connection in autocommit: each statement is a READ COMMITTED transaction of its own.

        Where the database's default is stricter, a statement that met another writer is refused, and the unit replayed;
        `pg.transaction()` is READ COMMITTED there too.
        """

        def attempt() -> T:
            with self._connections.one() as pg:
                return unit(pg)

        return self._replayed(attempt)

    def read(self, unit: Callable[[Connection], T]) -> T:
        """Run `unit` on one unchanging picture of the book: REPEATABLE READ, READ ONLY."""
        picture = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

        def attempt() -> T:
            with disentangled():
                connection = picture.connect()
            with connection:
                return unit(connection)

        return self._replayed(attempt)

    def listen(self, *names: str) -> Listener:
        """A connection of its own that hears when one of `names` is called; the caller closes it."""
        return Listener(self._connections, names)

    def tick_seconds(self) -> float:
        """The book's setting: how often reconcilers look."""
        return float(self.value("SELECT tick_seconds FROM jayrun.settings"))

    def periods(self) -> tuple[float, float]:
        """The book's settings: how often reconcilers look, and for how long what was pickled is kept (seconds)."""
        row = self.written(lambda pg: pg.execute("SELECT tick_seconds, lend_seconds FROM jayrun.settings").fetchone())
        assert row is not None
        return float(row[0]), float(row[1])

    def value(self, statement: str, parameters: tuple[object, ...] = ()) -> Any:
        """The first column of the one row that `statement` gives, as one transaction of `written`."""

        def unit(pg: PgConnection[Any]) -> Any:
            row = pg.execute(statement, parameters).fetchone()
            assert row is not None
            return row[0]

        return self.written(unit)

    def _replayed(self, attempt: Callable[[], T]) -> T:
        refusals = cut_offs = 0
        pause_seconds = 0.05
        give_up_at: float | None = None
        while True:
            try:
                return attempt()
            except (psycopg.Error, DBAPIError) as error:
                if is_refused(error):
                    refusals += 1
                    if refusals >= REPLAYS:
                        raise BookBusy(f"a transaction was refused {refusals} times, last with: {error}") from error
                    continue
                if is_denied(error):
                    raise denied(self.url, error) from error
                is_away = is_lost(error)
                if not is_away and not is_cut_off(error):
                    raise
                now = time.monotonic()
                give_up_at = give_up_at or now + self.patience_seconds
                cut_offs += not is_away
                if now + pause_seconds > give_up_at and (is_away or cut_offs >= CUT_OFFS):
                    raise (unreachable if is_away else busy)(self.url, error) from error
                time.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, 2.0)
