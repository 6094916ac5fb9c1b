"""Executions submitted to the book, by those who ask for them: written once per key, looked at, cancelled, retried."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import ClientCursor
from psycopg import Connection as PgConnection

from jayrun import kernel
from jayrun.domain.checks import MAX_BACKOFF, MAX_PAUSE_SECONDS, number, whole_number
from jayrun.domain.documents import check_text, to_json
from jayrun.domain.lifecycle import TERMINAL, ExecutionState
from jayrun.errors import KeyTaken, NotRetryable, UnknownId
from jayrun.store import admission, executions
from jayrun.store.ids import new_id
from jayrun.store.texts import plain, rendered
from jayrun.store.transactions import Book

# Of two with one key the first stays. The look whether a worker is idle comes after the commit (see wake_workers).
_SUBMIT = """
BEGIN;
INSERT INTO jayrun.executions (id, kind, detached, name, unit_id, host_id, pinned_host_id, state, priority, key, inputs,
                               max_attempts, retry_on, retry_seconds, retry_backoff, user_name, label)
VALUES (%s, 'operator', true, %s, %s, %s, %s, 'ready', %s, %s, %s::jsonb, %s, %s::text[], %s, %s, %s, %s)
ON CONFLICT DO NOTHING;
COMMIT;
SELECT jayrun.wake_workers(%s, %s)
"""
_BY_KEY = """
SELECT id, name, inputs, priority, pinned_host_id, max_attempts, retry_on, retry_seconds, retry_backoff,
       inputs = %s::jsonb
FROM jayrun.executions WHERE id = %s OR key = %s
"""
_LOOK = """
SELECT e.id, e.name, e.state, e.result, e.result_kind, e.failure, e.attempt, e.key, e.priority, e.detached, e.unit_id,
       e.holder_id, e.host_id, e.cancelled_at IS NOT NULL
FROM jayrun.executions e WHERE e.id = %s
"""
_WATCH = """
UPDATE jayrun.executions SET watched = true WHERE id = %s AND NOT watched AND ended_at IS NULL RETURNING id
"""
_CANCEL_READY = """
UPDATE jayrun.executions SET state = 'cancelled', cancelled_at = clock_timestamp(), ended_at = clock_timestamp(),
    failure = %s::jsonb
WHERE id = %s AND state = 'ready' RETURNING host_id, holder_id
"""
_CANCEL_RUNNING = """
UPDATE jayrun.executions SET cancelled_at = coalesce(cancelled_at, clock_timestamp())
WHERE id = %s AND state = 'running' RETURNING host_id, holder_id
"""
_WAITED_ON = """
SELECT h.id FROM jayrun.hosts h
WHERE EXISTS (SELECT FROM jayrun.executions w
              WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id IN (0, h.id)) ORDER BY h.id
"""
_TELL = "SELECT jayrun.tell(%s)"
_RETRY = """
UPDATE jayrun.executions SET state = 'ready', attempt = 1, crashes = 0, not_before = NULL, cancelled_at = NULL,
    ended_at = NULL, holder_id = NULL, host_id = pinned_host_id, result = NULL, result_kind = NULL
WHERE id = %s AND detached AND id = unit_id AND state IN ('failed', 'cancelled') RETURNING name, pinned_host_id
"""

MAX_KEY_BYTES = 1_000
"""The longest key; the database indexes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What is asked for: an operator by name, its inputs as JSON text, and on which terms.

    `host_id` pins it to a host. `retry_on` are exception names; before attempt n+1 it pauses for `retry_seconds` times
    `retry_backoff` to the power of n-1.
    """

    name: str
    inputs: str
    priority: int = 0
    key: str | None = None
    host_id: int | None = None
    max_attempts: int = 1
    retry_on: tuple[str, ...] = ()
    retry_seconds: float = 0
    retry_backoff: float = 1
    label: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """An execution as it stands in the book."""

    id: UUID
    name: str
    state: ExecutionState
    result: Any
    result_kind: str | None
    failure: dict[str, Any] | None
    attempt: int
    key: str | None
    priority: int
    detached: bool
    unit_id: UUID
    holder_id: UUID | None
    host_id: int | None
    cancelling: bool

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL


def submission(name: str, inputs: Mapping[str, object], **terms: Any) -> Submission:
    """A checked `Submission` of the operator `name`; `terms` are its other fields.

    Raises TypeError and ValueError for what the book cannot hold, naming argument and value.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"operator must be the name of a class, not {name!r}")
    if (key := terms.get("key")) is not None:
        check_text(key, "key")
        if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
            raise ValueError(f"key must be text of 1 to {MAX_KEY_BYTES} bytes, not {key!r}")
    priority = whole_number(terms.pop("priority", 0), "priority", minimum=-(2**31))
    whole_number(terms.get("max_attempts", 1), "max_attempts", minimum=1)
    for term, least, most in (("retry_seconds", 0, MAX_PAUSE_SECONDS), ("retry_backoff", 1, MAX_BACKOFF)):
        number(terms.get(term, least), term, minimum=least, maximum=most)
    return Submission(name=name, inputs=to_json(dict(inputs), "inputs"), priority=priority, **terms)


def submit(book: Book, wanted: Submission) -> UUID:
    """Write `wanted` into the book, durably, and wake an idle worker; returns its id.

    With a key that the book has already nothing is written: the id is that of the first. Raises `KeyTaken` when that
    one is something else.
    """
    execution_id = new_id()
    values = (
        *(execution_id, plain(wanted.name), execution_id, wanted.host_id, wanted.host_id, wanted.priority),
        *(wanted.key, wanted.inputs, wanted.max_attempts, list(wanted.retry_on), wanted.retry_seconds),
        *(wanted.retry_backoff, kernel.user_name(), plain(wanted.label)),
        *(wanted.name, wanted.host_id),
    )
    message = rendered(_SUBMIT, values)

    def unit(pg: PgConnection[Any]) -> UUID:
        cursor = ClientCursor(pg)
        cursor.execute(message)
        if wanted.key is None:  # also when a lost answer made us ask twice
            return execution_id
        found = pg.execute(_BY_KEY, (wanted.inputs, execution_id, wanted.key)).fetchone()
        assert found is not None
        if found[0] != execution_id:
            _check_equal(wanted, found)
        return UUID(str(found[0]))

    return book.written(unit)


def _check_equal(wanted: Submission, found: Sequence[Any]) -> None:
    terms = ("priority", "host_id", "max_attempts", "retry_on", "retry_seconds", "retry_backoff")
    asked = {"operator": wanted.name, "inputs": wanted.inputs} | {term: getattr(wanted, term) for term in terms}
    stands = {"operator": found[1], "inputs": json.dumps(found[2])} | dict(zip(terms, found[3:9], strict=True))
    stands["retry_on"] = tuple(stands["retry_on"])
    differing = [name for name in asked if asked[name] != stands[name] and not (name == "inputs" and found[9])]
    if differing:
        both = "\n".join(f"  {name}: {stands[name]} in the book, {asked[name]} now" for name in differing)
        raise KeyTaken(f"the key {wanted.key!r} belongs to execution {found[0]}, which differs:\n{both}")


def look(book: Book, execution_id: UUID) -> Look:
    """The execution as it stands. Raises `UnknownId`."""

    def unit(pg: PgConnection[Any]) -> Look:
        row = pg.execute(_LOOK, (execution_id,)).fetchone()
        if row is None:
            raise UnknownId(f"no execution has the id {execution_id}: `jayrun executions list` shows them")
        return Look(row[0], row[1], ExecutionState(row[2]), *row[3:])

    return book.written(unit)


def watch(book: Book, execution_id: UUID) -> None:
    """Let the end of the execution be notified, by its id."""

    def unit(pg: PgConnection[Any]) -> None:
        if pg.execute(_WATCH, (execution_id,)).fetchone():
            # A worker that looked while the row was locked has passed it over.
            pg.execute(executions.WAKE_FOR, (execution_id,))

    book.written(unit)


def cancel(book: Book, execution_id: UUID, *, who: str) -> Look:
    """End an execution that waits for anything; ask one that runs to end. Returns it as it stands then.

    Nothing changes for one that has ended. A running attached one is refused its next request; a worker that goes on
    for the book's `cancel_seconds` is ended. Raises `UnknownId`.
    """
    failure = {"type": "PlacementCancelled", "message": f"cancelled by {who}"}
    while True:
        found = look(book, execution_id)
        if found.has_ended:
            return found
        if found.unit_id != found.id:
            raise UnknownId(f"{execution_id} sets a resource up for execution {found.unit_id}: cancel that one")

        was: executions.Withdrawn | None
        if found.state in (ExecutionState.READY, ExecutionState.RUNNING):
            was = _cancel(book, found, failure)
        else:
            was = executions.withdraw(book, execution_id, state=ExecutionState.CANCELLED, failure=failure)
        if was is not None:
            # Whoever waits for it hears of it: its own process, and those that watch it.
            names = [str(name) for name in (was.holder_id, execution_id) if name]
            book.written(lambda pg, names=names: pg.execute(_TELL, (names,)))  # type: ignore[misc]
            # What was granted to it, or kept for it, is for the next there: wherever that may have been.
            for host_id in _waited_on(book) if was.host_id is None else [was.host_id]:
                admission.combine(book, host_id)
            return look(book, execution_id)


def _cancel(book: Book, found: Look, failure: dict[str, str]) -> executions.Withdrawn | None:
    statement, values = _CANCEL_RUNNING, (found.id,)
    if found.state is ExecutionState.READY:
        statement, values = _CANCEL_READY, (json.dumps(failure), found.id)  # type: ignore[assignment]
    row = book.written(lambda pg: pg.execute(statement, values).fetchone())
    return executions.Withdrawn(*row) if row else None


def _waited_on(book: Book) -> list[int]:
    """The hosts on which somebody waits."""
    return [row[0] for row in book.written(lambda pg: pg.execute(_WAITED_ON).fetchall())]


def retry(book: Book, execution_id: UUID) -> Look:
    """Let an execution that failed or was cancelled be run again, its attempts counted anew.

    What it recorded stays recorded. Raises `UnknownId`, and `NotRetryable` for one that lived in a process or
    has succeeded. Nothing changes for one that has not ended.
    """
    found = look(book, execution_id)
    if not found.detached or found.unit_id != found.id:
        raise NotRetryable(
            f"execution {execution_id} ({found.name}) belonged to a process and cannot be run by a worker: "
            "only submitted ones can be retried"
        )
    if found.state is ExecutionState.SUCCEEDED:
        raise NotRetryable(f"execution {execution_id} ({found.name}) has succeeded; submit it again to run it again")

    def unit(pg: PgConnection[Any]) -> None:
        if (row := pg.execute(_RETRY, (execution_id,)).fetchone()) is not None:
            pg.execute("SELECT jayrun.wake_workers(%s, %s)", row)

    book.written(unit)
    return look(book, execution_id)
