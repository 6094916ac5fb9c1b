"""Alembic's entry: runs the steps on the connection that `jayrun.store.schema` hands over."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError(
        "migrations run through `jayrun db upgrade` (jayrun.store.schema.upgrade), which hands over a connection"
    )

context.configure(
    connection=connection,
    version_table="schema_revision",
    version_table_schema="jayrun",
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
