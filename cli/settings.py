"""`jayrun settings`: what holds for the whole book."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from jayrun.settings import Settings
from jayrun.store import settings as booked

from .book import open_book
from .exits import checked_arguments
from .options import AsJson
from .render import Column, Row, show_rows

settings = typer.Typer(help="Show and change the settings of the book.", no_args_is_help=True)


def _shown(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("VALUE", lambda row: _shown(row["value"]), number=True),
    Column("DEFAULT", lambda row: _shown(row["default"]), number=True, spare=1),
    Column("MEANING", lambda row: row["meaning"], folds=True, below=True),
)


@settings.command("list")
def list_(as_json: AsJson = False) -> None:
    """List every setting: its value, its default and its meaning."""
    with closing(open_book(Settings.load())) as book:
        rows = booked.read(book)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="")


@settings.command("set", context_settings={"ignore_unknown_options": True})
def set_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A setting, as `jayrun settings list` names it.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="A number, or on or off. Spans of time are in seconds.")
    ],
    as_json: AsJson = False,
) -> None:
    """Change a setting, for every process that uses the book.

    It takes effect at their next tick at the latest.
    """
    with closing(open_book(Settings.load())) as book:
        with checked_arguments():
            booked.change(book, name, value)
        rows: list[Row] = [row for row in booked.read(book) if row["name"] == name]
    if as_json:
        show_rows(rows, COLUMNS, as_json=True, nothing="")
    else:
        typer.echo(f"{name} is {_shown(rows[0]['value'])}")
