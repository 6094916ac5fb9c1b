"""pgbouncer before a throwaway server."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from processes import PATIENCE, until

from jayrun.embedded import Throwaway
from jayrun.embedded.accounts import service_account

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")

needs_pgbouncer = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed: apt-get install pgbouncer")


@contextmanager
def pooler(server: Throwaway, *, mode: str, size: int) -> Iterator[str]:
    """The URL of a pgbouncer in `mode`, with at most `size` connections to the server."""
    assert PGBOUNCER is not None
    parts = urlsplit(server.url)
    query = parse_qs(parts.query)
    account = service_account(create=False)  # neither server nor pooler runs as root
    folder = Path(tempfile.mkdtemp(prefix="jayrun-pooler-", dir="/tmp"))
    folder.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"
    (folder / "pgbouncer.ini").write_text(
        f"""
[databases]
jayrun = host={query["host"][0]} port={query["port"][0]} user={parts.username}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 200
"""
    )
    log = (folder / "log").open("w+")
    process = account.spawn([PGBOUNCER, folder / "pgbouncer.ini"], output=log.fileno())
    try:
        until(lambda: process.poll() is not None or _answers(url))
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait(PATIENCE)
        log.close()
        shutil.rmtree(folder)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
