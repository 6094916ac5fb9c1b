"""The laws of one pass over the queue for those whom worker processes take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from time import process_time
from uuid import UUID

import pytest
from fleets import booked_devices, gpu, group, one
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import Workers, granted, idle_workers, queues, shares_of, times_bypassed, waiter, worker

from jayrun.domain.devices import BookedDevice
from jayrun.domain.queue import Bypass, Kept, Waiter, admit

OPERATORS = (None, "embed", "embed", "train")
hosts_of_devices = st.fixed_dictionaries({1: booked_devices(3), 2: booked_devices(2, host_id=2)})
Devices = dict[int, list[BookedDevice]]


@settings(max_examples=300, deadline=None)
@given(queues(OPERATORS), hosts_of_devices, idle_workers(), st.integers(0, 4))
def test_a_grant_with_an_operator_has_a_worker_of_its_host_that_knows_it_for_itself(
    waiters: list[Waiter], fleet: Devices, workers: Workers, limit: int
) -> None:
    admission = admit(waiters, fleet, workers=workers, bypass_limit=limit, batch=100)
    operators = {each.id: each.operator for each in waiters}
    for grant in admission.grants:
        known = {each.id: each.operators for each in workers.get(grant.host_id, ())}
        if operators[grant.id] is None:
            assert grant.worker is None
        else:
            assert operators[grant.id] in known[grant.worker]
    used = [grant.worker for grant in admission.grants if grant.worker is not None]
    assert len(set(used)) == len(used)
    # Nobody has room kept whom no worker could take with it.
    kept = Counter({(each.waiter_id, each.host_id) for each in admission.kept if operators[each.waiter_id]})
    for host in workers:
        left = [each for each in workers[host] if each.id not in used]
        mine = [operators[key] for key, at in kept if at == host]
        assert len(mine) <= len(left)
        assert all(any(operator in each.operators for each in left) for operator in mine)
    assert {at for _, at in kept} <= set(workers)


@settings(max_examples=200, deadline=None)
@given(queues(), hosts_of_devices, idle_workers(), st.integers(0, 4), st.integers(0, 6))
def test_those_without_an_operator_are_served_the_same_whatever_workers_there_are(
    waiters: list[Waiter], fleet: Devices, workers: Workers, limit: int, batch: int
) -> None:
    without = admit(waiters, fleet, bypass_limit=limit, batch=batch)
    assert admit(waiters, fleet, workers=workers, bypass_limit=limit, batch=batch) == without


@settings(max_examples=300, deadline=None)
@given(queues(OPERATORS), hosts_of_devices, idle_workers(), st.integers(0, 4), st.integers(0, 6))
def test_whom_no_worker_could_take_is_as_if_not_there(
    waiters: list[Waiter], fleet: Devices, workers: Workers, limit: int, batch: int
) -> None:
    known = {(host, operator) for host, idle in workers.items() for each in idle for operator in each.operators}
    known |= {(host, None) for host in fleet}
    there = [each for each in waiters if any((host, each.operator) in known for host in each.hosts)]
    admission = admit(waiters, fleet, workers=workers, bypass_limit=limit, batch=batch)
    among_themselves = admit(there, fleet, workers=workers, bypass_limit=limit, batch=batch)
    assert admission.grants == among_themselves.grants
    assert admission.bypasses == among_themselves.bypasses
    for each in waiters:
        if each not in there:
            assert times_bypassed(each, admission.bypasses) == 0
            assert each.id not in {kept.waiter_id for kept in admission.kept}


@settings(max_examples=200, deadline=None)
@given(queues(), hosts_of_devices, st.integers(0, 4), st.integers(0, 6))
def test_with_workers_enough_one_who_needs_them_is_served_like_any_other(
    waiters: list[Waiter], fleet: Devices, limit: int, batch: int
) -> None:
    workers = {host: [worker(100 * host + number, "embed") for number in range(9)] for host in fleet}
    detached = [waiter_with(each, "embed") for each in waiters]
    admission = admit(detached, fleet, workers=workers, bypass_limit=limit, batch=batch)
    attached = admit(waiters, fleet, bypass_limit=limit, batch=batch)
    assert [replace(grant, worker=None) for grant in admission.grants] == list(attached.grants)
    assert admission.kept == attached.kept
    assert admission.impossible == attached.impossible


def waiter_with(each: Waiter, operator: str) -> Waiter:
    """The same waiter, but one that a worker has to take."""
    return replace(each, operator=operator, shape=f"{each.shape} {operator}")


def test_the_worker_that_knows_the_fewest_operators_takes_the_grant_the_first_of_equals() -> None:
    workers = [worker(1, "embed", "train"), worker(2, "train"), worker(3, "embed"), worker(4, "embed")]
    waiters = [waiter(age, one(1), operator="embed") for age in range(5)]
    admission = admit(waiters, {1: [gpu(0, 80)]}, workers={1: workers}, bypass_limit=16, batch=9)
    assert [(grant.id.int, grant.worker) for grant in admission.grants] == [
        (0, UUID(int=3)),
        (1, UUID(int=4)),
        (2, UUID(int=1)),
    ]


def test_the_first_host_with_room_and_a_worker_is_taken() -> None:
    fleet = {1: [gpu(0, 80)], 2: [gpu(0, 80, host_id=2)]}
    workers = {1: [worker(1, "train")], 2: [worker(2, "embed")]}
    waiters = [waiter(age, one(1), hosts=(1, 2), operator="embed") for age in range(2)]
    admission = admit(waiters, fleet, workers=workers, bypass_limit=16, batch=9)
    assert [(grant.id.int, grant.host_id, grant.worker) for grant in admission.grants] == [(0, 2, UUID(int=2))]


def test_without_a_worker_it_is_not_bypassed_and_nothing_is_kept_for_it() -> None:
    waiters = [waiter(0, one(80), operator="train", bypassed=99), *(waiter(age, one(10)) for age in range(1, 9))]
    for idle in ([], [worker(1, "embed")]):
        admission = admit(waiters, {1: [gpu(0, 80, 10)]}, workers={1: idle}, bypass_limit=16, batch=99)
        assert granted(admission) == [1, 2, 3, 4, 5, 6, 7]
        assert admission.bypasses == ()
        assert admission.kept == ()
    able = admit(waiters, {1: [gpu(0, 80, 10)]}, workers={1: [worker(1, "train")]}, bypass_limit=16, batch=99)
    assert granted(able) == []
    assert able.kept == (Kept(UUID(int=0), 1, 100, 80),)


def test_it_is_bypassed_until_the_last_worker_is_used_and_by_the_grant_that_uses_it() -> None:
    big, small = waiter(0, one(80), operator="train"), waiter(2, one(1), operator="embed")
    waiters = [big, waiter(1, one(1)), small, waiter(3, one(1))]
    workers = {1: [worker(1, "embed", "train")]}
    admission = admit(waiters, {1: [gpu(0, 80, 10)]}, workers=workers, bypass_limit=16, batch=99)
    assert granted(admission) == [1, 2, 3]
    assert admission.bypasses == (Bypass(big.shape, 0, 1), Bypass(big.shape, 0, 2))


def test_it_has_had_enough_by_the_grant_that_uses_the_last_worker_but_nothing_is_kept() -> None:
    waiters = [waiter(0, one(80), operator="train", bypassed=15)]
    waiters += [waiter(1, one(1), operator="train"), waiter(2, one(1))]
    admission = admit(waiters, {1: [gpu(0, 80, 10)]}, workers={1: [worker(1, "train")]}, bypass_limit=16, batch=99)
    assert granted(admission) == [1, 2]
    assert times_bypassed(waiters[0], admission.bypasses) == 1
    assert admission.kept == ()


def test_it_is_bypassed_and_kept_for_only_on_hosts_with_a_worker_left() -> None:
    fleet = {1: [gpu(0, 80, 10)], 2: [gpu(0, 80, 40, host_id=2)]}
    big = waiter(0, one(80), hosts=(1, 2), operator="train", bypassed=15)
    waiters = [big, waiter(1, one(5)), waiter(2, one(5), hosts=(2,)), waiter(3, one(5), hosts=(2,)), waiter(4, one(5))]
    admission = admit(waiters, fleet, workers={2: [worker(1, "train")]}, bypass_limit=16, batch=99)
    assert granted(admission) == [1, 2, 4]
    assert admission.bypasses == (Bypass(big.shape, 0, 2),)
    assert admission.kept == (Kept(UUID(int=0), 2, 200, 80),)


def test_room_is_kept_together_with_the_worker_that_will_need_it() -> None:
    overdue = [waiter(age, one(80), operator="train", bypassed=16) for age in range(2)]
    waiters = [*overdue, waiter(2, one(5), operator="train"), waiter(3, one(5))]
    fleet = {1: [gpu(0, 80, 10), gpu(1, 80, 20)]}
    # One worker can take but one of them; for the other, room would be kept in vain.
    admission = admit(waiters, fleet, workers={1: [worker(1, "train")]}, bypass_limit=16, batch=99)
    assert granted(admission) == [3]
    assert admission.kept == (Kept(UUID(int=0), 1, 100, 80),)
    assert {share.host_index for share in shares_of(admission)} == {1}


def test_impossible_is_told_whatever_workers_there_are() -> None:
    fleet = {1: [gpu(0, 80)], 2: [gpu(0, 160, host_id=2)]}
    waiters = [
        waiter(1, one(100), operator="train"),
        waiter(2, one(100), hosts=(1, 2), operator="train"),
        waiter(3, one(100), hosts=(1, 99), operator="train"),
        waiter(4, group(0, 2, 2, each=1), operator="embed"),
    ]
    for workers in ({}, {1: [worker(1, "train")]}):
        admission = admit(waiters, fleet, workers=workers, bypass_limit=16, batch=9)
        assert set(admission.impossible) == {UUID(int=1), UUID(int=4)}
        assert granted(admission) == []


@pytest.mark.parametrize("bypassed", [0, 20])
@pytest.mark.parametrize("idle", [0, 3, 50])
@pytest.mark.parametrize("room", [0, 80])
def test_thousands_of_equal_waiters_are_examined_once(bypassed: int, idle: int, room: int) -> None:
    waiters = [waiter(age, one(1), operator="train", bypassed=bypassed) for age in range(10_000)]
    workers = {1: [worker(number, "train", "embed") for number in range(idle)]}
    started = process_time()
    admission = admit(waiters, {1: [gpu(0, 80, 80 - room)]}, workers=workers, bypass_limit=16, batch=99)
    assert process_time() - started < 0.5
    assert granted(admission) == list(range(min(idle, room)))


def test_a_worker_gets_only_what_it_can_see() -> None:
    fleet = {1: [gpu(0, 80, 80), gpu(1, 80)]}
    waiters = [waiter(age, one(30), operator="train") for age in range(3)]
    blind, seeing = worker(1, "train", sees=[100]), worker(2, "train", sees=[101])
    admission = admit(waiters, fleet, workers={1: [blind, seeing]}, bypass_limit=16, batch=9)
    assert [(grant.id.int, grant.worker) for grant in admission.grants] == [(0, UUID(int=2))]
    assert admission.impossible == {}
    # Who sees all can take what others cannot, so it comes last.
    admission = admit(waiters, fleet, workers={1: [worker(3, "train"), blind, seeing]}, bypass_limit=16, batch=9)
    assert [(grant.id.int, grant.worker) for grant in admission.grants] == [(0, UUID(int=2)), (1, UUID(int=3))]


def test_nothing_is_kept_or_bypassed_where_no_worker_sees_it() -> None:
    fleet = {1: [gpu(0, 80, 80), gpu(1, 80, 20)]}
    big = waiter(0, one(80), operator="train", bypassed=16)
    waiters = [big, *(waiter(age, one(10)) for age in range(1, 4))]
    for sees, served, kept in [
        ([100], [1, 2, 3], (Kept(UUID(int=0), 1, 100, 80),)),
        ([101], [], (Kept(UUID(int=0), 1, 101, 80),)),
        ([], [1, 2, 3], ()),
    ]:
        admission = admit(waiters, fleet, workers={1: [worker(1, "train", sees=sees)]}, bypass_limit=16, batch=9)
        assert granted(admission) == served
        assert admission.kept == kept
        assert admission.bypasses == ()
    fresh = replace(big, bypassed=0)
    hidden = admit([fresh, *waiters[1:]], fleet, workers={1: [worker(1, "train", sees=[100])]}, bypass_limit=9, batch=9)
    assert (granted(hidden), hidden.bypasses) == ([1, 2, 3], ())
    seen = admit([fresh, *waiters[1:]], fleet, workers={1: [worker(1, "train", sees=[101])]}, bypass_limit=9, batch=9)
    assert times_bypassed(fresh, seen.bypasses) == 3


def test_impossible_is_judged_by_all_devices_and_not_by_what_workers_see() -> None:
    waiters = [waiter(1, one(80), operator="train"), waiter(2, one(81), operator="train")]
    blind = {1: [worker(1, "train", sees=[])]}
    assert set(admit(waiters, {1: [gpu(0, 80)]}, workers=blind, bypass_limit=16, batch=9).impossible) == {UUID(int=2)}
