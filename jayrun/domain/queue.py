"""The queue of those who wait: in which order they are served, who was bypassed, and what is kept for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from jayrun.domain.devices import BookedDevice
from jayrun.domain.ending import Endable as Endable
from jayrun.domain.ending import fewest_to_end as fewest_to_end
from jayrun.domain.planner import Plan
from jayrun.domain.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Someone who waits for `requests` to be granted together, on one of `hosts` (tried in this order).

    `age` is the number drawn when it first asked, lower is older. `recorded` is the whole sequence by which it is
    judged impossible, when that is more than `requests`. `bypassed` counts grants that went past it. `shape` comes from
    `sequence.shape_of(hosts, requests)`.
    """

    id: UUID
    priority: int
    age: int
    hosts: tuple[int, ...]
    requests: tuple[Request, ...]
    recorded: tuple[Request, ...] | None = None
    bypassed: int = 0
    shape: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The waiter `id` gets all it waits for on `host_id`, as `plan` says."""

    id: UUID
    host_id: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Bypass:
    """Every waiter of `shape` that stands before (`priority`, `age`) in the order was bypassed once."""

    shape: str
    priority: int
    age: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What one pass over the queue decided; `impossible` gives the reason for each waiter that can never be served."""

    grants: tuple[Grant, ...]
    bypasses: tuple[Bypass, ...]
    impossible: Mapping[UUID, str]


def admit(
    waiters: Iterable[Waiter],
    fleet: Mapping[int, Sequence[BookedDevice]],
    *,
    bypass_limit: int,
    batch: int,
) -> Admission:
    """Decide (to be written)."""
    raise NotImplementedError
