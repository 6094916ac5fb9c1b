"""Crews of workers for fault tests: `jayrun worker`, with its words in a file, and what the book must be like after."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from history import replay
from processes import PATIENCE, command, until

from jayrun import kernel

Sql = psycopg.Connection[tuple[Any, ...]]

QUICK = """
UPDATE jayrun.settings SET tick_seconds = 0.2, claim_seconds = 1, cancel_seconds = 0.5, crash_limit = 1000
"""
"""Settings for fault tests; a probe that comes from the environment may end the next worker at the same point."""


@dataclass
class Crew:
    """A supervisor with its workers, in a process group of their own."""

    process: subprocess.Popen[str]
    log: Path

    def reached(self, point: str) -> list[int]:
        """The processes that reached the probe `point`."""
        return [
            int(pid) for pid in re.findall(rf"^probe {point} reached by process (\d+)$", self.words(), re.MULTILINE)
        ]

    def words(self) -> str:
        return self.log.read_text()

    def ready(self) -> int:
        """How many workers have got ready so far."""
        return self.words().count(" is ready and knows ")

    def workers(self) -> list[int]:
        """The worker processes there are now."""
        pid = self.process.pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def killed_at(self, point: str) -> int:
        """Wait until one of them was killed by the probe `point`; returns which."""
        until(lambda: self.reached(point))
        pid = self.reached(point)[0]
        until(lambda: kernel.is_absent(pid))
        return pid

    def kill(self) -> None:
        """All of them at once, as when the machine's administrator is in a hurry."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def drain(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.words()


@contextmanager
def crew_of(
    url: str,
    log: Path,
    *,
    processes: int = 1,
    host: str = "test-host",
    probes: str = "",
    modules: str = "work_for_workers",
    **variables: str,
) -> Iterator[Crew]:
    environment = {"JAYRUN_DATABASE_URL": url, "JAYRUN_HOST_ID": host, "JAYRUN_PROBES": probes, **variables}
    with command("worker", modules, "--processes", str(processes), log=log, **environment) as started:
        yield Crew(started, log)


class Sound:
    """What must be true of a book after whatever happened to it."""

    def __init__(self, sql: Sql) -> None:
        self._deadlocks = _deadlocks(sql)

    def check(self, sql: Sql) -> None:
        """No rule is broken, no lease left, the history legal, and nobody ever waited for another in a circle."""
        assert sql.execute("SELECT * FROM jayrun_audit.violations").fetchall() == []
        until(lambda: sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL").fetchone() == (0,))
        replay(sql)
        assert _deadlocks(sql) == self._deadlocks


def _deadlocks(sql: Sql) -> int:
    sql.execute("SELECT pg_stat_clear_snapshot()")
    row = sql.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


def assert_done_once(sql: Sql, execution_id: UUID, file: Path) -> None:
    """A `Tell` has succeeded, and what is stored is the word of the last process that ran it, which claimed it last."""
    row = sql.execute(
        "SELECT e.state, e.result, o.pid FROM jayrun.executions e JOIN jayrun.holders o ON o.id = e.holder_id "
        "WHERE e.id = %s",
        (execution_id,),
    ).fetchone()
    last = int(file.read_text().split()[-1])
    assert row == ("succeeded", last, last)
