"""The folders of a server, and the address it is reached at."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from psycopg.pq import PGconn, Ping

from jayrun.errors import ServerError

Kind = Literal["home", "host", "private"]

DATABASE = "jayrun"
OWNER_ROLE = "jayrun"
WORKER_ROLE = "jayrun_worker"
PORT = 5432
LONGEST_SOCKET_PATH_BYTES = 103  # sockaddr_un holds 108; PostgreSQL also makes a lock file with five more
PING_TIMEOUT_SECONDS = 2  # the least that libpq accepts

# Not tempfile.gettempdir(): server and clients must agree, and each may have a TMPDIR of its own.
TEMPORARY = Path("/tmp")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server keeps its things: everything below `root`, except the socket, which is in `sockets`."""

    kind: Kind
    root: Path
    sockets: Path

    @classmethod
    def at(cls, kind: Kind, root: Path, *, sockets: Path | None = None) -> Place:
        """The place at `root`; `sockets` is a folder in it unless given, and a short one where its name is too long."""
        folder = root / "run" if sockets is None else sockets
        if len(os.fsencode(folder / f".s.PGSQL.{PORT}")) > LONGEST_SOCKET_PATH_BYTES:
            folder = TEMPORARY / f"jayrun-{_digest(root)}"
        return cls(kind, root, folder)

    @property
    def data(self) -> Path:
        """PostgreSQL's data folder; it appears, complete, by a rename."""
        return self.root / "data"

    @property
    def logs(self) -> Path:
        """The folder of the server's logs."""
        return self.root / "log"

    @property
    def start_log(self) -> Path:
        """What the last start printed before the server's own log took over."""
        return self.root / "start.log"

    @property
    def start_lock(self) -> Path:
        """Locked by whoever starts or stops the server."""
        return self.root / "start.lock"

    @property
    def alive_lock(self) -> Path:
        """Locked as long as any process of the server is alive; every one of them inherits the handle."""
        return self.root / "alive.lock"

    @property
    def held_down(self) -> Path:
        """Exists from `down` until `up`."""
        return self.root / "held-down"

    @property
    def cluster_name(self) -> str:
        """Shown in the title of every process of this server and of no other."""
        return f"jayrun-{_digest(self.root)}"

    def role(self) -> str:
        """The role that the server gives to this process's user: the owner's, or the one of everybody else."""
        if os.geteuid() == 0:
            return OWNER_ROLE
        try:
            owner = self.data.stat().st_uid
        except (FileNotFoundError, NotADirectoryError):
            return OWNER_ROLE  # whoever makes it will own it
        except PermissionError:
            return WORKER_ROLE
        return OWNER_ROLE if owner == os.geteuid() else WORKER_ROLE

    def url(self, *, role: str | None = None) -> str:
        """The address for clients. It says everything a PG* variable of the caller could otherwise change."""
        return (
            f"postgresql://{role or self.role()}@/{DATABASE}?host={quote(str(self.sockets), safe='')}&port={PORT}"
            "&options=-cTimeZone%3DUTC"
        )

    def ping(self) -> Ping:
        """Whether the server answers; takes milliseconds, at most `PING_TIMEOUT_SECONDS`.

        Raises `ServerError` when libpq does not even try.
        """
        answer = ping(f"{self.url()}&hostaddr=")  # empty, or else a caller's PGHOSTADDR would lead elsewhere
        if answer is Ping.NO_ATTEMPT:
            raise ServerError(
                f"libpq refuses to connect to {self.sockets}: unset PGSERVICE and the other PG* variables"
            )
        return answer


def ping(url: str) -> Ping:
    """Whether a server answers at `url`: OK, REJECT (starting or stopping), NO_RESPONSE, NO_ATTEMPT (a bad URL)."""
    timeout = f"{'&' if '?' in url else '?'}connect_timeout={PING_TIMEOUT_SECONDS}"
    return Ping(PGconn.ping((url if "connect_timeout=" in url else url + timeout).encode()))


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
