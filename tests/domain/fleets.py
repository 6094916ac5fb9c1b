"""Small fleets and requests for the tests of the rules, and the brute force that the rules are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product

from hypothesis import strategies as st

from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, Share
from jayrun.domain.requests import Request

GB = 10**9
CUDA = frozenset({Backend.CUDA})


def gpu(index: int, capacity_bytes: int = 80 * GB, reserved_bytes: int = 0, **facts: object) -> BookedDevice:
    """A CUDA device of host 1 with key 100 + `index`; what is reserved is one share unless told otherwise."""
    known = {"host_id": 1, "backends": CUDA, "kind": Device.GPU, "share_count": int(reserved_bytes > 0)}
    return BookedDevice(
        **{
            "id": 100 * int(facts.get("host_id", 1)) + index,
            "host_index": index,
            "capacity_bytes": capacity_bytes,
            "reserved_bytes": reserved_bytes,
            **known,
            **facts,
        }
    )


def one(memory_bytes: int, **facts: object) -> Request:
    """A request for so many bytes on one CUDA device."""
    return Request(
        **{
            "device": Device.GPU,
            "backend": Backend.CUDA,
            "group": False,
            "min_devices": 1,
            "max_devices": 1,
            "prefer_max_devices": False,
            "group_bytes": 0,
            "per_device_bytes": memory_bytes,
            "exclusive": False,
            "device_id": None,
            **facts,
        }
    )


def group(group_bytes: int, at_least: int, at_most: int, *, each: int = 0, **facts: object) -> Request:
    """A request for a group of CUDA devices."""
    counts = {"min_devices": at_least, "max_devices": at_most}
    return one(each, group=True, group_bytes=group_bytes, **counts, **facts)


def accepts(device: BookedDevice, request: Request, share: Share) -> bool:
    """Whether a share may lie on a device, spelt out as the contract says it."""
    alone = request.exclusive or device.exclusive_only
    return (
        device.state is DeviceState.ONLINE
        and device.kind is request.device
        and request.backend in device.backends
        and request.device_id in (None, device.host_index)
        and not device.exclusive
        and not (alone and (device.share_count > 0 or device.withheld_bytes > 0))
        and share.exclusive is alone
        and device.reserved_bytes + device.withheld_bytes + share.memory_bytes <= device.capacity_bytes
        and (request.among is None or device.id in request.among)
    )


def one_process(shares: Iterable[Share], devices: Sequence[BookedDevice]) -> bool:
    """Whether one process can use them all: with a MIG slice it can use nothing else."""
    used = {share.device_id for share in shares}
    return len(used) <= 1 or not any(device.is_slice for device in devices if device.id in used)


def ways(request: Request, devices: Sequence[BookedDevice]) -> Iterator[tuple[tuple[Share, ...], list[BookedDevice]]]:
    """Every way to place one request, and the devices after it; larger shares first, not sorted."""
    for count in range(request.min_devices, request.max_devices + 1):
        for places in permutations(range(len(devices)), count):
            after, shares = list(devices), []
            for place, memory_bytes in zip(places, request.shares(count), strict=True):
                device = devices[place]
                share = Share(device.id, device.host_index, memory_bytes, request.exclusive or device.exclusive_only)
                if not accepts(device, request, share):
                    break
                shares.append(share)
                after[place] = device.with_share(share)
            else:
                if one_process(shares, devices):
                    yield tuple(shares), after


def every_plan(
    requests: Sequence[Request], devices: Sequence[BookedDevice]
) -> Iterator[tuple[tuple[tuple[Share, ...], ...], list[BookedDevice]]]:
    """Every way to place all requests together, and the devices after them."""
    if not requests:
        yield (), list(devices)
        return
    for shares, after in ways(requests[0], devices):
        for rest, end in every_plan(requests[1:], after):
            if one_process([share for each in (shares, *rest) for share in each], devices):
                yield (shares, *rest), end


def feasible(requests: Sequence[Request], devices: Sequence[BookedDevice]) -> bool:
    """Whether there is any way at all."""
    return next(every_plan(requests, devices), None) is not None


@st.composite
def booked_devices(draw: st.DrawFn, most: int = 4, *, host_id: int = 1) -> list[BookedDevice]:
    """A few devices of one host with few bytes, so that everything is tight; some carry leases, some too many."""
    states = st.sampled_from([*DeviceState, *[DeviceState.ONLINE] * 3])
    devices = []
    for index in range(draw(st.integers(1, most))):
        shares = draw(st.integers(0, 2))
        devices.append(
            gpu(
                index,
                draw(st.integers(1, 9)),
                draw(st.integers(0, 6)) if shares else 0,
                host_id=host_id,
                kind=draw(st.sampled_from([Device.GPU, Device.GPU, Device.GPU, Device.TPU])),
                backends=draw(st.sampled_from([CUDA, CUDA, frozenset({Backend.CUDA, Backend.OPENCL})])),
                share_count=shares,
                exclusive=shares == 1 and draw(st.booleans()),
                exclusive_only=draw(st.sampled_from([False, False, False, True])),
                state=draw(states),
                withheld_bytes=draw(st.sampled_from([0, 0, 0, 1, 3])),
                is_slice=draw(st.sampled_from([False, False, False, True])),
                island=draw(st.sampled_from([None, 0, 0, 1, 1, 2])),
            )
        )
    return draw(st.permutations(devices))


@st.composite
def any_request(draw: st.DrawFn, most: int = 3) -> Request:
    """A request for a few bytes."""
    exclusive = draw(st.sampled_from([False, False, True]))
    kind = draw(st.sampled_from([Device.GPU, Device.GPU, Device.GPU, Device.TPU]))
    backend = draw(st.sampled_from([Backend.CUDA, Backend.CUDA, Backend.OPENCL]))
    among = draw(st.sampled_from([None, None, None, frozenset({100, 102, 200}), frozenset({101})]))
    asked = {"device": kind, "backend": backend, "exclusive": exclusive, "among": among}
    if draw(st.booleans()):
        pinned = draw(st.sampled_from([None, None, 0, 1, 2]))
        return one(draw(st.integers(0 if exclusive else 1, 7)), device_id=pinned, **asked)
    at_least = draw(st.integers(1, most))
    at_most = draw(st.integers(at_least, most))
    each = draw(st.integers(0, 3))
    shared = draw(st.integers(0 if exclusive or each else 1, 9))
    return group(shared, at_least, at_most, each=each, prefer_max_devices=draw(st.booleans()), **asked)


def sequences(most: int = 3) -> st.SearchStrategy[list[Request]]:
    """A few requests."""
    return st.lists(any_request(), min_size=1, max_size=most)


def subsets(items: Sequence[object]) -> Iterator[tuple[object, ...]]:
    """Every subset."""
    for taken in product([False, True], repeat=len(items)):
        yield tuple(item for item, take in zip(items, taken, strict=True) if take)
