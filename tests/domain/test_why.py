"""Why a waiter waits and what would admit it, over a table of situations; and never another word than admission's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from fleets import GB, any_request, booked_devices, gpu, group, one, subsets
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import waiter

from jayrun.domain.devices import Backend, BookedDevice, DeviceState, Share
from jayrun.domain.ending import Endable
from jayrun.domain.explanation import Active, Ended, Explanation, Failure, Ready, Waiting, outlook_text
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.planner import plan
from jayrun.domain.queue import Waiter, Worker, admit
from jayrun.domain.requests import Request
from jayrun.domain.search import book
from jayrun.domain.why import (
    Held,
    HostPicture,
    Later,
    Never,
    Now,
    Outlook,
    Queued,
    RunningWorker,
    Who,
    knowing_workers,
    look_ahead,
)

LIMIT = 16
ME = 1_000  # an age: everyone else in these tests asked before


def held(number: int, *shares: tuple[int, int], exclusive: bool = False) -> Held:
    """Lease `number` with (host index, bytes) of devices of host 1, held by the process of that number for a minute."""
    taken = tuple(Share(100 + index, index, memory_bytes, exclusive) for index, memory_bytes in shares)
    who = Who(UUID(int=number), "Train", number, "ann", f"label {number}")
    return Held(Endable(UUID(int=number), taken), who, 60.0)


def queued(*waiters: Waiter) -> tuple[Queued, ...]:
    return tuple(Queued(each, Who(each.id, "Serve", each.id.int, "bob")) for each in waiters)


def host(
    devices: Sequence[BookedDevice],
    *leases: Held,
    waiters: Sequence[Waiter] = (),
    workers: Sequence[RunningWorker] = (),
    number: int = 1,
) -> HostPicture:
    carrying = book(devices, [share for each in leases for share in each.lease.shares])
    return HostPicture(
        id=number,
        name=f"host{number}",
        devices=tuple(carrying),
        leases=leases,
        waiters=queued(*waiters),
        workers=workers,
    )


def worker(number: int, *operators: str, busy: bool = False, silent: bool = False) -> RunningWorker:
    return RunningWorker(Worker(UUID(int=number), frozenset(operators)), busy, silent)


def detached(*requests: Request, operator: str = "Embed", hosts: tuple[int, ...] = (1,)) -> Waiter:
    return replace(waiter(ME, *requests, hosts=hosts), operator=operator)


def later(outlook: Outlook) -> Later:
    assert isinstance(outlook, Later), outlook
    return outlook


def unmet(outlook: Outlook) -> list[tuple[str, ...]]:
    return [each.unmet for terms in later(outlook).hosts for each in terms.devices]


def ids(leases: tuple[Held, ...] | None) -> list[int] | None:
    return None if leases is None else [each.lease.lease_id.int for each in leases]


def device(index: int, **facts: object) -> BookedDevice:
    return gpu(index, 80 * GB, **facts)


KEPT = "kept for Serve (pid 7 of bob)"
TRAIN = "Train (pid 1 of ann, label 1), lease 000000000001"
STRANGE = "\N{REPLACEMENT CHARACTER}"

SITUATIONS = {
    "free bytes": (
        (one(40 * GB),),
        host([device(0)], held(1, (0, 50 * GB))),
        [("30 GB free, needs 40 GB",)],
        [1],
    ),
    "to the byte where rounding would hide it": (
        (one(40 * GB),),
        host([device(0)], held(1, (0, 40 * GB + 1))),
        [("39999999999 B free, needs 40000000000 B",)],
        [1],
    ),
    "an exclusive holder": (
        (one(1),),
        host([device(0)], held(1, (0, 0), exclusive=True)),
        [("held by an exclusive lease",)],
        [1],
    ),
    "asked for exclusively": (
        (one(0, exclusive=True),),
        host([device(0), device(1)], held(1, (0, 5)), held(2, (0, 5)), held(3, (1, 50))),
        [("asked for exclusively, but carries 2 leases",), ("asked for exclusively, but carries 1 lease",)],
        [3],
    ),
    "an exclusive-only device": (
        (one(5),),
        host([device(0, exclusive_only=True)], held(1, (0, 5))),
        [("an exclusive-only device, but carries 1 lease",)],
        [1],
    ),
    "draining and offline": (
        (one(5),),
        host([device(0, state=DeviceState.DRAINING), device(1, state=DeviceState.OFFLINE)], held(1, (0, 5))),
        [("draining",), ("offline",)],
        None,
    ),
    "the wrong backend": (
        (one(80 * GB),),
        host([device(0, backends=frozenset({Backend.ROCM})), device(1)], held(1, (0, 5)), held(2, (1, 5 * GB))),
        [("no cuda",), ("75 GB free, needs 80 GB",)],
        [2],
    ),
    "a pinned device": (
        (one(80 * GB, device_id=1),),
        host([device(0), device(1)], held(1, (1, 5 * GB))),
        [("not device_id 1",), ("75 GB free, needs 80 GB",)],
        [1],
    ),
    "a group of which one member fits": (
        (group(0, 2, 2, each=60 * GB),),
        host([device(0), device(1), device(2)], held(1, (0, 30 * GB)), held(2, (1, 40 * GB)), held(3, (1, 5 * GB))),
        [("50 GB free, needs 60 GB",), ("35 GB free, needs 60 GB",), ()],
        [1],
    ),
    "a lease on two devices suffices where four others would be needed": (
        (group(0, 2, 2, each=80 * GB),),
        host(
            [device(index) for index in range(4)],
            *(held(index + 1, (index // 2, 30 * GB)) for index in range(4)),
            held(5, (2, 1), (3, 1)),
        ),
        [
            ("20 GB free, needs 80 GB",),
            ("20 GB free, needs 80 GB",),
            ("79999999999 B free, needs 80000000000 B",),
            ("79999999999 B free, needs 80000000000 B",),
        ],
        [5],
    ),
    "of several leases a smaller set suffices": (
        (one(50 * GB),),
        host([device(0)], held(1, (0, 10 * GB)), held(2, (0, 45 * GB)), held(3, (0, 10 * GB)), held(4, (0, 10 * GB))),
        [("5 GB free, needs 50 GB",)],
        [2],
    ),
    "two requests, each of which would fit alone": (
        (one(50 * GB), one(60 * GB)),
        host([device(0), device(1)], held(1, (0, 60 * GB))),
        [("20 GB free, needs 50 GB", "20 GB free, needs 60 GB"), ()],
        [1],
    ),
    "kept for an older waiter": (
        (one(10 * GB),),
        host([device(0)], held(1, (0, 20 * GB)), waiters=[waiter(7, one(80 * GB), bypassed=LIMIT)]),
        [(KEPT,)],
        None,  # whatever ends, Serve takes all of it
    ),
    "kept for an older waiter, and enough beside it in the end": (
        (one(10 * GB),),
        host(
            [device(0)],
            held(1, (0, 10 * GB)),
            held(2, (0, 10 * GB)),
            waiters=[waiter(7, one(65 * GB), bypassed=LIMIT)],
        ),
        [(KEPT,)],
        [1, 2],
    ),
    "kept for an older group, which leaves a part": (
        (one(40 * GB),),
        host(
            [device(0), device(1)],
            held(1, (1, 60 * GB)),
            waiters=[waiter(7, group(0, 2, 2, each=50 * GB), bypassed=LIMIT)],
        ),
        [(f"{KEPT}; beside that 30 GB free, needs 40 GB",), ("20 GB free, needs 40 GB",)],
        None,  # Serve takes 50 GB of both
    ),
    "kept for an older exclusive one": (
        (one(1),),
        host(
            [device(0), device(1)],
            held(1, (1, 60 * GB)),
            waiters=[waiter(7, group(0, 2, 2, exclusive=True), bypassed=LIMIT)],
        ),
        [(KEPT,), (KEPT,)],
        None,
    ),
    "going first to an older waiter": (
        (one(40 * GB),),
        host([device(0)], held(1, (0, 20 * GB)), waiters=[waiter(7, one(30 * GB))]),
        [("goes first to Serve (pid 7 of bob); beside that 30 GB free, needs 40 GB",)],
        [1],
    ),
    "an older waiter takes what ends first": (
        (one(40 * GB),),
        host([device(0), device(1)], held(1, (0, 70 * GB)), held(2, (1, 80 * GB)), waiters=[waiter(7, one(60 * GB))]),
        [("10 GB free, needs 40 GB",), ("0 GB free, needs 40 GB",)],
        [1, 2],
    ),
    "an older waiter that is left too little takes nothing": (
        (one(40 * GB),),
        host(
            [device(0)],
            held(1, (0, 40 * GB)),
            held(2, (0, 39 * GB)),
            waiters=[waiter(7, one(80 * GB))],
        ),
        [("1 GB free, needs 40 GB",)],
        [2],  # both would be too many: then Serve takes all
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_each_device_lacks_and_whose_end_would_admit(name: str) -> None:
    requests, picture, lacking, fewest = SITUATIONS[name]
    outlook = later(look_ahead(waiter(ME, *requests), [picture], LIMIT))
    assert unmet(outlook) == lacking
    assert ids(outlook.fewest) == fewest
    [terms] = outlook.hosts
    assert not terms.fits
    for each in terms.devices:
        assert each.leases == tuple(
            lease for lease in picture.leases if any(share.device_id == each.device.id for share in lease.lease.shares)
        )


def test_zero_devices_are_never() -> None:
    outlook = look_ahead(waiter(ME, one(GB)), [host([])], LIMIT)
    finds = "`jayrun devices discover` finds NVIDIA GPUs, `jayrun devices declare` adds others"
    remedy = f"this host has no devices in the book; {finds}"
    assert outlook == Never(f"cuda(memory_gb=1) can never be placed: {remedy}")


def test_never_comes_with_the_numbers_of_each_device() -> None:
    outlook = look_ahead(waiter(ME, one(90 * GB)), [host([device(0), gpu(1, 24 * GB)], held(1, (0, 5)))], LIMIT)
    assert outlook == Never(
        "cuda(memory_gb=90) can never be placed: it needs 90 GB on one gpu with cuda\n"
        "  gpu 0: 80 GB, cuda: too small\n"
        "  gpu 1: 24 GB, cuda: too small"
    )


def test_two_requests_that_never_fit_together() -> None:
    outlook = look_ahead(waiter(ME, one(50 * GB), one(60 * GB)), [host([device(0)])], LIMIT)
    assert isinstance(outlook, Never)
    assert outlook.reason.startswith(
        "the 2 requests cuda(memory_gb=50), cuda(memory_gb=60) can never be placed together, although each could be "
        "alone; they need at least 110 GB"
    )


def test_two_requests_that_fit_alone_and_not_together() -> None:
    wanted = waiter(ME, one(50 * GB), one(60 * GB))
    outlook = later(look_ahead(wanted, [host([device(0), device(1)], held(1, (1, 80 * GB)))], LIMIT))
    assert unmet(outlook) == [(), ("0 GB free, needs 50 GB", "0 GB free, needs 60 GB")]
    assert [terms.takers for terms in outlook.hosts] == [(1, 1)]
    assert ids(outlook.fewest) == [1]
    assert "  all of them together find no room" in list(outlook_text(outlook, wanted.requests))


def test_who_stands_before_it() -> None:
    older, later_on, urgent = waiter(5, one(80 * GB)), waiter(ME + 1, one(1)), waiter(ME + 2, one(80 * GB), priority=1)
    picture = host([device(0)], held(1, (0, GB)), waiters=[older, later_on, urgent])
    outlook = later(look_ahead(waiter(ME, one(80 * GB)), [picture], LIMIT))
    assert [who.execution_id.int for who in outlook.before] == [ME + 2, 5]
    assert outlook.fewest is None
    assert ids(outlook.room) == [1]
    later_ones = look_ahead(waiter(ME, one(80 * GB), priority=2), [picture], LIMIT)
    assert later(later_ones).before == ()
    assert ids(later(later_ones).fewest) == [1]


def test_several_leases_are_listed_one_a_line() -> None:
    wanted = waiter(ME, one(80 * GB))
    outlook = look_ahead(wanted, [host([device(0)], held(1, (0, GB)), held(2, (0, GB)))], LIMIT)
    assert list(outlook_text(outlook, wanted.requests))[-3:] == [
        "would be admitted after the end of 2 leases:",
        f"  {TRAIN}",
        "  Train (pid 2 of ann, label 2), lease 000000000002",
    ]


def test_now_with_the_devices_it_gets() -> None:
    picture = host([device(0), device(1)], held(1, (0, 30 * GB)), waiters=[waiter(5, one(80 * GB, device_id=0))])
    assert look_ahead(waiter(ME, one(40 * GB)), [picture], LIMIT) == Now(
        1, "host1", ((Share(100, 0, 40 * GB, False),),)
    )


def test_a_detached_one_needs_a_worker() -> None:
    devices = [device(0)]
    wanted = detached(one(GB))
    for workers, told in {
        (): "no running worker knows operator Embed",
        (worker(1, "Other"),): "no running worker knows operator Embed",
        (worker(1, "Embed", busy=True),): "the only worker that knows operator Embed is busy",
        (worker(1, "Embed", busy=True), worker(2, "Embed", "Other", busy=True), worker(3, "Other")): (
            "all 2 workers that know operator Embed are busy"
        ),
        (worker(1, "Embed", silent=True), worker(2, "Embed", busy=True)): (
            "of 2 workers that know operator Embed, 1 busy, 1 not answering"
        ),
    }.items():
        outlook = later(look_ahead(wanted, [host(devices, held(1, (0, 5)), workers=workers)], LIMIT))
        assert str(outlook.workers) == told
        assert [terms.fits for terms in outlook.hosts] == [True]
        assert unmet(outlook) == [()]
        assert outlook.fewest is None
        text = list(outlook_text(outlook, wanted.requests))
        assert f"  {told}" in text
        assert "  there is room, but no idle worker sees enough of it" in text


def test_a_worker_that_is_idle_takes_it() -> None:
    outlook = look_ahead(detached(one(GB)), [host([device(0)], workers=[worker(1, "Embed")])], LIMIT)
    assert isinstance(outlook, Now)


def test_a_worker_without_room() -> None:
    picture = host([device(0)], held(1, (0, 80 * GB)), workers=[worker(1, "Embed"), worker(2, "Embed", busy=True)])
    outlook = later(look_ahead(detached(one(GB)), [picture], LIMIT))
    assert str(outlook.workers) == "1 of 2 running workers that know operator Embed is idle"
    assert ids(outlook.fewest) == [1]


def test_a_detached_one_is_served_by_any_host() -> None:
    here = host([device(0)], held(1, (0, 80 * GB)), held(2, (0, 0)), workers=[worker(1, "Embed")])
    there = host([gpu(0, 24 * GB, host_id=2)], workers=[worker(2, "Embed")], number=2)
    wanted = detached(one(40 * GB), hosts=(1, 2))
    outlook = later(look_ahead(wanted, [here, there], LIMIT))
    assert unmet(outlook) == [("0 GB free, needs 40 GB",), ("24 GB free, needs 40 GB",)]
    assert ids(outlook.fewest) == [1]
    assert isinstance(look_ahead(detached(one(GB), hosts=(1, 2)), [here, there], LIMIT), Now)
    never = look_ahead(detached(one(90 * GB), hosts=(1, 2)), [here, there], LIMIT)
    assert isinstance(never, Never)
    assert "  gpu 0: 80 GB, cuda: too small" in never.reason
    assert "  gpu 0: 24 GB, cuda: too small" in never.reason
    assert later(look_ahead(wanted, [], LIMIT)).hosts == ()


def test_the_whole_text_of_one_that_waits() -> None:
    requests = (group(0, 2, 2, each=60 * GB),)
    picture = host(
        [device(0), device(1, state=DeviceState.DRAINING), device(2)],
        held(1, (0, 30 * GB), (2, 10 * GB)),
        waiters=[waiter(age, one(80 * GB, device_id=2)) for age in range(1, 8)],
    )
    outlook = look_ahead(waiter(ME, *requests), [picture], LIMIT)
    explanation = Explanation(
        who=Who(UUID(int=ME), "Me\x1b[31m", 12, "eve", "a\nb"),
        kind="operator",
        state=ExecutionState.WAITING,
        priority=0,
        seconds=192,
        failure=None,
        situation=Waiting(position=8, waiting=9, queue="host1", requests=requests, dormant=True, outlook=outlook),
    )
    assert explanation.text().splitlines() == [
        f"Me{STRANGE}[31m (pid 12 of eve, a{STRANGE}b), operator {UUID(int=ME)}",
        "waiting for 3 m 12 s, place 8 of 9 in the queue of host1",
        "its process does not answer: nothing is granted to it or kept for it until it shows life",
        "not now: cuda_group(per_device_memory_gb=60, max_devices=2, min_devices=2)",
        "on host1:",
        "  gpu 0: 50 GB free, needs 60 GB",
        f"    30 GB for 1 m: {TRAIN}",
        "  gpu 1: draining",
        "  gpu 2: would take a share",
        "  cuda_group(per_device_memory_gb=60, max_devices=2, min_devices=2): only 1 of 2 devices would take a share",
        "before it: " + ", ".join([*(f"Serve (pid {age} of bob)" for age in range(1, 6)), "2 more"]),
        "no end of leases alone would admit it",
        f"room for it, if nobody came first, would be made by the end of {TRAIN}",
    ]


BUSY = knowing_workers("Embed", [host([], workers=[worker(1, "Embed", busy=True)])])


@pytest.mark.parametrize(
    ("state", "failure", "situation", "told"),
    [
        (
            ExecutionState.READY,
            Failure("ValueError", "bad luck"),
            Ready(position=3, attempt=2, max_attempts=4, pause_seconds=65.5, workers=BUSY),
            [
                "ready, submitted 2 m 5 s ago, place 3 of those that are ready",
                "attempt 2 of 4",
                "not tried again before 1 m 5 s have passed",
                "the only worker that knows operator Embed is busy",
                "an attempt failed: ValueError: bad luck",
            ],
        ),
        (
            ExecutionState.RUNNING,
            None,
            Active(host="host1", leases=(held(1, (0, GB), (1, 0), exclusive=True),), cancelled_seconds=3.0),
            [
                "running for 2 m 5 s on host1",
                f"holds device 0 (1 GB, exclusive), device 1 (exclusive) for 1 m: {TRAIN}",
                "asked to end for 3 s",
            ],
        ),
        (
            ExecutionState.ADMITTED,
            None,
            Active(host="host1", leases=(), cancelled_seconds=None),
            ["admitted for 2 m 5 s on host1, granted and not claimed yet"],
        ),
        (ExecutionState.SUCCEEDED, None, Ended(), ["succeeded 2 m 5 s ago"]),
        (
            ExecutionState.FAILED,
            Failure("ProcessDied", "its process ended without finishing it"),
            Ended(),
            ["failed 2 m 5 s ago", "ProcessDied: its process ended without finishing it"],
        ),
        (
            ExecutionState.CANCELLED,
            Failure("PlacementCancelled", "the Runtime was closed"),
            Ended(),
            ["cancelled 2 m 5 s ago", "PlacementCancelled: the Runtime was closed"],
        ),
    ],
)
def test_the_text_of_one_that_does_not_wait(
    state: ExecutionState,
    failure: Failure | None,
    situation: Ready | Active | Ended,
    told: list[str],
) -> None:
    explanation = Explanation(
        who=Who(UUID(int=9), "Embed", user="ann"),
        kind="operator",
        state=state,
        priority=0,
        seconds=125,
        failure=failure,
        situation=situation,
    )
    head = "Embed (ann), operator 00000000-0000-0000-0000-000000000009"
    assert explanation.text().splitlines() == [head, *told]


@settings(max_examples=150, deadline=None)
@given(
    booked_devices(3),
    st.lists(any_request(2), max_size=5),
    st.lists(st.tuples(any_request(2), st.integers(0, 2)), max_size=3),
    any_request(2),
)
def test_it_is_what_admission_would_decide_and_no_smaller_set_would_do(
    devices: list[BookedDevice], leased: list[Request], older: list[tuple[Request, int]], wanted: Request
) -> None:
    booked, leases = [each.emptied() for each in devices], []
    for number, request in enumerate(leased):
        for shares in plan([request], booked) or ():
            booked = list(book(booked, shares))
            leases.append(Held(Endable(UUID(int=number), shares), Who(UUID(int=number), "Train"), 1.0))
    before = [waiter(age, request, bypassed=bypassed) for age, (request, bypassed) in enumerate(older, start=1)]
    me = waiter(ME, wanted)
    picture = HostPicture(id=1, name="host1", devices=tuple(booked), leases=leases, waiters=queued(*before))
    outlook = look_ahead(me, [picture], 2)

    def granted(ended: Sequence[Held]) -> bool:
        shares = [share for each in ended for share in each.lease.shares]
        freed = [each.without_shares(shares) for each in booked]
        decided = admit([*before, me], {1: freed}, bypass_limit=2, batch=10)
        return any(grant.id == me.id for grant in decided.grants)

    assert isinstance(outlook, Now) == granted(())
    if isinstance(outlook, Later):
        sufficient = [len(ended) for ended in subsets(leases) if granted(ended)]
        if outlook.fewest is None:
            assert sufficient == []
        else:
            assert granted(outlook.fewest)
            assert len(outlook.fewest) == min(sufficient)
        assert outlook.hosts[0].takers == (sum(not each.unmet for each in outlook.hosts[0].devices),)
