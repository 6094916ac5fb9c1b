"""The rule by which requests get devices: best fit, all members or none, a sequence as one set."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_open
from jayrun.domain.reasons import why_impossible
from jayrun.domain.requests import Request
from jayrun.domain.search import Plan as Plan
from jayrun.domain.search import Search


@dataclass(frozen=True, slots=True)
class Granted:
    """The requests fit now, as `plan` says."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The declared devices could satisfy the requests, or nobody can tell, but not now."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """No combination of the declared devices, were they empty, could ever satisfy the requests; `reason` says why."""

    reason: str


def plan(requests: Sequence[Request], devices: Sequence[BookedDevice]) -> Plan | None:
    """The shares that `requests` get together on `devices`, all of one host, or None when they do not fit now.

    One request is decided exactly, by best fit. Several are searched for as one set, within a bound: beyond it a set
    that would fit with great effort may be told not to.
    """
    return _plan(requests, devices)[0]


def can_never_fit(requests: Sequence[Request], devices: Sequence[BookedDevice]) -> bool:
    """Whether it is proven that `requests` do not fit on `devices`; a search that was given up proves nothing."""
    placed, complete = _plan(requests, devices)
    return placed is None and complete


def judge(
    requests: Sequence[Request], devices: Sequence[BookedDevice], recorded: Sequence[Request] | None = None
) -> Granted | Unavailable | Impossible:
    """Whether `requests` fit now on `devices`, all of one host, or later, or never.

    Never: when `recorded`, the whole sequence that must fit at once in the end (or else `requests`), does not fit the
    devices even empty. What is draining or offline counts as declared, for a person can bring it back.
    """
    placed, _ = _plan(requests, devices)
    return judge_later(recorded or requests, devices) if placed is None else Granted(placed)


def judge_later(whole: Sequence[Request], devices: Sequence[BookedDevice]) -> Unavailable | Impossible:
    """Whether a whole sequence may fit on `devices` one day, whatever has room on them now."""
    declared = [device.as_declared() for device in devices]
    placed, complete = _plan(whole, declared)
    # A search that was given up proves nothing.
    if placed is not None or not complete:
        return Unavailable()
    return Impossible(why_impossible(whole, declared, lambda request: _place(request, declared) is not None))


def _plan(requests: Sequence[Request], devices: Sequence[BookedDevice]) -> tuple[Plan | None, bool]:
    """The plan, and whether None is proven."""
    if not requests:
        return (), True
    if len(requests) == 1:
        shares = _place(requests[0], devices)
        return (None if shares is None else (shares,)), True
    search = Search(requests, devices)
    return next(search.plans(), None), search.complete


def _place(request: Request, devices: Sequence[BookedDevice]) -> tuple[Share, ...] | None:
    """The rule for one request, as the contract says it; what `Search` tries first, without its bookkeeping."""
    # (free bytes, host index, place in `devices`): in this order a device with the least left over comes first.
    usable = [
        (device.capacity_bytes - device.reserved_bytes, device.host_index, place)
        for place, device in enumerate(devices)
        if is_open(request, device)
    ]
    usable.sort()
    for count in request.counts():
        if count > len(usable):
            continue
        sizes = request.shares(count)
        large, small = sizes[0], sizes[-1]
        many = sizes.count(large)
        roomy = bisect_left(usable, (large,))
        fitting = bisect_left(usable, (small,))
        # The larger shares take the tightest devices that hold them; the others choose among what is left.
        chosen = usable[roomy : roomy + many]
        rest = (usable[fitting:roomy] + usable[roomy + many :])[: count - many]
        if len(chosen) + len(rest) < count:
            continue
        placed = [(index, place, large) for _, index, place in chosen]
        placed += [(index, place, small) for _, index, place in rest]
        return tuple(
            Share(devices[place].id, index, memory_bytes, request.exclusive or devices[place].exclusive_only)
            for index, place, memory_bytes in sorted(placed)
        )
    return None
