"""A PostgreSQL of our own, run as a service of the host or of one user."""

from __future__ import annotations

from jayrun.embedded.books import BookAddress, NotADatabaseUrl, locate, without_password
from jayrun.embedded.server import Status, down, ensure, forgotten, hindrance, how_to_start, may_manage, status, up
from jayrun.embedded.throwaway import Throwaway, start_throwaway

__all__ = [
    "BookAddress",
    "NotADatabaseUrl",
    "Status",
    "Throwaway",
    "down",
    "ensure",
    "forgotten",
    "hindrance",
    "how_to_start",
    "locate",
    "may_manage",
    "start_throwaway",
    "status",
    "up",
    "without_password",
]
