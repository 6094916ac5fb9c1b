"""The host's book, shared: another user of the host reserves, waits and looks, with the rights that `db up` gave."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest

from jayrun.embedded import Throwaway
from jayrun.errors import BookDenied
from jayrun.store import schema
from jayrun.store.transactions import Book

PROGRAM = """
import os, sys
from jayrun import Data, Operator, Runtime, RuntimeDevice
from jayrun.placement import Backend, Device
from jayrun.store import audit

class Take(Operator):
    def execute(self):
        return Data("taken", self.placement.cuda(2))

with Runtime(sys.argv[1], devices=[RuntimeDevice(Device.GPU, [Backend.CUDA], 0, 24)]) as runtime:
    blocker = runtime.run(Take)
    book = runtime._service.book
    print(len(audit.leases(book)), len(audit.capacity(book)), len(audit.queue(book)), len(audit.violations(book)))
    del blocker
"""


@pytest.fixture
def worker_url(url: str, server: Throwaway) -> str:
    """The book as `jayrun_worker` sees it, whom every ordinary user of the host is."""
    schema.upgrade(server.url)  # nothing to apply, but the rights are renewed
    return url.replace("jayrun@", "jayrun_worker@", 1)


def test_a_worker_reserves_and_looks(worker_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, worker_url],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1 0 0\n", "")


def test_a_worker_cannot_rewrite_history_or_settings(worker_url: str, sql: psycopg.Connection) -> None:
    assert sql.execute("SELECT rolsuper FROM pg_roles WHERE rolname = 'jayrun_worker'").fetchone() == (False,)
    with psycopg.connect(worker_url, autocommit=True) as connection:
        for statement in (
            "DELETE FROM jayrun.leases",
            "DELETE FROM jayrun.lease_events",
            "TRUNCATE jayrun.lease_events",
            "UPDATE jayrun.lease_events SET kind = 'granted'",
            "UPDATE jayrun.settings SET bypass_limit = 0",
            "DROP TABLE jayrun.leases CASCADE",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def test_without_rights_the_error_says_who_can_give_them(worker_url: str, sql: psycopg.Connection) -> None:
    sql.execute("REVOKE USAGE ON SCHEMA jayrun FROM jayrun_worker")
    book = Book(worker_url, role="test", patience_seconds=0)
    with pytest.raises(BookDenied, match="jayrun db upgrade"):
        book.read(schema.check_revision)
    book.close()
    schema.upgrade(worker_url.replace("jayrun_worker@", "jayrun@", 1))
