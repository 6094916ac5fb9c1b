"""Devices: declared, updated, drained and removed, always behind the gate: no admission decides on half of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jayrun import kernel
from jayrun.domain.devices import Backend, BookedDevice, Device, DeviceState, RuntimeDevice
from jayrun.domain.names import Named
from jayrun.domain.units import format_bytes
from jayrun.domain.visible import Sight, Visible
from jayrun.errors import DeviceInUse, NothingReserved, UnknownDevice, UnknownHost
from jayrun.store.picture import booked_device, sights
from jayrun.store.texts import plain
from jayrun.store.transactions import Book, Gate

# Declaring again updates, and brings a removed device back, of which nothing is known any more but that it is declared.
_DECLARE = """
INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes, exclusive_only)
VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (host_id, kind, host_index) DO UPDATE SET backends = excluded.backends,
    capacity_bytes = excluded.capacity_bytes, exclusive_only = excluded.exclusive_only, declared = true
WHERE devices.removed_at IS NULL
"""
_ADD = """
INSERT INTO jayrun.devices (host_id, host_index, kind, backends, capacity_bytes, exclusive_only)
VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (host_id, kind, host_index) DO UPDATE SET backends = excluded.backends,
    capacity_bytes = excluded.capacity_bytes, exclusive_only = excluded.exclusive_only, declared = true,
    device_uuid = NULL, parent_uuid = NULL, name = '', pci_bus_id = NULL, total_bytes = NULL, reserve_bytes = 0,
    island = NULL, fault = NULL, state = 'online', removed_at = NULL
WHERE devices.removed_at IS NOT NULL
"""
_FOLD = """
UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
WHERE ended_at IS NOT NULL AND folded_at IS NULL AND device_id = %s
"""
_FIND = """
SELECT id, share_count FROM jayrun.devices
WHERE host_id = %s AND kind = %s AND host_index = %s AND removed_at IS NULL
"""
_EXISTING = """
SELECT kind, host_index FROM jayrun.devices WHERE host_id = %s AND removed_at IS NULL ORDER BY kind, host_index
"""
_REMOVE = "UPDATE jayrun.devices SET removed_at = clock_timestamp(), state = 'offline' WHERE id = %s"
_RESERVES = "SELECT declared, capacity_bytes + reserve_bytes FROM jayrun.devices WHERE id = %s"
_RESERVE = """
UPDATE jayrun.devices SET capacity_bytes = capacity_bytes + reserve_bytes - %s, reserve_bytes = %s WHERE id = %s
"""
_SET_STATE = "UPDATE jayrun.devices SET state = %s WHERE id = %s"
_IGNORE = """
UPDATE jayrun.devices SET ignore_bytes = coalesce(%s, ignore_bytes),
    ignore_commands = coalesce(%s::text[], ignore_commands)
WHERE id = %s
"""
_HOST = "SELECT id, identity FROM jayrun.hosts WHERE identity = %s OR name = %s ORDER BY identity = %s DESC LIMIT 2"
_HOSTS = "SELECT name, identity FROM jayrun.hosts ORDER BY id"
# What is reserved without the ended leases that no admission has folded yet; on a silent host nobody admits.
_FLEET = """
SELECT d.id, d.host_index, d.kind, d.backends, d.capacity_bytes, d.reserved_bytes - coalesce(f.bytes, 0),
       d.share_count - coalesce(f.shares, 0), d.exclusive_count > coalesce(f.exclusives, 0), d.exclusive_only,
       CASE WHEN d.fault IS NOT NULL OR h.seen_at < clock_timestamp() - make_interval(secs => b.holder_ttl_seconds)
                 AND h.boot_id <> %s THEN 'offline' ELSE d.state END,
       d.withheld_bytes, d.parent_uuid IS NOT NULL, d.island, d.fault, d.device_uuid
FROM jayrun.settings b, jayrun.devices d JOIN jayrun.hosts h ON h.id = d.host_id
LEFT JOIN (SELECT device_id, sum(memory_bytes)::bigint AS bytes, count(*) AS shares,
                  count(*) FILTER (WHERE exclusive) AS exclusives
           FROM jayrun.lease_shares WHERE ended_at IS NOT NULL AND folded_at IS NULL GROUP BY device_id) f
    ON f.device_id = d.id
WHERE d.host_id = %s AND d.removed_at IS NULL ORDER BY d.kind, d.host_index
"""

# A card that was removed from the book is still in the machine, and counts there.
_NAMES = """
SELECT host_index, device_uuid, parent_uuid, kind, backends, fault IS NOT NULL FROM jayrun.devices
WHERE host_id = %s AND (parent_uuid IS NULL OR (removed_at IS NULL AND fault IS NULL)) ORDER BY kind, host_index
"""


def declare(book: Book, host_id: int, devices: Sequence[RuntimeDevice]) -> None:
    """Declare devices of the host, or update those that are declared. Combine: every waiter is judged again."""
    _write_devices(book, host_id, devices, _ADD, _DECLARE)


def add(book: Book, host_id: int, devices: Sequence[RuntimeDevice]) -> None:
    """Add those of `devices` that the host does not have; never alters one. Combine."""
    _write_devices(book, host_id, devices, _ADD)


def remove(book: Book, host_id: int, *, kind: str, host_indexes: Sequence[int]) -> None:
    """Take devices out of the fleet, all or none; their history stays. Combine.

    Raises `UnknownDevice`, saying which exist, and `DeviceInUse` while one carries leases.
    """

    def change(gate: Gate, host_index: int, device_id: int) -> None:
        gate.execute(_FOLD, (device_id,))
        [(_, leases)] = gate.execute(_FIND, (host_id, kind, host_index))
        if leases:
            gate.undo()
            raise DeviceInUse(
                f"device {kind} {host_index} still carries {leases} lease(s): "
                f"`jayrun devices drain {host_index}`, and remove it when `jayrun leases list` shows none on it"
            )
        gate.execute(_REMOVE, (device_id,))

    _change_each(book, host_id, kind, host_indexes, change)


def set_state(book: Book, host_id: int, *, kind: str, host_indexes: Sequence[int], state: DeviceState) -> None:
    """Put devices online, let them drain, or take them offline; leases stay. Combine. Raises `UnknownDevice`."""

    def change(gate: Gate, host_index: int, device_id: int) -> None:
        gate.execute(_SET_STATE, (state.value, device_id))

    _change_each(book, host_id, kind, host_indexes, change)


def set_reserve(book: Book, host_id: int, *, kind: str, host_indexes: Sequence[int], reserve_bytes: int) -> None:
    """Leave so much of what the driver reports of each to others; leases stay. Combine.

    Raises `UnknownDevice`, and `NothingReserved` where the capacity is a person's word, or nothing would be left.
    """

    def change(gate: Gate, host_index: int, device_id: int) -> None:
        [(declared, usable)] = gate.execute(_RESERVES, (device_id,))
        if declared or reserve_bytes >= usable:
            gate.undo()
            raise NothingReserved(
                f"the memory of device {kind} {host_index} is declared, and nothing is taken from it: declare less "
                f"(`jayrun devices declare --device-id {host_index} --memory-gb GB`)"
                if declared
                else f"device {kind} {host_index} has {format_bytes(usable)}, and {format_bytes(reserve_bytes)} in "
                f"reserve leave nothing of it: `jayrun devices drain {host_index}` gives it to nobody"
            )
        gate.execute(_RESERVE, (reserve_bytes, reserve_bytes, device_id))

    _change_each(book, host_id, kind, host_indexes, change)


def find_host(book: Book, name: str) -> int:
    """The key of the host with this identity, else with this name. Raises `UnknownHost`, saying which exist."""

    def unit(pg: Any) -> int:
        rows = pg.execute(_HOST, (name, name, name)).fetchall()
        if len(rows) != 1 and (not rows or rows[0][1] != name):
            known = ", ".join(f"{row[0]} ({row[1]})" for row in pg.execute(_HOSTS).fetchall()) or "none yet"
            several = "several hosts are" if rows else "no host in the book is"
            raise UnknownHost(f"{several} called {name!r}; by name (identity) there are: {known}")
        return int(rows[0][0])

    return book.written(unit)


def fleet(book: Book, host_id: int) -> tuple[list[BookedDevice], Callable[[Visible | None], Sight]]:
    """The devices of the host as the next admission would find them, offline where nobody is there to make one; and
    what a holder sees of them, by what its mask names."""
    return book.written(lambda pg: read_fleet(pg.execute, host_id))


def read_fleet(
    execute: Callable[..., Any], host_id: int
) -> tuple[list[BookedDevice], Callable[[Visible | None], Sight]]:
    """The same in a transaction that is open."""
    rows = execute(_FLEET, (kernel.boot_id(), host_id)).fetchall()
    return [booked_device(host_id, row) for row in rows], sights(rows)


def names(book: Book, host_id: int) -> list[Named]:
    """By which names the book knows the devices of the host. A MIG slice at fault is not there, so it has none."""
    rows = book.written(lambda pg: pg.execute(_NAMES, (host_id,)).fetchall())
    return [
        Named(
            host_index=index,
            uuid=uuid,
            parent_uuid=parent,
            kind=Device(kind),
            backends=frozenset(map(Backend, backends)),
            is_at_fault=is_at_fault,
        )
        for index, uuid, parent, kind, backends, is_at_fault in rows
    ]


def _write_devices(book: Book, host_id: int, devices: Sequence[RuntimeDevice], *statements: str) -> None:
    rows = [
        (
            host_id,
            d.device_id,
            d.device.value,
            [backend.value for backend in d.backends],
            d.memory_bytes,
            d.exclusive_only,
        )
        for d in devices
    ]

    def unit(gate: Gate) -> None:
        for statement in statements:
            for row in rows:
                gate.execute(statement, row)
        gate.commit()

    if rows:
        book.gated(unit)


def ignore(
    book: Book,
    host_id: int,
    *,
    kind: str,
    host_indexes: Sequence[int],
    below_bytes: int | None = None,
    commands: Sequence[str] | None = None,
) -> None:
    """What the audit passes over on devices: so many bytes, and processes of these names; None stays as it is.

    Raises `UnknownDevice`, saying which exist.
    """

    names = None if commands is None else list(map(plain, commands))

    def change(gate: Gate, host_index: int, device_id: int) -> None:
        gate.execute(_IGNORE, (below_bytes, names, device_id))

    _change_each(book, host_id, kind, host_indexes, change)


def _change_each(
    book: Book, host_id: int, kind: str, host_indexes: Sequence[int], change: Callable[[Gate, int, int], None]
) -> None:
    """`change(gate, host_index, device_id)` for each of them, all or none."""

    def unit(gate: Gate) -> None:
        for host_index in dict.fromkeys(host_indexes):
            change(gate, host_index, _find(gate, host_id, kind, host_index))
        gate.commit()

    book.gated(unit)


def _find(gate: Gate, host_id: int, kind: str, host_index: int) -> int:
    for found in gate.execute(_FIND, (host_id, kind, host_index)):
        return int(found[0])
    known = ", ".join(f"{each[0]} {each[1]}" for each in gate.execute(_EXISTING, (host_id,)))
    gate.undo()
    raise UnknownDevice(f"no device {kind} {host_index} on this host; there are: {known or 'none'}")
