"""What is kept for someone bypassed too often is the cheapest set to wait for, compared with brute force."""

from __future__ import annotations

from collections.abc import Sequence

from fleets import any_request, booked_devices, every_plan, gpu, group, one, sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from jayrun.domain.devices import BookedDevice, DeviceState, Share
from jayrun.domain.keeping import find_target
from jayrun.domain.planner import plan
from jayrun.domain.requests import Request
from jayrun.domain.search import book


def to_free(shares: Sequence[Share], now: Sequence[BookedDevice], kept: Sequence[BookedDevice]) -> tuple[int, int]:
    """Bytes that must end, and devices that must be left by somebody though they have the bytes."""
    total, others = 0, 0
    for device, others_kept in zip(now, kept, strict=True):
        mine = [share for share in shares if share.device_id == device.id]
        if mine and (device.exclusive or any(share.exclusive for share in mine)):
            total += device.reserved_bytes - others_kept.reserved_bytes
            others += device.share_count > others_kept.share_count
        elif mine:
            asked = sum(each.memory_bytes for each in mine)
            total += max(0, device.reserved_bytes + device.withheld_bytes + asked - device.capacity_bytes)
    return total, others


@settings(max_examples=400, deadline=None)
@given(sequences(2), booked_devices(), st.lists(any_request(), max_size=1))
def test_the_target_is_feasible_and_has_the_least_to_free(
    requests: list[Request], devices: list[BookedDevice], before: list[Request]
) -> None:
    now, kept = tuple(devices), tuple(device.emptied() for device in devices)
    for shares in plan(before, kept) or ():
        now, kept = book(now, shares), book(kept, shares)
    target = find_target(requests, now, kept)
    ways = [[share for shares in way for share in shares] for way, _ in every_plan(requests, kept)]
    costs = [to_free(shares, now, kept) for shares in ways]
    assert (target is None) == (not costs)
    if target is not None:
        chosen = [share for shares in target.plan for share in shares]
        assert set(map(frozenset, ways)) >= {frozenset(chosen)}
        assert target.to_free == to_free(chosen, now, kept) == min(costs)


def test_on_ties_the_lowest_host_index_is_kept() -> None:
    now = [gpu(2, 80, 40), gpu(0, 80, 50), gpu(1, 80, 40)]
    target = find_target([one(60)], now, [device.emptied() for device in now])
    assert target.plan == ((Share(101, 1, 60, False),),)
    assert target.to_free == (20, 0)


def test_a_group_is_kept_with_the_count_that_waits_for_the_least() -> None:
    now = [gpu(0, 80, 80), gpu(1, 80, 10), gpu(2, 80, 10)]
    kept = [device.emptied() for device in now]
    target = find_target([group(120, 2, 3, prefer_max_devices=True)], now, kept)
    assert target.plan == ((Share(101, 1, 60, False), Share(102, 2, 60, False)),)
    assert target.to_free == (0, 0)


def test_a_lease_of_zero_bytes_is_still_in_the_way_of_an_exclusive_request() -> None:
    now = [gpu(0, 80, share_count=1), gpu(1, 80)]
    target = find_target([one(0, exclusive=True)], now, [device.emptied() for device in now])
    assert target.plan == ((Share(101, 1, 0, True),),)


def test_nothing_is_kept_that_needs_a_device_which_only_a_person_brings_back() -> None:
    now = [gpu(0, 80, 80), gpu(1, 80, state=DeviceState.DRAINING), gpu(2, 80, state=DeviceState.OFFLINE)]
    kept = [device.emptied() for device in now]
    assert find_target([one(50)], now, kept).plan == ((Share(100, 0, 50, False),),)
    assert find_target([group(0, 2, 2, each=50)], now, kept) is None
