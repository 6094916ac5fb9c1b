"""The worker processes that take detached executions, and which of them are still idle in a pass over the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Worker:
    """An idle worker process of a host, and the names of the operators it takes."""

    id: UUID
    operators: frozenset[str]


class IdleWorkers:
    """The idle workers of each host, by the host's key; they only get fewer."""

    def __init__(self, workers: Mapping[int, Sequence[Worker]]) -> None:
        self._idle = {host_id: list(idle) for host_id, idle in workers.items()}

    def can_take(self, host_id: int, operator: str | None) -> bool:
        """Whether a waiter with `operator` finds its process on the host; one without has its own."""
        return operator is None or any(operator in worker.operators for worker in self._idle.get(host_id, ()))

    def choose(self, host_id: int, operator: str | None) -> UUID | None:
        """The worker to take a waiter with `operator`: of those that know it, the first that knows the fewest else.

        None when there is none, or none is needed.
        """
        able = [worker for worker in self._idle.get(host_id, ()) if operator in worker.operators]
        best = min(able, key=lambda worker: len(worker.operators), default=None)
        return None if best is None else best.id

    def use(self, host_id: int, worker_id: UUID | None) -> None:
        """The worker, if any, is idle no more."""
        if worker_id is not None:
            self._idle[host_id] = [worker for worker in self._idle[host_id] if worker.id != worker_id]
