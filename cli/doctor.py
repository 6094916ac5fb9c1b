"""`jayrun doctor`: whether everything that jayrun stands on is well."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from jayrun.domain.health import Finding, State
from jayrun.settings import Settings

from .exits import FAILED
from .render import printable, to_json

_COLOURS = {
    State.OK: typer.colors.GREEN,
    State.SKIPPED: typer.colors.BRIGHT_BLACK,
    State.WARNING: typer.colors.YELLOW,
    State.FAILED: typer.colors.RED,
}


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list of check, state, detail and next.")
    ] = False,
) -> None:
    """Check everything that jayrun stands on.

    One line each, with what is wrong and what to type next: this environment, the book and its server, this host, its
    devices and their driver. Starts, writes and repairs nothing. Exit code 1 if a check failed; warnings and what was
    skipped leave it 0.
    """
    from jayrun.runtime.doctor import examine

    started = time.monotonic()
    findings = []
    for finding in examine(Settings.load()):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        typer.echo(to_json([asdict(finding) for finding in findings]))
    else:
        counts = Counter(finding.state for finding in findings)
        told = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
        typer.echo(f"{told}; took {time.monotonic() - started:.1f} s")
    bad = {State.FAILED, State.WARNING} if strict else {State.FAILED}
    if any(finding.state in bad for finding in findings):
        raise typer.Exit(FAILED)


def _show(finding: Finding) -> None:
    state = typer.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
    todo = f"  -> {finding.next}" if finding.next is not None else ""
    typer.echo(f"{state} {finding.check:<12}  {printable(finding.detail + todo)}")
