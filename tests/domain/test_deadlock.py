"""Circles of processes that only wait: found exactly when nobody can ever be served, and broken where it helps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from uuid import UUID

from fleets import any_request, booked_devices, feasible, gpu, one, sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import waiter

from jayrun.domain.deadlock import Deadlock, Held, Party, find_deadlock
from jayrun.domain.devices import BookedDevice, DeviceState, Share
from jayrun.domain.planner import plan
from jayrun.domain.queue import Waiter
from jayrun.domain.search import book


def party(number: int, *waiters: Waiter) -> Party:
    return Party(UUID(int=number), 1000 + number, waiters)


def held(device: BookedDevice, memory_bytes: int, *holders: int) -> Held:
    share = Share(device.id, device.host_index, memory_bytes, False)
    return Held(frozenset(UUID(int=each) for each in holders), (share,))


def pids(deadlock: Deadlock | None) -> list[int]:
    assert deadlock is not None
    return [each.pid for each in deadlock.circle]


LEFT, RIGHT = gpu(0, 80), gpu(1, 80)


def test_two_that_wait_for_each_other_and_the_youngest_gives_up() -> None:
    parties = [party(1, waiter(7, one(80, device_id=1))), party(2, waiter(8, one(80, device_id=0)))]
    leases = [held(LEFT, 50, 1), held(RIGHT, 50, 2)]
    found = find_deadlock(parties, [LEFT, RIGHT], leases)
    assert pids(found) == [1001, 1002]
    assert found is not None
    assert found.victim.age == 8
    for said in ("pid 1001 holds 50 B of gpu 0 and waits for cuda(memory_gb=", "pid 1002 holds 50 B of gpu 1"):
        assert said in found.message


def test_priority_goes_before_age() -> None:
    parties = [party(1, waiter(7, one(80, device_id=1))), party(2, waiter(8, one(80, device_id=0), priority=1))]
    found = find_deadlock(parties, [LEFT, RIGHT], [held(LEFT, 50, 1), held(RIGHT, 50, 2)])
    assert found is not None
    assert found.victim.age == 7


def test_a_process_may_stand_in_its_own_way() -> None:
    assert pids(find_deadlock([party(1, waiter(7, one(50)))], [LEFT], [held(LEFT, 50, 1)])) == [1001]


def test_a_device_that_others_leave_makes_no_circle() -> None:
    parties = [party(1, waiter(7, one(80))), party(2, waiter(8, one(80)))]
    leases = [held(LEFT, 50, 1), held(RIGHT, 50, 2)]
    assert pids(find_deadlock(parties, [LEFT, RIGHT], leases)) == [1001, 1002]
    third = gpu(2, 80)
    assert find_deadlock(parties, [LEFT, RIGHT, third], [*leases, held(third, 80, 3)]) is None
    assert find_deadlock(parties, [LEFT, RIGHT, gpu(2, 80, state=DeviceState.OFFLINE)], leases) is None


def test_a_blocker_of_somebody_who_goes_on_makes_no_circle() -> None:
    parties = [party(1, waiter(7, one(40, device_id=1))), party(2, waiter(8, one(40, device_id=0)))]
    leases = [held(LEFT, 40, 1), held(LEFT, 40, 3), held(RIGHT, 80, 2)]
    assert find_deadlock(parties, [LEFT, RIGHT], leases) is None
    assert pids(find_deadlock([*parties, party(3, waiter(9, one(1)))], [LEFT, RIGHT], leases)) == [1001, 1002, 1003]


def test_one_of_several_waits_that_can_be_served_is_enough() -> None:
    parties = [
        party(1, waiter(7, one(80, device_id=1)), waiter(9, one(10, device_id=0))),
        party(2, waiter(8, one(80, device_id=0))),
    ]
    assert find_deadlock(parties, [LEFT, RIGHT], [held(LEFT, 50, 1), held(RIGHT, 50, 2)]) is None


def test_who_only_waits_behind_a_circle_is_not_the_one_to_fail() -> None:
    parties = [
        party(1, waiter(7, one(80, device_id=1))),
        party(2, waiter(8, one(80, device_id=0))),
        party(3, waiter(9, one(80, device_id=0))),
    ]
    found = find_deadlock(parties, [LEFT, RIGHT], [held(LEFT, 50, 1), held(RIGHT, 50, 2)])
    assert pids(found) == [1001, 1002]
    assert found is not None
    assert found.victim.age == 8


def test_who_holds_nothing_of_use_is_not_the_one_to_fail() -> None:
    parties = [
        party(1, waiter(7, one(50, device_id=1))),
        party(2, waiter(8, one(50, device_id=0))),
        party(3, waiter(9, one(50, device_id=0))),
    ]
    leases = [held(LEFT, 50, 1), held(RIGHT, 50, 2), held(RIGHT, 1, 3)]
    found = find_deadlock(parties, [LEFT, RIGHT], leases)
    assert found is not None
    assert found.victim.age == 8


def test_a_lease_of_two_holders_stays_as_long_as_one_of_them_waits() -> None:
    leases = [held(LEFT, 50, 1, 3)]
    assert pids(find_deadlock([party(1, waiter(7, one(80)))], [LEFT], leases)) == [1001]


def everyone_goes_on(parties: Sequence[Party], devices: Sequence[BookedDevice], leases: Sequence[Held]) -> bool:
    """Whether there is an order in which everybody is served, each letting go of everything before the next."""
    waiting = {each.id for each in parties}
    left = [lease for lease in leases if lease.holders & waiting]
    booked = book(devices, [share for lease in left for share in lease.shares])
    return not parties or any(
        any(feasible(each.requests, booked) for each in first.waiters)
        and everyone_goes_on([other for other in parties if other is not first], devices, leases)
        for first in parties
    )


@settings(max_examples=300, deadline=None)
@given(booked_devices(3), st.data())
def test_a_circle_is_found_exactly_when_no_order_serves_everybody(
    devices: list[BookedDevice], data: st.DataObject
) -> None:
    devices = [device.as_declared() for device in devices]
    leases, booked = [], devices
    for request in data.draw(st.lists(any_request(2), max_size=5)):
        for shares in plan([request], booked) or ():
            booked = list(book(booked, shares))
            holders = data.draw(st.sets(st.integers(1, 4), min_size=1, max_size=2))  # 4 is no party
            leases.append(Held(frozenset(UUID(int=each) for each in holders), shares))
    ages = count(1)
    parties = []
    for number in range(1, data.draw(st.integers(1, 3)) + 1):
        asked = [each for each in data.draw(st.lists(sequences(2), min_size=1, max_size=2)) if feasible(each, devices)]
        if asked:
            priorities = st.integers(0, 1)
            waiters = [waiter(next(ages), *each, priority=data.draw(priorities)) for each in asked]
            parties.append(party(number, *waiters))
    found = find_deadlock(parties, devices, leases)
    assert (found is None) == everyone_goes_on(parties, devices, leases)
    # Nobody fails who holds nothing, and no circle is left when the victims let go, one after the other.
    while found is not None:
        victim = next(each for each in parties if found.victim in each.waiters)
        assert victim in found.circle
        assert all(any(each.id in lease.holders for lease in leases) for each in found.circle)
        parties.remove(victim)
        found = find_deadlock(parties, devices, leases)
    assert everyone_goes_on(parties, devices, leases)
