"""Where an execution stands, whatever its state, and how that is said to people. Spans of time are seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.reasons import printable
from jayrun.domain.requests import Request
from jayrun.domain.units import format_bytes, format_seconds
from jayrun.domain.why import Held, HostTerms, KnowingWorkers, Later, Never, Now, Outlook, Who

_MOST_NAMED = 5
"""Of those who wait before, so many are named in a text and the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """It waits at `position` of the `waiting` in its queue (`queue` names the host; None: any host may take it)."""

    position: int
    waiting: int
    queue: str | None
    requests: tuple[Request, ...]
    dormant: bool
    outlook: Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker may take it, once `pause_seconds` are over; `position` counts those who come first and itself."""

    position: int
    attempt: int
    max_attempts: int
    pause_seconds: float
    workers: KnowingWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """It runs, or is granted (`admitted`) and not claimed yet; with what it holds, and since when it is to end."""

    host: str | None
    leases: tuple[Held, ...]
    cancelled_seconds: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What made an attempt fail."""

    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where an execution stands and why; `seconds` tells since when, `failure` how it, or its last attempt, failed."""

    who: Who
    kind: str
    state: ExecutionState
    priority: int
    seconds: float
    failure: Failure | None
    situation: Waiting | Ready | Active | Ended

    def text(self) -> str:
        """All of it for people, on several lines."""
        lines = [f"{self.who}, {self.kind} {self.who.execution_id}"]
        since = format_seconds(self.seconds)
        match self.situation:
            case Waiting() as waits:
                lines += _waiting_text(waits, since)
            case Ready() as ready:
                lines += _ready_text(ready, since)
            case Active(host=host, leases=leases, cancelled_seconds=cancelled):
                claimed = "" if self.state is ExecutionState.RUNNING else ", granted and not claimed yet"
                lines.append(f"{self.state} for {since}{f' on {printable(host)}' if host else ''}{claimed}")
                lines += [f"holds {_amount(held)} for {format_seconds(held.age_seconds)}: {held}" for held in leases]
                if cancelled is not None:
                    lines.append(f"asked to end for {format_seconds(cancelled)}")
            case Ended():
                lines.append(f"{self.state} {since} ago")
            case _:
                assert_never(self.situation)
        if self.failure is not None:
            ended_by_it = self.state in (ExecutionState.FAILED, ExecutionState.CANCELLED)
            told = f"{'' if ended_by_it else 'an attempt failed: '}{self.failure.type}: {self.failure.message}"
            lines += [printable(line) for line in told.splitlines()]
        return "\n".join(lines)


def _waiting_text(waits: Waiting, since: str) -> Iterator[str]:
    queue = "of any host" if waits.queue is None else f"of {printable(waits.queue)}"
    yield f"waiting for {since}, place {waits.position} of {waits.waiting} in the queue {queue}"
    if waits.dormant:
        yield "its process does not answer: nothing is granted to it or kept for it until it shows life"
    yield from outlook_text(waits.outlook, waits.requests)


def _ready_text(ready: Ready, since: str) -> Iterator[str]:
    yield f"ready, submitted {since} ago, place {ready.position} of those that are ready"
    if ready.attempt > 1:
        yield f"attempt {ready.attempt} of {ready.max_attempts}"
    if ready.pause_seconds > 0:
        yield f"not tried again before {format_seconds(ready.pause_seconds)} have passed"
    yield str(ready.workers)


def outlook_text(outlook: Outlook, requests: Sequence[Request]) -> Iterator[str]:
    """What `requests` may expect, for people: the answer first, then the devices."""
    asked = " and ".join(request.describe() for request in requests)
    match outlook:
        case Now(name=name, plan=planned):
            places = ", ".join(_share(share) for shares in planned for share in shares)
            yield f"now: {asked} gets {places} on {printable(name)}"
        case Never(reason):
            yield "never:"
            yield from (printable(line) for line in reason.splitlines())
        case Later() as later:
            yield from _later_text(later, asked, requests)
        case _:
            assert_never(outlook)


def _later_text(later: Later, asked: str, requests: Sequence[Request]) -> Iterator[str]:
    yield f"not now: {asked}"
    if later.workers is not None:
        yield f"  {later.workers}"
    for terms in later.hosts:
        yield from _host_text(terms, requests)
    if later.before:
        more = len(later.before) - _MOST_NAMED
        named = [*map(str, later.before[:_MOST_NAMED]), *([f"{more} more"] if more > 0 else [])]
        yield f"before it: {', '.join(named)}"
    if later.fewest:
        yield from _listed("would be admitted after the end of", later.fewest)
        return
    yield "no end of leases alone would admit it"
    if later.room:
        yield from _listed("room for it, if nobody came first, would be made by the end of", later.room)


def _listed(head: str, leases: Sequence[Held]) -> Iterator[str]:
    if len(leases) == 1:
        yield f"{head} {leases[0]}"
        return
    yield f"{head} {len(leases)} leases:"
    yield from (f"  {held}" for held in leases)


def _host_text(terms: HostTerms, requests: Sequence[Request]) -> Iterator[str]:
    yield f"on {printable(terms.name)}:" if terms.devices else f"on {printable(terms.name)}: no device"
    for each in terms.devices:
        lacks = "; ".join(each.unmet) or "would take a share"
        yield f"  {each.device.kind} {each.device.host_index}: {lacks}"
        if each.unmet:
            for held in each.leases:
                yield f"    {_amount(held, each.device)} for {format_seconds(held.age_seconds)}: {held}"
    if terms.fits:
        yield "  there is room, but no idle worker sees enough of it"
        return
    for request, takers in zip(requests, terms.takers, strict=True):
        if request.min_devices > takers > 0:
            yield f"  {request.describe()}: only {takers} of {request.min_devices} devices would take a share"
    if all(takers >= request.min_devices for request, takers in zip(requests, terms.takers, strict=True)):
        together = "all of them together" if len(requests) > 1 else "all its shares together"
        yield f"  {together} find no room"


def _amount(held: Held, device: BookedDevice | None = None) -> str:
    """What the lease has, there or in all."""
    shares = [share for share in held.lease.shares if device is None or share.device_id == device.id]
    return ", ".join(_share(share) if device is None else _size(share) for share in shares)


def _share(share: Share) -> str:
    return f"device {share.host_index} ({_size(share)})"


def _size(share: Share) -> str:
    alone = "exclusive" if share.exclusive else ""
    return ", ".join(filter(None, [format_bytes(share.memory_bytes) if share.memory_bytes else "", alone]))
