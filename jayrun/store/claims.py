"""What workers take and how it ended: one transaction finishes the last execution and claims the next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.liveness import Incarnation
from jayrun.domain.requests import Request
from jayrun.store.executions import WAKE_FOR, Claimed, claimed_unit
from jayrun.store.requests import from_row
from jayrun.store.texts import plain_failure
from jayrun.store.transactions import Book

_NEXT = "SELECT * FROM jayrun.next_execution(%s, %s::jsonb, %s)"
_PASS_ON = "SELECT jayrun.pass_on(%s)"
_ACCEPT = "UPDATE jayrun.holders SET operators = %s, silent = false WHERE id = %s AND state = 'alive'"
_KNOWN = "SELECT DISTINCT unnest(operators) FROM jayrun.holders WHERE state = 'alive' AND role = 'worker' ORDER BY 1"
# Workers that still run what was cancelled too long ago; their supervisor ends them.
_OVERDUE = """
SELECT o.boot_id, o.pid_namespace, o.pid, o.start_ticks, e.id
FROM jayrun.executions e JOIN jayrun.holders o ON o.id = e.holder_id, jayrun.settings s
WHERE e.state = 'running' AND e.detached AND o.host_id = %s AND o.role = 'worker' AND o.state = 'alive'
  AND e.cancelled_at < clock_timestamp() - make_interval(secs => s.cancel_seconds)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One execution of a taken unit: a set-up says in `setting_up` of which resource; `recorded` is its sequence."""

    id: UUID
    name: str
    setting_up: str | None
    recorded: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An execution that this worker runs now, by claim number `claim`; `unit` is what it was admitted with, if so."""

    id: UUID
    name: str
    inputs: dict[str, Any]
    claim: int
    attempt: int
    priority: int
    pinned_host_id: int | None
    max_attempts: int
    retry_on: tuple[str, ...]
    retry_seconds: float
    retry_backoff: float
    members: tuple[Member, ...]
    unit: Claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a taken execution ended: succeeded, failed, cancelled, or ready again (after `pause_seconds`; with a
    `failure` that counts as an attempt). `result` is JSON text."""

    id: UUID
    claim: int
    state: ExecutionState
    result: str | None = None
    result_kind: str | None = None
    failure: Mapping[str, Any] | None = None
    pause_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Next:
    """What `take` brought.

    Whether the book still has this worker as alive; whether what was done counted (None: nothing was told); whether
    somebody who waits stands before what is ready (then combine and take again); and the next execution, if any.
    """

    is_alive: bool
    finished: bool | None
    waits: bool
    taken: Taken | None


def accept(book: Book, worker_id: UUID, operators: Sequence[str]) -> None:
    """From now on the worker takes these operators; none while it drains."""

    def unit(pg: PgConnection[Any]) -> None:
        if not operators:
            pg.execute(_PASS_ON, (worker_id,))  # perhaps it was woken for what it will not take
        pg.execute(_ACCEPT, (sorted(operators), worker_id))

    book.written(unit)


def take(book: Book, worker_id: UUID, done: Done | None = None, *, before_waiting: bool = False) -> Next:
    """Tell how the last execution ended and take the next, in one commit.

    What a worker was given or had taken, unheard, comes first; then what is ready, by priority and age. With
    `before_waiting` off, nothing ready is taken that comes after somebody who waits for a worker.
    """
    told = None
    if done is not None:
        told = json.dumps(
            {
                "id": str(done.id),
                "claim": done.claim,
                "state": done.state.value,
                "result": None if done.result is None else json.loads(done.result),
                "result_kind": done.result_kind,
                "failure": plain_failure(done.failure),
                "pause_seconds": done.pause_seconds,
            }
        )

    def unit(pg: PgConnection[Any]) -> Next:
        row = pg.execute(_NEXT, (worker_id, told, before_waiting)).fetchone()
        assert row is not None
        is_alive, finished, waits, taken = row
        if finished:
            probes.reach("take.finished")
        if taken is not None:
            probes.reach("take.claimed")
        # It was idle, and perhaps woken; whoever wakes workers wakes one, and saw it idle until this commit.
        if done is None and taken is not None:
            pg.execute(_PASS_ON, (worker_id,))
        if done is not None and finished and done.state is ExecutionState.READY:
            pg.execute(WAKE_FOR, (done.id,))
        return Next(is_alive, finished, waits, None if taken is None else _taken(taken))

    return book.written(unit)


def _taken(row: dict[str, Any]) -> Taken:
    head = UUID(row["id"])
    unit = row["unit"] or [[row["id"], row["name"], row["invocation"], row["age"], None, None, None]]
    members = tuple(
        Member(
            id=UUID(id_),
            name=name,
            setting_up=None if id_ == row["id"] else inputs,
            recorded=tuple(from_row(each) for each in recorded or ()),
        )
        for id_, name, _, _, inputs, recorded, _ in unit
    )
    terms = {name: row[name] for name in ("max_attempts", "retry_seconds", "retry_backoff", "pinned_host_id")}
    return Taken(
        id=head,
        name=row["name"],
        inputs=row["inputs"] or {},
        claim=row["claim"],
        attempt=row["attempt"],
        priority=row["priority"],
        retry_on=tuple(row["retry_on"]),
        members=members,
        unit=claimed_unit(unit),
        **terms,
    )


def overdue(book: Book, host_id: int) -> list[tuple[Incarnation, UUID]]:
    """Workers of the host that go on with an execution long after it was cancelled, and the execution."""
    rows = book.written(lambda pg: pg.execute(_OVERDUE, (host_id,)).fetchall())
    return [(Incarnation(*row[:4]), row[4]) for row in rows]


def known_operators(book: Book) -> list[str]:
    """The operators that running workers know, sorted."""
    return [row[0] for row in book.written(lambda pg: pg.execute(_KNOWN).fetchall())]
