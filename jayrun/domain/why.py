"""Why an execution waits, and what would admit it: told by the pass over the queue that admission itself makes.

`look_ahead` makes that pass up to one waiter and no further, so what it says of room kept for others, of workers and of
those who come first is what admission would decide on the same picture. Spans of time are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.ending import Endable, fewest_to_end
from jayrun.domain.fit import is_candidate
from jayrun.domain.planner import Plan, plan
from jayrun.domain.queue import Admission, Waiter, Worker, admit
from jayrun.domain.reasons import printable, short_id, unmet
from jayrun.domain.requests import Request
from jayrun.domain.search import book
from jayrun.domain.visible import asked_by

_WORK = 20_000
"""Waiters looked at in search of the fewest leases, all passes together: a second at most."""


@dataclass(frozen=True, slots=True)
class Who:
    """An execution and the process that holds it, as people know them; no `pid` while no process does."""

    execution_id: UUID
    execution: str
    pid: int | None = None
    user: str | None = None
    label: str = ""

    def __str__(self) -> str:
        pid = None if self.pid is None else f"pid {self.pid}"
        owner = " of ".join(filter(None, [pid, self.user and printable(self.user)]))
        about = ", ".join(filter(None, [owner, self.label and printable(self.label)]))
        return printable(self.execution) + (f" ({about})" if about else "")


@dataclass(frozen=True, slots=True)
class Held:
    """A live lease, who holds it, and for how long."""

    lease: Endable
    who: Who
    age_seconds: float

    def __str__(self) -> str:
        return f"{self.who}, lease {short_id(self.lease.lease_id)}"


@dataclass(frozen=True, slots=True)
class Queued:
    """A waiter, and who that is."""

    waiter: Waiter
    who: Who


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A live worker process; a silent one did not take what it was given, and gets nothing until it shows life."""

    worker: Worker
    busy: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPicture:
    """One host at one moment, as an admission there would find it.

    `devices` carry the `leases`. `waiters` are those whom the host may serve and whose process, if they have one, shows
    life, in any order.
    """

    id: int
    name: str
    devices: Sequence[BookedDevice]
    leases: Sequence[Held] = ()
    waiters: Sequence[Queued] = ()
    workers: Sequence[RunningWorker] = ()


@dataclass(frozen=True, slots=True)
class Promise:
    """A share that is kept for a waiter who stands before, or that it gets next (`granted`)."""

    who: Who
    share: Share
    granted: bool

    def __str__(self) -> str:
        return f"{'goes first to' if self.granted else 'kept for'} {self.who}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTerms:
    """One device as it stands for the requests: what it lacks for them, what is promised to others, who is there."""

    device: BookedDevice
    unmet: tuple[str, ...]
    promises: tuple[Promise, ...]
    leases: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class KnowingWorkers:
    """The live workers that know an operator: how many, and how many of them could take it now or do not answer."""

    operator: str
    count: int
    idle: int
    silent: int

    def __str__(self) -> str:
        operator = printable(self.operator)
        if not self.count:
            return f"no running worker knows operator {operator}"
        if self.idle:
            verb = "is" if self.idle == 1 else "are"
            return f"{self.idle} of {self.count} running workers that know operator {operator} {verb} idle"
        if self.silent:
            busy = self.count - self.silent
            return f"of {self.count} workers that know operator {operator}, {busy} busy, {self.silent} not answering"
        if self.count == 1:
            return f"the only worker that knows operator {operator} is busy"
        return f"all {self.count} workers that know operator {operator} are busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTerms:
    """One host as it stands for the requests.

    `takers` counts, for each request, the devices that would take a share of it now. `fits`: there is room for all of
    them, and only a worker is missing. `room` are the fewest leases whose end would make room for them, whoever comes
    first, and `fewest` those whose end would admit them; None when no leases would.
    """

    host_id: int
    name: str
    devices: tuple[DeviceTerms, ...]
    takers: tuple[int, ...]
    fits: bool
    room: tuple[Held, ...] | None
    fewest: tuple[Held, ...] | None


@dataclass(frozen=True, slots=True)
class Now:
    """The next pass grants it `plan` on that host."""

    host_id: int
    name: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Later:
    """It waits. `before` are those who stand before it on those hosts; `workers` concern a detached one only."""

    hosts: tuple[HostTerms, ...]
    before: tuple[Who, ...]
    workers: KnowingWorkers | None

    @property
    def fewest(self) -> tuple[Held, ...] | None:
        """The smallest set of leases, on whichever host, whose end would admit it; None when no such set is known."""
        return _smallest(terms.fewest for terms in self.hosts)

    @property
    def room(self) -> tuple[Held, ...] | None:
        """The smallest set whose end would make room for it, if nobody came first; None when none would."""
        return _smallest(terms.room for terms in self.hosts)


@dataclass(frozen=True, slots=True)
class Never:
    """No candidate host could ever serve it; `reason` has the numbers of each device."""

    reason: str


Outlook: TypeAlias = Now | Later | Never


def look_ahead(waiter: Waiter, hosts: Sequence[HostPicture], bypass_limit: int) -> Outlook:
    """What the next pass on each of its candidate `hosts` decides for `waiter`, and if it waits, why."""
    everything: list[HostTerms] = []
    reasons: list[str] = []
    for host in hosts:
        line = _Line(waiter, host, bypass_limit)
        decided = line.admit(host.devices)
        own = next((grant for grant in decided.grants if grant.id == waiter.id), None)
        if own is not None:
            return Now(host.id, host.name, own.plan)
        if waiter.id in decided.impossible:
            reasons.append(decided.impossible[waiter.id])
        everything.append(_terms(waiter, host, line, decided))
    if hosts and len(reasons) == len(hosts):
        return Never("\n".join(dict.fromkeys(reasons)))
    before = {
        queued.waiter.id: queued
        for host in hosts
        for queued in host.waiters
        if queued.waiter.id != waiter.id and _order(queued.waiter) < _order(waiter)
    }
    ordered = sorted(before.values(), key=lambda queued: _order(queued.waiter))
    workers = None if waiter.operator is None else knowing_workers(waiter.operator, hosts)
    return Later(tuple(everything), tuple(queued.who for queued in ordered), workers)


def knowing_workers(operator: str, hosts: Sequence[HostPicture]) -> KnowingWorkers:
    """Who of the workers of `hosts` knows `operator`."""
    knowing = [each for host in hosts for each in host.workers if operator in each.worker.operators]
    silent = sum(each.silent for each in knowing)
    return KnowingWorkers(operator, len(knowing), len(_idle(knowing)), silent)


class _Line:
    """The queue of one host up to one waiter."""

    def __init__(self, waiter: Waiter, host: HostPicture, bypass_limit: int) -> None:
        others = [queued.waiter for queued in host.waiters if queued.waiter.id != waiter.id]
        # No other has its shape, so that it is judged by itself; and it is judged by this host alone.
        me = replace(waiter, hosts=(host.id,), shape="")
        self.waiters = [*(other for other in others if _order(other) < _order(waiter)), me]
        self._host_id = host.id
        self._workers = [each.worker for each in _idle(host.workers)]
        self._bypass_limit = bypass_limit

    def knows(self, operator: str) -> bool:
        """Whether an idle worker of the host knows `operator`."""
        return any(operator in worker.operators for worker in self._workers)

    def admit(self, devices: Sequence[BookedDevice]) -> Admission:
        """The pass over the line, however many it grants."""
        return admit(
            self.waiters,
            {self._host_id: devices},
            workers={self._host_id: self._workers},
            bypass_limit=self._bypass_limit,
            batch=len(self.waiters),
        )


def _terms(waiter: Waiter, host: HostPicture, line: _Line, decided: Admission) -> HostTerms:
    promises = _promises(host, decided)
    seen = {device.id: device for device in book(host.devices, [promise.share for promise in promises])}
    room = fewest_to_end(waiter.requests, host.devices, [held.lease for held in host.leases])
    fewest = None if room is None else _fewest(waiter, host, line, room)
    terms, takers = [], [0] * len(waiter.requests)
    for device in host.devices:
        mine = tuple(promise for promise in promises if promise.share.device_id == device.id)
        lacking = [
            _hidden(request, device, waiter, host) or _lacking(request, device, seen[device.id], mine, host.devices)
            for request in waiter.requests
        ]
        takers = [count + (lack is None) for count, lack in zip(takers, lacking, strict=True)]
        terms.append(
            DeviceTerms(
                device=device,
                unmet=tuple(dict.fromkeys(lack for lack in lacking if lack is not None)),
                promises=mine,
                leases=tuple(held for held in host.leases if _is_on(held, device)),
            )
        )
    return HostTerms(
        host_id=host.id,
        name=host.name,
        devices=tuple(terms),
        takers=tuple(takers),
        fits=plan(waiter.requests, list(seen.values())) is not None,
        room=_held(host, room),
        fewest=_held(host, fewest),
    )


def _promises(host: HostPicture, decided: Admission) -> list[Promise]:
    queued = {each.waiter.id: each for each in host.waiters}
    devices = {device.id: device for device in host.devices}
    promises = [
        Promise(queued[grant.id].who, share, granted=True)
        for grant in decided.grants
        for shares in grant.plan
        for share in shares
    ]
    for kept in decided.kept:
        device, waiter = devices[kept.device_id], queued[kept.waiter_id].waiter
        # Of what is kept only the bytes are told.
        alone = device.exclusive_only or any(
            request.exclusive and is_candidate(request, device) for request in waiter.requests
        )
        share = Share(device.id, device.host_index, kept.memory_bytes, alone)
        promises.append(Promise(queued[kept.waiter_id].who, share, granted=False))
    return promises


def _hidden(request: Request, device: BookedDevice, waiter: Waiter, host: HostPicture) -> str | None:
    """That none of the workers of the host that know the operator of `waiter`, if there are any, can see the device."""
    sights = [each.worker.sight for each in host.workers if waiter.operator in each.worker.operators]
    if not sights or not is_candidate(request, device):
        return None
    if any(is_candidate(seen, device) for sight in sights for seen in asked_by([request], sight)):
        return None
    return f"not visible to a worker that knows operator {printable(str(waiter.operator))}"


def _lacking(
    request: Request,
    device: BookedDevice,
    seen: BookedDevice,
    promises: Sequence[Promise],
    devices: Sequence[BookedDevice],
) -> str | None:
    """What the device lacks for a share of `request`: by itself, or because of what is promised to others there."""
    by_itself = unmet(request, device, devices)
    if by_itself is not None or not promises:
        return by_itself
    beside = unmet(request, seen, devices)
    if beside is None:
        return None
    whose = " and ".join(dict.fromkeys(map(str, promises)))
    nothing_left = request.exclusive or seen.exclusive_only or seen.exclusive or seen.free_bytes <= 0
    return whose if nothing_left else f"{whose}; beside that {beside}"


def _fewest(waiter: Waiter, host: HostPicture, line: _Line, room: tuple[UUID, ...]) -> tuple[UUID, ...] | None:
    """The fewest leases of the host whose end would make the pass grant it, though others come first."""
    if waiter.operator is not None and not line.knows(waiter.operator):
        return None
    work = _WORK

    def admits(devices: Sequence[BookedDevice]) -> bool:
        nonlocal work
        work -= len(line.waiters)
        return work >= 0 and any(grant.id == waiter.id for grant in line.admit(devices).grants)

    # What makes room is mostly enough, and no fewer could do.
    freed = [share for held in host.leases if held.lease.lease_id in room for share in held.lease.shares]
    if admits([device.without_shares(freed) for device in host.devices]):
        return room
    endable = [held.lease for held in host.leases]
    return fewest_to_end(waiter.requests, host.devices, endable, admits=admits)


def _held(host: HostPicture, ids: tuple[UUID, ...] | None) -> tuple[Held, ...] | None:
    return None if ids is None else tuple(held for held in host.leases if held.lease.lease_id in ids)


def _smallest(sets: Iterable[tuple[Held, ...] | None]) -> tuple[Held, ...] | None:
    known = [ended for ended in sets if ended is not None]
    return min(known, key=lambda ended: (len(ended), sum(map(_bytes_of, ended))), default=None)


def _idle(workers: Sequence[RunningWorker]) -> list[RunningWorker]:
    return [each for each in workers if not each.busy and not each.silent]


def _order(waiter: Waiter) -> tuple[int, int]:
    return (-waiter.priority, waiter.age)


def _is_on(held: Held, device: BookedDevice) -> bool:
    return any(share.device_id == device.id for share in held.lease.shares)


def _bytes_of(held: Held) -> int:
    return sum(share.memory_bytes for share in held.lease.shares)
