"""What one admission writes: collected while deciding, written as one document by one statement, then committed."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from jayrun.domain.devices import Share
from jayrun.domain.queue import Admission
from jayrun.domain.requests import Request
from jayrun.store.ids import new_id
from jayrun.store.picture import Picture, Slot
from jayrun.store.requests import COLUMNS, RECORD, to_record
from jayrun.store.transactions import Gate

# One statement writes one pass. Constraints and triggers see it whole, so the order within it does not matter.
_APPLY = f"""
WITH doc AS (SELECT %s::jsonb AS d),
new_executions AS (
    INSERT INTO jayrun.executions (
        id, kind, name, unit_id, host_id, holder_id, state, priority, shape, invocation, waiting_since)
    SELECT x.id, x.kind, x.name, x.unit_id, x.host_id, x.holder_id, x.state, x.priority, x.shape, x.invocation,
           CASE WHEN x.state = 'waiting' THEN clock_timestamp() END
    FROM doc, jsonb_to_recordset(doc.d -> 'executions') AS x (
        id uuid, kind text, name text, unit_id uuid, host_id bigint, holder_id uuid, state text, priority integer,
        shape text, invocation integer)),
new_requests AS (
    INSERT INTO jayrun.placement_requests (execution_id, position, {COLUMNS})
    SELECT x.* FROM doc, jsonb_to_recordset(doc.d -> 'requests') AS x (execution_id uuid, position integer, {RECORD})),
parked AS (
    UPDATE jayrun.executions e SET state = 'waiting', shape = x.shape, invocation = x.invocation, bypassed = 0,
        waiting_since = clock_timestamp()
    FROM doc, jsonb_to_recordset(doc.d -> 'parked') AS x (id uuid, shape text, invocation integer)
    WHERE e.id = x.id),
admitted AS (
    UPDATE jayrun.executions e SET state = 'admitted', invocation = e.invocation + 1, admitted_at = clock_timestamp(),
        waited_seconds = e.waited_seconds + extract(epoch FROM clock_timestamp() - e.waiting_since),
        waiting_since = NULL
    FROM doc WHERE doc.d ? 'admitted' AND e.state = 'waiting'
      AND e.unit_id IN (SELECT a::uuid FROM jsonb_array_elements_text(doc.d -> 'admitted') a)),
new_leases AS (
    INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
    SELECT x.id, x.execution_id, x.position, x.invocation, x.host_id
    FROM doc, jsonb_to_recordset(doc.d -> 'leases') AS x (
        id uuid, execution_id uuid, position integer, invocation integer, host_id bigint)
    RETURNING id, epoch),
new_shares AS (
    INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive)
    SELECT x.* FROM doc, jsonb_to_recordset(doc.d -> 'shares') AS x (
        lease_id uuid, device_id bigint, memory_bytes bigint, exclusive boolean)),
new_holders AS (
    INSERT INTO jayrun.lease_holders (lease_id, holder_id)
    SELECT x.id, x.holder_id FROM doc, jsonb_to_recordset(doc.d -> 'leases') AS x (id uuid, holder_id uuid))
SELECT id, epoch FROM new_leases
"""

_BYPASS = """
UPDATE jayrun.executions e SET bypassed = e.bypassed + x.times
FROM (SELECT e.id, count(*) AS times
      FROM jsonb_to_recordset(%s::jsonb) AS x (shape text, priority integer, age bigint)
      JOIN jayrun.executions e ON e.shape = x.shape AND e.host_id = %s AND e.state = 'waiting' AND e.id = e.unit_id
           AND NOT e.dormant AND (e.priority > x.priority OR (e.priority = x.priority AND e.age < x.age))
      GROUP BY e.id ORDER BY e.id) x
WHERE e.id = x.id AND e.bypassed < %s
"""

_FAIL_IMPOSSIBLE = """
UPDATE jayrun.executions e SET
    state = CASE WHEN e.id = e.unit_id THEN 'failed' ELSE 'cancelled' END, waiting_since = NULL,
    ended_at = clock_timestamp(), failure = jsonb_build_object('type', 'PlacementImpossible', 'message', x.message)
FROM jsonb_to_recordset(%s::jsonb) AS x (id uuid, message text)
WHERE e.unit_id = x.id AND e.state = 'waiting'
"""


class Changes:
    """The document of one pass, and the holders to tell about it."""

    def __init__(self) -> None:
        self._document: dict[str, list[Any]] = {}
        self._told: set[UUID] = set()

    def add_execution(self, record: dict[str, Any]) -> None:
        self._add("executions", record)

    def add_request(self, execution_id: UUID, position: int, request: Request) -> None:
        self._add("requests", {"execution_id": str(execution_id), "position": position, **to_record(request)})

    def park(self, execution_id: UUID, *, shape: str, invocation: int) -> None:
        self._add("parked", {"id": str(execution_id), "shape": shape, "invocation": invocation})

    def admit(self, unit_id: UUID, holder_id: UUID) -> None:
        self._add("admitted", str(unit_id))
        self._told.add(holder_id)

    def tell(self, holder_id: UUID) -> None:
        self._told.add(holder_id)

    def add_lease(self, slot: Slot, *, host_id: int, holder_id: UUID, shares: tuple[Share, ...]) -> UUID:
        """A lease for the request of `slot`, held by `holder_id`; returns its id."""
        lease_id = new_id()
        execution_id, position, invocation = slot
        record = {"id": str(lease_id), "execution_id": str(execution_id), "position": position}
        self._add("leases", {**record, "invocation": invocation, "host_id": host_id, "holder_id": str(holder_id)})
        for share in shares:
            taken = {"memory_bytes": share.memory_bytes, "exclusive": share.exclusive}
            self._add("shares", {"lease_id": str(lease_id), "device_id": share.device_id, **taken})
        return lease_id

    def write(self, gate: Gate, host_id: int, picture: Picture, decided: Admission) -> dict[UUID, int]:
        """Write everything, commit, and make it durable; returns the epoch of each new lease."""
        applied = gate.execute(_APPLY, (Jsonb(self._document),)) if self._document else None
        if decided.bypasses:
            rows = [{"shape": b.shape, "priority": b.priority, "age": b.age} for b in decided.bypasses]
            gate.execute(_BYPASS, (json.dumps(rows), host_id, max(picture.bypass_limit, 1)))
        if decided.impossible:
            reasons = [{"id": str(unit_id), "message": reason} for unit_id, reason in decided.impossible.items()]
            gate.execute(_FAIL_IMPOSSIBLE, (json.dumps(reasons),))
        gate.commit(durable=bool(self._document), notify=self._payload() if self._told else None)
        return dict(applied.fetchall()) if applied is not None else {}

    def _add(self, part: str, record: Any) -> None:
        self._document.setdefault(part, []).append(record)

    def _payload(self) -> str:
        """The holders to wake; `*` for everyone when they are more than a notification holds."""
        names = " ".join(sorted(map(str, self._told)))
        return names if len(names) < 7_900 else "*"
