"""The values that user code gets for granted requests: one placement, or a group of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, SupportsIndex, TypeAlias, overload
from uuid import UUID

from jayrun.domain.devices import Backend, Device


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Placement:
    """Capacity on one device, or the CPU; immutable, compared by value.

    `device_id` is the number that this process sees: None on the CPU, and where a process that unpickled the placement
    cannot see the device. `host_index` is the device's number on its host, `memory_bytes` what is reserved. `lease_id`
    and `epoch` name the lease, and are None on the CPU. `hold` is no part of the value: it only keeps the lease alive
    for as long as the placement is reachable, and a pickled copy's where that is unpickled.
    """

    device: Device
    backend: Backend | None
    device_id: int | None
    memory_bytes: int
    _: KW_ONLY
    host_index: int | None = None
    device_uuid: str | None = None
    lease_id: UUID | None = None
    epoch: int | None = None
    hold: object = field(default=None, repr=False, compare=False)

    @property
    def placements(self) -> tuple[Placement]:
        """A tuple of this placement only."""
        return (self,)

    @property
    def primary(self) -> Placement:
        """This placement."""
        return self

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The device id alone, or nothing where there is none."""
        return () if self.device_id is None else (self.device_id,)

    @property
    def reserved_memory_bytes(self) -> int:
        """Bytes reserved on the device."""
        return self.memory_bytes

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: object) -> Placement:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self is CPU_PLACEMENT:
            return "CPU_PLACEMENT"  # by name, so that it stays one object in every process
        named = (self.host_index, self.device_uuid, self.lease_id, self.epoch)
        return _received, (self.device, self.backend, self.device_id, self.memory_bytes, *named, self.hold)


class _Receiver(Protocol):
    """What the hold of a process knows of that process."""

    def device_id(self, kind: Device, backend: Backend | None, host_index: int, uuid: str | None) -> int | None: ...


def _received(
    device: Device,
    backend: Backend | None,
    device_id: int | None,
    memory_bytes: int,
    host_index: int | None,
    device_uuid: str | None,
    lease_id: UUID | None,
    epoch: int | None,
    hold: _Receiver | None,
) -> Placement:
    """The placement that another process has pickled, with the number by which this one uses the device; pickles call
    this by its name."""
    if hold is not None and host_index is not None:
        device_id = hold.device_id(device, backend, host_index, device_uuid)
    return Placement(
        device,
        backend,
        device_id,
        memory_bytes,
        host_index=host_index,
        device_uuid=device_uuid,
        lease_id=lease_id,
        epoch=epoch,
        hold=hold,
    )


CPU_PLACEMENT = Placement(Device.CPU, None, None, 0)
"""Where data lies that needs no reservation."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PlacementGroup(Sequence[Placement]):
    """Capacity on several devices of one kind that one lease holds; an immutable sequence of its placements.

    `group_memory_bytes` are divided among the members, `per_device_memory_bytes` come on top for each.

    Raises TypeError when a member is no Placement, and ValueError when there is none, when two have one device id, or
    when they differ in kind, backend or lease.
    """

    placements: tuple[Placement, ...]
    _: KW_ONLY
    group_memory_bytes: int = 0
    per_device_memory_bytes: int = 0
    prefer_max_devices: bool = False

    def __post_init__(self) -> None:
        members = tuple(self.placements)
        object.__setattr__(self, "placements", members)
        for each in members:
            if not isinstance(each, Placement):
                raise TypeError(f"placements must hold Placement only, not {each!r} ({type(each).__name__})")
        if not members:
            raise ValueError("placements must hold at least one Placement, but is empty")
        # Those that this process cannot see have no id here, and are told apart by their number on the host.
        ids = {each.host_index if each.device_id is None else (each.device_id,) for each in members}
        if len(ids) < len(members):
            raise ValueError(f"placements must have unique device ids, but have {[each.device_id for each in members]}")
        if len({(each.device, each.backend, each.lease_id, each.epoch) for each in members}) > 1:
            raise ValueError(f"placements must share device, backend and lease, but are {members!r}")

    @property
    def primary(self) -> Placement:
        """The first member."""
        return self.placements[0]

    @property
    def device(self) -> Device:
        """The kind of all members."""
        return self.primary.device

    @property
    def backend(self) -> Backend | None:
        """The backend of all members."""
        return self.primary.backend

    @property
    def lease_id(self) -> UUID | None:
        """The lease that holds all members."""
        return self.primary.lease_id

    @property
    def epoch(self) -> int | None:
        """The fencing number of that lease."""
        return self.primary.epoch

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The device ids of all members, in their order."""
        return tuple(each for member in self.placements for each in member.device_ids)

    @property
    def reserved_memory_bytes(self) -> int:
        """Bytes reserved on all devices together."""
        return sum(each.memory_bytes for each in self.placements)

    def __len__(self) -> int:
        return len(self.placements)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __contains__(self, value: object) -> bool:
        return value in self.placements

    @overload
    def __getitem__(self, index: int) -> Placement: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Placement, ...]: ...
    def __getitem__(self, index: int | slice) -> Placement | tuple[Placement, ...]:
        return self.placements[index]

    def __copy__(self) -> PlacementGroup:
        return self

    def __deepcopy__(self, memo: object) -> PlacementGroup:
        return self


PlacementLocation: TypeAlias = Placement | PlacementGroup
"""Where data may lie: code that only needs the location accepts either."""
