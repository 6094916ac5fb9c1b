"""`Data`: a value and where it lies. The lease of a placement lives as long as data that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jayrun.domain.placements import CPU_PLACEMENT, Placement, PlacementGroup, PlacementLocation


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Data:
    """A value with the placement it needs. Immutable.

    Attach the placement that was reserved for `value`: the lease then follows this object. Raises TypeError when
    `placement` is neither a Placement nor a PlacementGroup.
    """

    value: Any
    placement: PlacementLocation = CPU_PLACEMENT

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement | PlacementGroup):
            raise TypeError(
                f"placement must be a Placement or PlacementGroup, not {self.placement!r} "
                f"({type(self.placement).__name__})"
            )
