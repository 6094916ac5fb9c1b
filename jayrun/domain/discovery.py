"""Discovery: what a reading of the hardware makes of the devices that the book has on its host. Pure.

It adds and marks; it takes nothing away, and leases are none of its business. Whatever it is not told stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby, islice
from typing import TypeAlias

from jayrun.domain.devices import Backend, Device
from jayrun.domain.hardware import Link, Reading, Seen
from jayrun.domain.units import format_bytes

NVIDIA = "nvidia"
"""What the kernel calls NVIDIA's driver."""

_ASK = "`nvidia-smi` and `dmesg | grep -i -e nvrm -e xid` may tell why"
_OFF_THE_BUS = "its card is on the PCI bus no more: taken out, or dead"
_NOT_SHOWN = f"the NVIDIA driver shows it no more: {_ASK}"
_SPLIT = "MIG is on: its slices are leased instead of it"
_MIG_OFF = "MIG is off on its GPU, which is leased as a whole"
_NO_SLICE = "its GPU is divided into other MIG slices now"
_CLOSE = ("nvlink", "board", "switch", "switches", "bridge", "node")

Links: TypeAlias = Mapping[tuple[str, str], str]
"""How two cards reach each other, by their UUIDs in order: words of `device_links.link`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A device as it stands in the book of its host, or shall stand there (`id` None: it is new).

    `declared`: its capacity is a person's word. `is_removed`: a person took it out of the fleet.
    """

    id: int | None = None
    host_index: int
    kind: Device = Device.GPU
    backends: frozenset[Backend] = frozenset({Backend.CUDA})
    uuid: str | None = None
    parent_uuid: str | None = None
    name: str = ""
    pci_bus_id: str | None = None
    capacity_bytes: int
    declared: bool = False
    total_bytes: int | None = None
    reserve_bytes: int = 0
    island: int | None = None
    fault: str | None = None
    is_removed: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether NVIDIA's driver may have something to say of it."""
        return self.kind is Device.GPU and Backend.CUDA in self.backends

    @property
    def is_whole(self) -> bool:
        """Whether it is a card, and no MIG slice of one."""
        return self.parent_uuid is None

    @property
    def is_found(self) -> bool:
        """Whether a reading has shown it before."""
        return self.uuid is not None or not self.declared


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How much of the machine a process sees: what a reading of it does not show may be there all the same.

    `drivers`: by the PCI address of each card from NVIDIA, the kernel's driver for it ("": none has it); None: the bus
    cannot be read. `all_cards`: it may use every card that NVIDIA's driver has. `all_slices`: and every MIG slice.
    """

    drivers: Mapping[str, str] | None = None
    all_cards: bool = False
    all_slices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """What the book shall have: all its `devices` of the host, and the `links` that it does not have like this yet.

    `notes` say what was seen and could not be entered, and what to do.
    """

    devices: tuple[Entry, ...]
    links: Links = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def discover(known: Sequence[Entry], reading: Reading, view: View, links: Links, *, adds: bool) -> Discovered:
    """What `reading`, made by a process with that `view`, makes of the `known` devices of its host and their `links`.

    `adds`: a person asks for it. Else devices are added only where some have been found before, and what a person
    removed stays removed.
    """
    if reading.problem is not None:
        return Discovered(devices=tuple(_marked(known, reading, view)))
    matched = _match(known, reading.devices, view)
    notes: list[str] = []
    entries: dict[int, Entry] = {index: _seen_again(matched[index], seen, adds=adds)
                                 for index, seen in enumerate(reading.devices) if index in matched}  # fmt: skip
    strangers = [(index, seen) for index, seen in enumerate(reading.devices) if index not in matched]
    if adds or any(entry.is_found for entry in known if entry.is_cuda and not entry.is_removed):
        nameless = any(each.is_cuda and each.uuid is None and not each.is_removed for each in known)
        if strangers and nameless and not view.all_cards:
            notes.append(
                "this process sees only some of the host's GPUs, so nobody can tell which of the declared ones they "
                "are: run `jayrun devices discover` outside of containers and jobs that limit it"
            )
        else:
            entries |= {index: entry for index, seen in strangers if (entry := _new(seen)) is not None}
            notes += [_cannot_enter(seen) for index, seen in strangers if index not in entries]
    kept = {entry.id for entry in matched.values()}
    rest = list(_marked([entry for entry in known if entry.id not in kept], reading, view))
    devices = _numbered(reading.devices, entries, rest)
    shown = _shown_links(reading.links, devices)
    together = {**links, **shown}
    return Discovered(
        devices=tuple(_islanded(devices, together)) if reading.links else devices,
        links={pair: link for pair, link in shown.items() if links.get(pair) != link},
        notes=(*notes, *_doubts(devices)),
    )


def changes(before: Entry | None, after: Entry) -> list[str]:
    """What is told of a device that discovery changed, in a few words each; [] where nothing is."""
    memory = format_bytes(after.capacity_bytes)
    if before is None or (before.is_removed and not after.is_removed):
        what = "added" if before is None else "back"
        told = [f"{what}: {after.name or 'a device without a name'}, {memory}"]
        return told if after.fault is None else [*told, f"offline: {after.fault}"]
    told = []
    if after.is_removed:
        return told
    if before.host_index != after.host_index:
        told.append(f"was number {before.host_index}")
    if before.uuid is None and after.uuid is not None:
        told.append(f"is {after.name or 'a device'}, {after.uuid}")
    if before.capacity_bytes != after.capacity_bytes:
        told.append(f"has {memory} now, and had {format_bytes(before.capacity_bytes)}")
    if before.fault != after.fault:
        told.append("is there again" if after.fault is None else f"offline: {after.fault}")
    return told


def pci_address(bus_id: str) -> str:
    """A PCI address as the kernel writes it, whoever wrote `bus_id`: NVIDIA's has a longer domain, in capitals."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def _match(known: Sequence[Entry], devices: Sequence[Seen], view: View) -> dict[int, Entry]:
    """Which entry is which device of the reading, by the device's place there: by UUID; where one of both has none by
    the place on the bus; and then, if all cards are seen, by number, or as the only ones between two that are known."""
    matched: dict[int, Entry] = {}
    left = {entry.id: entry for entry in known if entry.is_cuda}

    def pair(is_same: Callable[[Seen, Entry], bool]) -> None:
        for index, seen in enumerate(devices):
            found = next((entry for entry in left.values() if is_same(seen, entry)), None)
            if index not in matched and found is not None:
                matched[index] = left.pop(found.id)

    def may_be(seen: Seen, entry: Entry) -> bool:
        return seen.parent_uuid is None and entry.is_whole and None in (entry.uuid, seen.uuid)

    pair(lambda seen, entry: seen.uuid is not None and entry.uuid == seen.uuid)
    pair(lambda seen, entry: may_be(seen, entry) and entry.pci_bus_id is not None
         and entry.pci_bus_id == seen.pci_bus_id)  # fmt: skip
    if view.all_cards:
        numbers = _numbers(known, len(devices))
        pair(lambda seen, entry: may_be(seen, entry) and entry.host_index == numbers[seen.index])
        cards = [index for index, seen in enumerate(devices) if seen.parent_uuid is None]
        for is_known, gap in groupby(cards, key=lambda index: index in matched):
            if is_known:
                continue
            unknown = list(gap)
            before = max((matched[at].host_index for at in cards if at < unknown[0] and at in matched), default=-1)
            behind = min((matched[at].host_index for at in cards if at > unknown[0] and at in matched), default=None)
            between = [
                entry
                for entry in sorted(left.values(), key=lambda each: each.host_index)
                if entry.is_whole and before < entry.host_index and (behind is None or entry.host_index < behind)
            ]
            if len(between) == len(unknown) and all(map(may_be, map(devices.__getitem__, unknown), between)):
                for index, entry in zip(unknown, between, strict=True):
                    matched[index] = left.pop(entry.id)
    return matched


def _numbers(known: Sequence[Entry], most: int) -> list[int]:
    """The number on the host of each card by its place among those that CUDA counts."""
    others = [entry for entry in known if entry.kind is Device.GPU and not entry.is_cuda and not entry.is_removed]
    taken = {entry.host_index for entry in others}
    return list(islice((number for number in count() if number not in taken), most))


def _seen_again(entry: Entry, seen: Seen, *, adds: bool) -> Entry:
    if entry.is_removed and not adds:
        return entry
    declared = entry.declared and not (entry.is_removed and seen.total_bytes is not None)
    capacity = entry.capacity_bytes
    is_told = seen.reserved_bytes is not None or seen.total_bytes != entry.total_bytes
    if not declared and seen.total_bytes is not None and (is_told or entry.declared):
        capacity = seen.total_bytes - (seen.reserved_bytes or 0) - entry.reserve_bytes
    return replace(
        entry,
        uuid=seen.uuid or entry.uuid,
        parent_uuid=seen.parent_uuid or entry.parent_uuid,
        name=seen.name or entry.name,
        pci_bus_id=seen.pci_bus_id or entry.pci_bus_id,
        total_bytes=seen.total_bytes or entry.total_bytes,
        capacity_bytes=capacity if capacity > 0 else entry.capacity_bytes,
        declared=declared,
        fault=seen.problem or (_SPLIT if seen.is_split else None),
        is_removed=False,
    )


def _new(seen: Seen) -> Entry | None:
    """The entry of a device that the book does not have; None where its memory is not known."""
    capacity = (seen.total_bytes or 0) - (seen.reserved_bytes or 0)
    if capacity <= 0:
        return None
    return _seen_again(Entry(host_index=seen.index, capacity_bytes=capacity), seen, adds=True)


def _cannot_enter(seen: Seen) -> str:
    name = seen.name or seen.uuid or ("a MIG slice" if seen.parent_uuid else "a GPU")
    if seen.problem is not None:
        return f"{name}, number {seen.index} for the driver, is not added: {seen.problem}"
    return (
        f"{name}, number {seen.index} for the driver, is not added, for the driver does not tell its memory: "
        f"`jayrun devices declare --device-id {seen.index} --memory-gb GB` does, if you know it"
    )


def _marked(unseen: Sequence[Entry], reading: Reading, view: View) -> Iterator[Entry]:
    """The entries that the reading does not show, those at fault of which that much is sure."""
    cards: dict[str | None, Seen] = {each.uuid: each for each in reading.devices if each.uuid is not None}
    faults: dict[str | None, str] = {}
    for entry in sorted(unseen, key=lambda each: not each.is_whole):
        why: str | None = None
        if entry.is_cuda and entry.is_found and not entry.is_removed:
            if entry.is_whole:
                why = _absence(entry, reading, view)
                if why is not None and entry.uuid is not None:
                    faults[entry.uuid] = why
            elif (card := cards.get(entry.parent_uuid)) is None:
                why = faults.get(entry.parent_uuid)
            elif card.problem is not None:
                why = card.problem
            elif not card.is_split:
                why = _MIG_OFF
            elif view.all_slices:
                why = _NO_SLICE
        yield entry if why is None else replace(entry, fault=why)


def _absence(entry: Entry, reading: Reading, view: View) -> str | None:
    """Why a card that is not shown does not work, None where it may well do: for processes that see more."""
    can_read = reading.problem is None
    if view.drivers is not None and entry.pci_bus_id is not None:
        driver = view.drivers.get(pci_address(entry.pci_bus_id))
        if driver is None:  # where nothing can be read, the bus may be one that does not show its cards
            return _OFF_THE_BUS if can_read else None
        if driver != NVIDIA:
            whose = f"the driver {driver} has its card" if driver else "no driver has its card"
            return f"{whose}, and not NVIDIA's: `sudo modprobe nvidia`, and `dmesg` if that fails"
    return _NOT_SHOWN if can_read and view.all_cards else None


def _numbered(devices: Sequence[Seen], entries: Mapping[int, Entry], rest: Sequence[Entry]) -> tuple[Entry, ...]:
    """All entries with their numbers: cards in PCI order, where those that are not shown keep their place too; then
    MIG slices, which keep their numbers as long as no card needs them. What CUDA does not count stays where it is."""
    placed = [entry for entry in rest if entry.is_cuda and entry.is_whole and entry.is_found and not entry.is_removed]
    line: list[tuple[Seen | None, Entry | None]] = [
        (seen, entries.get(index))
        for index, seen in enumerate(devices)
        # What tells nothing of itself may be one of those that are missed, and keeps no other place.
        if seen.parent_uuid is None and (index in entries or seen.uuid or seen.pci_bus_id or not placed)
    ]
    for entry in sorted(placed, key=lambda each: each.host_index):
        at = next((at for at, (seen, other) in enumerate(line) if _comes_before(entry, seen, other)), len(line))
        line.insert(at, (None, entry))
    moving = {id(entry) for entry in placed}
    staying = [
        entry
        for entry in rest
        if id(entry) not in moving and entry.kind is Device.GPU and entry.is_whole and not entry.is_removed
    ]
    taken = {entry.host_index for entry in staying}
    free = (number for number in count() if number not in taken)
    done: list[Entry] = [entry for entry in rest if entry.kind is not Device.GPU] + staying
    for _, card in line:
        number = next(free)
        taken.add(number)
        if card is not None:
            done.append(replace(card, host_index=number))
    last = max(taken, default=-1)
    slices = [entry for index, entry in entries.items() if devices[index].parent_uuid is not None]
    slices += [entry for entry in rest if entry.kind is Device.GPU and not entry.is_whole and not entry.is_removed]
    gone = [entry for entry in rest if entry.kind is Device.GPU and entry.is_removed]
    old = [entry for entry in slices if entry.id is not None] + gone
    later: list[Entry] = []
    for entry in sorted(old, key=lambda each: (each.is_removed, each.host_index)):
        if entry.host_index in taken or (entry.host_index <= last and not entry.is_removed):
            later.append(entry)
        else:
            taken.add(entry.host_index)
            done.append(entry)
    behind = count(max(taken, default=-1) + 1)
    done += [replace(entry, host_index=next(behind)) for entry in [*later, *(e for e in slices if e.id is None)]]
    return tuple(done)


def _comes_before(entry: Entry, seen: Seen | None, other: Entry | None) -> bool:
    """Whether a card that is not shown stands before one of the line."""
    bus_id = seen.pci_bus_id if seen is not None else other.pci_bus_id if other is not None else None
    if entry.pci_bus_id is not None and bus_id is not None:
        return entry.pci_bus_id < bus_id
    return other is not None and entry.host_index < other.host_index


def _shown_links(links: Sequence[Link], devices: Sequence[Entry]) -> dict[tuple[str, str], str]:
    cards = {entry.uuid for entry in devices if entry.is_whole and not entry.is_removed}
    return {_pair(each.one, each.other): each.link for each in links if {each.one, each.other} <= cards}


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _islanded(devices: Sequence[Entry], links: Links) -> Iterator[Entry]:
    """The devices with their islands: cards that are joined by NVLinks; where there is none, by the closest way that
    any two have to each other. An island is called by the lowest number on it."""
    closest = next((word for word in _CLOSE if word in links.values()), None)
    island: dict[str, set[str]] = {}
    for (one, other), link in links.items():
        if link == closest:
            joined = island.get(one, {one}) | island.get(other, {other})
            island |= dict.fromkeys(joined, joined)
    numbers = {entry.uuid: entry.host_index for entry in devices if entry.uuid is not None and not entry.is_removed}
    for entry in devices:
        if entry.is_whole and entry.uuid is not None and not entry.is_removed:
            yield replace(entry, island=_lowest(island.get(entry.uuid, ()), numbers))
        else:
            yield entry


def _lowest(island: Collection[str], numbers: Mapping[str, int]) -> int | None:
    return min((numbers[uuid] for uuid in island if uuid in numbers), default=None)


def _doubts(devices: Sequence[Entry]) -> Iterator[str]:
    for entry in devices:
        total = entry.total_bytes or entry.capacity_bytes
        if entry.declared and not entry.is_removed and entry.capacity_bytes > total:
            yield (
                f"{entry.kind} {entry.host_index} is declared with {format_bytes(entry.capacity_bytes)}, which stays, "
                f"but the driver reports {format_bytes(total)} in all"
            )
