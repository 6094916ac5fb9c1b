"""`jayrun.store.tables` is the migrated book: its tables, columns, types, defaults, keys, indexes and sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from jayrun.store import schema, tables
from jayrun.store.engine import connect_engine

# What alembic does not look at (names of keys, predicates and order of indexes), as the database itself writes it.
FACTS = {
    "columns": """
        SELECT c.oid::regclass::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.relkind = 'r' AND c.relnamespace = 'jayrun'::regnamespace AND c.relname <> 'schema_revision'
    """,
    "keys": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'jayrun'::regnamespace AND contype IN ('p', 'u', 'f')
          AND conrelid <> 'jayrun.schema_revision'::regclass
    """,
    "indexes": """
        SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class c ON c.oid = indrelid
        WHERE c.relnamespace = 'jayrun'::regnamespace AND c.relname <> 'schema_revision'
    """,
    "sequences": "SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'jayrun'",
}


@pytest.fixture
def connection(empty_url: str) -> Iterator[Connection]:
    """A connection to a migrated book of its own, on which nothing will be committed."""
    schema.upgrade(empty_url)
    engine = connect_engine(empty_url, role="test").execution_options(isolation_level="READ COMMITTED")
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def facts(connection: Connection) -> dict[str, set[tuple[object, ...]]]:
    return {name: {tuple(row) for row in connection.execute(text(query))} for name, query in FACTS.items()}


def test_alembic_sees_no_difference(connection: Connection) -> None:
    context = MigrationContext.configure(
        connection,
        opts={
            "compare_type": True,
            "compare_server_default": True,
            "autogenerate_plugins": ["alembic.autogenerate.*", "~alembic.autogenerate.comments"],
            "include_schemas": True,
            "include_name": lambda name, kind, parents: (
                name == "jayrun" if kind == "schema" else name != "schema_revision"
            ),
        },
    )
    assert compare_metadata(context, tables.metadata) == []


def test_the_database_sees_no_difference(connection: Connection) -> None:
    migrated = facts(connection)
    connection.execute(text("DROP SCHEMA jayrun_audit CASCADE"))
    connection.execute(text("ALTER SCHEMA jayrun RENAME TO migrated"))
    connection.execute(text("CREATE SCHEMA jayrun"))
    connection.execute(text("CREATE TABLE jayrun.schema_revision ()"))
    tables.metadata.create_all(connection)
    assert facts(connection) == migrated
