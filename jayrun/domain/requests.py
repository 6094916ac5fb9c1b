"""What user code asks for: one device or a group, checked at the door and comparable ever after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jayrun.domain.checks import flag, member, whole_number
from jayrun.domain.devices import Backend, Device, accelerator
from jayrun.domain.units import bytes_to_gigabytes, gigabytes_to_bytes

MAX_DEVICES = 1024
"""The most devices that one group may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `reserve` or `reserve_group`, in whole bytes; make it with `single` or `of_group`, which check.

    `group_bytes` are divided among the devices, `per_device_bytes` come on top for each. `device_id` is the number on
    the host that a single request insists on, or None. `among` are the keys of the devices in the book that the process
    can see, None for all: a matter of who asks and not of what is asked, so it is no part of the recorded sequence.
    """

    device: Device
    backend: Backend
    group: bool
    min_devices: int
    max_devices: int
    prefer_max_devices: bool
    group_bytes: int
    per_device_bytes: int
    exclusive: bool
    device_id: int | None
    among: frozenset[int] | None = field(default=None, compare=False)

    @classmethod
    def single(
        cls,
        *,
        device: object,
        backend: object,
        memory_gb: object,
        exclusive: object = False,
        device_id: object = None,
    ) -> Request:
        """The request for one device with `memory_gb` decimal gigabytes, perhaps exclusive, perhaps a certain one.

        Raises TypeError for a wrong type and ValueError for CPU, memory that is not finite or negative, a negative
        `device_id`, or zero bytes that are not exclusive.
        """
        request = cls(
            device=accelerator(device),
            backend=member(backend, "backend", Backend),
            group=False,
            min_devices=1,
            max_devices=1,
            prefer_max_devices=False,
            group_bytes=0,
            per_device_bytes=gigabytes_to_bytes(memory_gb, "memory_gb"),
            exclusive=flag(exclusive, "exclusive"),
            device_id=None if device_id is None else whole_number(device_id, "device_id"),
        )
        if not request.per_device_bytes and not request.exclusive:
            raise ValueError(f"memory_gb must be positive unless exclusive=True, but is {memory_gb!r}")
        return request

    @classmethod
    def of_group(
        cls,
        *,
        device: object,
        backend: object,
        group_memory_gb: object = 0,
        per_device_memory_gb: object = 0,
        max_devices: object,
        min_devices: object = 1,
        prefer_max_devices: object = False,
        exclusive: object = False,
    ) -> Request:
        """The request for `min_devices` to `max_devices` devices of one kind, all of them or none.

        Raises TypeError for a wrong type and ValueError for CPU, memory that is not finite or negative, counts below 1,
        above 1024 or in the wrong order, or zero bytes that are not exclusive.
        """
        request = cls(
            device=accelerator(device),
            backend=member(backend, "backend", Backend),
            group=True,
            min_devices=whole_number(min_devices, "min_devices", minimum=1, maximum=MAX_DEVICES),
            max_devices=whole_number(max_devices, "max_devices", minimum=1, maximum=MAX_DEVICES),
            prefer_max_devices=flag(prefer_max_devices, "prefer_max_devices"),
            group_bytes=gigabytes_to_bytes(group_memory_gb, "group_memory_gb"),
            per_device_bytes=gigabytes_to_bytes(per_device_memory_gb, "per_device_memory_gb"),
            exclusive=flag(exclusive, "exclusive"),
            device_id=None,
        )
        if request.min_devices > request.max_devices:
            raise ValueError(
                f"min_devices must not exceed max_devices, but min_devices is {request.min_devices} "
                f"and max_devices is {request.max_devices}"
            )
        if not request.group_bytes and not request.per_device_bytes and not request.exclusive:
            raise ValueError(
                "group_memory_gb or per_device_memory_gb must be positive unless exclusive=True, "
                f"but they are {group_memory_gb!r} and {per_device_memory_gb!r}"
            )
        return request

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        """The request that `to_json` wrote; raises KeyError, TypeError or ValueError when it is not one."""
        pinned = values["device_id"]
        return cls(
            device=Device(values["device"]),
            backend=Backend(values["backend"]),
            group=bool(values["group"]),
            min_devices=int(values["min_devices"]),
            max_devices=int(values["max_devices"]),
            prefer_max_devices=bool(values["prefer_max_devices"]),
            group_bytes=int(values["group_bytes"]),
            per_device_bytes=int(values["per_device_bytes"]),
            exclusive=bool(values["exclusive"]),
            device_id=None if pinned is None else int(pinned),
        )

    def to_json(self) -> dict[str, str | int | bool | None]:
        """The request as plain JSON scalars, exact: `from_json` gives an equal one back."""
        return {
            "device": self.device.value,
            "backend": self.backend.value,
            "group": self.group,
            "min_devices": self.min_devices,
            "max_devices": self.max_devices,
            "prefer_max_devices": self.prefer_max_devices,
            "group_bytes": self.group_bytes,
            "per_device_bytes": self.per_device_bytes,
            "exclusive": self.exclusive,
            "device_id": self.device_id,
        }

    def counts(self) -> range:
        """The device counts in the order in which they are tried."""
        if self.prefer_max_devices:
            return range(self.max_devices, self.min_devices - 1, -1)
        return range(self.min_devices, self.max_devices + 1)

    def shares(self, count: int) -> tuple[int, ...]:
        """The bytes on each of `count` devices, largest first; together they divide the group's bytes exactly."""
        each, longer = divmod(self.group_bytes, count)
        small = self.per_device_bytes + each
        return (small + 1,) * longer + (small,) * (count - longer)

    def describe(self) -> str:
        """The request as the call that made it, on one line: `cuda(memory_gb=2)`."""
        cuda = self.device is Device.GPU and self.backend is Backend.CUDA
        terms = [] if cuda else [f"device=Device.{self.device.name}", f"backend=Backend.{self.backend.name}"]
        if self.group:
            if self.group_bytes:
                terms.append(f"group_memory_gb={bytes_to_gigabytes(self.group_bytes)}")
            if self.per_device_bytes:
                terms.append(f"per_device_memory_gb={bytes_to_gigabytes(self.per_device_bytes)}")
            terms.append(f"max_devices={self.max_devices}")
            if self.min_devices != 1:
                terms.append(f"min_devices={self.min_devices}")
            if self.prefer_max_devices:
                terms.append("prefer_max_devices=True")
        else:
            terms.append(f"memory_gb={bytes_to_gigabytes(self.per_device_bytes)}")
        if self.exclusive:
            terms.append("exclusive=True")
        if self.device_id is not None:
            terms.append(f"device_id={self.device_id}")
        verb = ("cuda" if cuda else "reserve") + ("_group" if self.group else "")
        return f"{verb}({', '.join(terms)})"
