"""What `jayrun demo` shows while it runs: a live table in a terminal, a line a second elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from jayrun.domain.units import GIGABYTE, format_bytes

from .render import Row, printable, ranges, short_id

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BAR = 24
MOST_LEASES = 10
MOST_WAITERS = 6
LINE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The book at one moment of the demo."""

    seconds: float
    devices: list[Row]
    leases: list[Row]
    queue: list[Row]
    violations: int


@dataclass(frozen=True, slots=True)
class Screen:
    """`show` a moment; `say` something worth a line that stays."""

    show: Callable[[Moment], None]
    say: Callable[[str], None]


@contextmanager
def screen(*, stderr: bool = False) -> Iterator[Screen]:
    """A screen on standard output, or on standard error, for as long as the block lasts."""
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    say = _sayer(console)
    if console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:  # the last picture stays
            yield Screen(lambda moment: live.update(picture(moment), refresh=True), say)
        return
    told_at = -LINE_SECONDS

    def show(moment: Moment) -> None:
        nonlocal told_at
        if moment.seconds - told_at >= LINE_SECONDS:
            told_at = moment.seconds
            say(line(moment))

    yield Screen(show, say)


def line(moment: Moment) -> str:
    """The moment in one line."""
    devices = "  ".join(f"{_name(row)} {_gigabytes(row)} GB" for row in moment.devices)
    counts = f"{len(moment.leases)} leases  {len(moment.queue)} waiting  {moment.violations} violations"
    return f"{moment.seconds:5.1f} s  {devices}  {counts}"


def picture(moment: Moment) -> RenderableType:
    """The moment as tables: devices with bars, leases, the queue."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    devices = Table(box=None, title=f"{moment.seconds:.1f} s", title_justify="left", padding=(0, 2, 0, 0))
    for title in ("DEVICE", "RESERVED", "", "LEASES"):
        devices.add_column(title, no_wrap=True)
    for row in moment.devices:
        leased = "exclusive" if row["exclusively_leased"] else str(row["leases"])
        devices.add_row(_name(row), Text(bar(row), style="cyan"), f"{_gigabytes(row)} GB", leased)
    leases = Table(box=None, title="leases", title_justify="left", padding=(0, 2, 0, 0))
    for title in ("ID", "DEVICES", "MEMORY", "OPERATOR", "WORKER", "PID", "AGE"):
        leases.add_column(title, no_wrap=True)
    for row in moment.leases[:MOST_LEASES]:
        memory = "exclusive" if row["exclusive"] else format_bytes(row["memory_bytes"])
        who = (row["execution"], printable(row["label"] or ""), str(row["pid"]), _age(row["age"]))
        leases.add_row(short_id(row["id"]), ranges(row["device_ids"]), memory, *who)
    queue = Table(box=None, title="queue", title_justify="left", padding=(0, 2, 0, 0))
    for title in ("POS", "OPERATOR", "ASKS", "WORKER", "WAITING"):
        queue.add_column(title, no_wrap=True)
    for row in moment.queue[:MOST_WAITERS]:
        what = (str(row["position"]), row["execution"], row["asks"])
        queue.add_row(*what, printable(row["label"] or ""), _age(row["waiting"]))
    more = [
        f"and {count - shown} more {what}"
        for what, count, shown in (
            ("leases", len(moment.leases), MOST_LEASES),
            ("waiting", len(moment.queue), MOST_WAITERS),
        )
        if count > shown
    ]
    foot = "  ".join([f"violations: {moment.violations}", *more])
    return Group(devices, leases, queue, Text(foot, style="bold red" if moment.violations else ""))


def bar(device: Row, width: int = BAR) -> str:
    """How full a device is; one that somebody has for himself is full."""
    share = 1.0 if device["exclusively_leased"] else device["reserved_bytes"] / max(device["capacity_bytes"], 1)
    filled = min(round(share * width), width)
    return "█" * filled + "░" * (width - filled)


def _name(device: Row) -> str:
    return f"{device['device']} {device['device_id']}"


def _gigabytes(device: Row) -> str:
    used = "all" if device["exclusively_leased"] else f"{device['reserved_bytes'] / GIGABYTE:.0f}"
    return f"{used}/{device['capacity_bytes'] / GIGABYTE:.0f}"


def _age(passed: timedelta) -> str:
    return f"{passed.total_seconds():.1f} s"


def _sayer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True)
