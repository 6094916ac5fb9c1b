"""Devices as they are declared, and as the book pictures them."""

from __future__ import annotations

import pytest
from fleets import GB, gpu

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, RuntimeDevice, Share


def test_a_declared_device_keeps_sorted_backends_and_whole_bytes() -> None:
    device = RuntimeDevice(Device.GPU, [Backend.OPENCL, Backend.CUDA, Backend.OPENCL], 3, 0.1 + 0.2)
    assert device.backends == (Backend.CUDA, Backend.OPENCL)
    assert device.memory_bytes == 300_000_000
    assert not device.exclusive_only
    assert device == RuntimeDevice(
        device=Device.GPU, backends={Backend.CUDA, Backend.OPENCL}, device_id=3, memory_limit_gb=0.1 + 0.2
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "gpu"}, TypeError, "device must be one of Device.CPU, Device.GPU, Device.TPU, not 'gpu'"),
        ({"device": Device.CPU}, ValueError, "device must be an accelerator, but is Device.CPU"),
        ({"backends": []}, ValueError, "backends must name at least one Backend"),
        ({"backends": Backend.CUDA}, TypeError, "backends must be a collection of Backend"),
        ({"backends": ["cuda"]}, TypeError, "backends must be one of Backend.CUDA"),
        ({"backends": None}, TypeError, "backends must be a collection of Backend, not None"),
        ({"device_id": -1}, ValueError, "device_id must be at least 0, but is -1"),
        ({"device_id": 2**31}, ValueError, "device_id must be at most"),
        ({"device_id": True}, TypeError, "device_id must be a whole number, not True"),
        ({"device_id": 1.0}, TypeError, "device_id must be a whole number, not 1.0"),
        ({"memory_limit_gb": 0}, ValueError, "memory_limit_gb must be positive, but is 0"),
        ({"memory_limit_gb": -1}, ValueError, "memory_limit_gb must not be negative, but is -1"),
        ({"memory_limit_gb": "80"}, TypeError, "memory_limit_gb must be a number, not '80'"),
        ({"exclusive_only": 1}, TypeError, "exclusive_only must be True or False, not 1"),
    ],
)
def test_a_bad_declaration_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"device": Device.GPU, "backends": (Backend.CUDA,), "device_id": 0, "memory_limit_gb": 80}
    with pytest.raises(error, match=message):
        RuntimeDevice(**{**good, **changes})


def test_booking_and_ending_shares_are_inverse() -> None:
    device = gpu(0, 80 * GB)
    shares = [Share(device.id, 0, 50 * GB, False), Share(device.id, 0, 40 * GB, False), Share(999, 9, GB, True)]
    booked = device.with_share(shares[0]).with_share(shares[1])
    assert (booked.free_bytes, booked.share_count, booked.exclusive) == (-10 * GB, 2, False)
    assert booked.without_shares(shares) == device
    assert booked.emptied() == device


def test_an_exclusive_share_marks_the_device_until_it_ends() -> None:
    share = Share(100, 0, 0, True)
    booked = gpu(0).with_share(share)
    assert booked.exclusive
    assert booked.share_count == 1
    assert booked.without_shares([share]) == gpu(0)


def test_as_declared_is_empty_and_online_and_emptied_keeps_the_state() -> None:
    device: BookedDevice = gpu(0, reserved_bytes=GB, state=DeviceState.DRAINING)
    assert device.emptied() == gpu(0, state=DeviceState.DRAINING)
    assert device.as_declared() == gpu(0)
