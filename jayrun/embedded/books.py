"""Whose book applies to this process, and where it is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Ping

from jayrun.embedded.places import PORT, Place, ping
from jayrun.errors import ServerError
from jayrun.settings import Settings


class NotADatabaseUrl(ServerError):
    """What JAYRUN_DATABASE_URL says is no address of a PostgreSQL."""


@dataclass(frozen=True, slots=True)
class BookAddress:
    """A database that keeps the leases.

    `url`: where clients of this process's user connect, a `postgresql://` URL for libpq and SQLAlchemy.
    `kind`: why this one: "url" (JAYRUN_DATABASE_URL), "home" (JAYRUN_HOME), "host" (the host's), "private" (one's own).
    `running`: whether a server answered, were it only that it is starting.
    `place`: the folder of the server, or None when it is not one of ours.
    """

    url: str
    kind: Literal["url", "home", "host", "private"]
    running: bool
    place: Path | None


def locate(settings: Settings) -> BookAddress:
    """Whose book applies, without starting anything. Raises `NotADatabaseUrl`."""
    if settings.database_url is not None:
        url = _plain(settings.database_url)
        return BookAddress(url, "url", _answers(ping(url)), None)
    return book_at(place_for(settings))


def book_at(place: Place) -> BookAddress:
    """The book kept by the server at `place`."""
    return BookAddress(place.url(), place.kind, _answers(place.ping()), place.root)


def place_for(settings: Settings) -> Place:
    """The place of the server that applies when no URL is given.

    JAYRUN_HOME's and no other; else the host's, if root asks or has ever started it; else the user's own. That the
    host's is down does not make room for private ones: they would book the same devices twice.
    """
    if settings.home is not None:
        return Place.at("home", settings.home)
    if os.geteuid() == 0 or host_exists(settings):
        return host_place(settings)
    return Place.at("private", settings.data_home / "jayrun")


def host_place(settings: Settings) -> Place:
    """The place of the host's server."""
    return Place.at("host", settings.state_root, sockets=settings.run_root)


def host_exists(settings: Settings) -> bool:
    """Whether root has ever started the host's server."""
    place = host_place(settings)
    # The second is for an administrator who closed the first folder to others.
    return os.path.exists(place.data) or os.path.exists(place.sockets / f".s.PGSQL.{PORT}")


def _answers(answer: Ping) -> bool:
    return answer in (Ping.OK, Ping.REJECT)


def without_password(url: str) -> str:
    """`url`, which may be no URL, for people: nothing in it that could be a password."""
    in_front = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(password\s*=\s*)('[^']*'?|[^\s&]+)", r"\1***", in_front, flags=re.IGNORECASE)


def _plain(url: str) -> str:
    """`url` without the driver that SQLAlchemy allows in it (`postgresql+psycopg://`) and libpq does not."""
    scheme, separator, rest = url.partition("://")
    plain = f"postgresql://{rest}"
    try:
        if not separator or scheme.partition("+")[0] not in ("postgresql", "postgres"):
            raise ValueError("not a URL of PostgreSQL")
        if "," in rest.partition("/")[0].rpartition("@")[2]:
            raise ValueError("several hosts are named behind the question mark, or SQLAlchemy does not read it")
        for port in str(conninfo_to_dict(plain).get("port") or PORT).split(","):  # one for each host
            int(port or PORT)
    except (ValueError, psycopg.ProgrammingError):
        raise NotADatabaseUrl(
            f"JAYRUN_DATABASE_URL must look like postgresql://user@host:5432/database, but is {without_password(url)!r}"
        ) from None
    return plain
