"""`jayrun hosts`: the machines that share the book."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from jayrun.settings import Settings
from jayrun.store import audit, devices, levers

from .book import open_book, open_judged
from .options import AsJson
from .render import Column, age, local, show_rows

hosts = typer.Typer(help="Show the hosts of the book, and declare one gone.", no_args_is_help=True)

Force = Annotated[
    bool, typer.Option("--force", help="Also what shows life: two programs may meet in one GPU's memory.")
]

COLUMNS = (
    Column("HOST", lambda row: row["host"]),
    Column("STATE", lambda row: row["state"]),
    Column("SEEN", lambda row: f"{age(row['age'])} ago", number=True),
    Column("DEVICES", lambda row: str(row["devices"]), number=True),
    Column("LEASES", lambda row: str(row["leases"]), number=True),
    Column("HOLDERS", lambda row: str(row["holders"]), number=True),
    Column("IDENTITY", lambda row: row["identity"], folds=True, spare=1),
    Column("LAST SEEN", lambda row: local(row["seen_at"]), spare=3),
    Column("BOOT", lambda row: row["boot_id"], folds=True, spare=2),
)


@hosts.command("list")
def list_(as_json: AsJson = False) -> None:
    """List every host: whether it is heard of, and what it has.

    A host that was silent for the book's holder_ttl_seconds gets no new leases; those it has stay until it is seen
    again, or forgotten.
    """
    with closing(open_judged(Settings.load())) as book:
        rows = audit.hosts(book)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="no hosts: `jayrun devices declare` adds this one")


@hosts.command()
def forget(
    host: Annotated[str, typer.Argument(metavar="HOST", help="A host of the book, by name or identity.")],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Declare a host gone, with all that runs there.

    Ends its holders, their leases and executions, and removes its devices; submitted work is done elsewhere, unless it
    was submitted for that host. The host comes back by itself when it is seen again; then declare its devices again.
    Refused while it shows life: what still runs there would go on using GPUs that are not its own any more.
    """
    with closing(open_book(Settings.load())) as book:
        host_id = devices.find_host(book, host)
        ended = levers.forget_host(book, host_id, force=force)
        rows = [row for row in audit.hosts(book) if row["host_id"] == host_id]
    if as_json:
        show_rows(rows, COLUMNS, as_json=True, nothing="")
    else:
        typer.echo(f"forgot host {host}: {ended} holder(s) ended, its devices are removed")
