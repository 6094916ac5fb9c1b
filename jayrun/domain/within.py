"""Inside a lease: what of it a process that `jayrun run` started can be given, and who gives up when nothing moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_candidate
from jayrun.domain.queue import Waiter
from jayrun.domain.requests import Request
from jayrun.domain.units import format_bytes


def seen_inside(devices: Iterable[BookedDevice], shares: Iterable[Share]) -> tuple[BookedDevice, ...]:
    """The devices of a lease with these `shares` as a process inside it sees them: empty, and as large as its share.

    What is leased exclusively is there to the last byte, whatever was asked for. Draining is for others: a lease stays.
    """
    mine = {share.device_id: share for share in shares}
    return tuple(
        replace(
            device.as_declared(),
            capacity_bytes=device.capacity_bytes if mine[device.id].exclusive else mine[device.id].memory_bytes,
            exclusive_only=False,  # the lease has it alone, for all that runs inside
        )
        for device in devices
        if device.id in mine
    )


def why_not_alone(requests: Iterable[Request], devices: Sequence[BookedDevice], shares: Iterable[Share]) -> str | None:
    """Why one of `requests` cannot be exclusive inside a lease with these `shares`, or None.

    Alone is nobody on a device that the lease itself shares with others.
    """
    shared = {share.device_id: share for share in shares if not share.exclusive}
    for request in requests:
        if not request.exclusive:
            continue
        found = [device for device in devices if is_candidate(request, device) and device.id in shared]
        if found:
            names = ", ".join(f"{device.kind} {device.host_index}" for device in found)
            return f"{request.describe()} can never be placed: its lease shares {names} with others"
    return None


def give_up(waiters: Sequence[Waiter], pid: int, devices: Sequence[BookedDevice]) -> tuple[Waiter, str]:
    """Who of `waiters`, all that there are in process `pid`, gives up because nothing moves any more, and why.

    It is the youngest of those with the lowest priority. `devices` are those of the lease, with what the process holds.
    """
    victim = max(waiters, key=lambda waiter: (-waiter.priority, waiter.age))
    holds = ", ".join(
        f"{format_bytes(device.reserved_bytes)} of {device.kind} {device.host_index}"
        for device in devices
        if device.share_count
    )
    asks = " and for ".join(" + ".join(each.describe() for each in waiter.requests) for waiter in waiters)
    return victim, (
        f"pid {pid} only waits, for what its own data holds: inside its lease it has {holds or 'nothing'}, and waits "
        f"for {asks}. The youngest wait ends. Drop data before asking for more, or ask for everything in one execution"
    )
