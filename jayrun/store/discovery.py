"""What discovery makes of the devices of a host, written behind the gate: no admission decides on half of it.

Only `jayrun.devices` and `jayrun.device_links` are written, and nothing where nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jayrun.domain.devices import Backend, Device
from jayrun.domain.discovery import Discovered, Entry, View, changes, discover
from jayrun.domain.hardware import Reading
from jayrun.store.texts import plain
from jayrun.store.transactions import Book, Gate

Execute = Callable[..., Sequence[Any]]

_KNOWN = """
SELECT id, host_index, kind, backends, device_uuid, parent_uuid, name, pci_bus_id, capacity_bytes, declared,
       total_bytes, reserve_bytes, island, fault, removed_at IS NOT NULL
FROM jayrun.devices WHERE host_id = %s ORDER BY id
"""
_LINKS = """
SELECT least(a.device_uuid, b.device_uuid), greatest(a.device_uuid, b.device_uuid), l.link
FROM jayrun.device_links l JOIN jayrun.devices a ON a.id = l.device_id JOIN jayrun.devices b ON b.id = l.other_id
WHERE a.host_id = %s AND a.device_uuid IS NOT NULL AND b.device_uuid IS NOT NULL
"""
# Numbers change places: each leaves its own first.
_ASIDE = """
UPDATE jayrun.devices SET host_index = (SELECT max(host_index) + 1 FROM jayrun.devices WHERE host_id = %s)
WHERE id = %s
"""
_UPDATE = """
UPDATE jayrun.devices SET host_index = %s, device_uuid = %s, parent_uuid = %s, name = %s, pci_bus_id = %s,
    capacity_bytes = %s, declared = %s, total_bytes = %s, island = %s, fault = %s,
    state = CASE WHEN removed_at IS NULL THEN state ELSE 'online' END, removed_at = NULL
WHERE id = %s
"""
_RENUMBER = "UPDATE jayrun.devices SET host_index = %s WHERE id = %s"
_INSERT = """
INSERT INTO jayrun.devices (host_id, kind, backends, host_index, device_uuid, parent_uuid, name, pci_bus_id,
    capacity_bytes, declared, total_bytes, island, fault)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_LINK = """
INSERT INTO jayrun.device_links (device_id, other_id, link)
SELECT least(a.id, b.id), greatest(a.id, b.id), %s FROM jayrun.devices a, jayrun.devices b
WHERE a.host_id = %s AND a.device_uuid = %s AND b.host_id = %s AND b.device_uuid = %s
ON CONFLICT (device_id, other_id) DO UPDATE SET link = excluded.link
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one device, in words for people; `device_id` is its number on its host from now on, `is_fault`
    says that it does not work since just now."""

    device: str
    device_id: int
    device_uuid: str | None
    changes: tuple[str, ...]
    is_fault: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a discovery changed, `written`: at all; and what it could not enter."""

    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    written: bool = False


def enter(book: Book, host_id: int, reading: Reading, view: View, *, adds: bool, dry_run: bool = False) -> Outcome:
    """Enter what was read of this host's devices, as `domain.discovery.discover` says. Combine if it was `written`.

    `dry_run`: only tell what would be.
    """

    def judge(execute: Execute) -> tuple[dict[int | None, Entry], Discovered]:
        before = {row[0]: _entry(row) for row in execute(_KNOWN, (host_id,))}
        links = {(one, other): link for one, other, link in execute(_LINKS, (host_id,))}
        return before, discover(list(before.values()), reading, view, links, adds=adds)

    def unit(gate: Gate) -> Outcome:
        before, found = judge(gate.execute)
        _write(gate, host_id, before, found)
        gate.commit()
        return _outcome(before, found)

    # Mostly nothing has changed, which is seen without the gate.
    seen = book.written(lambda pg: _outcome(*judge(lambda *query: pg.execute(*query).fetchall())))
    return book.gated(unit) if seen.written and not dry_run else seen


def preview(reading: Reading, view: View) -> Outcome:
    """What would be entered in a book that does not know this host yet."""
    return _outcome({}, discover([], reading, view, {}, adds=True))


def _outcome(before: dict[int | None, Entry], found: Discovered) -> Outcome:
    order = sorted(found.devices, key=lambda each: (each.kind, each.host_index))
    told = [(entry, changes(before.get(entry.id), entry)) for entry in order]
    return Outcome(
        changes=tuple(
            Change(
                device=entry.kind.value,
                device_id=entry.host_index,
                device_uuid=entry.uuid,
                changes=tuple(words),
                is_fault=entry.fault not in (None, *(each.fault for each in [before.get(entry.id)] if each)),
            )
            for entry, words in told
            if words
        ),
        notes=found.notes,
        written=bool(found.links) or any(before.get(entry.id) != entry for entry in found.devices),
    )


def _write(gate: Gate, host_id: int, before: dict[int | None, Entry], found: Discovered) -> None:
    changed = sorted((each for each in found.devices if each.id in before and before[each.id] != each), key=_key)
    for entry in changed:
        if before[entry.id].host_index != entry.host_index:
            gate.execute(_ASIDE, (host_id, entry.id))
    for entry in changed:
        if entry.is_removed:
            gate.execute(_RENUMBER, (entry.host_index, entry.id))
        else:
            gate.execute(_UPDATE, (entry.host_index, *_facts(entry), entry.id))
    for entry in found.devices:
        if entry.id is None:
            backends = sorted(backend.value for backend in entry.backends)
            gate.execute(_INSERT, (host_id, entry.kind.value, backends, entry.host_index, *_facts(entry)))
    for (one, other), link in sorted(found.links.items()):
        gate.execute(_LINK, (link, host_id, one, host_id, other))


def _key(entry: Entry) -> int:
    return entry.id or 0


def _facts(entry: Entry) -> tuple[object, ...]:
    return (
        entry.uuid,
        entry.parent_uuid,
        plain(entry.name),
        entry.pci_bus_id,
        entry.capacity_bytes,
        entry.declared,
        entry.total_bytes,
        entry.island,
        entry.fault,
    )


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(
        id=row[0],
        host_index=row[1],
        kind=Device(row[2]),
        backends=frozenset(map(Backend, row[3])),
        uuid=row[4],
        parent_uuid=row[5],
        name=row[6],
        pci_bus_id=row[7],
        capacity_bytes=row[8],
        declared=row[9],
        total_bytes=row[10],
        reserve_bytes=row[11],
        island=row[12],
        fault=row[13],
        is_removed=row[14],
    )
