"""Placements: values that look alike for one device and for many, and that cannot be changed or copied away."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from dataclasses import FrozenInstanceError, fields
from uuid import UUID

import pytest

from jayrun.domain.devices import Backend, Device
from jayrun.domain.placements import CPU_PLACEMENT, Placement, PlacementGroup

LEASE = UUID(int=7)


class Hold:
    """Something that lives as long as it is held."""


def leased(device_id: int, memory_bytes: int = 100, hold: object = None) -> Placement:
    return Placement(
        Device.GPU,
        Backend.CUDA,
        device_id,
        memory_bytes,
        host_index=device_id + 4,
        device_uuid=f"GPU-{device_id}",
        lease_id=LEASE,
        epoch=3,
        hold=hold,
    )


def unseen(host_index: int) -> Placement:
    return dataclasses.replace(leased(0), device_id=None, host_index=host_index)


def test_a_placement_and_a_group_share_one_surface() -> None:
    first, second = leased(1, 100), leased(0, 99)
    group = PlacementGroup((first, second), group_memory_bytes=199, prefer_max_devices=True)
    assert first.placements == (first,)
    assert first.primary is first
    assert first.device_ids == (1,)
    assert first.reserved_memory_bytes == 100
    assert group.placements == (first, second)
    assert group.primary is first
    assert group.device_ids == (1, 0)
    assert group.reserved_memory_bytes == 199
    assert (group.device, group.backend, group.lease_id, group.epoch) == (Device.GPU, Backend.CUDA, LEASE, 3)
    assert (group.group_memory_bytes, group.per_device_memory_bytes, group.prefer_max_devices) == (199, 0, True)


def test_a_group_is_a_sequence() -> None:
    members = [leased(index) for index in range(3)]
    group = PlacementGroup(members)
    assert len(group) == 3
    assert list(group) == members
    assert list(reversed(group)) == members[::-1]
    assert group[0] is members[0]
    assert group[-1] is members[2]
    assert group[1:] == tuple(members[1:])
    assert members[1] in group
    assert leased(9) not in group
    assert group.index(members[2]) == 2
    with pytest.raises(IndexError):
        group[3]


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ((), ValueError, "at least one"),
        ((leased(1), leased(1, 5)), ValueError, r"unique device ids, but have \[1, 1\]"),
        ((unseen(3), unseen(3)), ValueError, r"unique device ids, but have \[None, None\]"),
        ((CPU_PLACEMENT, CPU_PLACEMENT), ValueError, "unique device ids"),
        ((leased(1), "cuda:1"), TypeError, "Placement only, not 'cuda:1'"),
        ((leased(1), Placement(Device.GPU, Backend.CUDA, 2, 5)), ValueError, "share device, backend and lease"),
        ((leased(1), CPU_PLACEMENT), ValueError, "share device, backend and lease"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(members: tuple[object, ...], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        PlacementGroup(members)


def test_members_that_this_process_cannot_see_are_told_apart_by_their_number_on_the_host() -> None:
    group = PlacementGroup((unseen(3), unseen(4), leased(3)))
    assert group.device_ids == (3,)
    assert [each.host_index for each in group] == [3, 4, 7]


def test_the_cpu_needs_no_device_and_no_lease() -> None:
    assert (CPU_PLACEMENT.device, CPU_PLACEMENT.backend, CPU_PLACEMENT.device_id) == (Device.CPU, None, None)
    assert CPU_PLACEMENT.device_ids == ()
    assert CPU_PLACEMENT.reserved_memory_bytes == 0
    assert CPU_PLACEMENT.lease_id is None


@pytest.mark.parametrize("value", [leased(1), PlacementGroup((leased(1), leased(2))), CPU_PLACEMENT])
def test_values_are_immutable_hashable_and_copied_as_themselves(value: Placement | PlacementGroup) -> None:
    for each in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, each.name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.anything_else = 1
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value
    assert {value: 1}[value] == 1


def test_values_compare_by_value_and_never_by_their_hold() -> None:
    one, other = leased(1, hold=Hold()), leased(1, hold=Hold())
    assert one == other
    assert hash(one) == hash(other)
    assert one != leased(2)
    assert "Hold" not in repr(one)


def test_any_member_keeps_the_hold_alive() -> None:
    hold = Hold()
    watch = weakref.ref(hold)
    group = PlacementGroup((leased(1, hold=hold), leased(2, hold=hold)))
    member = group[1]
    watched_group = weakref.ref(group)
    del hold, group
    gc.collect()
    assert watched_group() is None
    assert watch() is not None
    del member
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_without_a_lease_gives_an_equal_value(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(CPU_PLACEMENT, protocol)) is CPU_PLACEMENT
    plain = Placement(Device.GPU, Backend.CUDA, 1, 5, host_index=2)
    assert pickle.loads(pickle.dumps(plain, protocol)) == plain
    assert pickle.loads(pickle.dumps(PlacementGroup((plain,)), protocol)) == PlacementGroup((plain,))
