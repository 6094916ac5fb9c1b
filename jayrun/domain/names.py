"""The names of a device: its number on its host, its UUID, and the GPU that a MIG slice is a part of."""

from __future__ import annotations

from dataclasses import dataclass

from jayrun.domain.devices import Backend, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A device as far as its names go.

    `host_index` is its number: on its host as the book has it, or in this process as the driver shows it. `parent_uuid`
    is the GPU that a MIG slice is a part of, None for a whole device. `is_split`: it is divided into slices, and those
    are used instead of it.
    """

    host_index: int
    uuid: str | None = None
    parent_uuid: str | None = None
    kind: Device = Device.GPU
    backends: frozenset[Backend] = frozenset({Backend.CUDA})
    is_split: bool = False
    is_at_fault: bool = False

    @property
    def name(self) -> str:
        """What it is called in the list of what a process sees: the UUID where it is known, else the number."""
        return self.uuid or str(self.host_index)
