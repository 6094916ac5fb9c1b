"""Which devices a request may use at all, and which of those would take a share of it now."""

from __future__ import annotations

from jayrun.domain.devices import BookedDevice, DeviceState
from jayrun.domain.requests import Request


def is_candidate(request: Request, device: BookedDevice) -> bool:
    """Whether `device` is of the kind, backend and number asked for, whatever it carries now."""
    return (
        device.kind is request.device
        and request.backend in device.backends
        and (request.device_id is None or request.device_id == device.host_index)
    )


def is_open(request: Request, device: BookedDevice) -> bool:
    """Whether a share of `request` may lie on `device` now as far as memory is not concerned.

    The device is an online candidate, and nobody who is there, or would come, has to be alone.
    """
    return (
        device.state is DeviceState.ONLINE
        and device.kind is request.device
        and request.backend in device.backends
        and (device.share_count == 0 if request.exclusive or device.exclusive_only else not device.exclusive)
        and (request.device_id is None or request.device_id == device.host_index)
    )
