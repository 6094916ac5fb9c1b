"""The search for a place for a whole sequence of requests at once: depth first, best fit first, bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

from jayrun.domain.bounds import Need, may_fit, needs_of
from jayrun.domain.devices import BookedDevice, Share
from jayrun.domain.fit import is_open
from jayrun.domain.islands import gather
from jayrun.domain.requests import Request

Plan: TypeAlias = tuple[tuple[Share, ...], ...]
"""For each request, in their order, its shares by ascending host index."""

Rank: TypeAlias = Callable[[Request, BookedDevice, int], tuple[int, ...]]
"""How well a device takes a share of so many bytes of a request, and its host index: the lowest is tried first."""

_WORK = 3_000
"""Devices looked at before a search gives up: some 10 ms on one core, however many devices there are."""

_Picture: TypeAlias = tuple[BookedDevice, ...]


def best_fit(request: Request, device: BookedDevice, memory_bytes: int) -> tuple[int, ...]:
    """Rank a device by the memory left over."""
    return (device.free_bytes - memory_bytes, device.host_index)


class Search:
    """Every way to place `requests` on `devices`, the preferred one first.

    Pinned requests come first, then exclusive ones, then the largest. A MIG slice is used by all of them or by none,
    for a process that gets one can use no other device. `twin` says what else makes two devices differ than what the
    book shows, if anything. After the first descent the search is bounded: `complete` turns False when
    it was given up before everything had been tried.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        devices: Sequence[BookedDevice],
        *,
        rank: Rank = best_fit,
        twin: Callable[[BookedDevice], Hashable] | None = None,
    ) -> None:
        self.complete = True
        self._requests = requests
        self._order = sorted(range(len(requests)), key=lambda index: _urgency(requests[index]))
        self._picture = tuple(devices)
        self._rank = rank
        self._work = _WORK
        self._needs: dict[int, list[Need]] = {}
        self._linked = any(device.island is not None for device in devices)
        # Devices of one make are interchangeable for every request that is not pinned.
        masks = tuple({request.among for request in requests if request.among is not None})
        makes: dict[Hashable, int] = {}
        self._makes = {
            device.id: makes.setdefault((_make(device, masks), twin(device) if twin else None), len(makes))
            for device in devices
        }

    def plans(self) -> Iterator[Plan]:
        """The plans, those left out that differ from an earlier one by interchangeable devices only."""
        picture = self._promising()
        if not picture:
            return
        pictures = [picture]
        branches = [self._choices(0, picture)]
        chosen: list[tuple[Share, ...]] = []
        seen: set[Hashable] = set()
        first_descent = True
        while branches:
            choice = next(branches[-1], None)
            if choice is None:
                first_descent = False
                branches.pop()
                pictures.pop()
                if chosen:
                    chosen.pop()
                continue
            depth = len(branches)
            if not first_descent and not self._afford(depth):
                self.complete = False
                return
            if depth == len(self._requests):
                yield self._in_order([*chosen, choice])
                first_descent = False
                continue
            picture = book(pictures[-1], choice)
            if depth == 1:
                picture = _beside(choice, picture)
            if not first_descent and not self._may_fit(depth, picture):
                continue
            # The same picture at the same depth leads to nothing new, neither to failure nor to another plan.
            key = (depth, tuple(sorted(self._state(device) for device in picture)))
            if key not in seen:
                seen.add(key)
                chosen.append(choice)
                pictures.append(picture)
                branches.append(self._choices(depth, picture))

    def _promising(self) -> _Picture:
        """The devices that a plan might use: those that are no slices, and each slice, if it may have room for all."""
        whole = tuple(device for device in self._picture if not device.is_slice)
        alone = [(device,) for device in self._picture if device.is_slice]
        return tuple(device for part in (whole, *alone) if self._may_fit(0, part) for device in part)

    def _afford(self, depth: int) -> bool:
        """Pay for one more step; False when that was more than there is."""
        self._work -= len(self._picture) * (8 + sum(len(need.sizes) for need in self._needs_from(depth))) // 8
        return self._work >= 0

    def _may_fit(self, depth: int, picture: _Picture) -> bool:
        return may_fit(self._needs_from(depth), picture)

    def _needs_from(self, depth: int) -> list[Need]:
        if depth not in self._needs:
            self._needs[depth] = needs_of(self._requests[index] for index in self._order[depth:])
        return self._needs[depth]

    def _choices(self, depth: int, picture: _Picture) -> Iterator[tuple[Share, ...]]:
        request = self._requests[self._order[depth]]
        usable = [device for device in picture if is_open(request, device)]
        whole = [device for device in usable if not device.is_slice]
        for count in request.counts():
            if count <= len(usable):
                yield from self._arrangements(request, request.shares(count), whole if count > 1 else usable)

    def _arrangements(
        self, request: Request, sizes: tuple[int, ...], usable: list[BookedDevice]
    ) -> Iterator[tuple[Share, ...]]:
        large, small = sizes[0], sizes[-1]
        many = sizes.count(large)
        fitting = self._ranked(request, usable, small)
        roomy = self._ranked(request, usable, large) if large > small else fitting
        # Whoever holds a large share holds a small one: with enough of both, every selection can be completed.
        if len(fitting) < len(sizes):
            return
        rest = len(sizes) - many
        if self._linked and len(sizes) > 1:
            # Small shares go first to devices that have no room for a large one; the others are chosen along with them.
            need = len(sizes) - min(rest, len(fitting) - len(roomy))
            roomy = self._gathered(request, roomy, large, need, ())
        for first in self._selections(roomy, many):
            shares = [share_of(request, device, large) for device in first]
            taken = {device.id for device in first}
            others = [device for device in fitting if device.id not in taken]
            if self._linked and rest:
                others = self._gathered(request, others, small, rest, first)
            for second in self._selections(others, rest):
                yield (*shares, *(share_of(request, device, small) for device in second))

    def _ranked(self, request: Request, usable: list[BookedDevice], memory_bytes: int) -> list[BookedDevice]:
        fitting = [device for device in usable if device.free_bytes >= memory_bytes]
        return sorted(fitting, key=lambda device: self._rank(request, device, memory_bytes))

    def _gathered(
        self,
        request: Request,
        ranked: list[BookedDevice],
        memory_bytes: int,
        need: int,
        near: Sequence[BookedDevice],
    ) -> list[BookedDevice]:
        return gather([(self._rank(request, device, memory_bytes)[:-1], device) for device in ranked], need, near)

    def _selections(self, devices: list[BookedDevice], count: int) -> Iterator[list[BookedDevice]]:
        """Each way to take `count` of `devices`, the front ones first, interchangeable neighbours counted as one."""
        states = [self._state(device) for device in devices]
        # Where the run of interchangeable neighbours ends that each device belongs to.
        ends = list(range(1, len(devices) + 1))
        for index in range(len(devices) - 2, -1, -1):
            if states[index] == states[index + 1]:
                ends[index] = ends[index + 1]
        taken = list(range(count))
        while len(devices) >= count:
            yield [devices[index] for index in taken]
            for place in range(count - 1, -1, -1):
                start = ends[taken[place]]
                if start + count - place <= len(devices):
                    taken[place:] = range(start, start + count - place)
                    break
            else:
                return

    def _state(self, device: BookedDevice) -> tuple[int, int, bool, bool]:
        return (self._makes[device.id], device.reserved_bytes, device.share_count > 0, device.exclusive)

    def _in_order(self, chosen: list[tuple[Share, ...]]) -> Plan:
        placed: list[tuple[Share, ...]] = [()] * len(chosen)
        for index, shares in zip(self._order, chosen, strict=True):
            placed[index] = tuple(sorted(shares, key=lambda share: share.host_index))
        return tuple(placed)


def book(devices: Sequence[BookedDevice], shares: Sequence[Share]) -> tuple[BookedDevice, ...]:
    """The picture of `devices` with `shares` booked on them, whether or not they fit."""
    booked = list(devices)
    places = {device.id: place for place, device in enumerate(devices)}
    for share in shares:
        booked[places[share.device_id]] = booked[places[share.device_id]].with_share(share)
    return tuple(booked)


def _urgency(request: Request) -> tuple[bool, bool, int]:
    return (request.device_id is None, not request.exclusive, -request.shares(request.min_devices)[0])


def _beside(choice: Sequence[Share], picture: _Picture) -> _Picture:
    """What other requests may use beside the first `choice`: a MIG slice is all that a process gets."""
    taken = {share.device_id for share in choice}
    used = tuple(device for device in picture if device.is_slice and device.id in taken)
    return used or tuple(device for device in picture if not device.is_slice)


def _make(device: BookedDevice, masks: Sequence[frozenset[int]]) -> Hashable:
    facts = (device.kind, device.backends, device.capacity_bytes, device.exclusive_only, device.state)
    return (*facts, device.withheld_bytes, device.is_slice, *(device.id in mask for mask in masks))


def share_of(request: Request, device: BookedDevice, memory_bytes: int) -> Share:
    """The share of so many bytes that `request` takes of `device`."""
    return Share(device.id, device.host_index, memory_bytes, request.exclusive or device.exclusive_only)
