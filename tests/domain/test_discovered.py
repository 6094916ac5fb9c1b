"""What a reading of the hardware makes of the devices of the book."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from jayrun.domain.devices import Backend, Device
from jayrun.domain.discovery import Discovered, Entry, View, changes, discover, pci_address
from jayrun.domain.hardware import Link, Reading, Seen

GB = 10**9
ALL = View(drivers={}, all_cards=True, all_slices=True)
SOME = View(drivers={bus.lower()[4:]: "nvidia" for bus in [f"00000000:{at:02X}:00.0" for at in range(16, 24)]})


def card(at: int, index: int | None = None, **facts: Any) -> Seen:
    """The card at this place of the bus."""
    told = {
        "uuid": f"GPU-{at}",
        "name": "H100",
        "pci_bus_id": f"00000000:{16 + at:02X}:00.0",
        "total_bytes": 80 * GB,
        "reserved_bytes": GB,
    }
    return Seen(index=at if index is None else index, **{**told, **facts})


def part(of: int, number: int, index: int, **facts: Any) -> Seen:
    return card(of, index, uuid=f"MIG-{of}-{number}", parent_uuid=f"GPU-{of}", total_bytes=10 * GB, **facts)


def reading(*devices: Seen, links: tuple[Link, ...] = (), problem: str | None = None) -> Reading:
    return Reading(devices=devices, links=links, problem=problem)


def found(*devices: Seen) -> list[Entry]:
    """The book after these were discovered on a host that it did not know."""
    return booked(discover([], reading(*devices), ALL, {}, adds=True))


def booked(discovered: Discovered) -> list[Entry]:
    keys = count(max((entry.id or 0 for entry in discovered.devices), default=0) + 1)
    return [entry if entry.id else replace(entry, id=next(keys)) for entry in discovered.devices]


def again(known: list[Entry], *devices: Seen, view: View = ALL, adds: bool = False) -> dict[str | None, Entry]:
    """By UUID, what a look of later makes of it."""
    return {entry.uuid: entry for entry in discover(known, reading(*devices), view, {}, adds=adds).devices}


def numbers(entries: Any) -> dict[str | None, int]:
    return {entry.uuid: entry.host_index for entry in entries}


def declared(number: int, *, key: int = 100, **facts: Any) -> Entry:
    return Entry(**{"id": key + number, "host_index": number, "capacity_bytes": 24 * GB, "declared": True, **facts})


def test_cards_are_added_in_pci_order_with_what_is_left_of_their_memory() -> None:
    assert found(card(0), card(1, reserved_bytes=None)) == [
        Entry(id=1, host_index=0, uuid="GPU-0", name="H100", pci_bus_id="00000000:10:00.0", capacity_bytes=79 * GB,
              total_bytes=80 * GB),
        Entry(id=2, host_index=1, uuid="GPU-1", name="H100", pci_bus_id="00000000:11:00.0", capacity_bytes=80 * GB,
              total_bytes=80 * GB),
    ]  # fmt: skip


def test_a_second_look_changes_nothing() -> None:
    shown = (card(0), card(1, is_split=True), card(2, problem="lost"), part(1, 0, 3), part(1, 2, 4))
    known = found(*shown)
    for view in (ALL, SOME, View()):
        assert discover(known, reading(*shown), view, {}, adds=True).devices == tuple(known)
        assert sorted(again(known, *shown, view=view).values(), key=_id) == sorted(known, key=_id)


def _id(entry: Entry) -> int:
    return entry.id or 0


def test_a_card_in_the_middle_moves_those_behind_it() -> None:
    known = found(card(0), card(2), card(4, is_split=True), part(4, 0, 3))
    seen = again(known, card(0), card(1), card(2, 2), card(4, 3, is_split=True), part(4, 0, 4))
    assert numbers(seen.values()) == {"GPU-0": 0, "GPU-1": 1, "GPU-2": 2, "GPU-4": 3, "MIG-4-0": 4}
    assert {seen[entry.uuid].id for entry in known} == {entry.id for entry in known}


def test_a_card_that_is_gone_keeps_its_place_until_it_is_removed() -> None:
    known = found(card(0), card(1), card(2))
    seen = again(known, card(0), card(2, 1))
    assert numbers(seen.values()) == {"GPU-0": 0, "GPU-1": 1, "GPU-2": 2}
    assert "PCI bus" in (seen["GPU-1"].fault or "")
    gone = [replace(entry, is_removed=entry.uuid == "GPU-1") for entry in seen.values()]
    assert numbers(again(gone, card(0), card(2, 1)).values()) == {"GPU-0": 0, "GPU-2": 1, "GPU-1": 2}


def test_what_is_removed_stays_so_until_a_person_asks_and_is_counted_while_it_is_there() -> None:
    known = [replace(entry, is_removed=entry.uuid == "GPU-0") for entry in found(card(0), card(1))]
    assert tuple(again(known, card(0), card(1)).values()) == tuple(known)
    back = again([replace(known[0], declared=True, capacity_bytes=5), known[1]], card(0), card(1), adds=True)["GPU-0"]
    assert (back.is_removed, back.declared, back.capacity_bytes) == (False, False, 79 * GB)
    assert changes(known[0], back) == ["back: H100, 79 GB"]


def test_slices_come_and_go_behind_all_cards_and_keep_their_numbers() -> None:
    known = found(card(0, is_split=True), card(1), part(0, 0, 2), part(0, 1, 3), part(0, 2, 4))
    assert [(entry.host_index, entry.parent_uuid, entry.capacity_bytes) for entry in known[2:]] == [
        (number, "GPU-0", 9 * GB) for number in (2, 3, 4)
    ]
    assert "slices" in (known[0].fault or "")
    seen = again(known, card(0, is_split=True), card(1), part(0, 1, 2), part(0, 5, 3))
    assert numbers(seen.values()) == {"GPU-0": 0, "GPU-1": 1, "MIG-0-0": 2, "MIG-0-1": 3, "MIG-0-2": 4, "MIG-0-5": 5}
    assert [uuid for uuid, entry in seen.items() if entry.fault] == ["GPU-0", "MIG-0-0", "MIG-0-2"]
    seen = again(list(seen.values()), card(0), card(1))
    assert {uuid: entry.fault is None for uuid, entry in seen.items() if uuid in ("GPU-0", "MIG-0-1")} == {
        "GPU-0": True,
        "MIG-0-1": False,
    }
    assert "MIG is off" in (seen["MIG-0-1"].fault or "")


def test_a_split_card_without_slices_is_at_fault_too() -> None:
    [entry] = found(card(0, is_split=True))
    assert entry.fault is not None


def test_what_does_not_work_is_marked_and_heals_and_the_others_stay() -> None:
    known = found(card(0), card(1))
    seen = again(known, card(0), card(1, problem="needs a reset", total_bytes=None, reserved_bytes=None, name=None))
    assert seen == {"GPU-0": known[0], "GPU-1": replace(known[1], fault="needs a reset")}
    assert changes(known[1], seen["GPU-1"]) == ["offline: needs a reset"]
    healed = again(list(seen.values()), card(0), card(1))["GPU-1"]
    assert healed == known[1]
    assert changes(seen["GPU-1"], healed) == ["is there again"]


def test_a_lost_card_that_tells_nothing_is_known_by_its_place() -> None:
    known = found(card(0), card(1), card(2))
    bare = Seen(index=1, problem="lost")
    assert again(known, card(0), bare, card(2))["GPU-1"].fault == "lost"
    on_bus = Seen(index=1, pci_bus_id="00000000:11:00.0", problem="lost")
    assert again(known, card(0), on_bus, card(2), view=SOME)["GPU-1"].fault == "lost"
    assert again(known, card(0), bare, card(2), view=SOME)["GPU-1"].fault is None, "its number may be a container's"


def test_a_lost_card_that_tells_nothing_moves_no_other() -> None:
    known = found(card(1), card(2), card(3))
    bare = Seen(index=2, problem="lost")
    seen = again(known, card(0), card(1, 1), bare, card(3))
    assert numbers(seen.values()) == {"GPU-0": 0, "GPU-1": 1, "GPU-2": 2, "GPU-3": 3}
    assert seen["GPU-2"].fault == "lost"
    seen = again(known, card(1, 0), Seen(index=1, problem="lost"), card(3, 2), view=SOME)
    assert list(seen.values()) == known
    seen = again(known, card(1, 0), Seen(index=1, problem="lost"))
    assert numbers(seen.values()) == numbers(known), "one of two is lost, and the other is gone: nobody can tell which"


def test_a_slice_of_a_card_that_is_lost_is_lost_too() -> None:
    known = found(card(0, is_split=True), part(0, 0, 1))
    seen = again(known, card(0, problem="lost"))
    assert (seen["GPU-0"].fault, seen["MIG-0-0"].fault) == ("lost", "lost")
    assert again(known)["MIG-0-0"].fault == again(known)["GPU-0"].fault != known[0].fault


@pytest.mark.parametrize(
    ("driver", "all_cards", "words"),
    [
        ("nvidia", False, None),  # a container, or a job that is given only some
        ("nvidia", True, "shows it no more"),
        ("vfio-pci", False, "vfio-pci"),
        ("", False, "no driver has its card"),
        (None, False, "on the PCI bus no more"),
    ],
)
def test_who_does_not_see_a_card_marks_it_only_where_the_bus_tells(
    driver: str | None, all_cards: bool, words: str | None
) -> None:
    known = found(card(0), card(1))
    drivers = {"0000:10:00.0": "nvidia", **({} if driver is None else {"0000:11:00.0": driver})}
    seen = again(known, card(0), view=View(drivers=drivers, all_cards=all_cards))["GPU-1"]
    assert (seen.fault is None) if words is None else (words in (seen.fault or ""))


def test_where_the_bus_cannot_be_read_nobody_is_lost() -> None:
    known = found(card(0), card(1))
    assert list(again(known, card(0), view=View()).values()) == known


@pytest.mark.parametrize(("driver", "is_marked"), [("", True), ("nouveau", True), ("nvidia", False), (None, False)])
def test_a_reading_that_failed_marks_only_what_no_driver_has(driver: str | None, is_marked: bool) -> None:
    known = [*found(card(0)), declared(7)]
    view = View(drivers={} if driver is None else {"0000:10:00.0": driver}, all_cards=True, all_slices=True)
    seen = discover(known, reading(problem="the driver is not loaded"), view, {}, adds=True).devices
    assert [entry.fault is not None for entry in seen] == [is_marked, False]


def test_in_a_container_a_slice_that_is_not_shown_is_not_lost() -> None:
    known = found(card(0, is_split=True), part(0, 0, 1), part(0, 1, 2))
    view = replace(ALL, all_slices=False)
    assert again(known, card(0, is_split=True), part(0, 1, 1), view=view)["MIG-0-0"].fault is None


def test_a_container_sees_other_numbers_and_changes_none() -> None:
    known = found(*(card(at) for at in range(8)))
    assert tuple(again(known, card(5, 0), card(6, 1), view=SOME).values()) != ()
    assert numbers(again(known, card(5, 0), card(6, 1), view=SOME).values()) == numbers(known)
    first = booked(discover([], reading(card(5, 0), card(6, 1)), SOME, {}, adds=True))
    assert numbers(first) == {"GPU-5": 0, "GPU-6": 1}
    whole = again(first, *(card(at) for at in range(8)))
    assert numbers(whole.values()) == {f"GPU-{at}": at for at in range(8)}


def test_a_container_does_not_add_what_may_be_declared_already() -> None:
    known = [declared(number) for number in range(8)]
    seen = discover(known, reading(card(5, 0)), SOME, {}, adds=True)
    assert seen.devices == tuple(known)
    assert "outside of containers" in seen.notes[0]


def test_what_is_declared_keeps_its_capacity_and_gets_its_names() -> None:
    known = [declared(0), declared(1, capacity_bytes=90 * GB)]
    seen = discover(known, reading(card(0), card(1), card(2)), ALL, {}, adds=True)
    facts = [(each.uuid, each.name, each.total_bytes, each.capacity_bytes, each.declared) for each in seen.devices]
    assert facts == [
        ("GPU-0", "H100", 80 * GB, 24 * GB, True),
        ("GPU-1", "H100", 80 * GB, 90 * GB, True),
        ("GPU-2", "H100", 80 * GB, 79 * GB, False),
    ]  # fmt: skip
    assert seen.notes == ("gpu 1 is declared with 90 GB, which stays, but the driver reports 80 GB in all",)
    assert changes(known[0], seen.devices[0]) == ["is H100, GPU-0"]


def test_nothing_is_added_by_itself_where_nobody_has_asked_before() -> None:
    known = [declared(0)]
    assert [entry.uuid for entry in discover(known, reading(card(0), card(1)), ALL, {}, adds=False).devices] == [
        "GPU-0"
    ]
    assert discover([], reading(card(0)), ALL, {}, adds=False).devices == ()
    assert len(again(found(card(0)), card(0), card(1))) == 2


def test_other_kinds_of_devices_keep_their_numbers() -> None:
    known = [
        declared(0, backends=frozenset({Backend.ROCM})),
        declared(2, backends=frozenset({Backend.XPU})),
        declared(0, key=200, kind=Device.TPU, backends=frozenset({Backend.XLA})),
        declared(3),
    ]
    seen = discover(known, reading(card(0), card(1)), ALL, {}, adds=True).devices
    assert {(entry.kind.value, entry.host_index): entry.uuid for entry in seen} == {
        ("gpu", 0): None,
        ("gpu", 1): "GPU-0",
        ("gpu", 2): None,
        ("gpu", 3): "GPU-1",
        ("tpu", 0): None,
    }
    assert next(entry for entry in seen if entry.uuid == "GPU-1").id == 103


def test_simulated_devices_beyond_the_real_ones_are_left_alone() -> None:
    known = [declared(number) for number in range(4)]
    seen = discover(known, reading(card(0)), ALL, {}, adds=True).devices
    assert {entry.host_index: (entry.uuid, entry.fault) for entry in seen} == {
        0: ("GPU-0", None),
        **dict.fromkeys((1, 2, 3), (None, None)),
    }


def test_memory_that_the_driver_does_not_tell_is_not_zero() -> None:
    quiet = card(0, total_bytes=None, reserved_bytes=None)
    nothing = discover([], reading(quiet, card(1)), ALL, {}, adds=True)
    assert numbers(nothing.devices) == {"GPU-1": 1}, "its place is kept"
    assert "--device-id 0 --memory-gb" in nothing.notes[0]
    known = [declared(0), *booked(nothing)]
    seen = again(known, quiet, card(1))
    assert (seen["GPU-0"].capacity_bytes, seen["GPU-0"].total_bytes) == (24 * GB, None)
    [before] = found(card(0))
    assert again([before], quiet)["GPU-0"] == before


def test_capacity_follows_the_driver_less_the_reserve() -> None:
    [before] = found(card(0))
    reserved = replace(before, reserve_bytes=4 * GB, capacity_bytes=75 * GB)
    assert again([reserved], card(0))["GPU-0"] == reserved
    smaller = again([reserved], card(0, total_bytes=40 * GB))["GPU-0"]
    assert smaller.capacity_bytes == 35 * GB
    assert changes(reserved, smaller) == ["has 35 GB now, and had 75 GB"]
    assert again([reserved], card(0, reserved_bytes=None))["GPU-0"] == reserved, "an older driver's word is not zero"
    assert again([reserved], card(0, total_bytes=GB))["GPU-0"].capacity_bytes == 75 * GB, "nothing is left of it"


def islands(count: int, *links: Link) -> list[int | None]:
    seen = discover([], reading(*map(card, range(count)), links=links), ALL, {}, adds=True)
    return [entry.island for entry in seen.devices]


def test_islands_are_what_nvlinks_join() -> None:
    def link(one: int, other: int, how: str = "nvlink") -> Link:
        return Link(f"GPU-{one}", f"GPU-{other}", how)

    far = [link(one, other, "system") for one in range(5) for other in range(one)]
    assert islands(5, *far) == [None] * 5
    assert islands(5, *far, link(0, 3), link(4, 3), link(1, 2)) == [0, 1, 1, 0, 0]
    assert islands(5, link(0, 1, "bridge"), link(2, 3, "switch"), link(3, 4, "switch")) == [None, None, 2, 2, 2]
    assert islands(2) == [None, None]


def test_links_are_kept_and_only_news_is_written() -> None:
    known = found(card(0), card(1), card(2))
    shown = (Link("GPU-1", "GPU-0", "nvlink"), Link("GPU-1", "GPU-2", "node"), Link("GPU-1", "GPU-9", "node"))
    first = discover(known, reading(*map(card, range(3)), links=shown), ALL, {}, adds=False)
    assert first.links == {("GPU-0", "GPU-1"): "nvlink", ("GPU-1", "GPU-2"): "node"}
    again_ = discover(booked(first), reading(*map(card, range(3)), links=shown), ALL, first.links, adds=False)
    assert (again_.links, again_.devices) == ({}, first.devices)
    one = discover(booked(first), reading(card(1), links=()), SOME, first.links, adds=False)
    assert [entry.island for entry in one.devices] == [entry.island for entry in first.devices]


def test_addresses_as_the_kernel_writes_them() -> None:
    assert pci_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert pci_address("0000:3b:00.0") == "0000:3b:00.0"
    assert pci_address("00010000:3B:00.0") == "10000:3b:00.0"
