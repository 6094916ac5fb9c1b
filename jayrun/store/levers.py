"""What only an administrator does: declare a host or a holder gone. Refused for who shows life, unless forced.

Both leave a line in the log that says who did it. Nothing else ends what may be alive.
"""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import UUID

from psycopg import Connection as PgConnection

from jayrun import kernel
from jayrun.domain.liveness import Incarnation, Verdict
from jayrun.domain.units import format_seconds
from jayrun.errors import DeviceInUse, StillAlive, UnknownId
from jayrun.store import admission, heirs, reclaim
from jayrun.store.texts import plain
from jayrun.store.transactions import Book, Gate

_HOST = """
SELECT h.name, h.identity,
       extract(epoch FROM clock_timestamp() - greatest(h.seen_at, jayrun.in_reach_since(h.id)))::float8,
       s.holder_ttl_seconds
FROM jayrun.hosts h, jayrun.settings s WHERE h.id = %s
"""
_ALIVE = """
SELECT id, boot_id, pid_namespace, pid, start_ticks FROM jayrun.holders
WHERE host_id = %s AND state = 'alive' ORDER BY id
"""
_HOLDER = """
SELECT o.host_id, h.name, o.boot_id, o.pid_namespace, o.pid, o.start_ticks, o.user_name, o.state,
       extract(epoch FROM clock_timestamp() - greatest(o.seen_at, jayrun.in_reach_since(h.id)))::float8,
       s.holder_ttl_seconds
FROM jayrun.holders o JOIN jayrun.hosts h ON h.id = o.host_id, jayrun.settings s WHERE o.id = %s
"""
_STATE = "SELECT state FROM jayrun.holders WHERE id = %s"
_DECLARE = """
INSERT INTO jayrun.lease_events (kind, holder_id, detail)
VALUES ('declared', %s, %s || ' (database user ' || session_user || ')')
"""
_FOLD = """
UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
WHERE ended_at IS NOT NULL AND folded_at IS NULL
  AND device_id IN (SELECT d.id FROM jayrun.devices d WHERE d.host_id = %s)
"""
_IN_USE = "SELECT FROM jayrun.devices WHERE host_id = %s AND share_count > 0"
_REMOVE = """
UPDATE jayrun.devices SET removed_at = clock_timestamp(), state = 'offline' WHERE host_id = %s AND removed_at IS NULL
"""
_FORGET = "UPDATE jayrun.hosts SET forgotten_at = clock_timestamp() WHERE id = %s"

_ROUNDS = 20
_PAUSE_SECONDS = 0.1
_RISK = (
    "what still runs goes on using its GPUs until it notices (LeaseLost), beside whoever is given them next: two "
    "programs in one GPU's memory. --force does it all the same"
)


def forget_host(book: Book, host_id: int, *, force: bool = False) -> int:
    """Declare a host gone: its holders, their leases and executions end and its devices are removed; returns how many
    holders there were.

    What workers ran there is ready again; what was submitted for that very host waits for its return. The host comes
    back by itself when it is seen again; its devices must then be declared again. Raises `StillAlive` while it shows
    life, unless `force`, and `DeviceInUse` when its devices are leased anew as often as their leases are ended.
    """

    def look(pg: PgConnection[Any]) -> tuple[Any, list[Any], list[Verdict]]:
        holders = pg.execute(_ALIVE, (host_id,)).fetchall()
        verdicts = kernel.verdicts([Incarnation(*row[1:]) for row in holders])
        dead = [row[0] for row, verdict in zip(holders, verdicts, strict=True) if verdict is Verdict.DEAD]
        if dead and not force:  # what they left running is alive too
            heirs.join_and_spare(pg, dead)
            holders = pg.execute(_ALIVE, (host_id,)).fetchall()
            verdicts = kernel.verdicts([Incarnation(*row[1:]) for row in holders])
        return pg.execute(_HOST, (host_id,)).fetchone(), holders, verdicts

    (name, identity, silent_seconds, ttl_seconds), holders, verdicts = book.written(look)
    living = [str(row[3]) for row, verdict in zip(holders, verdicts, strict=True) if verdict is Verdict.ALIVE]
    if not force and living:
        who = f"pid {living[0]} is" if len(living) == 1 else f"pids {', '.join(living)} are"
        raise StillAlive(f"on host {name} {who} alive, says the kernel. If the host is forgotten, {_RISK}")
    if not force and silent_seconds < ttl_seconds:
        raise StillAlive(
            f"host {name} was heard of {format_seconds(silent_seconds)} ago; it can be forgotten once it has been "
            f"silent for {format_seconds(ttl_seconds)}. Before that, {_RISK}"
        )
    forced = ", by force" if force else ""
    _declare(book, None, f"declared host {name} ({identity}) gone{forced}")
    ended: set[UUID] = set()
    for attempt in range(_ROUNDS):  # what still runs there may introduce itself again
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        for holder_id, *_ in book.written(lambda pg: pg.execute(_ALIVE, (host_id,)).fetchall()):
            _declare(book, holder_id, f"declared it gone with host {name}{forced}")
            _end(book, holder_id, reason="declared")
            ended.add(holder_id)
        if book.gated(lambda gate: _remove_devices(gate, host_id)):
            return len(ended)
    raise DeviceInUse(
        f"devices of host {name} are leased again as often as their leases end: end what still runs there, then forget "
        "it. `jayrun leases list` shows who holds them"
    )


def end_holder(book: Book, holder_id: UUID, *, force: bool = False) -> bool:
    """Declare a holder gone: its leases and executions end. Returns whether it was alive until then.

    Raises `StillAlive`, unless `force`, for one that the kernel says is alive, for a dead command whose wrapper lives
    (that one ends it), and for one that nobody here sees while it has not been silent for the book's
    `holder_ttl_seconds`. Raises `UnknownId`. What a dead command left running joins its lease first, unless `force`.
    """
    row = book.written(lambda pg: pg.execute(_HOLDER, (holder_id,)).fetchone())
    if row is None:
        raise UnknownId(f"no holder has the id {holder_id}: `jayrun holders list` shows those alive")
    host_id, host, *incarnation, user, state, silent_seconds, ttl_seconds = row
    if state == "ended":
        return False
    [verdict] = kernel.verdicts([Incarnation(*incarnation)])
    who = f"pid {incarnation[2]} of {user} on host {host}"
    if not force and verdict is Verdict.ALIVE:
        raise StillAlive(f"{who} is alive, says the kernel: end the process itself. If its leases are ended, {_RISK}")
    if not force and verdict is Verdict.UNSEEN and silent_seconds < ttl_seconds:
        raise StillAlive(
            f"{who} cannot be seen from here and was heard of {format_seconds(silent_seconds)} ago; it can be ended "
            f"once it has been silent for {format_seconds(ttl_seconds)}. Before that, {_RISK}"
        )
    if not force and verdict is Verdict.DEAD and not book.written(lambda pg: heirs.join_and_spare(pg, [holder_id])):
        raise StillAlive(
            f"{who} is dead, but the `jayrun run` that started it is alive and is about to end it: end that one, if it "
            f"hangs. Before that, {_RISK}"
        )
    forced = ", by force" if force else ""
    _declare(book, holder_id, f"declared {who} gone, which the kernel calls {verdict}{forced}")
    _end(book, holder_id, reason="dead" if verdict is Verdict.DEAD else "declared")
    admission.combine(book, host_id)
    return True


def _declare(book: Book, holder_id: UUID | None, what: str) -> None:
    detail = f"{kernel.user_name()}, pid {os.getpid()} on {kernel.host_name()}, {what}"
    book.written(lambda pg: pg.execute(_DECLARE, (holder_id, plain(detail))))


def _end(book: Book, holder_id: UUID, *, reason: str) -> None:
    def unit(pg: PgConnection[Any]) -> None:
        while pg.execute(_STATE, (holder_id,)).fetchone() == ("alive",):  # a grant to it may have been on its way
            reclaim.end_holder(pg, holder_id, reason=reason)

    book.written(unit)


def _remove_devices(gate: Gate, host_id: int) -> bool:
    """Not while there are new leases on them."""
    gate.execute(_FOLD, (host_id,))
    if gate.execute(_IN_USE, (host_id,)):
        gate.leave()
        return False
    gate.execute(_REMOVE, (host_id,))
    gate.execute(_FORGET, (host_id,))
    gate.commit()
    return True
