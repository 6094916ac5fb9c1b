"""Connections: how jayrun connects to PostgreSQL, and what it says when it cannot."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import Connection as PgConnection
from psycopg import IsolationLevel
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from jayrun.errors import BookBusy, BookDenied, BookUnreachable
from jayrun.frames import clear_frames

_CONNECT = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "target_session_attrs": "read-write",
    "prepare_threshold": None,  # behind a pooler the next statement meets another server process
    "hostaddr": "",  # a caller's PGHOSTADDR would send us elsewhere than the URL says
}
_ANY_SERVER = {"target_session_attrs": "any"}

MAX_CONNECTIONS = 64
"""So many of a Book are in use at once."""
CROWDED_SECONDS = 60.0
"""So long after the server had no connection to spare this process keeps none that it does not use."""
# The server says it before there is a connection that could tell the SQLSTATE (53300); the last one is pgbouncer's.
_CROWDED = re.compile(r"too many (connections|clients)|connection slots are reserved|no more connections allowed")
_crowded_until: dict[str, float] = {}  # by URL, for all Books of this process, on its monotonic clock


def _as_text(record: logging.LogRecord) -> bool:
    """A log record that a handler keeps would keep the error in it, by the error's frames the locals of all callers,
    and with them a user's data and its leases."""
    record.msg, record.args = record.getMessage(), ()
    return True


logging.getLogger("psycopg").addFilter(_as_text)


def connect_engine(url: str, *, role: str, instance: str = "", writable: bool = True) -> Engine:
    """An engine for the book at `url`, in autocommit (transactions are begun where they are meant). Every connection
    is a new one, and it keeps none (`Connections` does).

    `role` and `instance` name this process to the server (`application_name`). Without `writable` a server that takes
    no writes, such as a standby, will do. Raises ValueError for a URL that is not PostgreSQL's.
    """
    name = f"jayrun:{role}:{instance}" if instance else f"jayrun:{role}"
    return create_engine(
        driver_url(url),
        isolation_level="AUTOCOMMIT",
        connect_args={**_CONNECT, **({} if writable else _ANY_SERVER), "application_name": name[:63]},
        poolclass=NullPool,
    )


def driver_url(url: str) -> Any:
    """`url` as SQLAlchemy wants it for psycopg; takes `postgres://` and `postgresql://` alike."""
    try:
        parsed = make_url(url)
    except Exception as error:  # SQLAlchemy raises its own type for unparsable text; the answer is the same for all
        raise ValueError(f"database URL {url!r} cannot be read: {error}") from None
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise ValueError(f"database URL {parsed!r} is not PostgreSQL's: it should start with postgresql://")
    return parsed.set(drivername="postgresql+psycopg")


def address(url: str) -> str:
    """`url` for people: without its password."""
    return make_url(url).render_as_string(hide_password=True)


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn a failed connection inside the block into `BookUnreachable` with address, reason and remedy."""
    try:
        yield
    except (OperationalError, psycopg.OperationalError) as error:
        if not is_lost(error):
            raise
        raise unreachable(url, error) from error


def unreachable(url: str, error: BaseException) -> BookUnreachable:
    return BookUnreachable(
        f"the book at {address(url)} cannot be reached: {_reason(error)}\n"
        "start jayrun's own server with `jayrun db up`, or check JAYRUN_DATABASE_URL; `jayrun doctor` tells more"
    )


def _reason(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split()) or type(cause).__name__


def denied(url: str, error: BaseException) -> BookDenied:
    return BookDenied(
        f"the book at {address(url)} does not let you do that: {_reason(error)}\n"
        "an administrator of that server can: `jayrun db up` or `jayrun db upgrade` as its owner renews the rights"
    )


def busy(url: str, error: BaseException) -> BookBusy:
    return BookBusy(
        f"the book at {address(url)} cut a statement off again and again, last with: {_reason(error)}\n"
        "try again; if the server's lock_timeout or statement_timeout did it, raise that for this user: "
        "ALTER ROLE ... SET ..."
    )


def is_denied(error: BaseException) -> bool:
    """Whether the database refused for want of rights."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.errors.InsufficientPrivilege)


def is_refused(error: BaseException) -> bool:
    """Whether a transaction was refused because of another one, so that it may be replayed at once.

    Also when a worker took something ready while an admission gave it what had waited: who comes second looks again.
    """
    if isinstance(error, psycopg.errors.UniqueViolation):
        return error.diag.constraint_name == "executions_one_per_worker"
    return isinstance(error, psycopg.errors.SerializationFailure | psycopg.errors.DeadlockDetected)


def is_lost(error: BaseException) -> bool:
    """Whether `error` means that the connection is gone or was never made (and not that a statement was refused)."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, psycopg.Error):
        return False
    # A refused statement carries an SQLSTATE; 08 is connection trouble, 57P a server that goes away, 53300 too many
    # clients, 25006 a standby, 25P03 our own idle-in-transaction guard, 25P04 the server's limit on whole transactions.
    state = cause.sqlstate
    if state is None:
        return isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
    return state[:2] == "08" or state[:3] == "57P" or state in ("53300", "25006", "25P03", "25P04")


def is_cut_off(error: BaseException) -> bool:
    """Whether a statement was ended by a limit of the database (`lock_timeout`, `statement_timeout`) or by somebody's
    `pg_cancel_backend`: nothing of its transaction was done, and it may go through later."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.errors.QueryCanceled | psycopg.errors.LockNotAvailable)


@contextmanager
def disentangled() -> Iterator[None]:
    """For a block that connects: errors of psycopg and SQLAlchemy refer to themselves by their frames. Until the
    collector came by they would keep the locals of all callers too, and with them a user's data and its leases."""
    around = sys.exception()
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        clear_frames(error, around=around)
        raise


def cast_off(connection: PgConnection[Any]) -> None:
    """In a forked child: let go of the parent's connection without a word to the server.

    A child that kept the socket would keep the session alive, and what it has locked, after its parent's death.
    """
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), connection.fileno(), inheritable=False)
    connection.close()


class Connections:
    """The psycopg connections of a Book, safe to share among threads.

    Threads at work find their connections again, the last one first: a new server process has nothing at hand, and its
    first admission takes several times as long. A check-out costs a microsecond; SQLAlchemy's pool takes 40, several
    times in each admission. After any exception a connection is thrown away; autocommit leaves nothing open.
    """

    _idle: list[PgConnection[Any]]  # the last one used at its end
    _used: set[PgConnection[Any]]
    _unneeded: int  # so many of them nobody has needed since `close_unused` looked
    _free: threading.BoundedSemaphore

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._url = str(engine.url)
        self.deaf_until = 0.0  # so long nobody tries to listen through a pooler that was found to pass nothing on
        self._renew()

    def new(self) -> PgConnection[Any]:
        """A connection that nobody had before, the caller's to close. Raises what psycopg and SQLAlchemy raise."""
        try:
            with disentangled():
                checked_out = self._engine.raw_connection()
        except (psycopg.Error, DBAPIError) as error:
            if _CROWDED.search(str(error)):
                _crowded_until[self._url] = time.monotonic() + CROWDED_SECONDS
            raise
        connection: PgConnection[Any] = checked_out.driver_connection  # type: ignore[assignment]
        checked_out.detach()
        connection.isolation_level = (
            IsolationLevel.READ_COMMITTED
        )  # each BEGIN says so; a pooler keeps no setting of ours
        return connection

    @contextmanager
    def one(self) -> Iterator[PgConnection[Any]]:
        """A connection for the block; waits while `MAX_CONNECTIONS` are in use."""
        with self._free:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self.new()
            self._unneeded = min(self._unneeded, len(self._idle))
            self._used.add(connection)
            try:
                yield connection
            except BaseException as error:  # also Ctrl-C in the middle of a message
                self._used.discard(connection)
                connection.close()
                if is_lost(error):  # and with it most likely the others
                    self.close()
                raise
            self._used.discard(connection)
            if self.is_crowded:
                connection.close()
            else:
                self._idle.append(connection)

    @property
    def is_crowded(self) -> bool:
        """Whether the server has refused this process a connection of late, because there were too many: then whoever
        does not use one keeps none, for another thread may be waiting for it."""
        return time.monotonic() < _crowded_until.get(self._url, 0.0)

    def close(self) -> None:
        """Close the idle ones."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()

    def close_unused(self) -> None:
        """Close those that were idle all the time since the last call of this."""
        for _ in range(self._unneeded):
            with suppress(IndexError):
                self._idle.pop(0).close()
        self._unneeded = len(self._idle)

    def forget(self) -> None:
        """Start anew: in a forked child, where the parent's connections are cast off."""
        for connection in (*self._idle, *self._used):
            cast_off(connection)
        self._renew()

    def _renew(self) -> None:
        self._idle = []
        self._used = set()
        self._unneeded = 0
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
