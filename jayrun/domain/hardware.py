"""What a driver shows of the devices of a machine at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that uses a device, by its number in the driver's pid namespace, with its bytes there (None: not
    told); `graphics`: it draws, and does not compute."""

    pid: int
    used_bytes: int | None
    graphics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A device as the driver shows it; None stands for what it does not tell, which is not zero.

    `index`: its number in PCI order among the cards of the machine, those that do not answer too; MIG slices are
    numbered after all cards. `uuid`: its key, `parent_uuid`: the card that this slice is a part of.
    `total_bytes`: all of its memory, `reserved_bytes`: the driver's own part, `used_bytes`: used by everybody.
    `utilization`: percent of the last moments in which it computed. `is_split`: MIG is on, work runs on its slices
    only, which are listed by themselves with its processes. `processes`: None where they may not be seen.
    `problem`: why it does not work, in words.
    """

    index: int
    uuid: str | None = None
    parent_uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    utilization: int | None = None
    is_split: bool = False
    processes: tuple[Process, ...] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """How two cards, named by UUID, reach each other; `link` is a word of `device_links.link`."""

    one: str
    other: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was seen, in the order of the index. `driver`, `cuda`: versions. `problem`: why nothing was seen, and what
    to do; `devices` is empty then, which says nothing about what is there."""

    devices: tuple[Seen, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    problem: str | None = None
