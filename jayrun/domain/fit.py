"""Which devices a request may use at all, and which of those would take a share of it now."""

from __future__ import annotations

from jayrun.domain.devices import BookedDevice, DeviceState
from jayrun.domain.requests import Request


def is_candidate(request: Request, device: BookedDevice) -> bool:
    """Whether `device` is of the kind, backend and number asked for, and visible to who asks, whatever it carries."""
    return (
        device.kind is request.device
        and request.backend in device.backends
        and (request.device_id is None or request.device_id == device.host_index)
        and (request.among is None or device.id in request.among)
    )


def is_open(request: Request, device: BookedDevice) -> bool:
    """Whether a share of `request` may lie on `device` now as far as memory is not concerned.

    The device is an online candidate, and nobody who is there, or would come, has to be alone. Who uses what is
    withheld is there too, though without a lease.
    """
    return (
        device.state is DeviceState.ONLINE
        and device.kind is request.device
        and request.backend in device.backends
        and (
            not device.share_count and not device.withheld_bytes
            if request.exclusive or device.exclusive_only
            else not device.exclusive
        )
        and (request.device_id is None or request.device_id == device.host_index)
        and (request.among is None or device.id in request.among)
    )
