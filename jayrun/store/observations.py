"""Observations: what the hardware of a host shows, set against its leases, and written down for the auditor.

They have tables of their own and change nothing else but what is withheld (`jayrun.write_observations`): no lease,
holder or share is written, or locked, because of anything that is seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from jayrun import descendants, kernel
from jayrun.domain.audit import Audit, Leased, Occupant, Situation, audit, is_given_back
from jayrun.domain.liveness import Incarnation
from jayrun.domain.ownership import Hold, Known, Lineage, Ownership, own
from jayrun.store.texts import plain
from jayrun.store.transactions import Book, Gate

_NOT_OURS = (
    "process numbers count in the host's own pid namespace, which this container does not see: "
    "look from the host, or from a container with --pid=host"
)
_NOT_SHOWN = "NVML does not show this device"
_DECLARED = "it is declared by hand, and no driver here tells who uses it"

_NOW = "SELECT clock_timestamp()"
_SETTINGS = "SELECT idle_lease_seconds FROM jayrun.settings"
_DEVICES = """
SELECT d.id, d.kind, d.host_index, d.device_uuid, d.declared, d.fault, d.ignore_bytes, d.ignore_commands,
       o.shows_processes AND o.observed_at > clock_timestamp() - make_interval(secs => 2 * b.look_seconds)
           AS is_well_seen
FROM jayrun.settings b, jayrun.devices d LEFT JOIN jayrun.device_observations o ON o.device_id = d.id
WHERE d.host_id = :host AND d.removed_at IS NULL ORDER BY d.id
"""
# Unused since when: not across a time in which nobody looked.
_LEASES = """
SELECT s.device_id, s.lease_id, s.memory_bytes, s.exclusive,
       CASE WHEN o.observed_at > clock_timestamp() - make_interval(secs => 3 * b.look_seconds) THEN y.unused_since END
           AS unused_since,
       extract(epoch FROM clock_timestamp() - y.unused_since)::float8 AS unused_seconds
FROM jayrun.settings b, jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id
LEFT JOIN jayrun.device_observations o ON o.device_id = d.id
LEFT JOIN jayrun.lease_observations y ON y.device_id = s.device_id AND y.lease_id = s.lease_id
WHERE d.host_id = :host AND s.folded_at IS NULL AND s.ended_at IS NULL
"""
# Whoever has to do with what lives on the host, or is in quarantine there: also who has left a lease that lives on.
_HOLDS = """
SELECT o.id, o.boot_id, o.pid_namespace, o.pid, o.start_ticks, x.device_id, x.lease_id, l.ended_at IS NULL AS is_live,
       l.epoch::float8 AS since, o.state = 'alive' AS is_attended
FROM (SELECT s.device_id, s.lease_id FROM jayrun.lease_shares s WHERE s.folded_at IS NULL
      UNION SELECT q.device_id, q.lease_id FROM jayrun.quarantines q WHERE q.ended_at IS NULL) x
JOIN jayrun.devices d ON d.id = x.device_id JOIN jayrun.leases l ON l.id = x.lease_id
JOIN jayrun.lease_holders t ON t.lease_id = x.lease_id JOIN jayrun.holders o ON o.id = t.holder_id
WHERE d.host_id = :host AND o.boot_id = :boot
"""
# The last lease on a device that each of these had; asked once of a process, for what is found is noted beside it.
_HELD_ONCE = """
SELECT o.id, o.boot_id, o.pid_namespace, o.pid, o.start_ticks, x.device_id, x.lease_id, x.is_live, x.since,
       o.state = 'alive' AS is_attended
FROM jayrun.holders o CROSS JOIN LATERAL (
    SELECT s.device_id, s.lease_id, l.ended_at IS NULL AS is_live, l.epoch::float8 AS since
    FROM jayrun.lease_holders t JOIN jayrun.leases l ON l.id = t.lease_id
    JOIN jayrun.lease_shares s ON s.lease_id = l.id AND s.device_id = :device
    WHERE t.holder_id = o.id ORDER BY l.epoch DESC LIMIT 1) x
WHERE o.host_id = :host AND o.boot_id = :boot AND o.pid = ANY (:pids)
"""
_NAMED = """
SELECT s.device_id, s.lease_id, l.ended_at IS NULL AS is_live, l.epoch::float8 AS since,
       EXISTS (SELECT FROM jayrun.lease_holders t JOIN jayrun.holders o ON o.id = t.holder_id
               WHERE t.lease_id = l.id AND o.state = 'alive') AS is_attended
FROM jayrun.leases l JOIN jayrun.lease_shares s ON s.lease_id = l.id WHERE l.id = ANY (:leases)
"""
_SEEN_BEFORE = """
SELECT p.device_id, p.pid, p.start_ticks, p.lease_id, p.first_seen, p.user_name, p.command
FROM jayrun.process_observations p JOIN jayrun.devices d ON d.id = p.device_id WHERE d.host_id = :host
"""
_QUARANTINES = """
SELECT q.device_id, q.lease_id FROM jayrun.quarantines q JOIN jayrun.devices d ON d.id = q.device_id
WHERE d.host_id = :host AND q.ended_at IS NULL AND q.since < :since
"""
_WRITE = "SELECT jayrun.write_observations(%s, %s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process on a card by the driver's word: its pid on the host, and its bytes (None: not told)."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the driver showed of a GPU, or a MIG slice: found in the book by its UUID, else by its number on the host.

    `processes`, each once, is None where they cannot be read, and `problem` says what is wrong with the card.
    """

    index: int
    uuid: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    processes: tuple[CardProcess, ...] | None = None
    problem: str | None = None


def instant(book: Book) -> datetime:
    """The database's clock: to be asked before the cards are read, for `observe`."""
    moment: datetime = book.value(_NOW)
    return moment


def observe(book: Book, host_id: int, cards: Sequence[Card], *, since: datetime, problem: str | None = None) -> bool:
    """Write down what was read of this host's `cards`, judged against its leases; `since` is before they were read.

    `problem` is why none could be read. Returns whether something is withheld no longer: then combine. What somebody
    saw of late who sees more (from outside of a container, or who may) stays.
    """
    sees_pids = kernel.sees_the_drivers_pids()
    pids = {process.pid for card in cards for process in card.processes or ()} if sees_pids else set()
    lineages = {pid: descendants.lineage(pid) for pid in pids}

    def unit(connection: Connection) -> dict[str, list[Any]]:
        scene = _Scene(connection, host_id, lineages, since)
        written: dict[str, list[Any]] = {"devices": [], "leases": [], "processes": [], "given_back": []}
        for device in scene.devices:
            card = _card_of(device, cards)
            shows = sees_pids and card is not None and card.processes is not None
            is_broken = card is not None and card.problem is not None
            if not shows and not is_broken and device.is_well_seen:
                continue
            if card is None:
                is_found = device.device_uuid is not None or not device.declared
                why = (problem or device.fault or _NOT_SHOWN) if is_found else _DECLARED
            else:
                why = card.problem or (None if sees_pids else _NOT_OURS)
            _add(written, scene, device, card or Card(index=device.host_index), shows, why)
        return written

    written = book.read(unit)

    def write(gate: Gate) -> bool:
        [(fell,)] = gate.commit(_WRITE, (host_id, json.dumps(written)))
        return bool(fell)

    return book.gated(write)


class _Scene:
    """What the book has that may matter: the host's devices and live leases, and who the processes may come from."""

    def __init__(self, connection: Connection, host_id: int, lineages: dict[int, Lineage], since: datetime) -> None:
        def rows(statement: str, **values: object) -> Sequence[Any]:
            return connection.execute(text(statement), values).all()

        [(self.idle_seconds,)] = rows(_SETTINGS)
        self._rows = rows
        self._host_id = host_id
        self.devices = rows(_DEVICES, host=host_id)
        self.leases = rows(_LEASES, host=host_id)
        self.quarantines = rows(_QUARANTINES, host=host_id, since=since)
        self.lineages = lineages
        self._before = {(row.device_id, row.pid): row for row in rows(_SEEN_BEFORE, host=host_id)}
        self._holds = rows(_HOLDS, host=host_id, boot=kernel.boot_id())
        names = {lineage.lease for lineage in lineages.values()} | {row.lease_id for row in self._before.values()}
        self._named = rows(_NAMED, leases=sorted(names - {None}, key=str))

    def before(self, device_id: int, pid: int) -> Any:
        """The row of the very same process at the last look, or None; one that is gone is known by its number."""
        row = self._before.get((device_id, pid))
        itself = self.lineages[pid].itself
        same = row is not None and (itself is None or row.start_ticks in (None, itself.start_ticks))
        return row if same else None

    def occupant(self, device_id: int, process: CardProcess) -> Occupant:
        """The process with the leases on the device that it counts to."""
        lineage = self.lineages[process.pid]
        owned = self._owned(device_id, lineage, self._holds)
        if owned == Ownership():
            numbers = {each.pid for each in (lineage.itself, *lineage.kin) if each} | {lineage.pid, *lineage.gone}
            once = self._rows(
                _HELD_ONCE, device=device_id, host=self._host_id, boot=kernel.boot_id(), pids=sorted(numbers)
            )
            owned = self._owned(device_id, lineage, once)
        return Occupant(
            pid=process.pid,
            used_bytes=process.used_bytes,
            leases=owned.leases,
            former=owned.former,
            name=lineage.name,
            command=lineage.command,
            is_gone=lineage.itself is None,
            is_attended=owned.is_attended,
        )

    def _owned(self, device_id: int, lineage: Lineage, rows: Sequence[Any]) -> Ownership:
        holders: dict[UUID, tuple[Incarnation, list[Hold]]] = {}
        for row in rows:
            if row.device_id == device_id:
                _, holds = holders.setdefault(row.id, (Incarnation(*row[1:5]), []))
                holds.append(_hold(row))
        before = self.before(device_id, lineage.pid)
        names = {lineage.lease, None if before is None else before.lease_id}
        named = [_hold(row) for row in self._named if row.device_id == device_id and row.lease_id in names]
        known = [Known(who, tuple(holds)) for who, holds in holders.values()]
        return own(lineage, known, named=named, pid_namespace=kernel.pid_namespace())


def _hold(row: Any) -> Hold:
    return Hold(row.lease_id, row.is_live, row.since, row.is_attended)


def _card_of(device: Any, cards: Sequence[Card]) -> Card | None:
    """By its UUID; a device that has none by its number, if it is a GPU."""
    if device.device_uuid is not None:
        return next((card for card in cards if card.uuid == device.device_uuid), None)
    return next((card for card in cards if device.kind == "gpu" and card.index == device.host_index), None)


def _add(
    written: dict[str, list[Any]], scene: _Scene, device: Any, card: Card, shows: bool, problem: str | None
) -> None:
    """Judge one device, and add what is to be written of it."""
    shares = [row for row in scene.leases if row.device_id == device.id]
    found = Situation(
        processes=tuple(scene.occupant(device.id, each) for each in card.processes or ()) if shows else None,
        leases=tuple(
            Leased(
                lease_id=row.lease_id,
                memory_bytes=row.memory_bytes,
                exclusive=row.exclusive,
                unused_seconds=None if row.unused_since is None else row.unused_seconds,
            )
            for row in shares
        ),
        used_bytes=card.used_bytes,
        ignore_bytes=device.ignore_bytes,
        ignore_commands=frozenset(device.ignore_commands),
        problem=problem,
    )
    judged: Audit = audit(found, idle_seconds=scene.idle_seconds)
    usable = None if card.total_bytes is None else card.total_bytes - (card.reserved_bytes or 0)
    written["devices"].append(
        {
            "id": device.id,
            "finding": judged.device.finding,
            "detail": judged.device.detail,
            "shows_processes": shows,
            "used_bytes": card.used_bytes,
            "usable_bytes": usable,
            "foreign_bytes": judged.foreign_bytes,
        }
    )
    for row in shares:
        told = judged.leases[row.lease_id]
        written["leases"].append(
            {
                "device_id": device.id,
                "lease_id": str(row.lease_id),
                "finding": told.finding,
                "detail": told.detail,
                "used_bytes": told.used_bytes,
                "leased_bytes": told.leased_bytes,
                "is_unused": told.used_bytes == 0,
                "unused_since": None if row.unused_since is None else row.unused_since.isoformat(),
            }
        )
    for each in found.processes or ():
        written["processes"].append(_process(scene, device.id, each, judged))
    for row in scene.quarantines:
        if row.device_id == device.id and is_given_back(found, row.lease_id):
            written["given_back"].append({"device_id": device.id, "lease_id": str(row.lease_id)})


def _process(scene: _Scene, device_id: int, process: Occupant, judged: Audit) -> dict[str, Any]:
    lineage, before = scene.lineages[process.pid], scene.before(device_id, process.pid)
    told = judged.processes.get(process.pid)
    lease_id = next(iter(sorted(process.leases)), None) or next(iter(process.former), None)
    return {
        "device_id": device_id,
        "pid": process.pid,
        "start_ticks": lineage.itself.start_ticks if lineage.itself else None if before is None else before.start_ticks,
        "finding": None if told is None else told.finding,
        "detail": "" if told is None else told.detail,
        "lease_id": None if lease_id is None else str(lease_id),
        "user_name": plain(lineage.user_name or ("" if before is None else before.user_name)),
        "command": plain(lineage.command or ("" if before is None else before.command)),
        "used_bytes": process.used_bytes,
        "first_seen": None if before is None else before.first_seen.isoformat(),
    }
