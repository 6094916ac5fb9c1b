"""`jayrun db`: the server that keeps the book."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from jayrun import embedded
from jayrun.settings import Settings

NOT_RUNNING = 5

db = typer.Typer(help="Start, stop and describe the PostgreSQL server that keeps the book.", no_args_is_help=True)


@db.command()
def up() -> None:
    """Start the server and bring its tables up to date; does nothing when both are so already.

    As root this is the host's server, shared by all its users; otherwise your own, or the one in JAYRUN_HOME.
    """
    settings = Settings.load()
    if not embedded.locate(settings).running:
        typer.echo("starting PostgreSQL; the first time takes a few seconds ...", err=True)
    book = embedded.up(settings)
    if book.kind == "url" or embedded.may_manage(settings):
        _upgrade(book.url)
    typer.echo(f"running: {_without_password(book.url)}")


@db.command()
def down() -> None:
    """Stop the server, ending every session; nothing but `jayrun db up` starts it again. Leases stay in the book."""
    if embedded.down(Settings.load()):
        typer.echo("stopped; `jayrun db up` starts it again")
    else:
        typer.echo("not running")


@db.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines for people.")] = False,
) -> None:
    """Say which book applies, where it is and whether its server runs (exit code 5 if not); starts nothing."""
    found = embedded.status(Settings.load())
    facts = {
        "kind": found.book.kind,
        "running": found.book.running,
        "held_down": found.held_down,
        "url": _without_password(found.book.url),
        "server_version": found.server_version,
        "pid": found.pid,
        "folder": None if found.book.place is None else str(found.book.place),
        "data_folder": None if found.data_folder is None else str(found.data_folder),
        "log_file": None if found.log_file is None else str(found.log_file),
    }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name.replace('_', ' '):<15} {_words(value)}")
    if not found.book.running:
        raise typer.Exit(NOT_RUNNING)


@db.command()
def url() -> None:
    """Print the URL of the book, for psql and other clients; starts nothing."""
    typer.echo(embedded.locate(Settings.load()).url)


@db.command()
def upgrade() -> None:
    """Bring the book's tables up to what this jayrun needs, starting the server if necessary."""
    before, after = _upgrade(embedded.ensure(Settings.load()).url)
    typer.echo(f"nothing to do at {after}" if before == after else f"upgraded from {before or 'nothing'} to {after}")


def _upgrade(database_url: str) -> tuple[str | None, str]:
    from jayrun.store import schema  # alembic is slow to import, and only these commands need it

    return schema.upgrade(database_url)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _without_password(database_url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", database_url)
