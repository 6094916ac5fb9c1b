"""The steps of the schema: up and down again, ten at once, and refused where this code and the book do not agree."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psycopg
import pytest
from processes import CONTEXT, PATIENCE
from sqlalchemy.exc import ProgrammingError

from jayrun.embedded import Throwaway
from jayrun.errors import SchemaMismatch
from jayrun.store import schema
from jayrun.store.engine import connect_engine

VERSIONS = Path(__file__).parents[2] / "migrations" / "versions"


def dump(server: Throwaway, url: str) -> str:
    """The whole database as SQL: every object, comment, grant and row."""
    command = [server.bindir / "pg_dump", "--dbname", url]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "".join(line for line in printed.splitlines(True) if not line.startswith(("\\restrict", "\\unrestrict")))


def objects(url: str) -> list[str]:
    """What is in the schemas of the book, by name."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            """
            SELECT n.nspname || '.' || o.name FROM pg_namespace n JOIN (
                SELECT relnamespace AS namespace, relname AS name FROM pg_class WHERE relkind NOT IN ('i', 't', 'c')
                UNION ALL SELECT pronamespace, proname FROM pg_proc
                UNION ALL SELECT typnamespace, typname FROM pg_type WHERE typtype <> 'c' AND typcategory <> 'A'
            ) o ON o.namespace = n.oid WHERE n.nspname LIKE 'jayrun%' ORDER BY 1
            """
        ).fetchall()
    return [row[0] for row in rows]


def waiting_for_a_lock(connection: psycopg.Connection) -> list[tuple[int]]:
    return connection.execute(
        "SELECT pid FROM pg_sleep(0.01), pg_locks WHERE locktype = 'advisory' AND NOT granted"
    ).fetchall()


def checked(url: str) -> None:
    engine = connect_engine(url, role="test")
    try:
        with engine.connect() as connection:
            schema.check_revision(connection)
    finally:
        engine.dispose()


def set_revision(url: str, revision: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE jayrun.schema_revision SET version_num = %s", (revision,))


def test_up_down_up_is_the_same_book(server: Throwaway, empty_url: str) -> None:
    assert schema.upgrade(empty_url) == (None, schema.REVISION)
    first = dump(server, empty_url)
    assert schema.downgrade(empty_url, "base") == (schema.REVISION, "base")
    assert objects(empty_url) == ["jayrun.schema_revision"]
    assert schema.upgrade(empty_url) == (None, schema.REVISION)
    assert dump(server, empty_url) == first


def test_down_of_a_used_book_removes_it(empty_url: str) -> None:
    schema.upgrade(empty_url)
    with psycopg.connect(empty_url) as connection:
        connection.execute("INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('a', 'a', 'a')")
        connection.execute("INSERT INTO jayrun.lease_events (kind) VALUES ('granted')")
    schema.downgrade(empty_url, "base")
    assert objects(empty_url) == ["jayrun.schema_revision"]


def test_the_code_needs_the_newest_step() -> None:
    files = sorted(path.name for path in VERSIONS.glob("[0-9]*.py"))
    assert [name.split("_")[0] for name in files] == schema.known_revisions()
    assert schema.known_revisions()[-1] == schema.REVISION


def test_ten_upgrades_at_once_apply_one(empty_url: str) -> None:
    with psycopg.connect(empty_url, autocommit=True) as connection, ProcessPoolExecutor(10, CONTEXT) as pool:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema._UPGRADE_LOCK,))
            upgrades = [pool.submit(schema.upgrade, empty_url) for _ in range(10)]
            deadline = time.monotonic() + PATIENCE
            while len(waiting_for_a_lock(connection)) < 10:
                assert time.monotonic() < deadline, "ten upgrades should wait for each other"
        outcomes = Counter(upgrade.result(PATIENCE) for upgrade in upgrades)
    assert outcomes == {(None, schema.REVISION): 1, (schema.REVISION, schema.REVISION): 9}
    checked(empty_url)


def test_no_book_is_refused(empty_url: str) -> None:
    with pytest.raises(SchemaMismatch, match=r"no jayrun book yet: run `jayrun db upgrade`"):
        checked(empty_url)


def test_a_removed_book_is_refused(empty_url: str) -> None:
    schema.upgrade(empty_url)
    schema.downgrade(empty_url, "base")
    with pytest.raises(SchemaMismatch, match=r"no jayrun book yet: run `jayrun db upgrade`"):
        checked(empty_url)


def test_a_stale_book_is_refused(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, newest = schema.upgrade(empty_url)
    checked(empty_url)
    monkeypatch.setattr(schema, "REVISION", "9999")
    with pytest.raises(SchemaMismatch, match=rf"has schema {newest}, .* needs 9999: run `jayrun db upgrade`"):
        checked(empty_url)


def test_a_newer_book_is_refused_and_left_alone(server: Throwaway, empty_url: str) -> None:
    schema.upgrade(empty_url)
    set_revision(empty_url, "9999")
    before = dump(server, empty_url)
    newer = r"has schema 9999, which is newer than this jayrun .*: install the newer jayrun-leases"
    with pytest.raises(SchemaMismatch, match=newer):
        checked(empty_url)
    with pytest.raises(SchemaMismatch, match=newer):
        schema.upgrade(empty_url)
    with pytest.raises(SchemaMismatch, match=newer):
        schema.downgrade(empty_url, "base")
    assert dump(server, empty_url) == before


def test_a_step_that_fails_leaves_nothing(empty_url: str) -> None:
    with psycopg.connect(empty_url) as connection:
        connection.execute("CREATE SCHEMA jayrun CREATE TABLE lease_events ()")  # in the way of the last table
    with pytest.raises(ProgrammingError, match="already exists"):
        schema.upgrade(empty_url)
    assert objects(empty_url) == ["jayrun.lease_events"]
