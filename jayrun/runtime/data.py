"""`Data`: a value and where it lies. The lease of a placement lives as long as data that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jayrun.domain.placements import CPU_PLACEMENT, Placement, PlacementGroup, PlacementLocation
from jayrun.runtime.holds import Hold, Part


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Data:
    """A value with the placement it needs. Immutable.

    Attach the placement that was reserved for `value`: the lease then follows this object, also into other processes
    when it is pickled. Raises TypeError when `placement` is neither a Placement nor a PlacementGroup, and `LeaseLost`
    when this process has lost the lease.
    """

    value: Any
    placement: PlacementLocation = CPU_PLACEMENT

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement | PlacementGroup):
            raise TypeError(
                f"placement must be a Placement or PlacementGroup, not {self.placement!r} "
                f"({type(self.placement).__name__})"
            )
        if isinstance(hold := self.placement.primary.hold, Hold | Part):
            hold.check()
