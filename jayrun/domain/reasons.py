"""Words for people: why requests can never be placed, and what a device lacks for one now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from uuid import UUID

from jayrun.domain.devices import BookedDevice, DeviceState
from jayrun.domain.fit import is_candidate
from jayrun.domain.requests import Request
from jayrun.domain.units import format_bytes

_MOST_LINES = 64
"""Devices listed one by one before the rest is only counted."""
_SHORT_ID = 12
_ALONE = "MIG slice: a process gets one alone"


def why_impossible(
    requests: Sequence[Request], devices: Sequence[BookedDevice], fits_alone: Callable[[Request], bool]
) -> str:
    """Why `requests` do not fit `devices`, all empty, with the numbers of each device.

    Several requests are all named; when one of them already fails alone (`fits_alone`), the numbers are told for it.
    """
    if not devices:
        adds = "`jayrun devices discover` finds NVIDIA GPUs, `jayrun devices declare` adds others"
        remedy = f"this host has no devices in the book; {adds}"
        return f"{_names(requests)} can never be placed: {remedy}"
    culprit = next((request for request in requests if not fits_alone(request)), None)
    if culprit is None:
        least = sum(request.group_bytes + request.min_devices * request.per_device_bytes for request in requests)
        alone = sum(request.min_devices for request in requests if request.exclusive)
        head = (
            f"{_names(requests)} can never be placed together, although each could be alone; they need at least "
            + format_bytes(least)
            + (f" and {_counted(alone, 'device')} to themselves" if alone else "")
        )
        return _listing(head, devices, lambda device: _ALONE if device.is_slice else "")
    because = f", because of {culprit.describe()}" if len(requests) > 1 else ""
    head = f"{_names(requests)} can never be placed{because}: it needs {_needs(culprit)}"
    usable = sum(_verdict(culprit, device, devices) == "large enough" for device in devices)
    if 0 < usable < culprit.min_devices:
        head += f", and only {_counted(usable, 'device')} would do"
    return _listing(head, devices, lambda device: _verdict(culprit, device, devices))


def unmet(request: Request, device: BookedDevice, devices: Sequence[BookedDevice]) -> str | None:
    """What `device`, one of `devices`, lacks now for the smallest share of `request`, in a few words, or None when it
    would take it."""
    if not is_candidate(request, device):
        return _mismatch(request, device, devices)
    if _is_too_little(request, device):
        return _ALONE
    if device.state is not DeviceState.ONLINE:
        return f"{device.state}" if device.fault is None else f"{device.state}: {printable(device.fault)}"
    if device.exclusive:
        return "held by an exclusive lease"
    alone = request.exclusive or device.exclusive_only
    who = "asked for exclusively" if request.exclusive else "an exclusive-only device"
    if alone and device.share_count:
        return f"{who}, but carries {_counted(device.share_count, 'lease')}"
    if alone and device.withheld_bytes:
        return f"{who}, but {_withheld(device)}"
    needed = _smallest(request, device)
    if device.free_bytes < needed:
        free, wanted = _differing(max(device.free_bytes, 0), needed)
        return f"{free} free, needs {wanted}" + (f"; {_withheld(device)}" if device.withheld_bytes else "")
    return None


def printable(text: str) -> str:
    """`text` without what would move a terminal's cursor or change its colours: labels are other people's words."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text) or "-"


def short_id(identity: UUID) -> str:
    """The end of an id, which is random; ids made at the same time begin alike."""
    return identity.hex[-_SHORT_ID:]


def _verdict(request: Request, device: BookedDevice, devices: Sequence[BookedDevice]) -> str:
    if not is_candidate(request, device):
        return _mismatch(request, device, devices)
    if _is_too_little(request, device):
        return _ALONE
    if device.capacity_bytes < _smallest(request, device):
        return "too small"
    largest = request.shares(request.min_devices)[0]
    return "large enough" if device.capacity_bytes >= largest else "too small for the largest share"


def _is_too_little(request: Request, device: BookedDevice) -> bool:
    """Whether it is a slice, beside which a process gets no other device, and the request needs several."""
    return device.is_slice and request.min_devices > 1


def _smallest(request: Request, device: BookedDevice) -> int:
    """The bytes of the smallest share of `request` that may lie on `device`."""
    return request.shares(1 if device.is_slice else request.max_devices)[-1]


def _withheld(device: BookedDevice) -> str:
    return f"{format_bytes(device.withheld_bytes)} withheld (used by processes without a lease, or in quarantine)"


def _mismatch(request: Request, device: BookedDevice, devices: Sequence[BookedDevice]) -> str:
    if device.kind is not request.device:
        return f"no {request.device}"
    if request.backend not in device.backends:
        return f"no {request.backend}"
    if request.among is not None and device.id not in request.among:
        seen = sorted(each.host_index for each in devices if each.id in request.among)
        return f"not visible to the process (its mask: {request.backend} {', '.join(map(str, seen)) or 'nothing'})"
    return f"not device_id {request.device_id}"


def _needs(request: Request) -> str:
    kind = f"{request.device} with {request.backend}"
    whole = not request.group_bytes and not request.per_device_bytes  # exclusive, whatever its memory
    if not request.group:
        pinned = "" if request.device_id is None else f" with device_id {request.device_id}"
        return f"{'all of' if whole else format_bytes(request.shares(1)[0]) + ' on'} one {kind}{pinned}"
    counts = sorted({request.min_devices, request.max_devices})
    if whole:
        return f"{' to '.join(map(str, counts))} whole devices, each a {kind}"
    ways = " to ".join(f"{count} x {format_bytes(request.shares(count)[0])}" for count in counts)
    return f"{ways}, each on its own {kind}"


def _names(requests: Sequence[Request]) -> str:
    if len(requests) == 1:
        return requests[0].describe()
    calls = Counter(request.describe() for request in requests)
    listed = ", ".join(call if count == 1 else f"{count} x {call}" for call, count in calls.items())
    return f"the {len(requests)} requests {listed}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listing(head: str, devices: Sequence[BookedDevice], verdict: Callable[[BookedDevice], str]) -> str:
    lines = [head]
    listed = sorted(devices, key=lambda device: device.host_index)
    for device in listed[:_MOST_LINES]:
        backends = ", ".join(sorted(device.backends))
        alone = ", exclusive only" if device.exclusive_only else ""
        facts = f"  {device.kind} {device.host_index}: {format_bytes(device.capacity_bytes)}, {backends}{alone}"
        lines.append(f"{facts}: {verdict(device)}" if verdict(device) else facts)
    if len(listed) > _MOST_LINES:
        lines.append(f"  and {_counted(len(listed) - _MOST_LINES, 'more device')}")
    return "\n".join(lines)


def _differing(one: int, other: int) -> tuple[str, str]:
    """Both numbers for people, but to the byte where rounding would make them look equal."""
    texts = format_bytes(one), format_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one} B", f"{other} B")
