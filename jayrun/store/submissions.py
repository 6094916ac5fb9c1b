"""Executions submitted to the book: written once per key, taken and finished by workers, cancelled, retried."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import ClientCursor
from psycopg import Connection as PgConnection

from jayrun import kernel, probes
from jayrun.domain.checks import MAX_BACKOFF, MAX_PAUSE_SECONDS, number, whole_number
from jayrun.domain.documents import to_json
from jayrun.domain.lifecycle import TERMINAL, ExecutionState
from jayrun.domain.liveness import Incarnation
from jayrun.domain.requests import Request
from jayrun.errors import KeyTaken, NotRetryable, UnknownId
from jayrun.store import executions
from jayrun.store.executions import Claimed
from jayrun.store.ids import new_id
from jayrun.store.leases import LEASES_OF_UNIT, read_row
from jayrun.store.requests import from_row
from jayrun.store.texts import plain, plain_failure, rendered
from jayrun.store.transactions import Book

# Of two with one key the first stays. The look whether a worker is idle comes after the commit (see
# wake_workers).
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
_NEXT = "SELECT * FROM jayrun.next_execution(%s, %s::jsonb, %s)"
_WAKE_FOR = """
SELECT jayrun.wake_workers(name, pinned_host_id) FROM jayrun.executions
WHERE id = %s AND state = 'ready' AND (not_before IS NULL OR not_before <= clock_timestamp())
"""
_PASS_ON = "SELECT jayrun.pass_on(%s)"
# The unit that was admitted together; without a wait there is only the head, with what it recorded in earlier tries.
_UNIT = """
jayrun.executions m JOIN jayrun.executions head ON head.id = %s
WHERE m.unit_id = head.id AND m.state = 'running' AND (m.id = head.id OR m.admitted_at = head.admitted_at)
"""
_MEMBERS = f"SELECT m.id, m.name, m.invocation, m.age, m.inputs FROM {_UNIT}"
_RECORDED = f"""
SELECT execution_id, device, backend, is_group, min_devices, max_devices, prefer_max_devices, group_bytes,
       per_device_bytes, exclusive, device_id
FROM jayrun.placement_requests WHERE execution_id IN (SELECT m.id FROM {_UNIT}) ORDER BY execution_id, position
"""
_ACCEPT = "UPDATE jayrun.holders SET operators = %s, silent = false WHERE id = %s AND state = 'alive'"
_LOOK = """
SELECT e.id, e.name, e.state, e.result, e.result_kind, e.failure, e.attempt, e.key, e.priority, e.detached, e.unit_id,
       e.holder_id, e.cancelled_at IS NOT NULL
FROM jayrun.executions e WHERE e.id = %s
"""
_WATCH = "UPDATE jayrun.executions SET watched = true WHERE id = %s AND NOT watched AND ended_at IS NULL"
_CANCEL_READY = """
UPDATE jayrun.executions SET state = 'cancelled', cancelled_at = clock_timestamp(), ended_at = clock_timestamp(),
    failure = %s::jsonb
WHERE id = %s AND state = 'ready' RETURNING id
"""
_CANCEL_RUNNING = """
UPDATE jayrun.executions SET cancelled_at = coalesce(cancelled_at, clock_timestamp())
WHERE id = %s AND state = 'running' RETURNING id
"""
_TELL = "SELECT pg_notify('jayrun', %s)"
_RETRY = """
UPDATE jayrun.executions SET state = 'ready', attempt = 1, crashes = 0, not_before = NULL, cancelled_at = NULL,
    ended_at = NULL, holder_id = NULL, host_id = pinned_host_id, result = NULL, result_kind = NULL
WHERE id = %s AND detached AND id = unit_id AND state IN ('failed', 'cancelled') RETURNING name, pinned_host_id
"""
_KNOWN = "SELECT DISTINCT unnest(operators) FROM jayrun.holders WHERE state = 'alive' AND role = 'worker' ORDER BY 1"
# Workers that still run what was cancelled too long ago; their supervisor ends them.
_OVERDUE = """
SELECT o.boot_id, o.pid_namespace, o.pid, o.start_ticks, e.id
FROM jayrun.executions e JOIN jayrun.holders o ON o.id = e.holder_id, jayrun.settings s
WHERE e.state = 'running' AND e.detached AND o.host_id = %s AND o.role = 'worker' AND o.state = 'alive'
  AND e.cancelled_at < clock_timestamp() - make_interval(secs => s.cancel_seconds)
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
    key = terms.get("key")
    if key is not None and (not isinstance(key, str) or not 0 < len(key.encode()) <= MAX_KEY_BYTES or "\0" in key):
        raise ValueError(f"key must be text of 1 to {MAX_KEY_BYTES} bytes, not {key!r}")
    priority = whole_number(terms.pop("priority", 0), "priority", minimum=-(2**31))
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
            pg.execute(_WAKE_FOR, (done.id,))
        return Next(is_alive, finished, waits, None if taken is None else _taken(pg, taken))

    return book.written(unit)


def _taken(pg: PgConnection[Any], row: dict[str, Any]) -> Taken:
    head = UUID(row["id"])
    described: list[Sequence[Any]] = [(head, row["name"], row["invocation"], row["age"], None)]
    recorded: dict[UUID, list[Request]] = {}
    leases = []
    if row["claim"] > 1 or row["has_waited"]:  # else it is new, and there is nothing else to read
        with pg.pipeline():  # one round trip
            found = pg.execute(_MEMBERS, (head,))
            requests = pg.execute(_RECORDED, (head,))
            granted = pg.execute(LEASES_OF_UNIT, (head,))
        described = found.fetchall()
        for each in requests.fetchall():
            recorded.setdefault(each[0], []).append(from_row(each[1:]))
        leases = [read_row(each) for each in granted.fetchall()]
    members = tuple(
        Member(
            id=each[0],
            name=each[1],
            setting_up=None if each[0] == head else each[4],
            recorded=tuple(recorded.get(each[0], ())),
        )
        for each in described
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
        unit=Claimed(
            {each[0]: (each[2], each[3]) for each in described},
            tuple(lease for lease in leases if lease.execution_id in {each[0] for each in described}),
        ),
        **terms,
    )


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
    book.written(lambda pg: pg.execute(_WATCH, (execution_id,)))


def cancel(book: Book, execution_id: UUID, *, who: str) -> Look:
    """End an execution that waits for anything; ask one that runs to end. Returns it as it stands then; combine.

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

        def unit(pg: PgConnection[Any], found: Look = found) -> bool:
            match found.state:
                case ExecutionState.READY:
                    return bool(pg.execute(_CANCEL_READY, (json.dumps(failure), execution_id)).fetchone())
                case ExecutionState.RUNNING:
                    return bool(pg.execute(_CANCEL_RUNNING, (execution_id,)).fetchone())
                case _:
                    return executions.withdraw(book, execution_id, state=ExecutionState.CANCELLED, failure=failure)

        if book.written(unit):
            # Whoever waits for it hears of it: its own process, and those that watch it.
            names = " ".join(str(name) for name in (found.holder_id, execution_id) if name)
            book.written(lambda pg, names=names: pg.execute(_TELL, (names,)))  # type: ignore[misc]
            return look(book, execution_id)


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


def overdue(book: Book, host_id: int) -> list[tuple[Incarnation, UUID]]:
    """Workers of the host that go on with an execution long after it was cancelled, and the execution."""
    rows = book.written(lambda pg: pg.execute(_OVERDUE, (host_id,)).fetchall())
    return [(Incarnation(*row[:4]), row[4]) for row in rows]


def known_operators(book: Book) -> list[str]:
    """The operators that running workers know, sorted."""
    return [row[0] for row in book.written(lambda pg: pg.execute(_KNOWN).fetchall())]
