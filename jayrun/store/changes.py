"""What one admission writes: collected while deciding, written as one document by one function, then committed."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from jayrun.domain.devices import Share
from jayrun.domain.queue import Admission
from jayrun.domain.requests import Request
from jayrun.store.ids import new_id
from jayrun.store.picture import Slot
from jayrun.store.requests import to_record
from jayrun.store.transactions import Gate

_WRITE = "SELECT * FROM jayrun.write_pass(%s)"
WORKERS = "workers"
"""The name of all workers: something waits for any host."""


class Changes:
    """The document of one pass on one host, and the holders to tell about it."""

    def __init__(self, host_id: int) -> None:
        self._host_id = host_id
        self._document: dict[str, list[Any]] = {}
        self._told: set[str] = set()

    def add_execution(self, record: dict[str, Any]) -> None:
        self._add("executions", record)

    def add_request(self, execution_id: UUID, position: int, request: Request) -> None:
        self._add("requests", {"execution_id": str(execution_id), "position": position, **to_record(request)})

    def park(self, execution_id: UUID, *, shape: str, invocation: int) -> None:
        self._add("parked", {"id": str(execution_id), "shape": shape, "invocation": invocation})

    def admit(self, unit_id: UUID, holder_id: UUID) -> None:
        self._add("admitted", {"id": str(unit_id), "holder_id": str(holder_id)})
        self._told.add(str(holder_id))

    def fail(self, unit_id: UUID, holder_id: UUID | None, reason: str) -> None:
        """`holder_id` is the process to tell; whoever watches an execution without one is told by its id."""
        self._add("impossible", {"id": str(unit_id), "message": reason})
        self._told.add(str(holder_id or unit_id))

    def tell_workers(self) -> None:
        """Something waits that a worker elsewhere may run."""
        self._told.add(WORKERS)

    def add_lease(self, slot: Slot, *, host_id: int, holder_id: UUID, shares: tuple[Share, ...]) -> UUID:
        """A lease for the request of `slot`, held by `holder_id`; returns its id."""
        lease_id = new_id()
        execution_id, position, invocation = slot
        record = {"id": str(lease_id), "execution_id": str(execution_id), "position": position}
        self._add("leases", {**record, "invocation": invocation, "host_id": host_id, "holder_id": str(holder_id)})
        for share in shares:
            named = {"device_id": share.device_id, "host_index": share.host_index}
            taken = {"memory_bytes": share.memory_bytes, "exclusive": share.exclusive}
            self._add("shares", {"lease_id": str(lease_id), **named, **taken})
        return lease_id

    def write(self, gate: Gate, decided: Admission, *, durable: bool = False) -> dict[UUID, int]:
        """Write everything, commit, and make it durable (`durable`: even if nothing is to be written); returns the
        epoch of each new lease."""
        for bypass in decided.bypasses:
            self._add("bypasses", {"shape": bypass.shape, "priority": bypass.priority, "age": bypass.age})
        if not self._document:
            gate.commit() if durable else gate.leave()
            return {}
        return dict(gate.commit(_WRITE, (self.document(),), tell=self._told))

    def document(self) -> dict[str, Any]:
        """What is to be written, as `jayrun.write_pass` takes it."""
        return self._document | {"host_id": self._host_id}

    def _add(self, part: str, record: Any) -> None:
        self._document.setdefault(part, []).append(record)
