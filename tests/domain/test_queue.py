"""The laws of the queue: order, bypasses, what is kept, and that the one who waits is served in the end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import count
from time import process_time
from uuid import UUID

import pytest
from fleets import GB, any_request, booked_devices, gpu, group, one
from hypothesis import given, settings
from hypothesis import strategies as st

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.keeping import find_target
from jayrun.domain.planner import Granted, Impossible, judge, plan
from jayrun.domain.queue import Admission, Bypass, Waiter, admit
from jayrun.domain.requests import Request
from jayrun.domain.search import book
from jayrun.domain.sequence import shape_of

Fleet = Mapping[int, Sequence[BookedDevice]]


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


def slow_pass(waiters: Sequence[Waiter], fleet: Fleet, limit: int, batch: int) -> tuple[object, ...]:
    """One pass told plainly: nothing is remembered of equal shapes, every waiter is counted by itself."""
    now = {host: tuple(devices) for host, devices in fleet.items()}
    kept = {host: tuple(device.emptied() for device in devices) for host, devices in fleet.items()}
    grants, impossible, waiting, counts, served = [], set(), [], {}, set()
    for asking in sorted(waiters, key=order):
        if len(grants) == batch:
            break
        for each in waiting:
            if each.bypassed + counts[each.id] >= limit and each.id not in served:
                targets = [
                    (found.to_free, place, host, found.plan)
                    for place, host in enumerate(each.hosts)
                    if host in now and (found := find_target(each.requests, now[host], kept[host]))
                ]
                if targets:
                    _, _, host, planned = min(targets, key=lambda target: target[:2])
                    served.add(each.id)
                    for shares in planned:
                        now[host], kept[host] = book(now[host], shares), book(kept[host], shares)
        verdicts = {host: judge(asking.requests, now[host], asking.recorded) for host in asking.hosts if host in now}
        host = next((host for host, verdict in verdicts.items() if isinstance(verdict, Granted)), None)
        if host is not None:
            grants.append((asking.id, host, verdicts[host].plan))
            taken = set()
            for shares in verdicts[host].plan:
                now[host] = book(now[host], shares)
                taken |= {share.device_id for share in shares}
            for each in waiting:
                counts[each.id] += host in each.hosts and any(
                    is_candidate(request, device)
                    for request in each.requests
                    for device in now[host]
                    if device.id in taken
                )
        elif asking.hosts and all(isinstance(verdicts.get(host), Impossible) for host in asking.hosts):
            impossible.add(asking.id)
        else:
            waiting.append(asking)
            counts[asking.id] = 0
    return grants, impossible, counts


@st.composite
def queues(draw: st.DrawFn) -> list[Waiter]:
    """Waiters of which many have one shape."""
    shapes = draw(st.lists(st.lists(any_request(2), min_size=1, max_size=2), min_size=1, max_size=4))
    hosts = st.sampled_from([(1,), (1,), (2,), (1, 2), (2, 1), (3, 1), ()])
    waiters = []
    for age in range(draw(st.integers(1, 9))):
        requests = tuple(draw(st.sampled_from(shapes)))
        waiters.append(
            waiter(
                age,
                *requests,
                priority=draw(st.sampled_from([0, 0, 0, 1])),
                hosts=draw(hosts),
                bypassed=draw(st.integers(0, 4)),
                recorded=draw(st.sampled_from([None, requests, (*requests, one(9))])),
            )
        )
    return draw(st.permutations(waiters))


@settings(max_examples=400, deadline=None)
@given(queues(), booked_devices(3), booked_devices(2, host_id=2), st.integers(0, 4), st.integers(0, 6))
def test_a_pass_decides_like_the_plain_telling_of_it(
    waiters: list[Waiter], here: list[BookedDevice], there: list[BookedDevice], limit: int, batch: int
) -> None:
    fleet = {1: here, 2: there}
    grants, impossible, counts = slow_pass(waiters, fleet, limit, batch)
    admission = admit(waiters, fleet, bypass_limit=limit, batch=batch)
    assert [(grant.id, grant.host_id, grant.plan) for grant in admission.grants] == grants
    assert set(admission.impossible) == impossible
    waiting = [each for each in waiters if each.id in counts]
    assert {each.id: times_bypassed(each, admission.bypasses) for each in waiting} == counts


@settings(max_examples=300, deadline=None)
@given(queues(), booked_devices(3), booked_devices(2, host_id=2), st.integers(0, 4))
def test_a_pass_never_overbooks_and_leaves_nobody_who_comes_first_behind(
    waiters: list[Waiter], here: list[BookedDevice], there: list[BookedDevice], limit: int
) -> None:
    fleet = {1: here, 2: there}
    admission = admit(waiters, fleet, bypass_limit=limit, batch=100)
    booked = {device.id: device for devices in fleet.values() for device in devices}
    for share in shares_of(admission):
        before = booked[share.device_id]
        assert before.state is DeviceState.ONLINE
        assert share.memory_bytes <= before.free_bytes
        assert not before.exclusive
        assert before.share_count == 0 or not (share.exclusive or before.exclusive_only)
        booked[share.device_id] = before.with_share(share)
    first = min(waiters, key=order)
    if any(host in fleet and plan(first.requests, fleet[host]) for host in first.hosts):
        assert admission.grants[0].id == first.id
    # Of equals, whoever came first is served first.
    served = set(granted(admission))
    for shape in {each.shape for each in waiters}:
        line = [each.id.int in served for each in sorted(waiters, key=order) if each.shape == shape]
        assert line == sorted(line, reverse=True)


def test_higher_priority_first_then_who_asked_first() -> None:
    waiters = [waiter(3, one(40)), waiter(1, one(40)), waiter(2, one(40)), waiter(4, one(40), priority=1)]
    admission = admit(waiters, {1: [gpu(0, 120)]}, bypass_limit=16, batch=9)
    assert granted(admission) == [4, 1, 2]
    assert admission.bypasses == ()


def test_the_batch_bounds_grants_and_not_the_waiters_examined() -> None:
    waiters = [*(waiter(age, one(70)) for age in range(50)), *(waiter(50 + age, one(1)) for age in range(9))]
    admission = admit(waiters, {1: [gpu(0, 80, 20)]}, bypass_limit=100, batch=3)
    assert granted(admission) == [50, 51, 52]
    assert admission.bypasses == tuple(Bypass(waiters[0].shape, 0, age) for age in (50, 51, 52))
    assert admit(waiters, {1: [gpu(0, 80)]}, bypass_limit=100, batch=0) == Admission((), (), {})


def test_one_grant_on_many_devices_is_one_bypass() -> None:
    waiters = [waiter(1, one(70)), waiter(2, group(0, 2, 2, each=10))]
    admission = admit(waiters, {1: [gpu(0, 80, 20), gpu(1, 80, 20)]}, bypass_limit=16, batch=9)
    assert granted(admission) == [2]
    assert admission.bypasses == (Bypass(waiters[0].shape, 0, 2),)


def test_a_grant_on_what_a_waiter_cannot_use_is_no_bypass() -> None:
    rocm = gpu(1, 80, backends=frozenset({Backend.ROCM}))
    elsewhere = gpu(0, 80, host_id=2)
    fleet = {1: [gpu(0, 80, 80), rocm], 2: [elsewhere]}
    waiters = [waiter(1, one(80)), waiter(2, one(70, backend=Backend.ROCM)), waiter(3, one(10), hosts=(2,))]
    admission = admit(waiters, fleet, bypass_limit=0, batch=9)
    assert granted(admission) == [2, 3]
    assert admission.bypasses == ()


def test_a_pinned_waiter_is_bypassed_on_its_device_only() -> None:
    waiters = [waiter(1, one(80, device_id=1)), waiter(2, one(10, device_id=0)), waiter(3, one(10, device_id=1))]
    admission = admit(waiters, {1: [gpu(0, 80), gpu(1, 80, 10)]}, bypass_limit=16, batch=9)
    assert granted(admission) == [2, 3]
    assert admission.bypasses == (Bypass(waiters[0].shape, 0, 3),)


def test_within_one_pass_nobody_is_bypassed_more_often_than_the_limit_on_one_device() -> None:
    waiters = [waiter(0, one(70), bypassed=13), *(waiter(age, one(1)) for age in range(1, 40))]
    admission = admit(waiters, {1: [gpu(0, 80, 20)]}, bypass_limit=16, batch=99)
    assert granted(admission) == [1, 2, 3]
    assert times_bypassed(waiters[0], admission.bypasses) == 3


def test_beside_what_is_kept_others_get_what_is_left() -> None:
    # 70 of 80 are kept on device 0, which has less to free; what fits beside it and all of device 1 is given away.
    waiters = [waiter(0, one(70), bypassed=16), *(waiter(age, one(10)) for age in range(1, 9))]
    devices = [gpu(0, 80, 20), gpu(1, 80, 40)]
    admission = admit(waiters, {1: devices}, bypass_limit=16, batch=99)
    assert {share.host_index for share in shares_of(admission)} == {1}
    assert granted(admission) == [1, 2, 3, 4]
    assert granted(admit(waiters, {1: [gpu(0, 90, 10), gpu(1, 80, 80)]}, bypass_limit=16, batch=99)) == [0, 1]


def test_each_who_had_enough_has_its_own_target() -> None:
    waiters = [*(waiter(age, one(80), bypassed=16) for age in range(2)), *(waiter(9 + age, one(1)) for age in range(9))]
    devices = [gpu(0, 80, 10), gpu(1, 80, 20), gpu(2, 80, 30)]
    admission = admit(waiters, {1: devices}, bypass_limit=16, batch=99)
    assert {share.host_index for share in shares_of(admission)} == {2}


def test_two_that_have_enough_at_the_same_grant_both_get_their_target() -> None:
    waiters = [*(waiter(age, one(80), bypassed=15) for age in range(2)), *(waiter(9 + age, one(1)) for age in range(9))]
    admission = admit(waiters, {1: [gpu(0, 80, 10), gpu(1, 80, 20)]}, bypass_limit=16, batch=99)
    assert granted(admission) == [9]


def test_two_never_get_one_target() -> None:
    waiters = [*(waiter(age, one(0, exclusive=True), bypassed=16) for age in range(2)), waiter(9, one(1))]
    assert granted(admit(waiters, {1: [gpu(0, 80, 1), gpu(1, 80, 50)]}, bypass_limit=16, batch=99)) == []
    assert granted(admit(waiters[1:], {1: [gpu(0, 80, 1), gpu(1, 80, 50)]}, bypass_limit=16, batch=99)) == [9]


def test_a_waiter_is_counted_from_its_own_place_in_the_line() -> None:
    waiters = [
        waiter(1, one(70)),
        *(waiter(age, one(1)) for age in (2, 3)),
        waiter(4, one(70), bypassed=14),
        *(waiter(age, one(1)) for age in (5, 6, 7)),
    ]
    admission = admit(waiters, {1: [gpu(0, 80, 20)]}, bypass_limit=16, batch=99)
    assert granted(admission) == [2, 3, 5, 6]
    assert times_bypassed(waiters[0], admission.bypasses) == 4
    assert times_bypassed(waiters[3], admission.bypasses) == 2


def test_an_older_waiter_of_lower_priority_gets_its_target_though_its_shape_was_just_refused() -> None:
    waiters = [waiter(5, one(80), priority=1), waiter(1, one(80), bypassed=16), waiter(6, one(1))]
    admission = admit(waiters, {1: [gpu(0, 80, 10)]}, bypass_limit=16, batch=9)
    assert granted(admission) == []


def test_the_target_lies_on_the_host_with_the_least_to_free() -> None:
    fleet = {1: [gpu(0, 80, 60)], 2: [gpu(0, 80, 10, host_id=2)]}
    waiters = [waiter(1, one(80), hosts=(1, 2), bypassed=16), waiter(2, one(5)), waiter(3, one(5), hosts=(2,))]
    assert granted(admit(waiters, fleet, bypass_limit=16, batch=9)) == [2]
    equal = {1: [gpu(0, 80, 60)], 2: [gpu(0, 80, 60, host_id=2)]}
    assert granted(admit(waiters, equal, bypass_limit=16, batch=9)) == [3]


def test_nothing_is_kept_while_only_a_person_could_help() -> None:
    devices = [gpu(0, 80), gpu(1, 80, state=DeviceState.DRAINING)]
    waiters = [waiter(1, group(0, 2, 2, each=80), bypassed=99), waiter(2, one(10))]
    assert granted(admit(waiters, {1: devices}, bypass_limit=16, batch=9)) == [2]


def test_impossible_only_when_impossible_on_every_candidate_host() -> None:
    fleet = {1: [gpu(0, 80)], 2: [gpu(0, 160, 160, host_id=2)], 3: []}
    waiters = [
        waiter(1, one(100)),
        waiter(2, one(100), hosts=(1, 2)),
        waiter(3, one(100), hosts=(1, 3)),
        waiter(4, one(100), hosts=()),
        waiter(5, one(100), hosts=(1, 99)),
        waiter(6, one(10), recorded=(one(80), one(10))),
    ]
    admission = admit([*waiters, waiter(0, one(75))], fleet, bypass_limit=16, batch=9)
    assert granted(admission) == [0]
    assert {key.int for key in admission.impossible} == {1, 3, 6}
    assert "gpu 0: 80 B" in admission.impossible[UUID(int=1)]
    assert "no device is declared" in admission.impossible[UUID(int=3)]


def test_equal_shapes_are_told_apart_by_the_sequence_they_are_judged_by() -> None:
    waiters = [waiter(1, one(10)), waiter(2, one(10), recorded=(one(10), one(80))), waiter(3, one(10))]
    admission = admit(waiters, {1: [gpu(0, 80, 80)]}, bypass_limit=16, batch=9)
    assert {key.int for key in admission.impossible} == {2}


def test_a_sequence_is_granted_as_a_whole_or_not_at_all() -> None:
    waiters = [waiter(1, one(50), one(60)), waiter(2, one(20))]
    admission = admit(waiters, {1: [gpu(0, 80), gpu(1, 80, 40)]}, bypass_limit=16, batch=9)
    assert granted(admission) == [2]
    admission = admit(waiters, {1: [gpu(0, 80), gpu(1, 80)]}, bypass_limit=16, batch=9)
    assert [[share.memory_bytes for (share,) in grant.plan] for grant in admission.grants] == [[50, 60], [20]]


@pytest.mark.parametrize("bypassed", [0, 20])
def test_thousands_of_equal_waiters_are_examined_once(bypassed: int) -> None:
    waiters = [waiter(age, one(70), bypassed=bypassed) for age in range(5_000)]
    started = process_time()
    admission = admit([*waiters, waiter(5_000, one(1))], {1: [gpu(0, 80, 70)]}, bypass_limit=16, batch=9)
    assert process_time() - started < 0.5
    assert granted(admission) == ([] if bypassed else [5_000])


# --- the queue over time ---------------------------------------------------------------------------------------------


class House:
    """A host in which waiters come, leases end after a while, and passes run; it counts as the store would."""

    def __init__(self, devices: Sequence[BookedDevice], limit: int) -> None:
        self.devices = tuple(devices)
        self.limit = limit
        self.line: dict[UUID, Waiter] = {}
        self.bypassed: dict[UUID, int] = {}
        self.leases: dict[UUID, tuple[int, list[Share]]] = {}
        self.started: dict[UUID, int] = {}
        self.clock = 0
        self.ages = count()

    def ask(self, *requests: Request, priority: int = 0) -> UUID:
        new = waiter(next(self.ages), *requests, priority=priority)
        self.line[new.id] = new
        self.bypassed[new.id] = 0
        return new.id

    def tick(self, lifetime: int) -> None:
        """Let a while pass: what is over ends, then one pass; each new lease lives for `lifetime`."""
        self.clock += 1
        for key in [key for key, (end, _) in self.leases.items() if end <= self.clock]:
            _, shares = self.leases.pop(key)
            self.devices = tuple(device.without_shares(shares) for device in self.devices)
        line = [
            waiter(each.age, *each.requests, priority=each.priority, bypassed=self.bypassed[each.id])
            for each in self.line.values()
        ]
        admission = admit(line, {1: self.devices}, bypass_limit=self.limit, batch=8)
        assert not admission.impossible
        for each in line:
            self.bypassed[each.id] += times_bypassed(each, admission.bypasses)
        for grant in admission.grants:
            shares = [share for shares in grant.plan for share in shares]
            self.devices = book(self.devices, shares)
            self.leases[grant.id] = (self.clock + lifetime, shares)
            self.started[grant.id] = self.clock
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
