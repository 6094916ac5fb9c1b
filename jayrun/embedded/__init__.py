"""A PostgreSQL of our own, run as a service of the host or of one user."""

from __future__ import annotations

from jayrun.embedded.books import BookAddress, locate
from jayrun.embedded.server import Status, down, ensure, may_manage, status, up
from jayrun.embedded.throwaway import Throwaway, start_throwaway

__all__ = [
    "BookAddress",
    "Status",
    "Throwaway",
    "down",
    "ensure",
    "locate",
    "may_manage",
    "start_throwaway",
    "status",
    "up",
]
