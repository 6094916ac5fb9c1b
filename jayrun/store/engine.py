"""Connections: how jayrun connects to PostgreSQL, and what it says when it cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Connection as PgConnection
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from jayrun.errors import BookDenied, BookUnreachable

# Threads at work find their connections again: a new server process has nothing at hand, and its first admission takes
# several times as long. Whoever keeps a Book for long closes them when nobody uses them (`Book.close_if_unused`).
_POOL = {
    "pool_size": 8,
    "max_overflow": 56,
    "pool_timeout": 30,
    "pool_use_lifo": True,
    "pool_reset_on_return": None,  # autocommit leaves nothing open, and after an error a connection is thrown away
}
_CONNECT = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "target_session_attrs": "read-write",
    "hostaddr": "",  # a caller's PGHOSTADDR would send us elsewhere than the URL says
}


def _as_text(record: logging.LogRecord) -> bool:
    """A log record that a handler keeps would keep the error in it, by the error's frames the locals of all callers,
    and with them a user's data and its leases."""
    record.msg, record.args = record.getMessage(), ()
    return True


logging.getLogger("psycopg").addFilter(_as_text)


def connect_engine(url: str, *, role: str, instance: str = "", pooled: bool = True) -> Engine:
    """An engine for the book at `url`; connects lazily, in autocommit (transactions are begun where they are meant).

    With `pooled` off every connection is a new one, and none is kept. `role` and `instance` name this process to the
    server (`application_name`). Raises ValueError for a URL that is not PostgreSQL's.
    """
    name = f"jayrun:{role}:{instance}" if instance else f"jayrun:{role}"
    return create_engine(
        driver_url(url),
        isolation_level="AUTOCOMMIT",
        connect_args={**_CONNECT, "application_name": name[:63]},
        **(_POOL if pooled else {"poolclass": NullPool}),
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
    except (OperationalError, psycopg.OperationalError, PoolTimeout) as error:
        if not is_lost(error):
            raise
        raise unreachable(url, error) from error


def unreachable(url: str, error: BaseException) -> BookUnreachable:
    return BookUnreachable(
        f"the book at {address(url)} cannot be reached: {_reason(error)}\n"
        "start jayrun's own server with `jayrun db up`, or check JAYRUN_DATABASE_URL"
    )


def _reason(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split()) or type(cause).__name__


def denied(url: str, error: BaseException) -> BookDenied:
    return BookDenied(
        f"the book at {address(url)} does not let you do that: {_reason(error)}\n"
        "an administrator of that server can: `jayrun db up` or `jayrun db upgrade` as its owner renews the rights"
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
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(cause, psycopg.Error):
        return False
    # A refused statement carries an SQLSTATE; 08 is connection trouble, 57P a server that goes away, 53300 too many
    # clients, 25006 a standby, 25P03 our own idle-in-transaction guard.
    state = cause.sqlstate
    if state is None:
        return isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
    return state[:2] == "08" or state[:3] == "57P" or state in ("53300", "25006", "25P03")


@contextmanager
def driver_connection(engine: Engine) -> Iterator[PgConnection[Any]]:
    """The psycopg connection under one of the engine's; after any exception it is thrown away."""
    checked_out = engine.raw_connection()
    try:
        pg: PgConnection[Any] = checked_out.driver_connection  # type: ignore[assignment]
        yield pg
    except BaseException:  # also Ctrl-C in the middle of a message
        checked_out.invalidate()
        raise
    finally:
        checked_out.close()
