"""`jayrun executions`: work in the book, of every process and of none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any

import typer

from jayrun import kernel
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.units import format_bytes
from jayrun.errors import PlacementTimeout
from jayrun.runtime.ticket import Ticket
from jayrun.settings import Settings
from jayrun.store import audit, claims, devices, submissions
from jayrun.store.submissions import submission
from jayrun.store.transactions import PATIENCE_SECONDS, Book

from .book import open_book, open_judged
from .exits import checked_arguments
from .options import AsJson
from .render import Column, Row, age, local, short_id, show_rows, to_json, to_lines

executions = typer.Typer(help="Submit work to the book, and see what became of it.", no_args_is_help=True)

ExecutionId = Annotated[
    str, typer.Argument(metavar="ID", help="An execution's id, or four or more characters of it.", show_default=False)
]

COLUMNS = (
    Column("ID", lambda row: short_id(row["id"])),
    Column("EXECUTION", lambda row: row["execution"]),
    Column("STATE", lambda row: "cancelling" if row["cancelling"] and not row["ended_at"] else row["state"]),
    Column("PRIORITY", lambda row: str(row["priority"]), number=True, spare=4),
    Column("ATTEMPT", lambda row: f"{row['attempt']}/{row['max_attempts']}", number=True, spare=5),
    Column("HOST", lambda row: row["host"] or "any", spare=2),
    Column("USER", lambda row: row["user"] or "-", spare=3),
    Column("PID", lambda row: str(row["pid"] or "-"), number=True, spare=6),
    Column("KEY", lambda row: row["key"] or "-", folds=True, spare=7),
    Column("AGE", lambda row: age(row["age"]), number=True),
    Column("FAILURE", lambda row: _failure(row), folds=True, below=True),
)


@executions.command("list")
def list_(
    state: Annotated[
        list[ExecutionState] | None, typer.Option(help="Only executions in this state; may be given several times.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only executions of this operator.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List executions, the newest first."""
    with closing(open_judged(Settings.load())) as book:
        rows = audit.executions(book, states=[each.value for each in state or ()], name=name, limit=limit)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="no executions")


@executions.command()
def show(execution: ExecutionId, as_json: AsJson = False) -> None:
    """Show one execution: inputs, result or failure, and who ran it."""
    with closing(open_judged(Settings.load())) as book:
        row = audit.execution(book, audit.find_execution(book, execution))
    typer.echo(to_json(row) if as_json else to_lines(_facts(row)))


@executions.command()
def submit(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The operator: the name of its class.", show_default=False)
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=VALUE", help="An input; VALUE is JSON, or else taken as text. May be repeated."
        ),
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher is served first.")] = 0,
    key: Annotated[str | None, typer.Option(help="Submitting again with the same key submits nothing.")] = None,
    host: Annotated[str | None, typer.Option(help="Run on this host only (name or identity).")] = None,
    max_attempts: Annotated[int, typer.Option(min=1, help="How often it is tried.")] = 1,
    retry_on: Annotated[
        list[str] | None, typer.Option(metavar="EXCEPTION", help="Which exceptions are tried again; default: all.")
    ] = None,
    retry_delay: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Pause before the second try.")] = 0,
    backoff: Annotated[float, typer.Option(min=1, help="By what the pause grows with each try.")] = 1,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until it has ended, and print its result as JSON.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="With --wait: stay no longer than this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit an execution, for any worker that knows the operator.

    Prints its id. With --wait the exit code tells how it ended: 1 failed or cancelled, 3 impossible, 4 still going on.
    """
    settings = Settings.load()
    if timeout is not None and not wait:
        raise typer.BadParameter("--timeout is for --wait", param_hint="--timeout")
    # A wait outlasts a restart of the server.
    with closing(open_book(settings, start=True, patience_seconds=PATIENCE_SECONDS if wait else 0)) as book:
        with checked_arguments():
            wanted = submission(
                name,
                _inputs(inputs or ()),
                priority=priority,
                key=key,
                host_id=None if host is None else devices.find_host(book, host),
                max_attempts=max_attempts,
                retry_on=tuple(retry_on or ["Exception"]),
                retry_seconds=retry_delay,
                retry_backoff=backoff,
                label=settings.label,
            )
        execution_id = submissions.submit(book, wanted)
        _warn_of_unknown(book, name)
        if not wait:
            typer.echo(json.dumps({"id": str(execution_id)}) if as_json else str(execution_id))
            return
        typer.echo(f"execution {execution_id}: waiting for its end; Ctrl-C leaves it in the book", err=True)
        ticket = Ticket(book, execution_id)
        found = ticket.wait(timeout)
        if as_json:
            told = {name: getattr(found, name) for name in ("state", "result", "result_kind", "failure")}
            typer.echo(json.dumps({"id": str(execution_id), **told}))
        try:
            result = ticket.result(0)
        except TimeoutError:
            raise PlacementTimeout(
                f"execution {execution_id} ({found.name}) is still {found.state} after {timeout:g} s and stays in the "
                f"book; `jayrun why {execution_id}` tells more"
            ) from None
        if as_json:
            return
        if found.result_kind == "json":
            typer.echo(json.dumps(result))
        else:
            typer.echo(f"its result is no JSON value on the CPU and was not kept: {found.result_kind}", err=True)


@executions.command()
def cancel(execution: ExecutionId, as_json: AsJson = False) -> None:
    """End an execution wherever it stands.

    One that waits ends at once. One that runs is refused its next request; a worker that goes on with it is ended after
    the book's cancel_seconds (10). A command of `jayrun run` that runs already goes on: end its process instead.
    """
    with closing(open_judged(Settings.load())) as book:
        found = submissions.cancel(book, audit.find_execution(book, execution), who=kernel.user_name())
        row = audit.execution(book, found.id)
    if as_json:
        typer.echo(to_json(row))
    elif found.has_ended and found.state is not ExecutionState.CANCELLED:
        typer.echo(f"{found.name} has {found.state} already; nothing was changed")
    elif row["kind"] == "command" and not found.has_ended:
        where = f"`kill {row['pid']}` on {row['host']}"
        typer.echo(f"{found.name} goes on: it is a command of {row['user']}, and {where} ends it")
    else:
        typer.echo(f"{found.name} is {'asked to end' if not found.has_ended else 'cancelled'}")


@executions.command()
def retry(execution: ExecutionId, as_json: AsJson = False) -> None:
    """Run an execution again that failed or was cancelled.

    Its attempts count anew; what it recorded stays recorded, so an operator whose requests have changed is submitted
    anew instead.
    """
    with closing(open_judged(Settings.load())) as book:
        found = submissions.retry(book, audit.find_execution(book, execution))
        row = audit.execution(book, found.id)
    changed = "" if found.state is ExecutionState.READY else "; nothing was changed"
    typer.echo(to_json(row) if as_json else f"{found.name} is {found.state}{changed}")


def _warn_of_unknown(book: Book, name: str) -> None:
    known = claims.known_operators(book)
    if name not in known:
        others = f"those that run know {', '.join(known)}" if known else "none runs"
        typer.echo(f"no running worker knows {name} yet ({others}): it waits for `jayrun worker MODULE`", err=True)


def _inputs(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each; a value that is no JSON is text."""
    values: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--input must be NAME=VALUE, not {each!r}")
        if name in values:
            raise ValueError(f"--input {name} is given twice")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def _failure(row: Row) -> str:
    failure = row["failure"] or {}
    return f"{failure['type']}: {failure.get('message', '')}".splitlines()[0] if "type" in failure else ""


def _facts(row: Row) -> list[tuple[str, str]]:
    where = row["host"] or ("-" if row["ended_at"] else "any host")
    if row["pid"]:
        where = f"pid {row['pid']} on {where}"
    attempt = f"{row['attempt']} of {row['max_attempts']}"
    if row["crashes"]:
        attempt += f"; crashes of its workers: {row['crashes']}"
    facts = [
        ("execution", str(row["id"])),
        ("operator" if row["kind"] == "operator" else row["kind"], row["execution"]),
        ("state", f"{row['state']}{', asked to end' if row['cancelling'] and not row['ended_at'] else ''}"),
        ("submitted", f"{local(row['submitted_at'])} by {row['user'] or '-'}"),
        ("runs on" if not row["ended_at"] else "ran on", where),
        ("priority", str(row["priority"])),
        ("attempt", attempt),
        ("waited", age(row["waited_seconds"])),
    ]
    for name in ("claimed_at", "waiting_since", "not_before", "ended_at"):
        if row[name] is not None:
            facts.append((name.replace("_", " "), local(row[name])))
    for name in ("key", "label"):
        if row[name]:
            facts.append((name, row[name]))
    if row["detached"]:
        facts.append(("inputs", _shown(row["inputs"])))
    if row["result_kind"]:
        kept = row["result_kind"] == "json"
        facts.append(("result", _shown(row["result"]) if kept else f"not kept: {row['result_kind']}"))
    failure = dict(row["failure"] or {})
    if failure:
        facts.append(("failure", _failure(row)))
        place = [f"{name} {failure[name]}" for name in ("attempt", "host", "pid") if name in failure]
        if "at" in failure:
            place.append(local(datetime.fromisoformat(failure["at"])))
        if place:
            facts.append(("failed in", ", ".join(place)))
        facts += [("", line) for line in str(failure.get("traceback", "")).splitlines()]
    return facts


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2_000 else f"{text[:2_000]}… ({format_bytes(len(text.encode()))})"
