"""The version guard: which schema the book has, which one this jayrun needs, and the way from one to the other."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from jayrun.errors import SchemaMismatch
from jayrun.store.engine import connect_engine, reaching

if TYPE_CHECKING:
    from alembic.config import Config

REVISION = "0001"
"""The revision that this code reads and writes; a test holds it equal to the newest file in `migrations`."""

# On a server of jayrun's own every other user of the host is `jayrun_worker`. The rights stop accidents, not malice:
# history cannot be deleted or rewritten by anybody, settings and schema belong to the owner.
RIGHTS = {
    "INSERT, UPDATE": (
        *("hosts", "devices", "device_links", "holders", "executions"),
        *("leases", "lease_shares", "lease_holders", "quarantines"),
    ),
    "INSERT, UPDATE, DELETE": ("device_observations", "lease_observations", "process_observations"),
    "INSERT": ("placement_requests", "lease_events"),
    "UPDATE": ("gate",),
}
"""What a program must be allowed to do with the tables, beside looking at all of them."""
_GRANT = f"""
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'jayrun_worker') AND to_regclass('jayrun.gate') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO jayrun_worker;
        GRANT SELECT ON ALL TABLES IN SCHEMA jayrun, jayrun_audit TO jayrun_worker;
        {" ".join(f"GRANT {r} ON {', '.join(f'jayrun.{t}' for t in ts)} TO jayrun_worker;" for r, ts in RIGHTS.items())}
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA jayrun TO jayrun_worker;
    END IF;
END $$
"""

_UPGRADE_LOCK = 0x6A617972756E  # "jayrun"; held by one transaction, so that ten upgrades at once apply one


def _configuration(connection: Connection | None = None) -> Config:
    from alembic.config import Config  # heavy; only those who upgrade or mismatch pay for it

    configuration = Config()
    found = find_spec("jayrun.migrations")
    assert found is not None
    assert found.submodule_search_locations is not None
    configuration.set_main_option("script_location", found.submodule_search_locations[0].replace("%", "%%"))
    configuration.set_main_option("path_separator", "os")
    configuration.attributes["connection"] = connection
    return configuration


def known_revisions() -> list[str]:
    """The revisions that this installation can apply, oldest first."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_configuration()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def current_revision(connection: Connection) -> str | None:
    """The revision of the book, or None when the database has no book yet."""
    if connection.scalar(text("SELECT to_regclass('jayrun.schema_revision')")) is None:
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM jayrun.schema_revision"))
    return revision


def check_revision(connection: Connection) -> None:
    """Raise `SchemaMismatch`, saying what to run, unless the book has exactly `REVISION`."""
    if (told := mismatch(current_revision(connection))) is not None:
        what, remedy = told
        raise SchemaMismatch(f"{what}: {remedy}")


def mismatch(found: str | None) -> tuple[str, str] | None:
    """What is wrong with a book of the revision `found` (None: there is none), and what to do; None: nothing is."""
    if found == REVISION:
        return None
    if found is None:
        return "this database has no jayrun book yet", "run `jayrun db upgrade`"
    if found in known_revisions():
        return f"the book has schema {found}, this jayrun needs {REVISION}", "run `jayrun db upgrade`"
    newer = f"the book has schema {found}, which is newer than this jayrun ({REVISION})"
    return newer, "install the newer jayrun-leases"


def create_if_missing(url: str) -> None:
    """Make the book in a database of jayrun's own that has none; one that exists is left as it is."""
    engine = connect_engine(url, role="schema")
    try:
        with reaching(url), engine.connect() as connection:
            found = current_revision(connection)
    finally:
        engine.dispose()
    if found is None:
        upgrade(url)


def upgrade(url: str) -> tuple[str | None, str]:
    """Bring the book at `url` to the newest schema and return the revisions (before, after).

    Safe to call from many processes at once: one applies the steps, the others wait and find it done.
    Raises `BookUnreachable`, or `SchemaMismatch` when the book is newer than this installation.
    """
    return _migrate(url, "head")


def downgrade(url: str, revision: str) -> tuple[str | None, str]:
    """Take the book at `url` back to `revision` ("base" removes it). Data of removed tables is lost."""
    return _migrate(url, revision)


def _migrate(url: str, target: str) -> tuple[str | None, str]:
    from alembic import command

    engine = connect_engine(url, role="schema")
    try:
        with reaching(url), engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            before = current_revision(connection)
            if before is not None and before not in known_revisions():
                check_revision(connection)
            connection.execute(text("CREATE SCHEMA IF NOT EXISTS jayrun"))
            move = command.downgrade if target == "base" or (before or "") > target else command.upgrade
            move(_configuration(connection), target)
            connection.execute(text(_GRANT))
            after = current_revision(connection)
        return before, after or "base"
    finally:
        engine.dispose()
