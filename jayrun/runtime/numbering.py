"""By which numbers this process, or a command that it is going to run, uses the devices of its host."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from jayrun.devices import nvml
from jayrun.devices.visible import Numbering, see
from jayrun.domain.devices import Backend
from jayrun.domain.names import Named
from jayrun.domain.requests import Request

log = logging.getLogger("jayrun")


def look(
    fleet: Sequence[Named], masks: Mapping[str, str], *, one_slice: bool = True, shown: Sequence[Named] = ()
) -> Numbering:
    """What `masks` leave of the `fleet`, the devices that the book has on this host, and of what the driver shows here.

    The driver is asked only where the book knows UUIDs by which its answer could be told. `one_slice` as in `see`.
    `shown` is what it showed before, for a process that counts by that for good: then it is not asked.
    """
    if not shown and any(_has_cuda_uuid(each) for each in fleet):
        shown = _shown()
    numbering = see(masks, fleet, shown, one_slice=one_slice)
    for backend, names in numbering.lists.items():
        mine = [device for device in fleet if backend in device.backends]
        if (
            mine
            and names
            and not any(name in (device.uuid, str(device.host_index)) for name in names for device in mine)
        ):
            log.warning(
                "of the %s devices that this process sees (%s) the book knows none; `jayrun devices list` shows what "
                "it knows, `jayrun devices discover` asks the driver",
                backend,
                numbering.told(backend),
            )
    return numbering


def typed(request: Request, numbering: Numbering) -> Request:
    """A request that a person typed in a shell that sees devices by `numbering`: `device_id` counts within the mask;
    without one it is the number on the host. Raises ValueError as `Numbering.booked`."""
    return numbering.booked(request) if request.backend in numbering.lists else request


def _has_cuda_uuid(device: Named) -> bool:
    return device.uuid is not None and Backend.CUDA in device.backends


def _shown() -> list[Named]:
    """What the NVIDIA driver shows this process, which in a container or a job may be only some of the host's GPUs."""
    return [
        Named(host_index=seen.index, uuid=seen.uuid, parent_uuid=seen.parent_uuid, is_split=seen.is_split)
        for seen in nvml.read(processes=False, links=False).devices
    ]
