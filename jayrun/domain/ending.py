"""Which leases would have to end so that requests fit: the smallest such set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from uuid import UUID

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.planner import plan
from jayrun.domain.requests import Request

_TRIES = 1_000
"""Sets tried, after a first good one is known, before that or a better one is taken: some 20 ms."""


@dataclass(frozen=True, slots=True)
class Endable:
    """A lease that might be ended, its shares, and when it was last used (any number that rises with time)."""

    lease_id: UUID
    shares: tuple[Share, ...]
    last_used: float = 0.0


def fewest_to_end(
    requests: Sequence[Request], devices: Sequence[BookedDevice], candidates: Sequence[Endable]
) -> tuple[UUID, ...] | None:
    """The smallest set of `candidates` whose end would let `requests` be placed on `devices`, all of one host.

    Of the smallest sets the one that frees the fewest bytes, then the one least recently used; () when the requests fit
    already, None when no set suffices. The search is exact while the candidates are few, and bounded beyond: then the
    set suffices and has no member too many, but a smaller one may exist.
    """

    def suffices(ended: Sequence[Endable]) -> bool:
        shares = [share for lease in ended for share in lease.shares]
        return plan(requests, [device.without_shares(shares) for device in devices]) is not None

    if suffices(()):
        return ()
    useful = {device.id for device in devices if any(is_candidate(request, device) for request in requests)}
    leases = [lease for lease in candidates if any(share.device_id in useful for share in lease.shares)]
    if not suffices(leases):
        return None
    best = min((_thinned(leases, focus, suffices) for focus in _focuses(leases, useful)), key=_price)
    tries = 0
    for size in range(1, len(best) + 1):
        for ended in combinations(leases, size):
            tries += 1
            if tries > _TRIES:
                return _ids(best)
            if _price(ended) < _price(best) and suffices(ended):
                best = ended
        if len(best) == size:
            break
    return _ids(best)
