"""Which leases would have to end so that requests fit, or a waiter is let in: the smallest such set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.planner import plan
from jayrun.domain.queue import Admission, Waiter
from jayrun.domain.requests import Request
from jayrun.domain.search import book

_TRIES = 2_000
"""Sets looked at, once a good one is known, before that one is taken: some 50 ms at most."""


@dataclass(frozen=True, slots=True)
class Endable:
    """A lease, or several that end together, their shares, and when last used (any number that rises with time)."""

    lease_id: UUID
    shares: tuple[Share, ...]
    last_used: float = 0.0


def fewest_to_end(
    requests: Sequence[Request],
    devices: Sequence[BookedDevice],
    candidates: Sequence[Endable],
    *,
    admits: Callable[[Sequence[BookedDevice]], bool] | None = None,
) -> tuple[UUID, ...] | None:
    """The smallest set of `candidates` whose end would let `requests` be placed on `devices`, all of one host.

    Of the smallest sets the one that frees the fewest bytes, then the one least recently used; () when the requests fit
    already, None when no set suffices. The search is exact while the candidates are few, and bounded beyond: then the
    set suffices and has no member too many, but a smaller one may exist.

    `admits` has the last word on the devices as they would be then, for others may come first there. With it, ending
    more may help less, so beyond the bound a set that suffices may stay unfound.
    """

    def suffices(ended: Sequence[Endable]) -> bool:
        freed = without(devices, ended)
        return plan(requests, freed) is not None and (admits is None or admits(freed))

    if suffices(()):
        return ()
    useful = [device.id for device in devices if any(is_candidate(request, device) for request in requests)]
    leases = [
        lease for lease in candidates if admits is not None or any(share.device_id in useful for share in lease.shares)
    ]
    best: Sequence[Endable] | None = None
    if suffices(leases):
        best = min((_thinned(leases, device_id, suffices) for device_id in useful), key=_price)
    elif admits is None:
        return None
    tries = 0
    for size in range(1, len(leases) + 1):
        for ended in combinations(leases, size):
            tries += 1
            if tries > _TRIES:
                return None if best is None else _ids(best)
            if (best is None or _price(ended) < _price(best)) and suffices(ended):
                best = ended
        if best is not None and len(best) == size:
            break
    return None if best is None else _ids(best)


def first_to_end(
    waiters: Sequence[Waiter],
    devices: Sequence[BookedDevice],
    candidates: Sequence[Endable],
    decide: Callable[[Sequence[BookedDevice]], Admission],
) -> tuple[UUID, ...]:
    """The fewest `candidates` (as `fewest_to_end` chooses them) whose end lets a waiter in: the first in line that they
    keep out; () when there is none.

    `decide` says what an admission decides when the devices are so; what it grants already needs no end, and what it
    keeps for somebody else is of no use.
    """

    def served(now: Sequence[BookedDevice]) -> dict[UUID, list[Share]]:
        return {grant.id: [share for shares in grant.plan for share in shares] for grant in decide(now).grants}

    if not candidates:
        return ()
    already = served(devices)
    left = book(devices, [share for shares in already.values() for share in shares])
    tried: set[str] = set()
    for waiter in sorted(waiters, key=lambda waiter: (-waiter.priority, waiter.age)):
        if waiter.id in already or waiter.shape in tried:
            continue
        tried.add(waiter.shape)
        ended = fewest_to_end(waiter.requests, left, candidates)
        if ended and waiter.id in served(without(devices, [each for each in candidates if each.lease_id in ended])):
            return ended
    return ()


def without(devices: Sequence[BookedDevice], ended: Sequence[Endable]) -> list[BookedDevice]:
    """The devices after the `ended` have."""
    shares: dict[int, list[Share]] = {}
    for lease in ended:
        for share in lease.shares:
            shares.setdefault(share.device_id, []).append(share)
    return [device.without_shares(shares[device.id]) if device.id in shares else device for device in devices]


def _thinned(leases: Sequence[Endable], focus: int, suffices: Callable[[Sequence[Endable]], bool]) -> Sequence[Endable]:
    """A sufficient set without a member too many, out of a sufficient one; it stays, if it can, with device `focus`.

    What is least on that device is left out first, so on one device the largest leases remain, which are the fewest.
    """
    rest = sorted(leases, key=lambda lease: (_bytes_on(lease, focus), _bytes_on(lease, None)))
    needed: list[Endable] = []
    while rest:
        # Leaving out more never helps, so the longest front that can be left out is found by halving.
        low, high = 0, len(rest)
        while low < high:
            middle = (low + high + 1) // 2
            if suffices([*needed, *rest[middle:]]):
                low = middle
            else:
                high = middle - 1
        needed += rest[low : low + 1]
        rest = rest[low + 1 :]
    return needed


def _bytes_on(lease: Endable, device_id: int | None) -> int:
    """What the lease has on that device, or on all; without a share there it is less than a share of nothing."""
    sizes = [share.memory_bytes for share in lease.shares if device_id is None or share.device_id == device_id]
    return sum(sizes) if sizes else -1


def _price(ended: Sequence[Endable]) -> tuple[int, int, list[float]]:
    return (
        len(ended),
        sum(_bytes_on(lease, None) for lease in ended),
        sorted((lease.last_used for lease in ended), reverse=True),
    )


def _ids(ended: Sequence[Endable]) -> tuple[UUID, ...]:
    return tuple(lease.lease_id for lease in ended)
