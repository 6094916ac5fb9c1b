"""Which devices are kept for someone who was bypassed too often: those with the least still to free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jayrun.domain.devices import BookedDevice
from jayrun.domain.requests import Request
from jayrun.domain.search import Plan, Search


@dataclass(frozen=True, slots=True)
class Target:
    """The shares to keep room for, and what must end before they fit: bytes, then devices that are in the way though
    they have the bytes (somebody is, or has to be, alone there)."""

    to_free: tuple[int, int]
    plan: Plan


def find_target(
    requests: Sequence[Request], now: Sequence[BookedDevice], kept: Sequence[BookedDevice]
) -> Target | None:
    """The place for `requests` that has the least still to free; on ties the lowest host indexes.

    `now` shows the devices of one host with everything booked, also what is kept for others; `kept`, in the same order,
    shows nothing but what is kept for others. None when there is no room beside that.

    Only online devices count, and of those not what is withheld. What drains or is offline comes back when a person
    says so, what is withheld when somebody without a lease goes, perhaps never, and until then the waiter cannot start
    whatever lease ends: to keep even the rest of such a set would leave it idle for nobody.
    """
    current = {device.id: device for device in now}
    others = {device.id: device for device in kept}

    def rank(request: Request, device: BookedDevice, memory_bytes: int) -> tuple[int, ...]:
        added = device.reserved_bytes - others[device.id].reserved_bytes + memory_bytes
        alone = request.exclusive or device.exclusive_only
        return (*_to_free(current[device.id], others[device.id], added, alone), device.host_index)

    def twin(device: BookedDevice) -> tuple[int, int, bool, bool]:
        state = current[device.id]
        return (state.reserved_bytes, device.reserved_bytes, state.share_count > device.share_count, state.exclusive)

    def plans() -> Iterator[Plan]:
        if len(requests) > 1:
            yield from Search(requests, kept, rank=rank, twin=twin).plans()
            return
        # For one request and one count, what the search tries first is already the best.
        for count in requests[0].counts():
            exact = replace(requests[0], min_devices=count, max_devices=count)
            yield from _first(Search((exact,), kept, rank=rank, twin=twin).plans())

    def cost(plan: Plan) -> tuple[int, int]:
        added: dict[int, int] = {}
        alone: set[int] = set()
        for share in (share for shares in plan for share in shares):
            added[share.device_id] = added.get(share.device_id, 0) + share.memory_bytes
            if share.exclusive:
                alone.add(share.device_id)
        costs = [_to_free(current[key], others[key], more, key in alone) for key, more in added.items()]
        return (sum(memory_bytes for memory_bytes, _ in costs), sum(devices for _, devices in costs))

    return min((Target(cost(plan), plan) for plan in plans()), key=lambda target: target.to_free, default=None)


def _to_free(now: BookedDevice, kept: BookedDevice, added_bytes: int, alone: bool) -> tuple[int, int]:
    """What must end on one device before `added_bytes` more fit there: bytes, and 1 if something must end anyhow."""
    if not alone and not now.exclusive:
        return (max(0, added_bytes - now.free_bytes), 0)
    return (now.reserved_bytes - kept.reserved_bytes, int(now.share_count > kept.share_count))


def _first(plans: Iterator[Plan]) -> Iterator[Plan]:
    for plan in plans:
        yield plan
        return
