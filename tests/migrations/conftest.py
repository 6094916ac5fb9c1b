"""Databases beside the tests' book: steps of the schema are tried where nothing else lives."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import make_url

from jayrun.embedded import Throwaway


@pytest.fixture
def empty_url(server: Throwaway) -> Iterator[str]:
    """The URL of a new database without a book, where no name means anything without its schema."""
    name = f"empty_{uuid4().hex}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        connection.execute(f"ALTER DATABASE {name} SET search_path = pg_catalog")
        yield make_url(server.url).set(database=name).render_as_string(hide_password=False)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
