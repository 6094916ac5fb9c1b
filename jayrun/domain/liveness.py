"""Whether a recorded holder still lives, judged from what the kernel shows a process of the same host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Incarnation:
    """What the book recorded of a process: one life of one pid.

    `pid_namespace` is the inode number of the namespace in which `pid` counts; `start_ticks` is the kernel's start time
    of the process in clock ticks since boot.
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


class Verdict(StrEnum):
    """What a sighting proves: that the holder lives, that it is dead, or nothing at all."""

    ALIVE = "alive"
    DEAD = "dead"
    UNSEEN = "unseen"


def judge(recorded: Incarnation, sighting: Sighting) -> Verdict:
    """Judge by facts alone: only an absent pid or one with another start is dead, and doubt means alive.

    An observer of another boot or another pid namespace cannot see the process: UNSEEN, for other facts to decide.
    """
    if (recorded.boot_id, recorded.pid_namespace) != (sighting.boot_id, sighting.pid_namespace):
        return Verdict.UNSEEN
    if sighting.absent:
        return Verdict.DEAD
    if sighting.start_ticks is not None and sighting.start_ticks != recorded.start_ticks:
        return Verdict.DEAD
    return Verdict.ALIVE
