"""`jayrun worker`: run what was submitted to the book."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from importlib.machinery import PathFinder
from typing import Annotated

import typer

from jayrun import kernel, probes
from jayrun.runtime.supervisor import Crew, Supervisor
from jayrun.runtime.within import surrounding
from jayrun.settings import Settings
from jayrun.store import holders

from .book import open_book


def worker(
    modules: Annotated[
        list[str],
        typer.Argument(metavar="MODULE...", help="Modules with operators, as Python imports them.", show_default=False),
    ],
    processes: Annotated[int, typer.Option(min=1, max=1024, help="How many executions run at once.")] = 1,
    label: Annotated[str | None, typer.Option(help="Shown beside everything the workers hold.")] = None,
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast", help="Take nothing new once an execution has failed for good; then exit with 1."),
    ] = False,
    drain_timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="How long a drain may take; default: as long as what runs."),
    ] = None,
) -> None:
    """Run submitted executions of the operators in MODULE.

    Each process runs one execution at a time; one that waits for capacity occupies none. The first SIGTERM, SIGHUP or
    Ctrl-C drains: what runs is finished, nothing new is taken. A second one, or the drain timeout, gives what runs back
    to the book, for other workers.
    """
    _check(modules)
    settings = Settings.load()
    probes.arm_from_settings(settings.probes)
    crew = Crew(
        modules=tuple(modules),
        processes=processes,
        label=settings.label if label is None else label,
        fail_fast=fail_fast,
        drain_seconds=drain_timeout,
    )
    with closing(open_book(settings, role="supervisor", start=True)) as book:
        host_id = holders.attest_host(book, settings.host_id)
        if (around := surrounding(book, host_id, settings.lease, None)) is not None:
            raise typer.BadParameter(
                f"this runs inside `jayrun run` (JAYRUN_LEASE={around.lease.id}), where only that lease's devices are "
                "seen, but what a worker runs gets leases of its own: start it outside, or unset JAYRUN_LEASE and "
                "CUDA_VISIBLE_DEVICES"
            )
        _say(f"{processes} worker{'' if processes == 1 else 's'} for {', '.join(modules)} on {kernel.host_name()}")
        code = Supervisor(book, host_id, crew, say=_say).run()
    raise typer.Exit(code)


def _check(modules: list[str]) -> None:
    """Refuse what is no module, without importing any: this process runs no code of the user's."""
    for name in modules:
        if name.endswith(".py"):
            raise typer.BadParameter(f"{name!r}: write {name.removesuffix('.py').replace('/', '.')!r}, as for import")
        package = name.partition(".")[0]
        folder = os.getcwd()
        if PathFinder.find_spec(package, [folder, *sys.path]) is None:
            raise typer.BadParameter(f"there is no module {package!r} in {folder} or on Python's path")


def _say(line: str) -> None:
    typer.echo(f"jayrun worker {os.getpid()}: {line}", err=True)
