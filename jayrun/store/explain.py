"""One unchanging picture of the book for `why` and `can`: read as an admission would find it; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from jayrun import kernel
from jayrun.domain.devices import Share
from jayrun.domain.ending import Endable
from jayrun.domain.explanation import Active, Ended, Explanation, Failure, Ready, Waiting
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.queue import Waiter, Worker
from jayrun.domain.requests import Request
from jayrun.domain.visible import Sight, Visible, asked_by
from jayrun.domain.why import Held, HostPicture, Outlook, Queued, RunningWorker, Who, knowing_workers, look_ahead
from jayrun.errors import UnknownId
from jayrun.store.devices import read_fleet
from jayrun.store.ids import new_id
from jayrun.store.reclaim import find_dead
from jayrun.store.requests import from_row
from jayrun.store.transactions import Book

_SETTINGS = "SELECT bypass_limit, grants_per_batch FROM jayrun.settings"
_HOSTS = "SELECT id, name FROM jayrun.hosts ORDER BY id"
_LEASES = """
SELECT v.host_id, v.id, v.execution_id, v.execution, v.pid, v."user", v.label, extract(epoch FROM v.age)::float8 AS age,
       (SELECT json_agg(json_build_array(s.device_id, d.host_index, s.memory_bytes, s.exclusive) ORDER BY d.host_index)
        FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id WHERE s.lease_id = v.id) AS shares,
       ARRAY(SELECT x.holder_id FROM jayrun.lease_holders x WHERE x.lease_id = v.id AND x.ended_at IS NULL) AS holders
FROM jayrun_audit.leases v ORDER BY v.granted_at
"""
# Of every shape as many as one admission looks at, as `jayrun.picture` does, and the unit in question.
_WAITERS = """
SELECT w.id, w.name, w.detached, w.host_id, w.queue_id, w.holder_id, w.priority, w.age, w.bypassed, w.shape, o.pid,
       coalesce(o.user_name, nullif(w.user_name, '')) AS user_name, coalesce(nullif(w.label, ''), o.label, '') AS label,
       o.visible,
       (SELECT json_agg(json_build_array(q.device, q.backend, q.is_group, q.min_devices, q.max_devices,
                                         q.prefer_max_devices, q.group_bytes, q.per_device_bytes, q.exclusive,
                                         q.device_id) ORDER BY m.id = m.unit_id, m.age, q.position)
        FROM jayrun.executions m JOIN jayrun.placement_requests q ON q.execution_id = m.id
        WHERE m.unit_id = w.id AND m.state = 'waiting') AS requests
FROM (SELECT e.*, row_number() OVER shape AS place
      FROM jayrun.executions e WHERE e.state = 'waiting' AND e.id = e.unit_id
      WINDOW shape AS (PARTITION BY e.queue_id, e.shape, e.dormant ORDER BY e.priority DESC, e.age)) w
LEFT JOIN jayrun.holders o ON o.id = w.holder_id
WHERE (w.place <= :batch AND NOT w.dormant) OR w.id = :unit
"""
_WORKERS = """
SELECT o.host_id, o.id, o.operators, o.silent, o.visible,
       EXISTS (SELECT FROM jayrun.executions t WHERE t.holder_id = o.id AND t.detached AND t.id = t.unit_id
               AND t.state IN ('admitted', 'running')) AS busy
FROM jayrun.holders o WHERE o.state = 'alive' AND o.operators <> '{}' ORDER BY o.registered_at
"""
# A set-up that waits, waits with its unit, and is explained by it.
_EXECUTION = """
SELECT e.id, e.name, e.kind, e.state, e.queue_id, e.priority, e.age, e.attempt, e.max_attempts, e.dormant, e.failure,
       h.name AS host, o.pid, coalesce(o.user_name, nullif(e.user_name, '')) AS user_name,
       coalesce(nullif(e.label, ''), o.label, '') AS label,
       extract(epoch FROM clock_timestamp() - CASE
           WHEN e.state IN ('succeeded', 'failed', 'cancelled') THEN e.ended_at
           WHEN e.state = 'waiting' THEN e.waiting_since
           WHEN e.state = 'admitted' THEN e.admitted_at
           WHEN e.state = 'running' THEN greatest(e.submitted_at, e.admitted_at, e.claimed_at)
           ELSE e.submitted_at END)::float8 AS seconds,
       extract(epoch FROM clock_timestamp() - e.cancelled_at)::float8 AS cancelled_seconds,
       greatest(extract(epoch FROM e.not_before - clock_timestamp())::float8, 0) AS pause_seconds
FROM jayrun.executions e
LEFT JOIN jayrun.hosts h ON h.id = e.host_id
LEFT JOIN jayrun.holders o ON o.id = e.holder_id
WHERE e.id = (SELECT CASE WHEN x.state IN ('waiting', 'admitted') THEN x.unit_id ELSE x.id END
              FROM jayrun.executions x WHERE x.id = :id)
"""
_PLACE_IN_QUEUE = """
SELECT count(*) FILTER (WHERE w.priority > :priority OR (w.priority = :priority AND w.age <= :age)), count(*)
FROM jayrun.executions w WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = :queue
"""
# Those whom the same workers would take before it.
_PLACE_AMONG_READY = """
SELECT 1 + count(*) FROM jayrun.executions r
WHERE r.state = 'ready' AND r.name = ANY (:operators) AND (:queue = 0 OR r.queue_id IN (0, :queue))
  AND (r.not_before IS NULL OR r.not_before <= clock_timestamp())
  AND (r.priority > :priority OR (r.priority = :priority AND r.age < :age))
"""


def explain(book: Book, execution_id: UUID) -> Explanation:
    """Where the execution stands, and if it waits, why. Raises `UnknownId`."""

    def unit(connection: Connection) -> Explanation:
        row = connection.execute(text(_EXECUTION), {"id": execution_id}).mappings().one_or_none()
        if row is None:
            raise UnknownId(f"no execution has the id {execution_id}: `jayrun executions list` shows them")
        failure = row["failure"]
        return Explanation(
            who=_who(row),
            kind=row["kind"],
            state=ExecutionState(row["state"]),
            priority=row["priority"],
            seconds=row["seconds"],
            failure=None if failure is None else Failure(failure.get("type", ""), failure.get("message", "")),
            situation=_situation(connection, row),
        )

    return book.read(unit)


def forecast(
    book: Book,
    host_id: int | None,
    request: Request,
    *,
    priority: int = 0,
    judged: bool = False,
    visible: Visible | None = None,
) -> Outlook:
    """What `request` may expect on the host as the last in line of its priority.

    `host_id` None is a host that the book does not know. `judged`: it is this very host, so the kernel tells which of
    its processes are dead; they count for nothing. `visible`: what a mask names to who asks, as of a holder.
    """

    def unit(connection: Connection) -> Outlook:
        dead = find_dead(connection.exec_driver_sql, host_id) if judged and host_id is not None else ()
        bypass_limit, everything = _picture(connection, dead=dead)
        unknown = HostPicture(id=0, name=kernel.host_name(), devices=())
        host = next((each for each in everything if each.id == host_id), unknown)
        _, sights = read_fleet(connection.exec_driver_sql, host.id)
        requests = asked_by([request], sights(visible))
        ask = Waiter(
            id=new_id(),
            priority=priority,
            age=1 + max((queued.waiter.age for queued in host.waiters), default=0),
            hosts=(host.id,),
            requests=requests,
            recorded=requests,
            shape="",
        )
        return look_ahead(ask, [host], bypass_limit)

    return book.read(unit)


def _situation(connection: Connection, row: Any) -> Waiting | Ready | Active | Ended:
    order = {"priority": row["priority"], "age": row["age"], "queue": row["queue_id"]}
    match ExecutionState(row["state"]):
        case ExecutionState.WAITING:
            bypass_limit, everything = _picture(connection, unit_id=row["id"])
            hosts = [host for host in everything if row["queue_id"] in (0, host.id)]
            mine = next(queued.waiter for host in hosts for queued in host.waiters if queued.waiter.id == row["id"])
            position, waiting = connection.execute(text(_PLACE_IN_QUEUE), order).one()
            return Waiting(
                position=position,
                waiting=waiting,
                queue=row["host"],
                requests=mine.requests,
                dormant=row["dormant"],
                outlook=look_ahead(mine, hosts, bypass_limit),
            )
        case ExecutionState.READY:
            _, everything = _picture(connection)
            hosts = [host for host in everything if row["queue_id"] in (0, host.id)]
            known = {row["name"]}.union(
                *(
                    each.worker.operators
                    for host in hosts
                    for each in host.workers
                    if row["name"] in each.worker.operators
                )
            )
            operators = {"operators": sorted(known)}
            return Ready(
                position=connection.execute(text(_PLACE_AMONG_READY), order | operators).scalar_one(),
                attempt=row["attempt"],
                max_attempts=row["max_attempts"],
                pause_seconds=row["pause_seconds"] or 0,
                workers=knowing_workers(row["name"], hosts),
            )
        case ExecutionState.RUNNING | ExecutionState.ADMITTED:
            leases = [held for held in _leases(connection) if held[1].who.execution_id == row["id"]]
            return Active(
                host=row["host"],
                leases=tuple(held for _, held, _ in leases),
                cancelled_seconds=row["cancelled_seconds"],
            )
        case ExecutionState.SUCCEEDED | ExecutionState.FAILED | ExecutionState.CANCELLED:
            return Ended()


def _picture(
    connection: Connection, *, unit_id: UUID | None = None, dead: Collection[UUID] = ()
) -> tuple[int, list[HostPicture]]:
    """The bypass limit and every host, without the `dead` holders; `unit_id` is among the waiters in any case."""
    bypass_limit, batch = connection.execute(text(_SETTINGS)).one()
    hosts = connection.execute(text(_HOSTS)).all()
    leases = _leases(connection)
    fleets = {host_id: read_fleet(connection.exec_driver_sql, host_id) for host_id, _ in hosts}
    waiters = [
        (row["queue_id"], Queued(_waiter(row, {host_id: sight for host_id, (_, sight) in fleets.items()}), _who(row)))
        for row in connection.execute(text(_WAITERS), {"batch": batch, "unit": unit_id}).mappings()
        if row["holder_id"] not in dead
    ]
    workers = [
        (
            row.host_id,
            RunningWorker(
                Worker(row.id, frozenset(row.operators), fleets[row.host_id][1](row.visible)), row.busy, row.silent
            ),
        )
        for row in connection.execute(text(_WORKERS))
        if row.id not in dead
    ]
    pictures = []
    for host_id, name in hosts:
        mine = [(held, all(holder in dead for holder in holders)) for host, held, holders in leases if host == host_id]
        ended = [share for held, over in mine if over for share in held.lease.shares]
        fleet, _ = fleets[host_id]
        pictures.append(
            HostPicture(
                id=host_id,
                name=name,
                devices=tuple(device.without_shares(ended) for device in fleet),
                leases=tuple(held for held, over in mine if not over),
                waiters=tuple(queued for queue_id, queued in waiters if queue_id in (0, host_id)),
                workers=tuple(worker for host, worker in workers if host == host_id),
            )
        )
    return bypass_limit, pictures


def _leases(connection: Connection) -> list[tuple[int, Held, list[UUID]]]:
    """Every live lease with its host and its holders, oldest first."""
    found = []
    for row in connection.execute(text(_LEASES)):
        shares = tuple(Share(*share) for share in row.shares)
        who = Who(row.execution_id, row.execution, row.pid, row.user, row.label or "")
        # Of two that would both do, the one held for longer is the likelier to end.
        found.append((row.host_id, Held(Endable(row.id, shares, -row.age), who, row.age), row.holders))
    return found


def _waiter(row: Any, sights: Mapping[int, Callable[[Visible | None], Sight]]) -> Waiter:
    requests = tuple(from_row(request) for request in row["requests"] or ())
    if row["holder_id"] is not None:
        requests = asked_by(requests, sights[row["host_id"]](row["visible"]))
    return Waiter(
        id=row["id"],
        priority=row["priority"],
        age=row["age"],
        hosts=tuple(sights) if row["host_id"] is None else (row["host_id"],),
        requests=requests,
        bypassed=row["bypassed"],
        shape=row["shape"],
        operator=row["name"] if row["detached"] else None,
    )


def _who(row: Any) -> Who:
    return Who(row["id"], row["name"], row["pid"], row["user_name"], row["label"])
