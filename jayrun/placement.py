"""The names that code working with placements needs."""

from __future__ import annotations

from jayrun.domain.devices import Backend, Device
from jayrun.domain.placements import CPU_PLACEMENT, Placement, PlacementGroup, PlacementLocation
from jayrun.runtime.placement import PlacementInterface

__all__ = [
    "CPU_PLACEMENT",
    "Backend",
    "Device",
    "Placement",
    "PlacementGroup",
    "PlacementInterface",
    "PlacementLocation",
]
