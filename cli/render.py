"""Rows of the book for people (a table) and for programs (JSON). Pure, but for the few that print."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import groupby
from typing import Any, Literal
from uuid import UUID

import typer

from jayrun.domain.reasons import printable as printable
from jayrun.domain.reasons import short_id as short_id
from jayrun.domain.units import format_seconds

Row = dict[str, Any]

_UNLIMITED_WIDTH = 100_000
_GAP = 2
_LEAST_FOLDED = 8
_INDENT = " " * 4
_HERE_BELOW = "\ue000"  # marks a row's place; no cell has it, for it is not printable


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and what it says of a row.

    `number`: aligned to the right. `folds`: may take several lines where the terminal is narrow. `spare`: where that is
    not enough the column is left out, the highest number first; 0 stays. `below`: where not all columns fit, this one
    gets lines of its own under each row.
    """

    title: str
    text: Callable[[Row], str]
    number: bool = False
    folds: bool = False
    spare: int = 0
    below: bool = False


def to_json(value: Row | Sequence[Row]) -> str:
    """JSON with the columns as keys: times in ISO 8601 with their offset, intervals in seconds, ids as text."""
    return json.dumps(value, default=_plain, indent=2)


def to_table(rows: Iterable[Row], columns: Sequence[Column], *, width: int | None = None, styled: bool = False) -> str:
    """A table for a terminal of `width` characters (None: as wide as it needs); `styled` with a terminal's colours."""
    from rich.console import Console  # slow to import, and JSON does without it
    from rich.table import Table

    rows = list(rows)
    cells = {column: [printable(column.text(row)) for row in rows] for column in columns}
    below = [column for column in columns if column.below and width is not None and _width(cells) > width]
    texts = {column: cells.pop(column) for column in below}
    fitting = list(cells) if width is None else _fitting(cells, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold" if styled else "")
    for column in fitting:
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(column.title, justify=justify, no_wrap=not column.folds, overflow="fold")
    for number in range(len(rows)):
        table.add_row(*(cells[column][number] for column in fitting))
        if below:
            table.add_row(_HERE_BELOW)
    text = io.StringIO()
    console = Console(
        file=text, width=width or _UNLIMITED_WIDTH, force_terminal=styled, markup=False, highlight=False, emoji=False
    )
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")]
    under = (_indented([texts[column][number] for column in below], width) for number in range(len(rows)))
    filled = (next(under) if line.strip() == _HERE_BELOW else line for line in lines)
    return "\n".join(line for line in filled if line)


def _indented(texts: list[str], width: int | None) -> str:
    return "\n".join(
        textwrap.fill(text, width or _UNLIMITED_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        for text in texts
        if text != "-"
    )


def _width(cells: dict[Column, list[str]]) -> int:
    """How wide a table is where nothing folds."""
    from rich.cells import cell_len

    widest = [max(map(cell_len, [column.title, *texts])) for column, texts in cells.items()]
    return sum(widest) + _GAP * (len(widest) - 1)


def _fitting(cells: dict[Column, list[str]], width: int) -> list[Column]:
    """The columns that fit into `width`, those that fold being as narrow as may be."""
    from rich.cells import cell_len

    needs = {}
    for column, texts in cells.items():
        widest = max(map(cell_len, [column.title, *texts]))
        needs[column] = min(widest, max(_LEAST_FOLDED, len(column.title))) if column.folds else widest
    while sum(needs.values()) + _GAP * (len(needs) - 1) > width and any(column.spare for column in needs):
        del needs[max(needs, key=lambda column: column.spare)]
    return list(needs)


def to_lines(facts: Iterable[tuple[str, str]]) -> str:
    """One thing, a fact a line."""
    known = [(name, printable(text)) for name, text in facts]
    width = max(len(name) for name, _ in known)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in known)


def show_rows(rows: Sequence[Row], columns: Sequence[Column], *, as_json: bool, nothing: str) -> None:
    """Print a listing as JSON or as a table that fits the terminal; `nothing` is what to say of an empty one."""
    if as_json:
        typer.echo(to_json(rows))
    elif not rows:
        typer.echo(nothing)
    else:
        from rich.console import Console

        terminal = Console()
        width = terminal.width if terminal.is_terminal else None
        styled = terminal.is_terminal and not terminal.no_color and not terminal.is_dumb_terminal
        typer.echo(to_table(rows, columns, width=width, styled=styled), color=styled)


def age(passed: timedelta | float) -> str:
    """A span of time (a number means seconds) in its two largest units."""
    return format_seconds(passed.total_seconds() if isinstance(passed, timedelta) else passed)


def local(moment: datetime | None) -> str:
    """A moment in this machine's time zone, to the second."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with runs put together: `0-3,6`."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case UUID():
            return str(value)
        case Decimal():
            return int(value) if value == int(value) else float(value)
        case _:
            raise TypeError(f"no JSON for {value!r} ({type(value).__name__})")
