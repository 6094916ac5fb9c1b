"""Processes by descent: who is below one, whence one comes, who inherited a variable. Read from /proc; Linux only."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from jayrun import kernel
from jayrun.domain.liveness import Incarnation, Inhabitant, Verdict
from jayrun.domain.ownership import Lineage

LEASE_VARIABLE = "JAYRUN_LEASE"
"""Names the lease of a wrapped command to the command, and so to all that it starts."""
_MOST_KIN = 256  # a chain that changes while it is read might have no end


@dataclass(frozen=True, slots=True)
class Process:
    """A process that lived when it was looked at: its identity, its short name, and its command line for people."""

    who: Incarnation
    name: str
    command: str
    user_name: str


def children(pid: int) -> list[int]:
    """The pids of the children of `pid` that can be seen."""
    return _children_by_parent().get(pid, [])


def below(pid: int, *, since_ticks: int) -> list[Process]:
    """The living processes below `pid` that can be seen: its children, theirs, and so on.

    A child that started before `since_ticks` (clock ticks since boot) is passed over with all that is below it.
    """
    children = _children_by_parent()
    waiting = [each for each in children.get(pid, ()) if (kernel.start_ticks(each) or 0) >= since_ticks]
    found = []
    while waiting:
        each = waiting.pop(0)
        waiting += children.get(each, ())
        if not kernel.is_absent(each) and (process := _look_at(each)) is not None:
            found.append(process)
    return found


def bearers(variable: str, values: Collection[str]) -> list[tuple[str, Process]]:
    """The living processes that were started with `variable` set to one of `values`, and to which.

    Where the environment cannot be read (another user's process, unless the reader is root) a process is passed over.
    """
    found: dict[Incarnation, tuple[str, Process]] = {}
    for _ in range(2):  # a process that ends while it starts another one may slip through one look with both
        for pid in _pids():
            value = _variable(pid, variable)
            if value is None or value not in values or (process := _look_at(pid)) is None:
                continue
            if _variable(pid, variable) == value:  # read once more, now that it is known who has this pid
                found.setdefault(process.who, (value, process))
    return list(found.values())


def lineage(pid: int) -> Lineage:
    """A process by the number that this process sees it by, and where it comes from."""
    itself = kernel.inhabitant(pid)
    if itself is None or itself.absent:
        return Lineage(pid=pid)
    kin: list[Inhabitant] = []
    parent = _parent(pid)
    while parent and (found := kernel.inhabitant(parent)) is not None and len(kin) < _MOST_KIN:
        kin.append(found)
        parent = _parent(parent)
    gone = []
    for leader in {*_stat(pid)[1:]} - {0, pid}:
        if (found := kernel.inhabitant(leader)) is not None:
            kin.append(found)
        else:
            gone.append(leader)
    process = _look_at(pid)
    lease = None
    with suppress(ValueError):
        lease = UUID(_variable(pid, LEASE_VARIABLE) or "")
    return Lineage(
        pid=pid,
        itself=itself,
        kin=tuple(kin),
        gone=tuple(gone),
        lease=lease,
        name=process.name if process else "",
        command=process.command if process else "",
        user_name=process.user_name if process else "",
    )


def send(process: Process, number: int) -> None:
    """Send the signal `number` to this very process, if it is still there and may be sent one."""
    with suppress(OSError):
        pidfd = os.pidfd_open(process.who.pid)
        try:
            # Only now is it sure that the signal goes to the process that is looked at.
            if kernel.verdict(process.who) is Verdict.ALIVE:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for each in _pids():
        if (parent := _parent(each)) is not None:
            found.setdefault(parent, []).append(each)
    return found


def _pids() -> list[int]:
    if os.readlink("/proc/self") != str(os.getpid()):  # it counts the pids of another namespace
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    return next(iter(_stat(pid)), None)


def _stat(pid: int) -> list[int]:
    """Its parent, process group and session; nothing when it is gone."""
    stat = _read(pid, "stat")
    return [int(number) for number in stat[stat.rindex(b")") + 2 :].split()[1:4]] if stat else []


def _variable(pid: int, name: str) -> str | None:
    prefix = os.fsencode(f"{name}=")
    environment = _read(pid, "environ")
    if prefix not in environment:
        return None
    entries = environment.split(b"\0")
    return next((os.fsdecode(entry[len(prefix) :]) for entry in entries if entry.startswith(prefix)), None)


def _look_at(pid: int) -> Process | None:
    with suppress(ProcessLookupError, FileNotFoundError):
        who = kernel.incarnation(pid)
        name = os.fsdecode(_read(pid, "comm")).strip()
        line = os.fsdecode(_read(pid, "cmdline")).replace("\0", " ").strip()
        uid = os.stat(f"/proc/{pid}").st_uid
        try:
            user_name = pwd.getpwuid(uid).pw_name
        except KeyError:
            user_name = str(uid)
        return Process(who, name, line[:200] or name, user_name)
    return None


def _read(pid: int, file: str) -> bytes:
    """The file of the process, empty where it is gone or not ours to see."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""
