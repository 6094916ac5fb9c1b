"""What people are told: why never, and what is missing now."""

from __future__ import annotations

import pytest
from fleets import CUDA, GB, any_request, booked_devices, gpu, group, one
from hypothesis import given, settings

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState
from jayrun.domain.planner import Impossible, judge, plan
from jayrun.domain.reasons import unmet
from jayrun.domain.requests import Request


def reason(requests: list[Request], devices: list[BookedDevice]) -> list[str]:
    verdict = judge(requests, devices)
    assert isinstance(verdict, Impossible)
    return verdict.reason.splitlines()


def test_a_single_request_is_told_with_the_numbers_of_each_device() -> None:
    devices = [
        gpu(1, 24 * GB, reserved_bytes=20 * GB),
        gpu(0, 80 * GB, backends=frozenset({Backend.ROCM})),
        gpu(2, 16 * GB, kind=Device.TPU, backends=frozenset({Backend.XLA}), state=DeviceState.OFFLINE),
    ]
    assert reason([one(40 * GB)], devices) == [
        "cuda(memory_gb=40) can never be placed: it needs 40 GB on one gpu with cuda",
        "  gpu 0: 80 GB, rocm: no cuda",
        "  gpu 1: 24 GB, cuda: too small",
        "  tpu 2: 16 GB, xla: no gpu",
    ]


def test_a_pinned_request_is_told_with_its_device() -> None:
    assert reason([one(40 * GB, device_id=1)], [gpu(0), gpu(1, 24 * GB)]) == [
        "cuda(memory_gb=40, device_id=1) can never be placed: it needs 40 GB on one gpu with cuda with device_id 1",
        "  gpu 0: 80 GB, cuda: not device_id 1",
        "  gpu 1: 24 GB, cuda: too small",
    ]


def test_a_group_is_told_with_its_counts() -> None:
    devices = [gpu(0, 24 * GB), gpu(1, 40 * GB), gpu(2, exclusive_only=True)]
    assert reason([group(90 * GB, 2, 3)], devices) == [
        (
            "cuda_group(group_memory_gb=90, max_devices=3, min_devices=2) can never be placed: "
            "it needs 2 x 45 GB to 3 x 30 GB, each on its own gpu with cuda, and only 1 device would do"
        ),
        "  gpu 0: 24 GB, cuda: too small",
        "  gpu 1: 40 GB, cuda: too small for the largest share",
        "  gpu 2: 80 GB, cuda, exclusive only: large enough",
    ]


def test_a_set_is_named_whole_with_the_request_that_fails_alone() -> None:
    lines = reason([one(2 * GB), one(2 * GB), one(90 * GB)], [gpu(0)])
    assert lines == [
        (
            "the 3 requests 2 x cuda(memory_gb=2), cuda(memory_gb=90) can never be placed, "
            "because of cuda(memory_gb=90): it needs 90 GB on one gpu with cuda"
        ),
        "  gpu 0: 80 GB, cuda: too small",
    ]


def test_a_set_that_fails_only_together_is_told_so() -> None:
    requests = [one(50 * GB), one(40 * GB), one(1 * GB, exclusive=True)]
    head, *listing = reason(requests, [gpu(0), gpu(1, 60 * GB)])
    assert head.startswith("the 3 requests cuda(memory_gb=50), cuda(memory_gb=40), cuda(memory_gb=1, exclusive=True) ")
    assert head.endswith("each could be alone; they need at least 91 GB and 1 device to themselves")
    assert listing == ["  gpu 0: 80 GB, cuda", "  gpu 1: 60 GB, cuda"]


def test_a_large_fleet_is_not_listed_without_end() -> None:
    lines = reason([one(90 * GB)], [gpu(index) for index in range(100)])
    assert len(lines) == 66
    assert lines[-1] == "  and 36 more devices"


@pytest.mark.parametrize(
    ("request_", "device", "text"),
    [
        (one(GB), gpu(0), None),
        (group(5, 2, 2), gpu(0, 2), None),
        (group(5, 2, 2), gpu(0, 1), "1 B free, needs 2 B"),
        (one(20 * GB), gpu(0, reserved_bytes=70 * GB), "10 GB free, needs 20 GB"),
        (one(GB + 1), gpu(0, GB), "1000000000 B free, needs 1000000001 B"),
        (one(GB), gpu(0, state=DeviceState.DRAINING), "draining"),
        (one(GB), gpu(0, state=DeviceState.OFFLINE), "offline"),
        (one(GB), gpu(0, share_count=1, exclusive=True), "held by an exclusive lease"),
        (one(GB, exclusive=True), gpu(0, share_count=1), "asked for exclusively, but carries 1 lease"),
        (one(GB), gpu(0, share_count=2, exclusive_only=True), "an exclusive-only device, but carries 2 leases"),
        (one(GB), gpu(0, state=DeviceState.OFFLINE, fault="lost (Xid 79)"), "offline: lost (Xid 79)"),
        (one(GB, backend=Backend.XPU), gpu(0), "no xpu"),
        (one(GB, among=frozenset({101})), gpu(0), "not visible to the process (its mask: cuda nothing)"),
        (one(GB, among=frozenset({100})), gpu(0), None),
        (group(GB, 2, 2), gpu(0, is_slice=True), "MIG slice: a process gets one alone"),
        (group(2 * GB, 1, 2), gpu(0, GB, is_slice=True), "1 GB free, needs 2 GB"),
        (
            one(20 * GB),
            gpu(0, reserved_bytes=50 * GB, withheld_bytes=20 * GB),
            "10 GB free, needs 20 GB; 20 GB withheld (used by processes without a lease, or in quarantine)",
        ),
        (
            one(GB, exclusive=True),
            gpu(0, withheld_bytes=GB),
            "asked for exclusively, but 1 GB withheld (used by processes without a lease, or in quarantine)",
        ),
        (one(GB, device=Device.TPU), gpu(0), "no tpu"),
        (one(GB, device_id=1), gpu(0, backends=CUDA), "not device_id 1"),
    ],
)
def test_what_a_device_lacks_now(request_: Request, device: BookedDevice, text: str | None) -> None:
    assert unmet(request_, device, [device]) == text


@settings(max_examples=200, deadline=None)
@given(any_request(), booked_devices())
def test_nothing_lacks_when_and_only_when_one_share_would_fit(request: Request, devices: list[BookedDevice]) -> None:
    for device in devices:
        smallest = one(
            request.shares(1 if device.is_slice else request.max_devices)[-1],
            device=request.device,
            backend=request.backend,
            exclusive=request.exclusive,
            device_id=request.device_id,
            among=request.among,
        )
        takes = plan([smallest], [device]) is not None and not (device.is_slice and request.min_devices > 1)
        assert (unmet(request, device, devices) is None) == takes
