"""`jayrun db`: the server that keeps the book."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from jayrun import embedded
from jayrun.settings import Settings

from .book import running_book
from .exits import UNREACHABLE

db = typer.Typer(help="Start, stop and describe the server that keeps the book.", no_args_is_help=True)


@db.command()
def up() -> None:
    """Start the server and bring its tables up to date.

    Does nothing when both are so already. As root this is the host's server, shared by all its users; otherwise your
    own, or the one in JAYRUN_HOME.
    """
    settings = Settings.load()
    _tell_of_a_forgotten_one(settings)
    if embedded.may_manage(settings) and not embedded.locate(settings).running:
        typer.echo("starting PostgreSQL; the first time takes a few seconds ...", err=True)
    book = embedded.up(settings)
    if book.kind == "url" or embedded.may_manage(settings):
        _upgrade(book.url)
    typer.echo(f"running: {embedded.without_password(book.url)}")


@db.command()
def down() -> None:
    """Stop the server, ending every session.

    Nothing but `jayrun db up` starts it again. Leases stay in the book.
    """
    settings = Settings.load()
    _tell_of_a_forgotten_one(settings)
    if embedded.down(settings):
        typer.echo("stopped; `jayrun db up` starts it again")
    else:
        typer.echo("not running")


@db.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines for people.")] = False,
) -> None:
    """Say which book applies, and whether its server runs.

    Exit code 5 if it does not. Starts nothing.
    """
    settings = Settings.load()
    found = embedded.status(settings)
    facts = {
        "kind": found.book.kind,
        "running": found.book.running,
        "held_down": found.held_down,
        "url": embedded.without_password(found.book.url),
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
    _tell_of_a_forgotten_one(settings)
    if not found.book.running:
        raise typer.Exit(UNREACHABLE)


@db.command()
def url() -> None:
    """Print the URL of the book, for psql and other clients.

    Starts nothing.
    """
    typer.echo(embedded.locate(Settings.load()).url)


@db.command()
def upgrade() -> None:
    """Bring the book's tables up to what this jayrun needs.

    Starts the server if necessary.
    """
    before, after = _upgrade(running_book(Settings.load(), start=True).url)
    typer.echo(f"nothing to do at {after}" if before == after else f"upgraded from {before or 'nothing'} to {after}")


def _upgrade(database_url: str) -> tuple[str | None, str]:
    from jayrun.store import schema  # alembic is slow to import, and only these commands need it

    return schema.upgrade(database_url)


def _tell_of_a_forgotten_one(settings: Settings) -> None:
    """Of a private server from before the host had one: nothing uses it any more, and nothing else would end it."""
    folder = embedded.forgotten(settings)
    if folder is not None:
        typer.echo(
            f"a server of your own in {folder} still runs, beside the host's: "
            f"`JAYRUN_HOME={shlex.quote(str(folder))} jayrun db down` ends it",
            err=True,
        )


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
