"""What is found of a device: a word, numbers and a sentence for each lease and each process that has none."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pytest

from jayrun.domain.audit import Audit, Finding, Leased, Occupant, Situation, audit, is_given_back

GB = 10**9
A, B, ENDED = UUID(int=1), UUID(int=2), UUID(int=3)
SMALL = GB // 2  # what the device passes over


def used(pid: int, gigabytes: float | None, *leases: UUID, former: Sequence[UUID] = (), **more: object) -> Occupant:
    memory = None if gigabytes is None else int(gigabytes * GB)
    return Occupant(pid=pid, used_bytes=memory, leases=frozenset(leases), former=tuple(former), **more)  # type: ignore[arg-type]


def lease(key: UUID, gigabytes: float, *, exclusive: bool = False, unused: float | None = None) -> Leased:
    return Leased(lease_id=key, memory_bytes=int(gigabytes * GB), exclusive=exclusive, unused_seconds=unused)


def look(
    *processes: Occupant, leases: Sequence[Leased] = (), in_all: float | None = None, problem: str | None = None
) -> Situation:
    return Situation(
        processes=processes,
        leases=tuple(leases),
        used_bytes=None if in_all is None else int(in_all * GB),
        ignore_bytes=SMALL,
        ignore_commands=frozenset({"Xorg"}),
        problem=problem,
    )


def judged(found: Situation) -> Audit:
    return audit(found, idle_seconds=600)


@pytest.mark.parametrize(
    ("processes", "leases", "word", "sentence"),
    [
        ([used(1, 9, A)], [lease(A, 10)], "ok", "pid 1 uses 9 GB; 10 GB are leased"),
        ([used(1, 10.5, A)], [lease(A, 10)], "ok", "pid 1 uses 10.5 GB; 10 GB are leased"),
        ([used(1, 10.6, A)], [lease(A, 10)], "over-use", "pid 1 uses 10.6 GB, but 10 GB are leased"),
        ([used(1, 6, A), used(2, 5, A)], [lease(A, 10)], "ok", "2 processes use 11 GB; 10 GB are leased"),
        ([used(1, 6, A), used(2, 5.1, A)], [lease(A, 10)], "over-use", "2 processes use 11.1 GB, but 10 GB are leased"),
        ([used(1, 70, A)], [lease(A, 0, exclusive=True)], "ok", "pid 1 uses 70 GB; the whole device is leased"),
        ([used(1, None, A)], [lease(A, 10)], "unreadable",
         "the driver does not tell what pid 1 uses; 10 GB are leased"),
        ([used(1, None, A), used(2, 12, A)], [lease(A, 10)], "over-use", "2 processes use 12 GB, but 10 GB are leased"),
        ([], [lease(A, 10)], "ok", "nothing is used; 10 GB are leased"),
        ([], [lease(A, 10, unused=599)], "ok", "nothing is used; 10 GB are leased"),
        ([], [lease(A, 10, unused=600)], "idle-lease", "10 GB are leased, and nothing was used for 10 m"),
        ([used(1, 0, A)], [lease(A, 10, unused=600)], "idle-lease", "10 GB are leased, and nothing was used for 10 m"),
        ([used(1, 0.1, A)], [lease(A, 10, unused=600)], "ok", "pid 1 uses 100 MB; 10 GB are leased"),
        ([used(1, None, A)], [lease(A, 10, unused=600)], "unreadable",
         "the driver does not tell what pid 1 uses; 10 GB are leased"),
    ],
)  # fmt: skip
def test_a_lease(processes: list[Occupant], leases: list[Leased], word: str, sentence: str) -> None:
    told = judged(look(*processes, leases=leases)).leases[A]
    assert (told.finding, told.detail) == (word, sentence)


def test_leases_of_the_same_processes_are_one_account() -> None:
    ours = [lease(A, 4), lease(B, 6)]
    both = judged(look(used(1, 9, A, B), leases=ours))
    assert both.leases[A] == both.leases[B]
    assert both.leases[A].detail == "pid 1 uses 9 GB; 10 GB are leased (with 1 more of the same processes)"
    assert both.leases[A].finding is Finding.OK
    chained = judged(look(used(1, 9, A), used(2, 0.5, A, B), leases=ours))
    assert (chained.leases[B].finding, chained.leases[B].used_bytes, chained.leases[B].leased_bytes) == (
        *("ok", 9.5 * GB, 10 * GB),
    )
    apart = judged(look(used(1, 9, A), used(2, 0.5, B), leases=ours))
    assert [apart.leases[each].finding for each in (A, B)] == ["over-use", "ok"]


def test_a_lease_whose_processes_may_be_hidden_is_not_called_idle() -> None:
    told = judged(look(leases=[lease(A, 10, unused=600)], in_all=3)).leases[A]
    assert told.finding is Finding.UNREADABLE
    assert told.detail == (
        "no process of it is shown, but 3 GB are used by processes that are not shown here; 10 GB are leased"
    )


@pytest.mark.parametrize(
    ("processes", "words", "foreign"),
    [
        ([used(1, 3)], ["squatter"], 3),
        ([used(1, 3, former=[ENDED])], ["orphan"], 3),
        ([used(1, 3, former=[ENDED], is_gone=True)], ["orphan"], 3),
        ([used(1, 0.5)], ["ok"], 0),
        ([used(1, 0.3), used(2, 0.3)], ["squatter", "squatter"], 0.6),
        ([used(1, 5, name="Xorg")], ["ok"], 0),
        ([used(1, 5, command="/usr/lib/Xorg :0")], ["ok"], 0),
        ([used(1, 5, name="Xorg"), used(2, 0.4)], ["ok", "ok"], 0),
        ([used(1, 5, name="Xorg"), used(2, 4)], ["ok", "squatter"], 4),
        ([used(1, 5, command="python Xorg")], ["squatter"], 5),
        ([used(1, None)], ["squatter"], None),
        ([used(1, 3, former=[ENDED], is_attended=True)], ["orphan"], 0),
        ([used(1, 3, former=[ENDED], is_attended=True), used(2, 0.1)], ["orphan", "squatter"], 0.1),
    ],
)
def test_processes_without_a_lease(processes: list[Occupant], words: list[str], foreign: float | None) -> None:
    found = judged(look(*processes))
    assert [found.processes[each.pid].finding for each in processes] == words
    assert found.foreign_bytes == (None if foreign is None else foreign * GB)


@pytest.mark.parametrize(
    ("process", "sentence"),
    [
        (used(1, 3), "uses 3 GB without a lease"),
        (used(1, None), "uses an unknown amount without a lease"),
        (used(1, 3, former=[ENDED]), "uses 3 GB of a lease that has ended"),
        (used(1, 3, former=[ENDED], is_gone=True), "is gone, and the driver still keeps 3 GB of it"),
    ],
)
def test_what_is_said_of_a_process(process: Occupant, sentence: str) -> None:
    assert judged(look(process)).processes[1].detail == sentence


@pytest.mark.parametrize(
    ("processes", "in_all", "foreign"),
    [
        ([used(1, None)], 7, 7),
        ([used(1, None), used(2, 3, A)], 7, 4),
        ([used(1, None), used(2, None, A)], 17, 7),  # the lease of 10 is taken to be used
        ([used(1, None), used(2, None, A)], 9, 0),
        ([used(1, None), used(2, 5)], 3, 5),  # read at two moments
        ([used(1, None)], 0.4, 0),
    ],
)
def test_what_the_driver_does_not_tell_of_a_process_is_what_is_left(
    processes: list[Occupant], in_all: float, foreign: float
) -> None:
    assert judged(look(*processes, leases=[lease(A, 10)], in_all=in_all)).foreign_bytes == foreign * GB


def test_a_device() -> None:
    assert judged(look()).device.detail == "nobody uses it"
    assert judged(look(used(1, 3), in_all=3.4)).device.finding is Finding.OK
    hidden = judged(look(used(1, 3), in_all=8)).device
    assert (hidden.finding, hidden.detail) == ("unreadable", "5 GB are used by processes that are not shown here")
    lost = judged(look(problem="it is lost")).device
    assert (lost.finding, lost.detail) == ("unreadable", "it is lost")


def test_nothing_is_said_of_processes_that_cannot_be_seen() -> None:
    found = judged(Situation(processes=None, leases=(lease(A, 10, unused=700),), used_bytes=3 * GB))
    assert found.device.detail == "the driver does not show who uses it"
    assert (found.leases[A].finding, found.leases[A].used_bytes) == ("unreadable", None)
    assert (found.processes, found.foreign_bytes) == ({}, 0)


@pytest.mark.parametrize(
    ("found", "free"),
    [
        (look(), True),
        (look(in_all=0.4), True),
        (look(in_all=3), False),
        (look(used(1, 3, B), in_all=3), True),
        (look(used(1, 3, former=[B]), in_all=3), True),
        (look(used(1, 3, former=[B, ENDED])), False),
        (look(used(1, 3, is_gone=True)), False),
        (Situation(processes=None, used_bytes=0), False),
    ],
)
def test_when_the_driver_shows_memory_given_back(found: Situation, free: bool) -> None:
    assert is_given_back(found, ENDED) is free
