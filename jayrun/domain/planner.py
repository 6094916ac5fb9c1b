"""The rule by which requests get devices: best fit, all members or none, a sequence as one set."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_open
from jayrun.domain.islands import gather
from jayrun.domain.reasons import why_impossible
from jayrun.domain.requests import Request
from jayrun.domain.search import Plan as Plan
from jayrun.domain.search import Search, share_of


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
        (device.capacity_bytes - device.reserved_bytes - device.withheld_bytes, device.host_index, place)
        for place, device in enumerate(devices)
        if is_open(request, device)
    ]
    if request.max_devices == 1:
        [memory_bytes] = request.shares(1)
        best = min((each for each in usable if each[0] >= memory_bytes), default=None)
        return None if best is None else (share_of(request, devices[best[2]], memory_bytes),)
    usable.sort()
    # A process gets a MIG slice alone, so of several devices none is one.
    whole = [each for each in usable if not devices[each[2]].is_slice]
    for count in request.counts():
        ranked = whole if count > 1 else usable
        if count > len(ranked):
            continue
        sizes = request.shares(count)
        large, small = sizes[0], sizes[-1]
        many = sizes.count(large)
        roomy = bisect_left(ranked, (large,))
        fitting = bisect_left(ranked, (small,))
        # The larger shares take the tightest devices that hold them; the others choose among what is left.
        chosen = ranked[roomy : roomy + many]
        rest = (ranked[fitting:roomy] + ranked[roomy + many :])[: count - many]
        if len(chosen) + len(rest) < count:
            continue
        first, second = [devices[each[2]] for each in chosen], [devices[each[2]] for each in rest]
        if count > 1 and any(devices[each[2]].island is not None for each in ranked[fitting:]):
            by_rank = [(each[0], devices[each[2]]) for each in ranked]
            first = gather(by_rank[roomy:], count - min(count - many, roomy - fitting))[:many]
            taken = {device.id for device in first}
            left = [each for each in by_rank[fitting:] if each[1].id not in taken]
            second = gather(left, count - many, first)[: count - many]
        placed = [share_of(request, device, large) for device in first]
        placed += [share_of(request, device, small) for device in second]
        return tuple(sorted(placed, key=lambda share: share.host_index))
    return None
