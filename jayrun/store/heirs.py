"""Heirs: what a wrapped command left running joins its lease, before the dead cease to be holders of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import kernel, probes
from jayrun.descendants import LEASE_VARIABLE, Process, bearers
from jayrun.domain.liveness import Incarnation, Verdict
from jayrun.store.ids import new_id
from jayrun.store.texts import plain

_HELD_BY_DEAD = """
SELECT x.lease_id::text, o.id, o.role, o.id = e.holder_id, o.label, o.boot_id, o.pid_namespace, o.pid, o.start_ticks
FROM jayrun.lease_holders x JOIN jayrun.holders o ON o.id = x.holder_id
JOIN jayrun.leases l ON l.id = x.lease_id JOIN jayrun.executions e ON e.id = l.execution_id
WHERE x.ended_at IS NULL AND x.lease_id IN (
    SELECT d.lease_id FROM jayrun.lease_holders d JOIN jayrun.holders c ON c.id = d.holder_id
    WHERE d.holder_id = ANY (%s::uuid[]) AND d.ended_at IS NULL AND c.role IN ('command', 'wrapper'))
ORDER BY x.lease_id, x.since
"""
# The lock waits for whoever ends the lease just now, and lets two passes see each other's heirs.
_LOCK_LEASE = "SELECT host_id FROM jayrun.leases WHERE id = %s AND ended_at IS NULL FOR UPDATE"
_IS_IT = """
host_id = %(host_id)s AND boot_id = %(boot_id)s AND pid_namespace = %(pid_namespace)s AND pid = %(pid)s
AND start_ticks = %(start_ticks)s AND role = 'command' AND state = 'alive'
"""
_ADD = f"""
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, label, command, role)
SELECT %(id)s, %(host_id)s, %(boot_id)s, %(pid_namespace)s, %(pid)s, %(start_ticks)s, %(user_name)s, %(label)s,
       %(command)s, 'command' WHERE NOT EXISTS (SELECT FROM jayrun.holders WHERE {_IS_IT})
"""
_JOIN = f"""
INSERT INTO jayrun.lease_holders (lease_id, holder_id)
SELECT %(lease_id)s, id FROM jayrun.holders WHERE {_IS_IT} ORDER BY id LIMIT 1 FOR KEY SHARE ON CONFLICT DO NOTHING
"""


def join_and_spare(pg: PgConnection[Any], dead: Sequence[UUID]) -> list[UUID]:
    """Those of the `dead` holders that may end now. Where all that hold a wrapped command's lease as its command are
    dead, the processes that bear it in their environment have joined it by then. A Runtime inside counts for nothing
    here: it lets go as it likes, and nobody would ask again for what it left running.

    Spared is a dead command whose wrapper lives: that one knows the exit code, and holds the lease meanwhile.
    Idempotent: a process is made a holder once, and joins a lease once.
    """
    if not dead:
        return []
    spared: set[UUID] = set()
    heirless: dict[str, str] = {}  # the label by the lease
    for lease_id, rows in groupby(pg.execute(_HELD_BY_DEAD, (list(dead),)).fetchall(), key=lambda row: row[0]):
        holders = [_Held(row[1], row[2], row[3], row[4], Incarnation(*row[5:])) for row in rows]
        # Asked again, since of two that die while two passes look, each pass may have found another one dead.
        others = [held for held in holders if held.id not in dead and held.role in ("command", "wrapper")]
        verdicts = kernel.verdicts([held.who for held in others])
        living = [held for held, verdict in zip(others, verdicts, strict=True) if verdict is not Verdict.DEAD]
        if not living:
            heirless[lease_id] = holders[0].label
        elif any(held.role == "wrapper" for held in living):
            spared |= {held.id for held in holders if held.id in dead and held.is_asker}
    if heirless:
        for lease_id, heir in sorted(bearers(LEASE_VARIABLE, heirless), key=lambda found: found[0]):
            _join(pg, lease_id, heir, heirless[lease_id])
            probes.reach("heirs.joined")
    return [holder_id for holder_id in dead if holder_id not in spared]


@dataclass(frozen=True, slots=True)
class _Held:
    """Who holds a lease; `is_asker`: it is the command that the lease was granted to."""

    id: UUID
    role: str
    is_asker: bool
    label: str
    who: Incarnation


def _join(pg: PgConnection[Any], lease_id: str, process: Process, label: str) -> None:
    with pg.transaction():
        lease = pg.execute(_LOCK_LEASE, (lease_id,)).fetchone()
        if lease is None:
            return
        who = process.who
        values = {
            "id": new_id(),
            "host_id": lease[0],
            "boot_id": who.boot_id,
            "pid_namespace": who.pid_namespace,
            "pid": who.pid,
            "start_ticks": who.start_ticks,
            "user_name": process.user_name,
            "label": label,
            "command": plain(process.command),
            "lease_id": lease_id,
        }
        pg.execute(_ADD, values)
        pg.execute(_JOIN, values)
