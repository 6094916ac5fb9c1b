"""Which devices a process sees, and by which numbers: the masks of every vendor in all their forms. Pure.

A process numbers what its mask leaves it from 0. `see` says which device of the book has which number there. What the
masks mean is told in docs/names.md; where a vendor's rule is unknown, the reading that sees less is taken.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jayrun.domain.devices import Backend, Device
from jayrun.domain.names import Named
from jayrun.domain.requests import Request

MOST_DEVICES = 4096
"""A number from here on in a mask names no device of any host."""


class Mask(StrEnum):
    """By which names a command is told its devices."""

    UUID = "uuid"
    INDEX = "index"


_VARIABLES = {
    Backend.CUDA: ("CUDA_VISIBLE_DEVICES",),
    Backend.ROCM: ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    Backend.XPU: ("ZE_AFFINITY_MASK",),
}


@dataclass(frozen=True, slots=True)
class _Line:
    """The devices of one kind and backend as a process without any mask counts them.

    `names` are those of the whole ones by number; `others` the numbers, ascending, that are not counted here: devices
    of another backend, and slices. `slices` are (name, UUID of the GPU it is a part of). `complete`: there are no more;
    else a number that is not known is a device of this backend that the book does not lease.
    """

    names: Mapping[int, str]
    others: tuple[int, ...]
    slices: tuple[tuple[str, str | None], ...]
    split: frozenset[str]
    complete: bool

    def number_at(self, ordinal: int) -> int:
        """The number of the device that is counted as `ordinal`."""
        number = ordinal
        for other in self.others:
            if other > number:
                break
            number += 1
        return number

    def ordinal_of(self, number: int) -> int:
        """As what the device of that number is counted."""
        return number - bisect_left(self.others, number)

    def at(self, ordinal: int) -> str | None:
        """The name of the device that is counted as `ordinal`, None where there is surely none."""
        number = self.number_at(ordinal)
        return self.names.get(number, None if self.complete or ordinal >= MOST_DEVICES else str(number))

    def meant_by(self, name: str | None) -> tuple[str, ...] | None:
        """What one gets who names a device: of a GPU that is split its slices. None: nothing."""
        if name is None:
            return None
        if name in self.split:
            return tuple(each for each, parent in self.slices if parent == name) or None
        return (name,)

    def all(self) -> tuple[str, ...]:
        """What a process without a mask sees, whole devices first."""
        last = max((self.ordinal_of(number) for number in self.names), default=-1)
        counted = (self.at(ordinal) for ordinal in range(min(last + 1, MOST_DEVICES)))
        whole = tuple(name for name in counted if name is not None and name not in self.split)
        return whole + tuple(name for name, _ in self.slices)


@dataclass(frozen=True, slots=True)
class Numbering:
    """By which numbers a process uses the devices of its host.

    `lists` are, by backend, the names of what it sees in its own order: a UUID, or the number on the host; a backend
    that is missing is not limited. A name that the book does not know is a hole: a number of the process for something
    that jayrun does not lease.
    """

    fleet: tuple[Named, ...] = ()
    lists: Mapping[Backend, tuple[str, ...]] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    shown: tuple[Named, ...] = ()
    _lines: dict[tuple[Device, Backend], _Line] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def visible(self) -> dict[str, list[str]] | None:
        """`lists` as the book keeps them; None: the process sees everything."""
        return {backend.value: list(names) for backend, names in self.lists.items()} or None

    def ordinal(self, kind: Device, backend: Backend | None, host_index: int, uuid: str | None) -> int | None:
        """The number by which this process uses a device of the host; None when it cannot see it."""
        if backend is None:
            return None
        names = self._list(kind, backend)
        if names is None:
            return self._line(kind, backend).ordinal_of(host_index)
        if uuid is None:  # perhaps it has become known since the lease was granted
            uuid = next((each.uuid for each in self.fleet if (each.kind, each.host_index) == (kind, host_index)), None)
        return next((ordinal for ordinal, name in enumerate(names) if name in (uuid, str(host_index))), None)

    def host_index(self, kind: Device, backend: Backend, ordinal: int) -> int:
        """The number on the host of what this process calls `ordinal`.

        Raises ValueError, naming `device_id` and the mask, where it is no device of the book.
        """
        names = self._list(kind, backend)
        if names is None:
            return self._line(kind, backend).number_at(ordinal)
        why = self.told(backend)
        if ordinal >= len(names):
            count = f"{len(names)} {backend} device{'s' if len(names) != 1 else ''}"
            which = f", 0 to {len(names) - 1}" if len(names) > 1 else ", number 0" if names else ""
            raise ValueError(f"device_id is {ordinal}, but this process sees {count}{which} ({why})")
        name = names[ordinal]
        known = next((device for device in self.fleet if device.kind is kind and device.uuid == name), None)
        if known is None and not _is_number(name):
            raise ValueError(
                f"device_id is {ordinal}, which is {name} in this process ({why}), and the book knows no such device: "
                "`jayrun devices list` shows what it knows, `jayrun devices discover` asks the driver"
            )
        return int(name) if known is None else known.host_index

    def booked(self, request: Request) -> Request:
        """The request with the number on the host for what this process calls `device_id`; raises as `host_index`."""
        if request.device_id is None:
            return request
        host_index = self.host_index(request.device, request.backend, request.device_id)
        return replace(request, device_id=host_index)

    def issued(self, request: Request) -> Request:
        """A request of the book with the number of this process again; the host's, where this process cannot see it."""
        if request.device_id is None:
            return request
        ordinal = self.ordinal(request.device, request.backend, request.device_id, None)
        return request if ordinal is None else replace(request, device_id=ordinal)

    def index(self, kind: Device, backend: Backend, host_index: int, uuid: str | None) -> int:
        """The number that names a device in a mask of numbers: its place among all that the driver shows here."""
        here = next((device.host_index for device in self.shown if uuid is not None and device.uuid == uuid), None)
        return self._line(kind, backend).ordinal_of(host_index) if here is None else here

    def told(self, backend: Backend) -> str:
        """What limits the process to what it sees, for people."""
        given = [f"{name}={self.masks[name]!r}" for name in _VARIABLES.get(backend, ()) if name in self.masks]
        return ", ".join(given) or "that is what the driver shows here"

    def _line(self, kind: Device, backend: Backend) -> _Line:
        if (line := self._lines.get((kind, backend))) is None:  # kept, for a large group asks once for each member
            line = self._lines[kind, backend] = _booked_line(self.fleet, kind, backend)
        return line

    def _list(self, kind: Device, backend: Backend) -> tuple[str, ...] | None:
        return self.lists.get(backend) if kind is Device.GPU else None


def see(
    masks: Mapping[str, str], fleet: Sequence[Named], shown: Sequence[Named] = (), *, one_slice: bool = True
) -> Numbering:
    """How a process with these `masks` (by the names of their variables) sees the `fleet`, the book's devices of its
    host.

    `shown` is what the NVIDIA driver shows in this process, in PCI order: in a container perhaps only some GPUs, with
    other numbers than on the host; it counts where the book knows UUIDs. `one_slice`: the process uses CUDA itself,
    which gives it one MIG slice at most; without it, it chooses for another process among all that its mask names.
    """
    lists: dict[Backend, tuple[str, ...]] = {}
    shown = _recognised(shown, fleet) if any(device.uuid for device in fleet) else ()
    cuda = _see_cuda(masks.get("CUDA_VISIBLE_DEVICES"), fleet, shown, one_slice=one_slice)
    if cuda is not None:
        lists[Backend.CUDA] = cuda
    rocm = _see_rocm(masks, _booked_line(fleet, Device.GPU, Backend.ROCM))
    if rocm is not None:
        lists[Backend.ROCM] = rocm
    if mask := masks.get("ZE_AFFINITY_MASK"):
        lists[Backend.XPU] = _read_affinity(mask, _booked_line(fleet, Device.GPU, Backend.XPU))
    return Numbering(tuple(fleet), lists, masks, tuple(shown))


def _recognised(shown: Sequence[Named], fleet: Sequence[Named]) -> Sequence[Named]:
    """`shown` with the UUIDs of cards that are lost and tell none: they are those of the book, where as many are shown
    as it has, and the others in the same places. Who asks for one waits until it works again."""
    booked = sorted((each for each in fleet if _is_card(each)), key=lambda each: each.host_index)
    cards = [each for each in shown if _is_card(each)]
    if len(cards) != len(booked) or any(
        card.uuid not in (None, other.uuid) for card, other in zip(cards, booked, strict=True)
    ):
        return shown
    known = {card.host_index: other.uuid for card, other in zip(cards, booked, strict=True)}
    return [replace(each, uuid=known[each.host_index]) if _is_card(each) else each for each in shown]


def _is_card(device: Named) -> bool:
    return device.kind is Device.GPU and Backend.CUDA in device.backends and device.parent_uuid is None


def _booked_line(fleet: Sequence[Named], kind: Device, backend: Backend) -> _Line:
    devices = [device for device in fleet if device.kind is kind]
    mine = [device for device in devices if backend in device.backends]
    whole = {device.host_index: device.name for device in mine if device.parent_uuid is None}
    others = tuple(sorted(device.host_index for device in devices if device.host_index not in whole))
    return _Line(whole, others, *_slices(mine), complete=False)


def _shown_line(shown: Sequence[Named]) -> _Line:
    # What has no UUID takes a number all the same, under a name that no device of the book has.
    names = {each.host_index: each.uuid or f"unknown-{each.host_index}" for each in shown if each.parent_uuid is None}
    return _Line(names, (), *_slices(shown), complete=True)


def _slices(devices: Sequence[Named]) -> tuple[tuple[tuple[str, str | None], ...], frozenset[str]]:
    slices = sorted((device for device in devices if device.parent_uuid is not None), key=lambda each: each.host_index)
    split = {device.name for device in devices if device.is_split} | {each.parent_uuid or "" for each in slices}
    return tuple((device.name, device.parent_uuid) for device in slices), frozenset(split)


def _see_cuda(
    mask: str | None, fleet: Sequence[Named], shown: Sequence[Named], *, one_slice: bool
) -> tuple[str, ...] | None:
    booked = _booked_line(fleet, Device.GPU, Backend.CUDA)
    line = _shown_line(shown) if shown else booked
    if mask is None and not shown and not (one_slice and booked.slices):
        return None
    names = line.all() if mask is None else _read_cuda(mask, line)
    if one_slice:
        names = _usable_at_once(names, {name for name, _ in line.slices})
    if mask is not None or (one_slice and (booked.slices or line.slices)):
        return names
    # Where the driver limits nothing, nothing is limited for devices either that the book will know later.
    found = {name: ordinal for ordinal, name in enumerate(names)}
    counted = {name: booked.ordinal_of(number) for number, name in booked.names.items() if name not in booked.split}
    all_there = found.keys() >= {*counted, *(name for name, _ in booked.slices)}
    as_counted = not one_slice or all(found[name] == ordinal for name, ordinal in counted.items() if name in found)
    return None if all_there and as_counted else names


def _usable_at_once(names: tuple[str, ...], slices: set[str]) -> tuple[str, ...]:
    """CUDA gives a process whole GPUs, or one MIG slice alone: what comes first decides."""
    is_slice = [name in slices or name.startswith("MIG-") for name in names]
    if is_slice[:1] == [True]:
        return names[:1]
    return names[: is_slice.index(True)] if True in is_slice else names


def _read_cuda(mask: str, line: _Line) -> tuple[str, ...]:
    """CUDA's rules: the first item that names nothing ends the list, and so does one of another form than the first; a
    device named twice makes it empty."""
    names: list[str] = []
    items = [each.strip() for each in mask.split(",")]
    for item in items:
        found = _read_cuda_item(item, line)
        if found is None or _form(item) != _form(items[0]):
            break
        if any(name in names for name in found):
            return ()
        names += found
    return tuple(names)


def _form(item: str) -> str:
    return item[:4] if item[:4] in ("GPU-", "MIG-") else "number"


def _read_cuda_item(item: str, line: _Line) -> tuple[str, ...] | None:
    if item.startswith("MIG-"):
        return _read_slice(item, line)
    if item.startswith("GPU-"):
        matching = [name for name in line.names.values() if name.startswith(item) and item != "GPU-"]
        if item in matching or len(matching) == 1:
            return line.meant_by(item if item in matching else matching[0])
        return None if matching or line.complete or item == "GPU-" else (item,)
    digits = re.match(r"\+?(\d{1,9})(?!\d)", item, re.ASCII)  # CUDA reads as far as there are digits
    return None if digits is None else line.meant_by(line.at(int(digits[1])))


def _read_slice(item: str, line: _Line) -> tuple[str, ...] | None:
    known = [name for name, _ in line.slices]
    if item in known:
        return (item,)
    former = re.fullmatch(r"MIG-(GPU-[^/]+)/\d+/\d+", item)
    if former is None:
        return None if line.complete else (item,)
    # Which of several slices the numbers of its instances mean, nobody tells: then it is one that cannot be leased.
    of_parent = [name for name, parent in line.slices if parent == former[1]]
    return tuple(of_parent) if len(of_parent) == 1 else (item,)


def _see_rocm(masks: Mapping[str, str], line: _Line) -> tuple[str, ...] | None:
    """What ROCR shows; HIP_VISIBLE_DEVICES counts within that, or CUDA_VISIBLE_DEVICES where the former is empty."""
    rocr = masks.get("ROCR_VISIBLE_DEVICES")
    outer = None if rocr is None else _read_rocr(rocr, line)
    inner = masks.get("HIP_VISIBLE_DEVICES") or (masks.get("CUDA_VISIBLE_DEVICES") if line.names else None)
    if not inner:
        return outer
    names: list[str] = []
    for item in inner.split(","):
        if item.startswith("GPU-"):
            name = item if item in (line.names.values() if outer is None else outer) else None
        elif not _is_number(item):
            name = None
        elif outer is None:
            name = line.at(int(item))
        else:
            name = outer[int(item)] if int(item) < len(outer) else None
        if name is None:
            break
        if name not in names:
            names.append(name)
    return tuple(names)


def _read_rocr(mask: str, line: _Line) -> tuple[str, ...]:
    names: list[str] = []
    for item in (each.strip() for each in mask.split(",")):
        if item.startswith("GPU-"):
            name: str | None = item
        else:
            name = line.at(int(item)) if _is_number(item) else None
        if name is None or name in names:
            break
        names.append(name)
    return tuple(names)


def _read_affinity(mask: str, line: _Line) -> tuple[str, ...]:
    """Level Zero leaves out what the mask does not name, and keeps its own order; a tile stands for its card."""
    cards = (re.fullmatch(r"\s*(\d{1,9})(\.\d+)*\s*", item, re.ASCII) for item in mask.split(","))
    found = (line.at(number) for number in sorted({int(card[1]) for card in cards if card}))
    return tuple(name for name in found if name is not None)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"0|[1-9]\d{0,8}", text, re.ASCII) is not None
