"""The laws of one pass over the queue: order, bypasses, and what is kept."""

from __future__ import annotations

from time import process_time
from uuid import UUID

import pytest
from fleets import booked_devices, gpu, group, one
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import Workers, granted, idle_workers, order, queues, shares_of, slow_pass, times_bypassed, waiter

from jayrun.domain.devices import Backend, BookedDevice, DeviceState
from jayrun.domain.planner import plan
from jayrun.domain.queue import Admission, Bypass, Kept, Waiter, admit


@settings(max_examples=400, deadline=None)
@given(
    queues([None, None, "embed", "train"]),
    booked_devices(3),
    booked_devices(2, host_id=2),
    idle_workers(),
    st.integers(0, 4),
    st.integers(0, 6),
)
def test_a_pass_decides_like_the_plain_telling_of_it(
    waiters: list[Waiter],
    here: list[BookedDevice],
    there: list[BookedDevice],
    workers: Workers,
    limit: int,
    batch: int,
) -> None:
    fleet = {1: here, 2: there}
    grants, impossible, counts, kept = slow_pass(waiters, fleet, workers, limit, batch)
    admission = admit(waiters, fleet, workers=workers, bypass_limit=limit, batch=batch)
    assert [(grant.id, grant.host_id, grant.plan, grant.worker) for grant in admission.grants] == grants
    assert set(admission.impossible) == impossible
    waiting = [each for each in waiters if each.id in counts]
    assert {each.id: times_bypassed(each, admission.bypasses) for each in waiting} == counts
    assert {(each.waiter_id, each.device_id): each.memory_bytes for each in admission.kept} == kept
    assert len(admission.kept) == len(kept)


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
    assert admit(waiters, {1: [gpu(0, 80)]}, bypass_limit=100, batch=0) == Admission((), (), {}, ())


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


def test_what_can_never_fit_waits_for_no_worker() -> None:
    waiters = [waiter(age, one(10), recorded=(one(10), one(90)), operator="embed", bypassed=age) for age in (1, 2)]
    admission = admit(waiters, {1: [gpu(0, 80)]}, bypass_limit=0, batch=9)
    assert {key.int for key in admission.impossible} == {1, 2}


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
    assert admission.kept == (Kept(UUID(int=0), 1, 100, 70),)
    assert granted(admit(waiters, {1: [gpu(0, 90, 10), gpu(1, 80, 80)]}, bypass_limit=16, batch=99)) == [0, 1]


def test_each_who_had_enough_has_its_own_target() -> None:
    waiters = [*(waiter(age, one(80), bypassed=16) for age in range(2)), *(waiter(9 + age, one(1)) for age in range(9))]
    devices = [gpu(0, 80, 10), gpu(1, 80, 20), gpu(2, 80, 30)]
    admission = admit(waiters, {1: devices}, bypass_limit=16, batch=99)
    assert {share.host_index for share in shares_of(admission)} == {2}
    assert admission.kept == (Kept(UUID(int=0), 1, 100, 80), Kept(UUID(int=1), 1, 101, 80))


def test_what_is_kept_for_a_sequence_is_told_once_for_each_device() -> None:
    waiters = [waiter(0, one(30), one(20), one(60), bypassed=16), waiter(1, one(50))]
    admission = admit(waiters, {1: [gpu(0, 80, 40), gpu(1, 80, 40)]}, bypass_limit=16, batch=99)
    assert sorted(each.memory_bytes for each in admission.kept) == [50, 60]
    alone = [waiter(0, one(0, exclusive=True), bypassed=16), waiter(1, one(50))]
    assert admit(alone, {1: [gpu(0, 80, 40)]}, bypass_limit=16, batch=99).kept == (Kept(UUID(int=0), 1, 100, 0),)


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
    assert "this host has no devices" in admission.impossible[UUID(int=3)]


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
