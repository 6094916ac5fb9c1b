"""Waiters for the tests of the queue, and what one pass means for them."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from jayrun.domain.devices import Share
from jayrun.domain.queue import Admission, Bypass, Waiter
from jayrun.domain.requests import Request
from jayrun.domain.sequence import shape_of


def waiter(
    age: int,
    *requests: Request,
    priority: int = 0,
    hosts: tuple[int, ...] = (1,),
    bypassed: int = 0,
    recorded: tuple[Request, ...] | None = None,
) -> Waiter:
    return Waiter(
        id=UUID(int=age),
        priority=priority,
        age=age,
        hosts=hosts,
        requests=requests,
        recorded=recorded,
        bypassed=bypassed,
        shape=shape_of(hosts, requests),
    )


def order(each: Waiter) -> tuple[int, int]:
    return (-each.priority, each.age)


def granted(admission: Admission) -> list[int]:
    """The ages of those who were granted, in the order of the grants."""
    return [grant.id.int for grant in admission.grants]


def times_bypassed(each: Waiter, bypasses: Sequence[Bypass]) -> int:
    """How often the store would count this waiter up."""
    return sum(each.shape == by.shape and order(each) < (-by.priority, by.age) for by in bypasses)


def shares_of(admission: Admission) -> list[Share]:
    return [share for grant in admission.grants for shares in grant.plan for share in shares]
