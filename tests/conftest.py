"""Every test that needs PostgreSQL gets a real one: a server per test worker, emptied between tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from fleet import EMPTY

from jayrun.embedded import Throwaway, start_throwaway
from jayrun.settings import MASKS, Settings
from jayrun.store import schema
from jayrun.store.transactions import Book

sys.path.insert(0, str(Path(__file__).parent))

for _mask in MASKS:  # a machine that limits what its processes see must not limit what the tests declare
    os.environ.pop(_mask, None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Throwaway]:
    settings = Settings.load({name: value for name, value in os.environ.items() if name == "JAYRUN_PG_BINDIR"})
    with start_throwaway(tmp_path_factory.mktemp("server"), settings=settings) as throwaway:
        schema.upgrade(throwaway.url)
        yield throwaway


@pytest.fixture
def url(server: Throwaway) -> str:
    """The URL of an empty, migrated book."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(EMPTY)
    return server.url


@pytest.fixture
def book(url: str) -> Iterator[Book]:
    opened = Book(url, role="test", patience_seconds=10)
    yield opened
    opened.close()


@pytest.fixture
def sql(url: str) -> Iterator[psycopg.Connection]:
    """A hand in psql: a plain connection in autocommit."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection
