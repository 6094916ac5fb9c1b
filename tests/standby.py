"""A streaming standby of a throwaway server, and the URL of both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
from processes import until

from jayrun.embedded import Throwaway, start_throwaway
from jayrun.embedded.accounts import service_account
from jayrun.settings import Settings

_REPLICATES = "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"


@dataclass(frozen=True)
class Pair:
    """`url` names both; whatever is acknowledged on `primary` is on `standby` too."""

    primary: Throwaway
    standby: Throwaway
    url: str

    def promote(self) -> None:
        with psycopg.connect(self.standby.url, autocommit=True) as sql:
            assert sql.execute("SELECT pg_promote()").fetchone() == (True,)


@contextmanager
def standby_of(primary: Throwaway) -> Iterator[Pair]:
    """A standby made by pg_basebackup, which the primary then waits for at every commit."""
    with (primary.data_folder / "pg_hba.conf").open("a") as access:
        access.write("local replication all peer map=jayrun\n")
    folder = Path(tempfile.mkdtemp(prefix="jayrun-standby-", dir="/tmp"))
    account = service_account(create=False)
    account.make_folder(folder, mode=0o755)
    try:
        with psycopg.connect(primary.url, autocommit=True) as sql:
            sql.execute("SELECT pg_reload_conf()")
            copy: list[str | Path] = [primary.bindir / "pg_basebackup", "-h", _sockets(primary), "-U", "jayrun"]
            copy += ["-D", folder / "data", "-R", "-c", "fast", "--no-sync"]
            status, printed = account.run(copy)
            assert status == 0, printed
            with start_throwaway(folder, settings=Settings(pg_bindir=primary.bindir)) as standby:
                sql.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                sql.execute("SELECT pg_reload_conf()")
                until(lambda: sql.execute(_REPLICATES).fetchall())
                hosts = f"host={_sockets(primary)},{_sockets(standby)}&port=5432,5432"
                yield Pair(primary, standby, f"postgresql://jayrun@/jayrun?{hosts}")
    finally:
        shutil.rmtree(folder)


def _sockets(server: Throwaway) -> str:
    return parse_qs(urlsplit(server.url).query)["host"][0]
