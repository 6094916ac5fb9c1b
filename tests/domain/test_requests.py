"""Requests: checked at the door, compared by value, written down exactly."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
from fleets import any_request
from hypothesis import given
from hypothesis import strategies as st
from test_units import Int64

from jayrun.domain.devices import Backend, Device
from jayrun.domain.requests import Request
from jayrun.domain.units import gigabytes_to_bytes

CUDA = {"device": Device.GPU, "backend": Backend.CUDA}


def test_a_single_request_in_bytes() -> None:
    request = Request.single(**CUDA, memory_gb=2, device_id=Int64(3))
    assert request.per_device_bytes + request.group_bytes == 2 * 10**9
    assert list(request.counts()) == [1]
    assert request.shares(1) == (2 * 10**9,)
    assert request.device_id == 3
    assert type(request.device_id) is int
    assert request == Request.single(**CUDA, memory_gb=2.0, exclusive=False, device_id=3)


def test_a_group_request_in_bytes() -> None:
    request = Request.of_group(
        **CUDA, group_memory_gb=8, per_device_memory_gb=1, min_devices=Int64(2), max_devices=4, prefer_max_devices=True
    )
    assert list(request.counts()) == [4, 3, 2]
    assert request.shares(4) == (3 * 10**9,) * 4
    assert request.shares(3) == (3_666_666_667, 3_666_666_667, 3_666_666_666)


def test_a_group_of_one_is_another_request_than_a_single() -> None:
    assert Request.of_group(**CUDA, group_memory_gb=1, max_devices=1) != Request.single(**CUDA, memory_gb=1)


@given(any_request(most=9))
def test_shares_divide_the_group_exactly_and_as_evenly_as_can_be(request: Request) -> None:
    for count in request.counts():
        shares = request.shares(count)
        assert len(shares) == count
        assert sum(shares) == request.group_bytes + count * request.per_device_bytes
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[0] - shares[-1] <= 1


@given(any_request(most=9))
def test_counts_are_those_allowed_each_once(request: Request) -> None:
    counts = list(request.counts())
    assert sorted(counts) == list(range(request.min_devices, request.max_devices + 1))
    assert counts == sorted(counts, reverse=request.prefer_max_devices)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "gpu"}, TypeError, "device must be one of"),
        ({"device": Backend.CUDA}, TypeError, "device must be one of"),
        ({"device": Device.CPU}, ValueError, "device must be an accelerator, but is Device.CPU"),
        ({"backend": "cuda"}, TypeError, "backend must be one of .*, not 'cuda'"),
        ({"backend": None}, TypeError, "backend must be one of .*, not None"),
        ({"memory_gb": True}, TypeError, "memory_gb must be a number, not True"),
        ({"memory_gb": "2"}, TypeError, "memory_gb must be a number, not '2'"),
        ({"memory_gb": nan}, ValueError, "memory_gb must be finite, not nan"),
        ({"memory_gb": -2}, ValueError, "memory_gb must not be negative, but is -2"),
        ({"memory_gb": 0}, ValueError, "memory_gb must be positive unless exclusive=True, but is 0"),
        ({"exclusive": 1}, TypeError, "exclusive must be True or False, not 1"),
        ({"device_id": -1}, ValueError, "device_id must be at least 0, but is -1"),
        ({"device_id": True}, TypeError, "device_id must be a whole number, not True"),
        ({"device_id": "0"}, TypeError, "device_id must be a whole number, not '0'"),
    ],
)
def test_a_bad_single_request_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Request.single(**{**CUDA, "memory_gb": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": Device.CPU}, ValueError, "device must be an accelerator"),
        ({"backend": Device.GPU}, TypeError, "backend must be one of"),
        ({"group_memory_gb": None}, TypeError, "group_memory_gb must be a number, not None"),
        ({"group_memory_gb": inf}, ValueError, "group_memory_gb must be finite, not inf"),
        ({"per_device_memory_gb": False}, TypeError, "per_device_memory_gb must be a number, not False"),
        ({"per_device_memory_gb": -0.5}, ValueError, "per_device_memory_gb must not be negative, but is -0.5"),
        ({"group_memory_gb": 0}, ValueError, "group_memory_gb or per_device_memory_gb must be positive"),
        ({"min_devices": 0}, ValueError, "min_devices must be at least 1, but is 0"),
        ({"max_devices": -1}, ValueError, "max_devices must be at least 1, but is -1"),
        ({"max_devices": 1025}, ValueError, "max_devices must be at most 1024, but is 1025"),
        ({"max_devices": 2.0}, TypeError, "max_devices must be a whole number, not 2.0"),
        ({"min_devices": True}, TypeError, "min_devices must be a whole number, not True"),
        ({"min_devices": 5}, ValueError, "min_devices must not exceed max_devices, .* is 5 and max_devices is 4"),
        ({"prefer_max_devices": None}, TypeError, "prefer_max_devices must be True or False, not None"),
        ({"exclusive": "yes"}, TypeError, "exclusive must be True or False, not 'yes'"),
    ],
)
def test_a_bad_group_request_is_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Request.of_group(**{**CUDA, "group_memory_gb": 8, "max_devices": 4, **changes})


def test_zero_bytes_are_allowed_when_exclusive() -> None:
    assert Request.single(**CUDA, memory_gb=0, exclusive=True).shares(1) == (0,)
    assert Request.of_group(**CUDA, max_devices=2, exclusive=True).shares(2) == (0, 0)


@given(any_request(most=9))
def test_json_gives_the_same_request_back(request: Request) -> None:
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_json_holds_plain_scalars_only() -> None:
    values = Request.single(**CUDA, memory_gb=2, exclusive=True).to_json()
    assert {type(value) for value in values.values()} <= {str, int, bool, type(None)}
    assert Request.single(**CUDA, memory_gb=9_000_000_000).to_json()["per_device_bytes"] == 9 * 10**18


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request.single(**CUDA, memory_gb=2), "cuda(memory_gb=2)"),
        (Request.single(**CUDA, memory_gb=0.3, device_id=0), "cuda(memory_gb=0.3, device_id=0)"),
        (Request.single(**CUDA, memory_gb=0, exclusive=True), "cuda(memory_gb=0, exclusive=True)"),
        (
            Request.single(device=Device.TPU, backend=Backend.XLA, memory_gb=16),
            "reserve(device=Device.TPU, backend=Backend.XLA, memory_gb=16)",
        ),
        (
            Request.of_group(**CUDA, group_memory_gb=8, per_device_memory_gb=1, min_devices=2, max_devices=4),
            "cuda_group(group_memory_gb=8, per_device_memory_gb=1, max_devices=4, min_devices=2)",
        ),
        (
            Request.of_group(**CUDA, per_device_memory_gb=1, max_devices=4, prefer_max_devices=True),
            "cuda_group(per_device_memory_gb=1, max_devices=4, prefer_max_devices=True)",
        ),
        (
            Request.of_group(device=Device.GPU, backend=Backend.ROCM, max_devices=2, exclusive=True),
            "reserve_group(device=Device.GPU, backend=Backend.ROCM, max_devices=2, exclusive=True)",
        ),
    ],
)
def test_a_request_reads_like_its_call(request_: Request, text: str) -> None:
    assert request_.describe() == text


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_the_described_call_asks_for_the_same(memory_gb: float) -> None:
    request = Request.single(**CUDA, memory_gb=memory_gb)
    number = request.describe().removeprefix("cuda(memory_gb=").removesuffix(")")
    assert gigabytes_to_bytes(float(number), "memory_gb") == request.shares(1)[0]
