"""Simple sums that prove at once that requests do not fit, where a search would take long to exhaust all ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState
from jayrun.domain.requests import Request


@dataclass(frozen=True, slots=True)
class Need:
    """What the requests for one kind and backend, of processes that see the same devices, need at least.

    `least_bytes` together; and for each size in `sizes` so many shares of at least so many bytes, as far as the number
    of shares is fixed.
    """

    device: Device
    backend: Backend
    among: frozenset[int] | None
    least_bytes: int
    sizes: tuple[tuple[int, int], ...]


def needs_of(requests: Iterable[Request]) -> list[Need]:
    """The needs of `requests`, one for each kind, backend and mask."""
    by_use: dict[tuple[Device, Backend, frozenset[int] | None], list[Request]] = {}
    for request in requests:
        by_use.setdefault((request.device, request.backend, request.among), []).append(request)
    needs = []
    for (kind, backend, among), asked in by_use.items():
        fixed = [request for request in asked if request.min_devices == request.max_devices]
        shares = sorted((share for request in fixed for share in request.shares(request.max_devices)), reverse=True)
        # Of equal sizes the last one counts them all.
        at_least = {size: number for number, size in enumerate(shares, start=1) if size}
        least = sum(request.group_bytes + request.min_devices * request.per_device_bytes for request in asked)
        needs.append(Need(kind, backend, among, least, tuple(at_least.items())))
    return needs


def may_fit(needs: Iterable[Need], devices: Sequence[BookedDevice]) -> bool:
    """False when `needs` surely do not fit `devices` now; True proves nothing."""
    for need in needs:
        usable = [device for device in devices if _takes_any(need, device)]
        if need.least_bytes > sum(max(0, device.free_bytes) for device in usable):
            return False
        # So many shares of this size or larger are too many if there is not room for as many just of it.
        if any(number > sum(_room(device, size) for device in usable) for size, number in need.sizes):
            return False
    return True


def _takes_any(need: Need, device: BookedDevice) -> bool:
    return (
        device.state is DeviceState.ONLINE
        and device.kind is need.device
        and need.backend in device.backends
        and not device.exclusive
        and not (device.exclusive_only and (device.share_count or device.withheld_bytes))
        and (need.among is None or device.id in need.among)
    )


def _room(device: BookedDevice, memory_bytes: int) -> int:
    """How many shares of so many bytes fit the device."""
    shares = max(0, device.free_bytes) // memory_bytes
    return min(1, shares) if device.exclusive_only else shares
