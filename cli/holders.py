"""`jayrun holders`: the processes that hold or may hold leases."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from jayrun.domain.units import format_bytes
from jayrun.settings import Settings
from jayrun.store import audit, levers

from .book import open_book, open_judged
from .hosts import Force
from .options import AsJson
from .render import Column, age, local, short_id, show_rows, to_json

holders = typer.Typer(help="Show the processes in the book, and declare one gone.", no_args_is_help=True)

COLUMNS = (
    Column("ID", lambda row: short_id(row["id"])),
    Column("HOST", lambda row: row["host"], spare=1),
    Column("PID", lambda row: str(row["pid"]), number=True),
    Column("USER", lambda row: row["user"]),
    Column("ROLE", lambda row: row["role"]),
    Column("STATE", lambda row: row["state"]),
    Column("SEEN", lambda row: f"{age(row['age'])} ago", number=True),
    Column("LEASES", lambda row: str(row["leases"]), number=True),
    Column("MEMORY", lambda row: format_bytes(row["memory_bytes"]), number=True),
    Column("LABEL", lambda row: row["label"] or "-", folds=True, spare=2),
    Column("SINCE", lambda row: local(row["since"]), spare=4),
    Column("COMMAND", lambda row: row["command"] or "-", folds=True, spare=3),
)


@holders.command("list")
def list_(as_json: AsJson = False) -> None:
    """List every process that the book has as alive.

    Silent is who was not seen for the book's holder_ttl_seconds, by nobody of its host.
    """
    with closing(open_judged(Settings.load())) as book:
        rows = audit.holders(book)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="no holders")


@holders.command()
def end(
    holder: Annotated[str, typer.Argument(metavar="ID", help="A holder's id, or four or more characters of it.")],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """End a holder that is gone, and with it what it holds.

    Needed only where nobody can see that it is gone; who is seen to be dead is ended by every pass. Refused for who is
    alive, and for who was heard of within the book's holder_ttl_seconds and cannot be seen from here: end the process
    itself. It ends no process.
    """
    with closing(open_book(Settings.load())) as book:
        holder_id = audit.find_holder(book, holder)
        ended = levers.end_holder(book, holder_id, force=force)
    if as_json:
        typer.echo(to_json({"id": holder_id, "ended": ended}))
    else:
        typer.echo(
            f"ended holder {short_id(holder_id)}" if ended else f"holder {short_id(holder_id)} had ended already"
        )
