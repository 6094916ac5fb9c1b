"""Which of equally good devices a group takes: those that leave it on the fewest islands of linked devices."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from typing import TypeAlias

from jayrun.domain.devices import BookedDevice

Ranked: TypeAlias = tuple[Hashable, BookedDevice]
"""A device and how well it fits; devices of one rank fit equally well."""


def gather(ranked: Sequence[Ranked], need: int, near: Collection[BookedDevice] = ()) -> list[BookedDevice]:
    """The devices of `ranked`, which is ordered by rank and then by host index, the first `need` on few islands.

    Only devices of one rank change places. Of those that the group does not need all, it takes first what is on the
    islands that it is on already (`near` tells with which devices); then, whole, the largest of the other islands, as
    long as it needs more than any of them has; then the smallest that has enough. On ties the lowest host index.
    """
    ordered: list[BookedDevice] = []
    for _, run in groupby(ranked, key=lambda each: each[0]):
        tied = [device for _, device in run]
        wanted = need - len(ordered)
        ordered += _nearest(tied, wanted, [*near, *ordered]) if 0 < wanted < len(tied) else tied
    return ordered


def _nearest(tied: Sequence[BookedDevice], wanted: int, near: Collection[BookedDevice]) -> list[BookedDevice]:
    used = {_island(device) for device in near}
    taken = [device for device in tied if _island(device) in used]
    islands: dict[Hashable, list[BookedDevice]] = {}
    for device in tied:
        if _island(device) not in used:
            islands.setdefault(_island(device), []).append(device)
    rest = sorted(islands.values(), key=len, reverse=True)  # of equals still the lowest host index first
    while rest and len(taken) < wanted:
        enough = [island for island in rest if len(island) >= wanted - len(taken)]
        chosen = min(enough, key=len) if enough else rest[0]
        rest = [island for island in rest if island is not chosen]
        taken += chosen
    return [*taken, *(device for island in rest for device in island)]


def _island(device: BookedDevice) -> Hashable:
    """What its island is known by; a device without known links is an island of its own."""
    return ("alone", device.id) if device.island is None else device.island
