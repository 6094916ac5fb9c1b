"""`jayrun audit`: the book against the hardware."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Annotated

import typer

from jayrun.domain.audit import Finding
from jayrun.domain.units import format_bytes
from jayrun.errors import BookBusy, BookDenied
from jayrun.runtime import hardware
from jayrun.settings import Settings
from jayrun.store import audit as booked
from jayrun.store import holders

from .book import open_judged
from .exits import FAILED
from .options import AsJson
from .render import Column, Row, age, printable, short_id, show_rows


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


COLUMNS = (
    Column("HOST", lambda row: row["host"], spare=1),
    Column("DEVICE", lambda row: f"{row['device']} {row['device_id']}"),
    Column("FINDING", lambda row: row["finding"]),
    Column("USED", lambda row: _bytes(row["used_bytes"]), number=True),
    Column("LEASED", lambda row: _bytes(row["leased_bytes"]), number=True),
    Column("PID", lambda row: "-" if row["pid"] is None else str(row["pid"]), number=True),
    Column("USER", lambda row: row["user"] or "-"),
    Column("LEASE", lambda row: "-" if row["lease_id"] is None else short_id(row["lease_id"]), spare=3),
    Column("LASTS", lambda row: "-" if row["lasts"] is None else age(row["lasts"]), number=True, spare=2),
    Column("LOOKED AT", lambda row: "never" if row["age"] is None else f"{age(row['age'])} ago", number=True, spare=4),
    Column("COMMAND", lambda row: row["command"] or "-", folds=True, spare=5),
    Column("DETAIL", lambda row: row["detail"] or "-", folds=True, below=True),
)


def audit(
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help=f"Exit with 1 when one of these is found, several with commas: {', '.join(Finding)}.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who uses what of each device, leased or not.

    Sets the book against what the driver tells. Looks at this host now; other hosts are shown as they were last looked
    at. A row is a lease on a device, a process that uses one without a lease, or a device that could not be read.
    """
    wanted = set() if fail_on is None else _findings(fail_on)
    settings = Settings.load()
    with closing(open_judged(settings)) as book:
        with suppress(BookDenied, BookBusy):  # then what there is is shown, with its age
            host_id = holders.find_own_host(book, settings.host_id)
            if host_id is not None:
                hardware.look(book, host_id)
        rows = booked.audit(book)
    nothing = "no devices: `jayrun devices discover` or `jayrun devices declare` adds some"
    show_rows(rows, COLUMNS, as_json=as_json, nothing=nothing)
    found = [row for row in rows if row["finding"] in wanted and not row["stale"]]
    for row in found:
        typer.echo(f"found {_named(row)}", err=True)
    if found:
        raise typer.Exit(FAILED)


def _findings(words: str) -> set[Finding]:
    found = set()
    for word in (each.strip() for each in words.split(",")):
        if word not in set(Finding):
            raise typer.BadParameter(f"--fail-on must be of {', '.join(Finding)}, but names {word!r}")
        found.add(Finding(word))
    return found


def _named(row: Row) -> str:
    who = "" if row["pid"] is None else f", pid {row['pid']} ({printable(row['user'] or '?')})"
    return f"{row['finding']}: {row['host']} {row['device']} {row['device_id']}{who}: {printable(row['detail'] or '')}"
