"""Heirs: what a wrapped command left running joins its lease, before the dead cease to be holders of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import probes
from jayrun.descendants import LEASE_VARIABLE, Process, bearers
from jayrun.store.ids import new_id
from jayrun.store.texts import plain

# A command whose wrapper lives is left to it: the wrapper knows the exit code, and holds the lease meanwhile.
_DEAD_COMMANDS = """
SELECT o.id, o.label, array_agg(DISTINCT x.lease_id::text), bool_or(o.role = 'command' AND EXISTS (
    SELECT FROM jayrun.lease_holders y JOIN jayrun.holders w ON w.id = y.holder_id
    WHERE y.lease_id = x.lease_id AND y.ended_at IS NULL AND w.role = 'wrapper' AND w.state = 'alive'
      AND w.id <> ALL (%(dead)s::uuid[])))
FROM jayrun.holders o JOIN jayrun.lease_holders x ON x.holder_id = o.id AND x.ended_at IS NULL
WHERE o.id = ANY (%(dead)s::uuid[]) AND o.role IN ('command', 'wrapper') GROUP BY o.id, o.label
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


def without_heirs(pg: PgConnection[Any], dead: Sequence[UUID]) -> list[UUID]:
    """Those of the `dead` holders that may end now: what outlives a dead command or wrapper, and bears its lease in its
    environment, has joined the lease; a dead command whose wrapper lives is not among them.

    Idempotent: a process is made a holder once, and joins a lease once.
    """
    if not dead:
        return []
    rows = pg.execute(_DEAD_COMMANDS, {"dead": list(dead)}).fetchall()
    left_to_wrappers = {holder_id for holder_id, _, _, has_wrapper in rows if has_wrapper}
    labels = {lease_id: label for holder_id, label, ids, has_wrapper in rows if not has_wrapper for lease_id in ids}
    for lease_id, process in sorted(bearers(LEASE_VARIABLE, labels), key=lambda found: found[0]) if labels else ():
        _join(pg, lease_id, process, labels[lease_id])
        probes.reach("heirs.joined")
    return [holder_id for holder_id in dead if holder_id not in left_to_wrappers]


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
