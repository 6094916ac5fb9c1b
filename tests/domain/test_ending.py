"""The smallest set of leases whose end would admit a request, compared with all sets; and whom it is ended for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from uuid import UUID

import pytest
from fleets import any_request, booked_devices, gpu, group, one, sequences, subsets
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import waiter

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.ending import Endable, fewest_to_end, first_to_end, without
from jayrun.domain.planner import plan
from jayrun.domain.queue import Admission, Waiter, admit
from jayrun.domain.requests import Request
from jayrun.domain.search import book


def lease(number: int, *shares: tuple[BookedDevice, int], last_used: float = 0.0) -> Endable:
    taken = tuple(Share(device.id, device.host_index, memory_bytes, False) for device, memory_bytes in shares)
    return Endable(UUID(int=number), taken, last_used)


def carrying(devices: list[BookedDevice], leases: list[Endable]) -> list[BookedDevice]:
    return list(book(devices, [share for each in leases for share in each.shares]))


@settings(max_examples=200, deadline=None)
@given(
    sequences(2),
    booked_devices(3),
    st.lists(st.tuples(any_request(2), st.integers(0, 3), st.booleans()), max_size=6),
)
def test_no_smaller_cheaper_or_longer_unused_set_suffices(
    requests: list[Request], devices: list[BookedDevice], others: list[tuple[Request, int, bool]]
) -> None:
    booked, candidates, ids = [device.emptied() for device in devices], [], count(1)
    for request, last_used, endable in others:
        for shares in plan([request], booked) or ():
            booked = list(book(booked, shares))
            if endable:
                candidates.append(Endable(UUID(int=next(ids)), shares, last_used))
    best = None
    for ended in subsets(candidates):
        freed = [device.without_shares([share for each in ended for share in each.shares]) for device in booked]
        if plan(requests, freed) is not None:
            price = (
                len(ended),
                sum(share.memory_bytes for each in ended for share in each.shares),
                sorted((each.last_used for each in ended), reverse=True),
            )
            best = min(best, price) if best else price
    found = fewest_to_end(requests, booked, candidates)
    if found is None:
        assert best is None
    else:
        ended = [each for each in candidates if each.lease_id in found]
        assert best == (
            len(found),
            sum(share.memory_bytes for each in ended for share in each.shares),
            sorted((each.last_used for each in ended), reverse=True),
        )


def test_what_fits_already_needs_no_end() -> None:
    device = gpu(0, 80)
    assert fewest_to_end([one(10)], [device], [lease(1, (device, 10))]) == ()


def test_what_cannot_fit_whatever_ends_has_no_set() -> None:
    device = gpu(0, 80)
    leases = [lease(1, (device, 50))]
    assert fewest_to_end([one(81)], carrying([device], leases), leases) is None
    assert fewest_to_end([one(40)], [gpu(0, 80, 60)], []) is None


@pytest.mark.parametrize("used", [(5.0, 3.0), (3.0, 5.0)])
def test_the_longer_unused_of_two_equal_leases_ends(used: tuple[float, float]) -> None:
    device = gpu(0, 80)
    leases = [lease(number, (device, 40), last_used=used[number]) for number in range(2)]
    assert fewest_to_end([one(40)], carrying([device], leases), leases) == (UUID(int=used.index(3.0)),)


def test_the_smaller_of_two_sufficient_leases_ends() -> None:
    device = gpu(0, 80)
    leases = [lease(1, (device, 50)), lease(2, (device, 30))]
    assert fewest_to_end([one(20)], carrying([device], leases), leases) == (UUID(int=2),)


def test_a_lease_on_two_devices_can_be_the_one_that_suffices() -> None:
    left, right = gpu(0, 80), gpu(1, 80)
    leases = [lease(1, (left, 80)), lease(2, (right, 40)), lease(3, (right, 40))]
    assert fewest_to_end([one(60)], carrying([left, right], leases), leases) == (UUID(int=1),)
    both = [lease(1, (left, 40)), lease(2, (right, 40)), lease(3, (left, 40), (right, 40))]
    assert fewest_to_end([group(0, 2, 2, each=40)], carrying([left, right], both), both) == (UUID(int=3),)


def test_among_hundreds_of_leases_the_set_is_still_the_smallest_on_one_device() -> None:
    devices = [gpu(index, 10_000) for index in range(8)]
    numbers = count(1)
    large = [lease(next(numbers), (devices[5], size)) for size in (1_000, 1_500, 2_500)]
    small = [lease(next(numbers), (device, 10 + place)) for device in devices for place in range(60)]
    filler = [lease(0, (device, device.capacity_bytes - 2_370)) for device in devices if device is not devices[5]]
    booked = carrying(devices, [*large, *small, *filler])
    assert set(fewest_to_end([one(7_600)], booked, [*large, *small])) == {each.lease_id for each in large}


def test_among_hundreds_of_leases_no_member_of_the_set_is_too_many() -> None:
    devices = [gpu(index, 1_000) for index in range(8)]
    leases = [
        lease(8 * place + index, (device, 10 + (7 * place + 3 * index) % 11), (devices[index - 1], 5))
        for place in range(40)
        for index, device in enumerate(devices)
    ]
    booked = carrying(devices, leases)
    wanted = [group(0, 3, 3, each=600), one(300)]
    found = fewest_to_end(wanted, booked, leases)
    ended = [each for each in leases if each.lease_id in found]
    for spared in [None, *ended]:
        shares = [share for each in ended if each is not spared for share in each.shares]
        freed = [device.without_shares(shares) for device in booked]
        assert (plan(wanted, freed) is not None) == (spared is None)


def outcome(waiters: Sequence[Waiter], **terms: int) -> Callable[[Sequence[BookedDevice]], Admission]:
    """What an admission decides about these waiters on host 1."""
    known = {"bypass_limit": 16, "batch": 64, **terms}
    return lambda devices: admit(waiters, {1: devices}, **known)


def test_the_first_in_line_whom_idle_leases_keep_out_is_let_in() -> None:
    device = gpu(0, 80)
    idle = [lease(1, (device, 30)), lease(2, (device, 20))]
    booked = carrying([device], [*idle, lease(3, (device, 10))])
    line = [waiter(1, one(75)), waiter(2, one(50)), waiter(3, one(40))]
    # The first has to wait for others whatever ends; the second needs the larger one; the third could do with less.
    assert first_to_end(line, booked, idle, outcome(line)) == (UUID(int=1),)
    assert first_to_end(line[:1], booked, idle, outcome(line[:1])) == ()
    assert first_to_end(line[::2], booked, idle, outcome(line[::2])) == (UUID(int=2),)
    assert first_to_end(line, booked, [], outcome(line)) == ()


def test_nothing_ends_for_room_that_another_waiter_gets() -> None:
    device = gpu(0, 80)
    idle = [lease(1, (device, 40))]
    line = [waiter(1, one(40)), waiter(2, one(40))]
    assert first_to_end(line, carrying([device], idle), idle, outcome(line)) == (UUID(int=1),)
    assert first_to_end(line[:1], carrying([device], idle), idle, outcome(line)) == ()  # 40 are free already


def test_nothing_ends_for_room_that_is_kept_for_somebody_else() -> None:
    device = gpu(0, 80)
    idle, blocker = [lease(1, (device, 40))], lease(2, (device, 30))
    line = [waiter(1, one(60), bypassed=16), waiter(2, one(40))]
    booked = carrying([device], [*idle, blocker])
    assert first_to_end(line, booked, idle, outcome(line)) == ()
    assert first_to_end(line, booked, idle, outcome(line, bypass_limit=17)) == (UUID(int=1),)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(sequences(2), min_size=1, max_size=3),
    booked_devices(3),
    st.lists(st.tuples(any_request(2), st.booleans()), max_size=5),
    st.sampled_from([0, 16]),
)
def test_what_ends_lets_somebody_in_and_nobody_is_left_whom_it_could(
    asked: list[list[Request]], devices: list[BookedDevice], others: list[tuple[Request, bool]], bypassed: int
) -> None:
    booked, idle, ids = [device.emptied() for device in devices], [], count(1)
    for request, endable in others:
        for shares in plan([request], booked) or ():
            booked = list(book(booked, shares))
            if endable:
                idle.append(Endable(UUID(int=next(ids)), shares))
    line = [waiter(age, *requests, bypassed=bypassed) for age, requests in enumerate(asked)]
    decide = outcome(line)
    before = {grant.id for grant in decide(booked).grants}
    ended = first_to_end(line, booked, idle, decide)
    after = {grant.id for grant in decide(without(booked, [each for each in idle if each.lease_id in ended])).grants}
    assert bool(ended) == bool(after - before)
    if not ended and not before and len(line) == 1:
        assert not decide(without(booked, idle)).grants
