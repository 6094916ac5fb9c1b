"""Hearing that the book has changed. What is heard is a hint to look at the book, and so is silence: polling is the
truth, and a connection that listens in vain is missed by nobody for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import psycopg
from psycopg import Connection as PgConnection
from sqlalchemy.exc import DBAPIError

from jayrun import kernel
from jayrun.store.engine import Connections, cast_off
from jayrun.store.ids import new_id

log = logging.getLogger("jayrun")

POLL_SECONDS = 0.5
"""How often somebody who wants to listen, and cannot, looks at the book instead."""
RENEW_SECONDS = 60.0
"""How old a connection that listens becomes: it might have gone silent without an end that anybody could see."""
_RETRY_SECONDS = 5.0  # after one that could not be had
_ECHO_SECONDS = 0.5  # so long a notification may take on its way through a pooler
_DEAF_SECONDS = 600.0  # a pooler that passes nothing on is asked again after that

_LISTEN = 'LISTEN "jayrun:{}"'
_ECHO = "jayrun:echo"  # no name: names are ids, and WORKERS

_deafness_was_said = False


class Listener:
    """A connection that LISTENs while somebody waits.

    Each name is a channel, so that nobody is woken for what concerns others. Behind a pooler that gives connections out
    by the transaction no notification arrives; that is found out, and said once, and `wait` returns every
    `POLL_SECONDS` instead.
    """

    def __init__(self, connections: Connections, names: Sequence[str]) -> None:
        self._connections = connections
        self._listen = "; ".join(_LISTEN.format(name) for name in names)
        self._connection: PgConnection[Any] | None = None
        self._renew_at = 0.0
        self._retry_at = 0.0
        self._wanted = False

    @property
    def is_open(self) -> bool:
        """Whether it listens, on a connection that need not be renewed yet, nor is needed for anything else."""
        return self._connection is not None and time.monotonic() < self._renew_at and not self._connections.is_crowded

    def open(self) -> bool:
        """Listen if it does not, and tell whether that began now; a look at the book after this misses nothing told
        later."""
        self._wanted = True
        now = time.monotonic()
        if self.is_open:
            return False
        self._disconnect()
        if self._connections.is_crowded or now < max(self._retry_at, self._connections.deaf_until):
            return False
        self._retry_at = now + _RETRY_SECONDS
        with suppress(psycopg.Error, DBAPIError):
            connection = self._connections.new()
            try:
                if not is_pooled(connection) or self._hears(connection):
                    connection.execute(self._listen)
                    self._connection, self._renew_at, self._retry_at = connection, now + RENEW_SECONDS, 0.0
            finally:
                if self._connection is not connection:
                    connection.close()
        return self._connection is not None

    def wait(self, seconds: float, *sources: int) -> bool:
        """Until one of the names is called, one of the file descriptors `sources` is readable, or the time is over;
        whether a name was called, or might have been."""
        if self._connection is None:
            kernel.readable(min(seconds, POLL_SECONDS) if self._wanted else seconds, *sources)
            return self._wanted
        kernel.readable(seconds, *sources, self._connection.fileno())
        try:
            return bool(list(self._connection.notifies(timeout=0)))
        except psycopg.Error:
            self._disconnect()
            return True

    def forget(self) -> None:
        """In a forked child: let go of the parent's connection."""
        if self._connection is not None:
            cast_off(self._connection)
            self._connection = None

    def close(self) -> None:
        """Listen no more; `open` begins anew."""
        self._disconnect()
        self._wanted, self._retry_at = False, 0.0

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _hears(self, connection: PgConnection[Any]) -> bool:
        """Whether a notification gets through the pooler: one is sent, by another connection. The names are not
        listened to before that, for what a pooler's connection listens to stays with it."""
        global _deafness_was_said
        with self._connections.one() as other:
            if echoes(connection, other):
                return True
        self._connections.deaf_until = time.monotonic() + _DEAF_SECONDS
        if not _deafness_was_said:
            _deafness_was_said = True
            log.warning(
                "a pooler in transaction mode stands before the book, and notifications do not pass it: whoever waits "
                "looks every %g s instead",
                POLL_SECONDS,
            )
        return False

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def echoes(connection: PgConnection[Any], other: PgConnection[Any]) -> bool:
    """Whether `connection` hears a notification that `other` sends."""
    token = str(new_id())
    connection.execute(f'LISTEN "{_ECHO}"')
    other.execute("SELECT pg_notify(%s, %s)", (_ECHO, token))
    with closing(connection.notifies(timeout=_ECHO_SECONDS)) as heard:  # it locks the connection
        echoed = any(each.payload == token for each in heard)
    if echoed:
        connection.execute(f'UNLISTEN "{_ECHO}"')
    return echoed


def is_pooled(connection: PgConnection[Any]) -> bool:
    """Whether somebody else than the server answered when this connection was made: a pooler gives the client a number
    of its own invention."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return bool(row[0] != connection.info.backend_pid)
