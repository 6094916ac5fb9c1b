"""The worker processes that take detached executions, and which of them are still idle in a pass over the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from jayrun.domain.visible import EVERYTHING, Sight


@dataclass(frozen=True, slots=True)
class Worker:
    """An idle worker process of a host, the names of the operators it takes, and what it can see of the devices."""

    id: UUID
    operators: frozenset[str]
    sight: Sight = EVERYTHING


class IdleWorkers:
    """The idle workers of each host, by the host's key; they only get fewer."""

    def __init__(self, workers: Mapping[int, Sequence[Worker]]) -> None:
        self._idle = {host_id: list(idle) for host_id, idle in workers.items()}
        self._able: dict[tuple[int, str], dict[Sight, UUID]] = {}

    def sights(self, host_id: int, operator: str | None) -> Sequence[Sight]:
        """What those see who could take a waiter with `operator` on the host, each sight once, the preferred first.

        A waiter without an operator has its own process, and its requests tell already what that one sees.
        """
        return (EVERYTHING,) if operator is None else tuple(self._taking(host_id, operator))

    def choose(self, host_id: int, operator: str | None, sight: Sight) -> UUID | None:
        """The worker to take it of those with that sight; None when none is needed.

        Preferred is who knows the fewest other operators, then who does not see everything, then the first.
        """
        return None if operator is None else self._taking(host_id, operator)[sight]

    def use(self, host_id: int, worker_id: UUID | None) -> None:
        """The worker, if any, is idle no more."""
        if worker_id is not None:
            self._idle[host_id] = [worker for worker in self._idle[host_id] if worker.id != worker_id]
            self._able = {key: able for key, able in self._able.items() if key[0] != host_id}

    def _taking(self, host_id: int, operator: str) -> dict[Sight, UUID]:
        """For each sight the worker that would take it, in the order of preference."""
        key = (host_id, operator)
        if key not in self._able:
            able = [worker for worker in self._idle.get(host_id, ()) if operator in worker.operators]
            able.sort(key=lambda worker: (len(worker.operators), worker.sight == EVERYTHING))
            taking = self._able[key] = {}
            for worker in able:
                taking.setdefault(worker.sight, worker.id)
        return self._able[key]
