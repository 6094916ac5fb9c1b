"""The queue over time: whoever waits is served in the end, and nothing is idle for nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from uuid import UUID

import pytest
from fleets import GB, any_request, gpu, group, one
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import times_bypassed, waiter, worker

from jayrun.domain.devices import Backend, BookedDevice, Device, Share
from jayrun.domain.planner import plan
from jayrun.domain.queue import Waiter, Worker, admit
from jayrun.domain.requests import Request
from jayrun.domain.search import book


class House:
    """A host in which waiters come, leases end after a while, and passes run; it counts as the store would.

    A worker that took a lease is idle again when it has ended.
    """

    def __init__(self, devices: Sequence[BookedDevice], limit: int, workers: Sequence[Worker] = ()) -> None:
        self.devices = tuple(devices)
        self.workers = tuple(workers)
        self.busy: dict[UUID, UUID] = {}
        self.limit = limit
        self.line: dict[UUID, Waiter] = {}
        self.bypassed: dict[UUID, int] = {}
        self.leases: dict[UUID, tuple[int, list[Share]]] = {}
        self.started: dict[UUID, int] = {}
        self.clock = 0
        self.ages = count()

    def ask(self, *requests: Request, priority: int = 0, operator: str | None = None) -> UUID:
        new = waiter(next(self.ages), *requests, priority=priority, operator=operator)
        self.line[new.id] = new
        self.bypassed[new.id] = 0
        return new.id

    def tick(self, lifetime: int) -> None:
        """Let a while pass: what is over ends, then one pass; each new lease lives for `lifetime`."""
        self.clock += 1
        for key in [key for key, (end, _) in self.leases.items() if end <= self.clock]:
            _, shares = self.leases.pop(key)
            self.devices = tuple(device.without_shares(shares) for device in self.devices)
            self.busy.pop(key, None)
        line = [replace(each, bypassed=self.bypassed[each.id]) for each in self.line.values()]
        idle = [each for each in self.workers if each.id not in self.busy.values()]
        admission = admit(line, {1: self.devices}, workers={1: idle}, bypass_limit=self.limit, batch=8)
        assert not admission.impossible
        for each in line:
            self.bypassed[each.id] += times_bypassed(each, admission.bypasses)
        for grant in admission.grants:
            shares = [share for shares in grant.plan for share in shares]
            self.devices = book(self.devices, shares)
            self.leases[grant.id] = (self.clock + lifetime, shares)
            self.started[grant.id] = self.clock
            if grant.worker is not None:
                self.busy[grant.id] = grant.worker
            del self.line[grant.id]
        assert all(device.free_bytes >= 0 for device in self.devices)


BIG = {
    "a whole device": ([gpu(0, 80)], [one(80)]),
    "a device alone": ([gpu(0, 80), gpu(1, 80)], [one(0, exclusive=True)]),
    "a pinned device": ([gpu(0, 80), gpu(1, 80)], [one(80, device_id=1)]),
    "a group": ([gpu(index, 80) for index in range(4)], [group(0, 3, 4, each=60)]),
    "a sequence": ([gpu(index, 80) for index in range(3)], [one(70), one(50), one(30, exclusive=True)]),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("big", BIG)
def test_a_big_one_starts_though_small_ones_never_end_coming(big: str, seed: int) -> None:
    devices, requests = BIG[big]
    lifetime, limit = 7, 4
    house = House(devices, limit)
    dice = random.Random(seed)
    for _ in range(5):
        for _ in range(2 * len(devices)):
            house.ask(one(dice.randint(5, 20)))
        house.tick(dice.randint(1, lifetime))
    wanted, asked, enough = house.ask(*requests), house.clock, None
    while wanted not in house.started and house.clock < asked + 200:
        # The small ones wait before it too; only those behind it go past it.
        for _ in range(2 * len(devices)):
            house.ask(one(dice.randint(5, 20)))
        house.tick(dice.randint(1, lifetime))
        if enough is None and house.bypassed[wanted] >= limit:
            enough = house.clock
    # From the limit on, nothing new lies on the target, so it is free when the last lease of then has ended.
    assert enough is not None
    assert wanted in house.started
    assert house.started[wanted] <= enough + lifetime + 1


def test_a_big_one_starts_though_some_never_end_wanting_its_device_and_others_its_worker() -> None:
    house = House([gpu(0, 80), gpu(1, 40)], limit=4, workers=[worker(1, "embed", "train")])
    house.ask(one(20, device_id=1), operator="embed")
    house.tick(3)
    wanted = house.ask(one(80), operator="train")
    while wanted not in house.started and house.clock < 200:
        house.ask(one(20, device_id=0))
        house.ask(one(20, device_id=0))
        house.ask(one(20, device_id=1), operator="embed")
        house.tick(3)
    assert wanted in house.started
    assert house.bypassed[wanted] == 4


def test_while_the_workers_are_busy_nothing_is_idle_for_those_they_will_take() -> None:
    house = House([gpu(0, 80)], limit=0, workers=[worker(1, "train")])
    house.ask(one(10), operator="train")
    house.tick(50)
    wanted = house.ask(one(80), operator="train")
    while house.clock < 50:
        served = house.ask(one(70))
        house.tick(1)
        assert house.started[served] == house.clock
    assert house.bypassed[wanted] == 0


def test_without_a_limit_in_reach_the_big_one_would_wait_for_ever() -> None:
    house = House([gpu(0, 80)], limit=10**9)
    house.ask(one(10))
    house.tick(2)
    wanted = house.ask(one(80))
    for _ in range(300):
        house.ask(one(10))
        house.tick(2)
    assert wanted not in house.started
    assert house.bypassed[wanted] == 300


def test_on_its_only_device_a_waiter_is_bypassed_exactly_up_to_the_limit() -> None:
    house = House([gpu(0, 80)], limit=16)
    house.ask(one(10))
    house.tick(5)
    wanted = house.ask(one(80))
    while wanted not in house.started and house.clock < 100:
        house.ask(one(10))
        house.ask(one(10))
        house.tick(5)
    assert wanted in house.started
    assert house.bypassed[wanted] == 16


def test_devices_that_the_big_one_cannot_use_are_never_idle_because_of_it() -> None:
    xla = gpu(1, 80, kind=Device.TPU, backends=frozenset({Backend.XLA}))
    house = House([gpu(0, 80), xla, gpu(2, 80, backends=frozenset({Backend.ROCM}))], limit=0)
    house.ask(one(10))
    house.tick(1_000)
    wanted = house.ask(one(80, exclusive=True))
    for _ in range(50):
        served = [
            house.ask(one(80, device=Device.TPU, backend=Backend.XLA)),
            house.ask(one(80, backend=Backend.ROCM)),
        ]
        house.tick(1)
        assert all(house.started[each] == house.clock for each in served)
    assert wanted not in house.started
    assert house.bypassed[wanted] == 0


def test_many_times_more_waiters_than_capacity_all_finish_in_order() -> None:
    house = House([gpu(0, 80 * GB), gpu(1, 80 * GB)], limit=16)
    asked = [house.ask(one(40 * GB)) for _ in range(100)]
    while house.line:
        house.tick(1)
    starts = [house.started[each] for each in asked]
    assert starts == sorted(starts)
    assert starts[-1] == 25


@settings(max_examples=60, deadline=None)
@given(st.lists(any_request(2), min_size=5, max_size=25), st.integers(0, 4), st.randoms(use_true_random=False))
def test_whatever_is_possible_is_served_in_the_end(asked: list[Request], limit: int, dice: random.Random) -> None:
    devices = [gpu(0, 9), gpu(1, 7), gpu(2, 8, exclusive_only=True), gpu(3, 9, kind=Device.TPU)]
    possible = [request for request in asked if plan([request], devices) is not None]
    house = House(devices, limit)
    for request in possible:
        house.ask(request, priority=dice.choice([0, 0, 1]))
        if dice.random() < 0.5:
            house.tick(dice.randint(1, 4))
    for _ in range(5 * len(possible)):
        house.tick(dice.randint(1, 4))
    assert not house.line
