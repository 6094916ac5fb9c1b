"""The book against the hardware: what is found on a device, given its leases and what the driver shows of it."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from jayrun.domain.units import format_bytes, format_seconds


class Finding(StrEnum):
    """What is found of a lease on a device, of a process without one, or of a device."""

    OK = "ok"
    OVER_USE = "over-use"
    IDLE_LEASE = "idle-lease"
    ORPHAN = "orphan"
    SQUATTER = "squatter"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A process that the driver shows on a device.

    `used_bytes` is None where the driver does not tell, which is not zero. `leases` are the live ones on this device
    that it counts to; else `former` are the ended ones that it comes from, the last first. `is_gone`: the kernel has no
    such process any more, and the driver still keeps its memory. `is_attended`: who held one of `former` is alive.
    `name` and `command` are the kernel's short name and the command line.
    """

    pid: int
    used_bytes: int | None
    leases: frozenset[UUID] = frozenset()
    former: tuple[UUID, ...] = ()
    name: str = ""
    command: str = ""
    is_gone: bool = False
    is_attended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """What a live lease has of the device. `unused_seconds`: for how long nothing was seen to be used by it (None: it
    was, or nobody could tell, when somebody looked the last time)."""

    lease_id: UUID
    memory_bytes: int
    exclusive: bool = False
    unused_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A device at one look: what the driver shows, and what the book has of it.

    `processes` is None where the driver does not show them, and `problem` says why. `used_bytes` is what is used in
    all, None where the driver does not tell. `ignore_bytes` is what a process may use beside its lease, and what others
    may use together; processes whose name is in `ignore_commands` are passed over whatever they use.
    """

    processes: tuple[Occupant, ...] | None
    leases: tuple[Leased, ...] = ()
    used_bytes: int | None = None
    ignore_bytes: int = 0
    ignore_commands: frozenset[str] = frozenset()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """A word and a sentence. `used_bytes` and `leased_bytes` are the numbers behind them, None where there is none."""

    finding: Finding
    detail: str
    used_bytes: int | None = None
    leased_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found of the device itself, of each of its leases, and of each process that counts to none (by pid).

    `foreign_bytes` is what such processes use, as far as it is not passed over, and not kept by a program that is alive
    and had a lease, for it would wait for itself; None: something, and nobody can tell how much.
    """

    device: Told
    leases: dict[UUID, Told]
    processes: dict[int, Told]
    foreign_bytes: int | None


def audit(found: Situation, *, idle_seconds: float) -> Audit:
    """Judge a device. A lease that nothing was used of for `idle_seconds` is idle."""
    if found.processes is None:
        why = found.problem or "the driver does not show who uses it"
        unreadable = Told(Finding.UNREADABLE, why, found.used_bytes, _total(found.leases))
        unknown = {each.lease_id: Told(Finding.UNREADABLE, why, None, each.memory_bytes) for each in found.leases}
        return Audit(unreadable, unknown, {}, 0)
    hidden = _hidden_bytes(found)
    leases: dict[UUID, Told] = {}
    for shares, theirs in _accounts(found.leases, found.processes):
        told = _of_account(shares, theirs, found, hidden=hidden, idle_seconds=idle_seconds)
        leases |= dict.fromkeys((each.lease_id for each in shares), told)
    processes, foreign_bytes = _of_others([each for each in found.processes if not each.leases], found)
    return Audit(_of_device(found, hidden), leases, processes, foreign_bytes)


def is_given_back(found: Situation, lease_id: UUID) -> bool:
    """Whether the driver shows free what an ended lease had of the device: no process that comes from it or may, and
    nothing used that no process is shown for."""
    if found.processes is None:
        return False
    if any(lease_id in each.former or (each.is_gone and not each.former) for each in found.processes):
        return False
    return _hidden_bytes(found) <= found.ignore_bytes


def _accounts(leases: Iterable[Leased], processes: Iterable[Occupant]) -> list[tuple[list[Leased], list[Occupant]]]:
    """Leases that the same processes count to are one account, with all their processes."""
    accounts = [([each], list[Occupant]()) for each in leases]
    for process in processes:
        mine = [account for account in accounts if process.leases.intersection(each.lease_id for each in account[0])]
        if not mine:
            continue
        for other in mine[1:]:
            mine[0][0].extend(other[0])
            mine[0][1].extend(other[1])
            accounts.remove(other)
        mine[0][1].append(process)
    return accounts


def _of_account(
    shares: Sequence[Leased], processes: Sequence[Occupant], found: Situation, *, hidden: int, idle_seconds: float
) -> Told:
    leased = _total(shares)
    known = sum(each.used_bytes or 0 for each in processes)
    together = f" (with {len(shares) - 1} more of the same processes)" if len(shares) > 1 else ""
    exclusive = any(each.exclusive for each in shares)
    has = ("the whole device is" if exclusive else f"{format_bytes(leased)} are") + f" leased{together}"
    silent = [each.pid for each in processes if each.used_bytes is None]
    if not exclusive and known > leased + found.ignore_bytes * len(processes):
        return Told(Finding.OVER_USE, f"{_pids(processes)} {format_bytes(known)}, but {has}", known, leased)
    if silent:
        return Told(Finding.UNREADABLE, f"the driver does not tell what pid {silent[0]} uses; {has}", None, leased)
    if not known and hidden > found.ignore_bytes:
        return Told(Finding.UNREADABLE, f"no process of it is shown, but {_of_hidden(hidden)}; {has}", None, leased)
    unused = [each.unused_seconds for each in shares]
    for_seconds = min((each for each in unused if each is not None), default=None)
    if not known and None not in unused and for_seconds is not None and for_seconds >= idle_seconds:
        return Told(Finding.IDLE_LEASE, f"{has}, and nothing was used for {format_seconds(for_seconds)}", 0, leased)
    used = f"{_pids(processes)} {format_bytes(known)}" if processes else "nothing is used"
    return Told(Finding.OK, f"{used}; {has}", known, leased)


def _of_others(others: Sequence[Occupant], found: Situation) -> tuple[dict[int, Told], int | None]:
    """Processes that count to no live lease: passed over by name, or together small, or each orphan or squatter."""
    listed = [each for each in others if _is_ignored(each, found.ignore_commands)]
    told = {each.pid: Told(Finding.OK, "passed over: it is on the device's list", each.used_bytes) for each in listed}
    rest = [each for each in others if each.pid not in told]
    used = _foreign_bytes(rest, found)
    if used is not None and used <= found.ignore_bytes:
        few = f"passed over: no more than {format_bytes(found.ignore_bytes)} are used without a lease"
        return told | {each.pid: Told(Finding.OK, few, each.used_bytes) for each in rest}, 0
    foreign = _foreign_bytes([each for each in rest if not each.is_attended], found)
    return told | {each.pid: _of_stranger(each) for each in rest}, foreign


def _of_stranger(process: Occupant) -> Told:
    amount = "an unknown amount" if process.used_bytes is None else format_bytes(process.used_bytes)
    if not process.former:
        return Told(Finding.SQUATTER, f"uses {amount} without a lease", process.used_bytes)
    if process.is_gone:
        return Told(Finding.ORPHAN, f"is gone, and the driver still keeps {amount} of it", process.used_bytes)
    return Told(Finding.ORPHAN, f"uses {amount} of a lease that has ended", process.used_bytes)


def _of_device(found: Situation, hidden: int) -> Told:
    leased = _total(found.leases)
    if found.problem:
        return Told(Finding.UNREADABLE, found.problem, found.used_bytes, leased)
    if hidden > found.ignore_bytes:
        return Told(Finding.UNREADABLE, _of_hidden(hidden), found.used_bytes, leased)
    return Told(Finding.OK, "nobody uses it" if not found.processes else "", found.used_bytes, leased)


def _foreign_bytes(others: Sequence[Occupant], found: Situation) -> int | None:
    """What they use together. Where the driver does not tell of one, it is what is used in all without what is known
    of others, and without the leases of those that it does not tell of either."""
    known = sum(each.used_bytes or 0 for each in others)
    if all(each.used_bytes is not None for each in others):
        return known
    if found.used_bytes is None:
        return None
    assert found.processes is not None
    silent = {lease for each in found.processes if each.used_bytes is None for lease in each.leases}
    theirs = sum(each.memory_bytes for each in found.leases if each.lease_id in silent)
    elsewhere = sum(each.used_bytes or 0 for each in found.processes if each not in others)
    return max(known, found.used_bytes - elsewhere - theirs)


def _hidden_bytes(found: Situation) -> int:
    """What is used in all beyond what the processes that are shown use; 0 where that cannot be told."""
    processes = found.processes or ()
    if found.used_bytes is None or any(each.used_bytes is None for each in processes):
        return 0
    return max(0, found.used_bytes - sum(each.used_bytes or 0 for each in processes))


def _is_ignored(process: Occupant, names: frozenset[str]) -> bool:
    program = os.path.basename(process.command.partition(" ")[0])
    return process.name in names or program in names


def _total(shares: Iterable[Leased]) -> int:
    return sum(each.memory_bytes for each in shares)


def _pids(processes: Sequence[Occupant]) -> str:
    if len(processes) == 1:
        return f"pid {processes[0].pid} uses"
    return f"{len(processes)} processes use"


def _of_hidden(hidden: int) -> str:
    return f"{format_bytes(hidden)} are used by processes that are not shown here"
