"""Whether a recorded holder still lives, judged from what the kernel shows a process of the same host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Incarnation:
    """What the book recorded of a process: one life of one pid.

    `pid_namespace` is the inode number of the namespace in which `pid` counts; `start_ticks` is the kernel's start time
    of the process in clock ticks since boot, without what a time namespace adds.
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """What an observing process sees of that pid now.

    `boot_id` and `pid_namespace` are the observer's own. `start_ticks` are those of the process that bears the pid now;
    `absent` means that the kernel answered ESRCH. None and not absent: it could not be read.
    """

    boot_id: str
    pid_namespace: int
    start_ticks: int | None
    absent: bool


@dataclass(frozen=True, slots=True)
class Inhabitant:
    """A process of a pid namespace below the observer's, which sees it as `seen_as`; `pid` is its number there.

    `pid_namespace` and `start_ticks` are None where they cannot be read.
    """

    seen_as: int
    pid: int
    pid_namespace: int | None
    start_ticks: int | None
    absent: bool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an observer sees of the pid namespaces below its own.

    `sees_all`: nothing is hidden from it. `is_first`: its own is the kernel's first one, which all others are below.
    """

    inhabitants: Sequence[Inhabitant]
    sees_all: bool
    is_first: bool


class Verdict(StrEnum):
    """What a sighting proves: that the holder lives, that it is dead, or nothing at all."""

    ALIVE = "alive"
    DEAD = "dead"
    UNSEEN = "unseen"


def judge(recorded: Incarnation, sighting: Sighting) -> Verdict:
    """Judge by facts alone: only an absent pid or one with another start is dead, and doubt means alive.

    An observer of another boot or another pid namespace does not see the process so: UNSEEN, for `judge_below`.
    """
    if (recorded.boot_id, recorded.pid_namespace) != (sighting.boot_id, sighting.pid_namespace):
        return Verdict.UNSEEN
    if sighting.absent:
        return Verdict.DEAD
    return Verdict.ALIVE if _same_start(sighting.start_ticks, recorded) else Verdict.DEAD


def judge_below(recorded: Incarnation, around: Surroundings) -> Verdict:
    """Judge a process of another pid namespace of the observer's boot by what the observer sees below its own.

    Dead is who is not there though the observer would see it: whoever sees one process of a namespace sees all of it.
    """
    if (found := find_below(recorded, around.inhabitants)) is not None:
        return Verdict.DEAD if found.absent else Verdict.ALIVE
    is_below = around.is_first or any(each.pid_namespace == recorded.pid_namespace for each in around.inhabitants)
    return Verdict.DEAD if around.sees_all and is_below else Verdict.UNSEEN


def find_below(recorded: Incarnation, inhabitants: Iterable[Inhabitant]) -> Inhabitant | None:
    """The process that was recorded, as far as can be read."""
    return next((each for each in inhabitants if is_same(recorded, each)), None)


def is_same(recorded: Incarnation, seen: Inhabitant) -> bool:
    """Whether a process that is seen is the one that was recorded, as far as can be read."""
    return (
        seen.pid == recorded.pid
        and seen.pid_namespace in (None, recorded.pid_namespace)
        and _same_start(seen.start_ticks, recorded)
    )


def _same_start(start_ticks: int | None, recorded: Incarnation) -> bool:
    """As far as can be read. Readers in two time namespaces may round to two ticks that follow one another."""
    return start_ticks is None or abs(start_ticks - recorded.start_ticks) <= 1


def is_over(verdict: Verdict, *, silent: bool, watched: bool) -> bool:
    """Whether a holder is to be ended.

    Time counts only where nobody sees it: when it has been `silent` for the TTL and its host was `watched`, that is in
    touch with the book through its present boot, without a gap and for as long, so that it had time to be seen.
    """
    return verdict is Verdict.DEAD or (verdict is Verdict.UNSEEN and silent and watched)
