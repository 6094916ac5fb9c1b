"""`jayrun leases`: who holds what."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from typing import Annotated

import typer

from jayrun.domain.units import format_bytes
from jayrun.settings import Settings
from jayrun.store import audit

from .book import open_judged
from .options import AsJson
from .render import Column, Row, age, local, ranges, short_id, show_rows, to_json, to_lines

leases = typer.Typer(
    help="""Show who holds which capacity.

    There is no release command: a lease ends with its process or its data; `leases list` shows the pid.
    """,
    no_args_is_help=True,
)

COLUMNS = (
    Column("ID", lambda row: short_id(row["id"])),
    Column("HOST", lambda row: row["host"], spare=1),
    Column("DEVICES", lambda row: ranges(row["device_ids"])),
    Column("MEMORY", lambda row: "exclusive" if row["exclusive"] else format_bytes(row["memory_bytes"]), number=True),
    Column("EXECUTION", lambda row: row["execution"]),
    Column("USER", lambda row: row["user"] or "-"),
    Column("PID", lambda row: _pids(row), number=True),
    Column("LABEL", lambda row: row["label"] or "-", folds=True, spare=2),
    Column("AGE", lambda row: age(row["age"]), number=True),
    Column("SINCE", lambda row: local(row["granted_at"]), spare=3),
)


def _pids(row: Row) -> str:
    """The first holder's, and how many others hold it too."""
    others = (row["holders"] or 1) - 1
    return f"{row['pid'] or '-'}{f' +{others}' if others else ''}"


@leases.command("list")
def list_(
    user: Annotated[str | None, typer.Option(help="Only leases that this user holds.")] = None,
    device: Annotated[
        int | None, typer.Option(metavar="DEVICE_ID", help="Only leases with a share of the device of this number.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List every live lease, oldest first."""
    with closing(open_judged(Settings.load())) as book:
        rows = [
            row
            for row in audit.leases(book)
            if (user is None or row["user"] == user) and (device is None or device in row["device_ids"])
        ]
    show_rows(rows, COLUMNS, as_json=as_json, nothing="no live leases")


@leases.command()
def show(
    lease: Annotated[str, typer.Argument(metavar="ID", help="A lease's id, or four or more characters of it.")],
    as_json: AsJson = False,
) -> None:
    """Show one lease, live or ended.

    Its shares, its holders and what happened to it.
    """
    with closing(open_judged(Settings.load())) as book:
        row = audit.lease(book, audit.find_lease(book, lease))
    typer.echo(to_json(row) if as_json else to_lines(_facts(row)))


def _facts(row: Row) -> list[tuple[str, str]]:
    held = "for" if row["ended_at"] is None else "lasted"
    facts = [
        ("lease", str(row["id"])),
        ("state", f"{row['state']}, {held} {age(row['age'])}"),
        ("granted", local(row["granted_at"])),
        ("ended", local(row["ended_at"])),
        ("host", row["host"]),
        ("execution", f"{row['execution']} ({row['kind']} {row['execution_id']})"),
        ("request", f"{row['position']} of invocation {row['invocation']}"),
        ("epoch", str(row["epoch"])),
    ]
    for share in row["shares"] or ():
        alone = ", exclusive" if share["exclusive"] else ""
        facts.append(("share", f"{share['device']} {share['device_id']}: {format_bytes(share['memory_bytes'])}{alone}"))
    for holder in row["holders"] or ():
        left = (
            "holds it"
            if holder["left_at"] is None
            else f"{holder['end_reason']} {local(datetime.fromisoformat(holder['left_at']))}"
        )
        label = f", {holder['label']}" if holder["label"] else ""
        facts.append(("holder", f"pid {holder['pid']} of {holder['user']}{label}, {left}: {holder['command']}"))
    for event in row["events"]:
        who = f" (pid {event['pid']})" if event["pid"] is not None else ""
        facts.append(
            (
                "event",
                f"{local(event['at'])} {event['kind']}{who}{': ' if event['detail'] else ''}{event['detail'] or ''}",
            )
        )
    return facts
