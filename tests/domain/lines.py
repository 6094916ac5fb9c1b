"""Waiters and workers for the tests of the queue, one pass told plainly, and what it means for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from fleets import any_request, one
from hypothesis import strategies as st

from jayrun.domain.devices import Backend, BookedDevice, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.keeping import find_target
from jayrun.domain.planner import Impossible, judge_later, plan
from jayrun.domain.queue import Admission, Bypass, Waiter, Worker
from jayrun.domain.requests import Request
from jayrun.domain.search import book
from jayrun.domain.sequence import shape_of
from jayrun.domain.visible import EVERYTHING, asked_by

Fleet = Mapping[int, Sequence[BookedDevice]]
Workers = Mapping[int, Sequence[Worker]]


def waiter(
    age: int,
    *requests: Request,
    priority: int = 0,
    hosts: tuple[int, ...] = (1,),
    bypassed: int = 0,
    recorded: tuple[Request, ...] | None = None,
    operator: str | None = None,
) -> Waiter:
    return Waiter(
        id=UUID(int=age),
        priority=priority,
        age=age,
        hosts=hosts,
        requests=requests,
        recorded=recorded,
        bypassed=bypassed,
        operator=operator,
        shape=shape_of(hosts, requests, operator, masks_of(requests)),
    )


def masks_of(requests: Sequence[Request]) -> dict[str, list[str]]:
    """Something that is equal for equal requests only where they are asked for the same devices."""
    masks = [None if request.among is None else sorted(request.among) for request in requests]
    return {str(request.backend): [str(masks)] for request in requests} if any(masks) else {}


def worker(number: int, *operators: str, sees: Sequence[int] | None = None) -> Worker:
    sight = EVERYTHING if sees is None else ((Backend.CUDA, frozenset(sees)),)
    return Worker(UUID(int=number), frozenset(operators), sight)


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


@st.composite
def queues(draw: st.DrawFn, operators: Sequence[str | None] = (None,)) -> list[Waiter]:
    """Waiters of which many have one shape."""
    shapes = draw(st.lists(st.lists(any_request(2), min_size=1, max_size=2), min_size=1, max_size=4))
    hosts = st.sampled_from([(1,), (1,), (2,), (1, 2), (2, 1), (3, 1), ()])
    waiters = []
    for age in range(draw(st.integers(1, 9))):
        requests = tuple(draw(st.sampled_from(shapes)))
        operator = draw(st.sampled_from(operators))
        if operator is not None:  # whatever takes it knows what it sees
            requests = tuple(replace(request, among=None) for request in requests)
        waiters.append(
            waiter(
                age,
                *requests,
                priority=draw(st.sampled_from([0, 0, 0, 1])),
                hosts=draw(hosts),
                bypassed=draw(st.integers(0, 4)),
                recorded=draw(st.sampled_from([None, requests, (*requests, one(9))])),
                operator=operator,
            )
        )
    return draw(st.permutations(waiters))


def idle_workers() -> st.SearchStrategy[Workers]:
    """A few workers of the hosts 1 and 2, each of which knows some operators."""
    known = st.frozensets(st.sampled_from(["embed", "train", "other"]))
    sees = st.sampled_from([None, None, [100, 200], [101, 102, 201], []])
    places = st.lists(st.tuples(st.sampled_from([1, 1, 2]), known, sees), max_size=4)
    return places.map(
        lambda drawn: {
            host: [worker(number, *knows, sees=sees) for number, (at, knows, sees) in enumerate(drawn) if at == host]
            for host, _, _ in drawn
        }
    )


def slow_pass(
    waiters: Sequence[Waiter], fleet: Fleet, workers: Workers, limit: int, batch: int
) -> tuple[list[object], set[UUID], dict[UUID, int], dict[tuple[UUID, int], int]]:
    """One pass told plainly: nothing is remembered of equal shapes, every waiter is counted by itself.

    The grants, who is impossible, how often each waiter was bypassed, and the bytes kept by waiter and device.
    """
    now = {host: tuple(devices) for host, devices in fleet.items()}
    kept = {host: tuple(device.emptied() for device in devices) for host, devices in fleet.items()}
    idle = {host: list(workers.get(host, ())) for host in fleet}
    grants, impossible, waiting, counts, served = [], set(), [], {}, {}

    def able(each: Waiter) -> list[tuple[int, Worker | None, tuple[Request, ...]]]:
        """Where it might run, by whom, and what that one asks, in the order of preference."""
        found: list[tuple[int, Worker | None, tuple[Request, ...]]] = []
        for host in (host for host in each.hosts if host in fleet):
            if each.operator is None:
                found.append((host, None, each.requests))
                continue
            knowing = [w for w in idle[host] if each.operator in w.operators]
            knowing.sort(key=lambda w: (len(w.operators), w.sight == EVERYTHING))
            found += [(host, w, asked_by(each.requests, w.sight)) for w in knowing]
        return found

    def use(host: int, chosen: Worker | None) -> UUID | None:
        if chosen is None:
            return None
        idle[host].remove(chosen)
        return chosen.id

    for asking in sorted(waiters, key=order):
        if len(grants) == batch:
            break
        for each in waiting:
            if each.bypassed + counts[each.id] >= limit and each.id not in served:
                targets = [
                    (found.to_free, place, host, who, found.plan)
                    for place, (host, who, requests) in enumerate(able(each))
                    if (found := find_target(requests, now[host], kept[host]))
                ]
                if targets:
                    _, _, host, who, planned = min(targets, key=lambda target: target[:2])
                    use(host, who)
                    served[each.id] = Counter()
                    for shares in planned:
                        now[host], kept[host] = book(now[host], shares), book(kept[host], shares)
                        for share in shares:
                            served[each.id][share.device_id] += share.memory_bytes
        placed = ((host, who, plan(requests, now[host])) for host, who, requests in able(asking))
        host, who, planned = next((each for each in placed if each[2] is not None), (0, None, None))
        if planned is not None:
            taken = {share.device_id for shares in planned for share in shares}
            for each in waiting:
                counts[each.id] += any(
                    is_candidate(request, device)
                    for at, _, requests in able(each)
                    if at == host
                    for request in requests
                    for device in now[host]
                    if device.id in taken
                )
            grants.append((asking.id, host, planned, use(host, who)))
            for shares in planned:
                now[host] = book(now[host], shares)
        elif asking.hosts and all(
            host in now and isinstance(judge_later(asking.recorded or asking.requests, now[host]), Impossible)
            for host in asking.hosts
        ):
            impossible.add(asking.id)
        else:
            waiting.append(asking)
            counts[asking.id] = 0
    told = {(key, device): memory_bytes for key, devices in served.items() for device, memory_bytes in devices.items()}
    return grants, impossible, counts, told
