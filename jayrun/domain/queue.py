"""The queue of those who wait: in which order they are served, who was bypassed, and what is kept for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.keeping import Target, find_target
from jayrun.domain.planner import Impossible, Plan, judge_later, plan
from jayrun.domain.requests import Request
from jayrun.domain.search import book
from jayrun.domain.visible import Sight, asked_by
from jayrun.domain.workers import IdleWorkers
from jayrun.domain.workers import Worker as Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Someone who waits for `requests` to be granted together, on one of `hosts` (tried in this order).

    `age` is the number drawn when it first asked, lower is older. `recorded` is the whole sequence by which it is
    judged impossible, when that is more than `requests`. `bypassed` counts grants that went past it. `operator` names
    what a worker must know to take the grant, and then its devices are those that this worker sees; None: the waiter's
    own process takes it, and the requests tell what that one sees. `shape` comes from `sequence.shape_of`.
    """

    id: UUID
    priority: int
    age: int
    hosts: tuple[int, ...]
    requests: tuple[Request, ...]
    recorded: tuple[Request, ...] | None = None
    bypassed: int = 0
    operator: str | None = None
    shape: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The waiter `id` gets all it waits for on `host_id`, as `plan` says; `worker` takes it, or its own process."""

    id: UUID
    host_id: int
    plan: Plan
    worker: UUID | None = None


@dataclass(frozen=True, slots=True)
class Bypass:
    """Every waiter of `shape` that stands before (`priority`, `age`) in the order was bypassed once."""

    shape: str
    priority: int
    age: int


@dataclass(frozen=True, slots=True)
class Kept:
    """So many bytes of a device are kept for a waiter: 0 when it only has to be alone there."""

    waiter_id: UUID
    host_id: int
    device_id: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What one pass over the queue decided.

    `impossible` gives the reason for each waiter that can never be served. `kept` says what was kept from those who
    were examined, once for each waiter and device; when nobody asked any more, nothing had to be kept.
    """

    grants: tuple[Grant, ...]
    bypasses: tuple[Bypass, ...]
    impossible: Mapping[UUID, str]
    kept: tuple[Kept, ...]


def admit(
    waiters: Iterable[Waiter],
    fleet: Mapping[int, Sequence[BookedDevice]],
    *,
    workers: Mapping[int, Sequence[Worker]] = {},
    bypass_limit: int,
    batch: int,
) -> Admission:
    """One pass over the queue: who is granted what now, who was bypassed, and who waits in vain.

    Higher priority first, then who asked first. `fleet` shows the devices of each host by the host's key; a host that
    it lacks is not judged. `batch` bounds the grants of the pass, not the waiters examined. A waiter that was bypassed
    `bypass_limit` times, those of this pass included, has one target set of devices kept for it from then on.

    `workers` are the idle ones of each host. A waiter with an operator is served, bypassed and kept for only on hosts
    where one is left that knows it, with devices which that one sees; each takes one grant, or is kept with the devices
    of one waiter. Impossible is what does not fit all devices: another worker may see more.
    """
    line = sorted(waiters, key=lambda waiter: (-waiter.priority, waiter.age))
    return _Pass(line, fleet, IdleWorkers(workers), bypass_limit).run(batch)


@dataclass(slots=True)
class _Standing:
    """The waiters of one shape that could not be served in this pass.

    `first` is one of them. `candidates` are the keys of the devices they could use, busy or not, by what the process
    sees that takes them. `passes` counts how often they were bypassed in this pass. `due` is a heap with an entry for
    each that nothing is kept for yet: the number of `passes` at which it has had enough, and its place in the line.
    """

    first: Waiter
    candidates: dict[Sight, frozenset[int]] = field(default_factory=dict)
    passes: int = 0
    due: list[tuple[int, int]] = field(default_factory=list)


class _Pass:
    """The state of one pass. Room and workers only get less in it, so what failed once is not tried again."""

    def __init__(
        self,
        line: Sequence[Waiter],
        fleet: Mapping[int, Sequence[BookedDevice]],
        workers: IdleWorkers,
        bypass_limit: int,
    ) -> None:
        self._line = line
        self._workers = workers
        self._bypass_limit = bypass_limit
        # Everything booked: leases, the grants of this pass, and the room kept; and nothing but the room kept.
        self._now: dict[int, Sequence[BookedDevice]] = dict(fleet)
        self._kept: dict[int, Sequence[BookedDevice]] = {}
        # Why (or None: not now) a shape was refused. Equal shapes may differ in the sequence they are judged by.
        self._refused: dict[tuple[str, tuple[Request, ...] | None], str | None] = {}
        self._standing: dict[str, _Standing] = {}
        self._owed: list[int] = []
        self._hopeless: set[str] = set()
        self._kept_for: list[Kept] = []

    def run(self, batch: int) -> Admission:
        grants: list[Grant] = []
        bypasses: list[Bypass] = []
        impossible: dict[UUID, str] = {}
        for place, waiter in enumerate(self._line):
            if len(grants) >= batch:
                break
            # Not before somebody else asks: for the last in line nothing needs to be kept.
            self._keep_what_is_owed()
            match self._decide(waiter):
                case Grant() as grant:
                    grants.append(grant)
                    bypasses += self._book(grant, waiter)
                case str() as reason:
                    impossible[waiter.id] = reason
                case None:
                    self._stand(place, waiter)
        return Admission(tuple(grants), tuple(bypasses), impossible, tuple(self._kept_for))

    def _decide(self, waiter: Waiter) -> Grant | str | None:
        """The grant, the reason why there can never be one, or None when there is none now."""
        key = (waiter.shape, waiter.recorded)
        if key in self._refused:
            return self._refused[key]
        reasons = []
        for host_id in waiter.hosts:
            if host_id not in self._now:
                continue
            for sight in self._workers.sights(host_id, waiter.operator):
                placed = plan(asked_by(waiter.requests, sight), self._now[host_id])
                if placed is not None:
                    return Grant(waiter.id, host_id, placed, self._workers.choose(host_id, waiter.operator, sight))
            # Without a worker, or one that sees enough, there may be room: it waits, but not in vain.
            verdict = judge_later(waiter.recorded or waiter.requests, self._now[host_id])
            if isinstance(verdict, Impossible):
                reasons.append(verdict.reason)
        # Only what no candidate host could ever give is impossible.
        everywhere = bool(reasons) and len(reasons) == len(waiter.hosts)
        self._refused[key] = "\n".join(dict.fromkeys(reasons)) if everywhere else None
        return self._refused[key]

    def _book(self, grant: Grant, waiter: Waiter) -> list[Bypass]:
        """Book the grant, and tell whom it bypassed: each once, on however many of its devices."""
        self._now[grant.host_id] = book(self._now[grant.host_id], _shares(grant.plan))
        taken = {share.device_id for share in _shares(grant.plan)}
        bypasses = []
        for shape, standing in self._standing.items():
            # Whom no worker could take now, nobody goes past. The worker of this grant counts: it could have taken it.
            sights = self._workers.sights(grant.host_id, standing.first.operator)
            if all(self._candidates(standing, sight).isdisjoint(taken) for sight in sights):
                continue
            bypasses.append(Bypass(shape, waiter.priority, waiter.age))
            standing.passes += 1
            self._call(standing)
        self._workers.use(grant.host_id, grant.worker)
        return bypasses

    def _stand(self, place: int, waiter: Waiter) -> None:
        """Let the waiter wait, and count from now on who goes past it."""
        standing = self._standing.get(waiter.shape)
        if standing is None:
            standing = self._standing[waiter.shape] = _Standing(waiter)
        heappush(standing.due, (standing.passes + self._bypass_limit - waiter.bypassed, place))
        self._call(standing)

    def _call(self, standing: _Standing) -> None:
        """Note for whom of them something has to be kept now."""
        while standing.due and standing.due[0][0] <= standing.passes:
            self._owed.append(heappop(standing.due)[1])

    def _keep_what_is_owed(self) -> None:
        """Keep one target set of devices for each who has been bypassed often enough, the first in line first.

        It is booked like a lease, so that later ones get only what fits beside it, though the device may be full now.
        A worker is kept with it: else the room would be for nobody as soon as another grant had taken the last one.
        """
        for place in sorted(self._owed):
            waiter = self._line[place]
            # What is kept only grows, so where there was no more for one there is none for its equals.
            if waiter.shape in self._hopeless:
                continue
            targets = [found for host_id in waiter.hosts for found in self._targets(waiter, host_id)]
            if not targets:
                self._hopeless.add(waiter.shape)
                continue
            host_id, sight, target = min(targets, key=lambda found: found[2].to_free)
            shares = _shares(target.plan)
            self._now[host_id] = book(self._now[host_id], shares)
            self._kept[host_id] = book(self._kept[host_id], shares)
            self._workers.use(host_id, self._workers.choose(host_id, waiter.operator, sight))
            memory_bytes: Counter[int] = Counter()
            for share in shares:
                memory_bytes[share.device_id] += share.memory_bytes
            self._kept_for += [Kept(waiter.id, host_id, *each) for each in memory_bytes.items()]
        self._owed.clear()

    def _targets(self, waiter: Waiter, host_id: int) -> Iterator[tuple[int, Sight, Target]]:
        """The cheapest target on the host for each kind of process that could take it there."""
        if host_id not in self._now:
            return
        if host_id not in self._kept:
            self._kept[host_id] = tuple(device.emptied() for device in self._now[host_id])
        for sight in self._workers.sights(host_id, waiter.operator):
            requests = asked_by(waiter.requests, sight)
            target = find_target(requests, self._now[host_id], self._kept[host_id])
            if target is not None:
                yield host_id, sight, target

    def _candidates(self, standing: _Standing, sight: Sight) -> frozenset[int]:
        if sight not in standing.candidates:
            requests = asked_by(standing.first.requests, sight)
            standing.candidates[sight] = frozenset(
                device.id
                for host_id in standing.first.hosts
                for device in self._now.get(host_id, ())
                if any(is_candidate(request, device) for request in requests)
            )
        return standing.candidates[sight]


def _shares(plan: Plan) -> list[Share]:
    return [share for shares in plan for share in shares]
