"""The command `jayrun`."""

from __future__ import annotations

import errno
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jayrun.errors import JayrunError

from .audit import audit
from .can import can
from .db import db
from .demo import demo
from .devices import devices
from .doctor import doctor
from .executions import executions
from .exits import FAILED, INTERRUPTED, exit_code
from .holders import holders
from .hosts import hosts
from .leases import leases
from .queue import queue
from .reconciler import reconciler
from .run import RunCommand, run
from .settings import settings
from .why import why
from .worker import worker


class Commands(TyperGroup):
    """The commands in the order in which one gets to know them; typer would list groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [
            *("run", "can", "devices", "leases", "queue", "why", "executions", "worker"),
            *("holders", "hosts", "audit", "settings", "db", "reconciler", "doctor", "demo"),
        ]


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(db, name="db")
app.add_typer(devices, name="devices")
app.add_typer(leases, name="leases")
app.command()(queue)
app.command()(why)
app.command()(can)
app.add_typer(executions, name="executions")
app.command()(worker)
app.add_typer(holders, name="holders")
app.add_typer(hosts, name="hosts")
app.command()(audit)
app.add_typer(settings, name="settings")
app.command()(reconciler)
app.command()(doctor)
app.command()(demo)
app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})(run)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jayrun {version('jayrun-leases')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """A durable lease manager for accelerator capacity, on PostgreSQL.

    Exit codes: 0 done, 1 failed, 2 usage, 3 impossible, 4 timed out waiting, 5 database not reachable.
    """


def main() -> None:
    """Run the command of this process's arguments, and end with its exit code."""
    try:
        app(prog_name="jayrun")
    except JayrunError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"error: cannot write: {error.strerror}", err=True)
        raise SystemExit(FAILED) from None
