"""Releases: the guarded update by which a holder leaves its leases, and the look whether somebody waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import ClientCursor
from psycopg import Connection as PgConnection

from jayrun import probes
from jayrun.domain.devices import Share
from jayrun.domain.lifecycle import ExecutionState
from jayrun.errors import LeaseLost, PlacementUnavailableHere
from jayrun.store.engine import address
from jayrun.store.holders import Holder
from jayrun.store.texts import plain_failure, rendered
from jayrun.store.transactions import Book, Gate


@dataclass(frozen=True, slots=True)
class LeasedShare:
    """What a lease has of one device: the device's key in the book, its number on the host, its UUID if known, bytes,
    and whether it is exclusive."""

    device_key: int
    host_index: int
    device_uuid: str | None
    memory_bytes: int
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request: what the book gave to (execution, position) for one invocation."""

    id: UUID
    epoch: int
    execution_id: UUID
    position: int
    shares: tuple[LeasedShare, ...]


_LEAVE = "SELECT jayrun.leave(%s, %s::uuid[], %s, %s, %s)"
_GONE = """
SELECT n.lease_id, n.epoch, n.hold, current_setting('transaction_read_only')
FROM unnest(%s::uuid[], %s::bigint[], %s::integer[]) AS n (lease_id, epoch, hold)
WHERE NOT EXISTS (SELECT FROM jayrun.lease_holders h WHERE h.holder_id = %s AND h.lease_id = n.lease_id
                  AND h.hold = n.hold AND h.ended_at IS NULL)
"""
_JOIN = "SELECT * FROM jayrun.join_lease(%s, %s, %s, %s)"
_FINISH = "SELECT jayrun.finish(%s)"
_ANYBODY_WAITS = "SELECT jayrun.anybody_waits(%s)"
# Whoever parks looks for unfolded releases after its own commit. So of a release and a park that race, at least one
# sees the other, and that one combines.
_ANYTHING_TO_FOLD = """
SELECT EXISTS (SELECT FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id
               WHERE s.ended_at IS NOT NULL AND s.folded_at IS NULL AND d.host_id = %s)
"""

_LEASE = "SELECT id, epoch, execution_id, position, jayrun.shares_of(id) FROM jayrun.leases WHERE id = %s"
_FIND = """
SELECT id, epoch, execution_id, position, jayrun.shares_of(id) FROM jayrun.leases WHERE id = %s AND host_id = %s
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a running execution ended: its terminal state, the failure to store, and the number of its last attempt."""

    execution_id: UUID
    state: ExecutionState
    failure: dict[str, Any] | None = None
    attempt: int = 1


class Held(NamedTuple):
    """A lease by id and epoch, and which of the holder's holds on it: 0 is the grant's."""

    lease_id: UUID
    epoch: int
    hold: int = 0


Named = Sequence[Held | tuple[UUID, int]]
"""Leases that a holder holds by their grant, or by the hold that is said."""


def release(book: Book, host_id: int, holder_id: UUID, leases: Named) -> bool:
    """Let the holder leave `leases`, durably. Returns whether somebody waits on the host: then combine."""
    return settle(book, host_id, holder_id, released=leases)


def settle(
    book: Book,
    host_id: int,
    holder_id: UUID,
    *,
    released: Named = (),
    returned: Named = (),
    finished: Sequence[Finished] = (),
) -> bool:
    """Let the holder leave leases that were used (`released`) or never were (`returned`), and record how executions
    ended; one durable commit. Returns whether somebody waits on the host: then combine.
    """
    ends = settling(holder_id, released=released, returned=returned, finished=finished)
    # The look whether somebody waits is a transaction of its own in the same message: it needs a later snapshot.
    message = f"BEGIN; {ends}; COMMIT; {rendered(_ANYBODY_WAITS, (host_id,))}"

    def unit(pg: PgConnection[Any]) -> bool:
        cursor = ClientCursor(pg)
        probes.reach("settle.telling")
        cursor.execute(message)
        probes.reach("settle.told")
        cursor.set_result(-1)
        [(somebody_waits,)] = cursor.fetchall()
        return bool(somebody_waits)

    return book.written(unit)


def settling(holder_id: UUID, *, released: Named = (), returned: Named = (), finished: Sequence[Finished] = ()) -> str:
    """The statements of `settle`, for a transaction that does more (`admission.combine`).

    What was settled before, also by a reclaim, and what names a wrong epoch changes nothing.
    """
    statements: list[str] = []
    parameters: list[object] = []
    for reason, leases in (("released", released), ("returned", returned)):
        if leases:
            ids, epochs, holds = zip(*(Held(*lease) for lease in leases), strict=True)
            statements.append(_LEAVE)
            parameters += [holder_id, list(ids), list(epochs), list(holds), reason]
    if finished:
        statements.append(_FINISH)
        ends = [
            {
                "id": str(each.execution_id),
                "state": each.state,
                "failure": plain_failure(each.failure),
                "attempt": each.attempt,
            }
            for each in finished
        ]
        parameters.append(json.dumps(ends))
    return rendered("; ".join(statements), parameters)


def join(book: Book, holder: Holder, held: Held) -> None:
    """Make `holder` a further holder of a live lease, durably; done already, it does nothing.

    `held.hold` is a number that the holder never used for this lease. Raises `LeaseLost` when the lease has ended, and
    `PlacementUnavailableHere` when it is another host's.
    """
    try:
        joined, lease_host_id = book.written(
            lambda pg: pg.execute(_JOIN, (holder.id, held.lease_id, held.epoch, held.hold)).fetchone()
        ) or (None, None)
    except psycopg.errors.IntegrityConstraintViolation as error:
        if error.diag.constraint_name != "holders_joined":
            raise
        raise LeaseLost("this process was declared dead in the book", held.lease_id, held.epoch) from None
    if lease_host_id is None:
        raise LeaseLost(
            f"lease {held.lease_id} has ended: in the book at {address(book.url)} nobody holds it. Whoever sends a "
            "placement must live until it is unpickled, within `lend_seconds` of the last pickling",
            held.lease_id,
            held.epoch,
        )
    if not joined:
        raise PlacementUnavailableHere(f"lease {held.lease_id} is on another host: its capacity can only be used there")


def gone(book: Book, holder: Holder, held: Sequence[Held]) -> list[Held]:
    """Those of these holds that are not live holds of `holder` in the book."""
    ids, epochs, holds = zip(*held, strict=True)
    values = (list(ids), list(epochs), list(holds), holder.id)

    def unit(pg: PgConnection[Any]) -> list[Held]:
        rows = pg.execute(_GONE, values).fetchall()
        if any(row[3] == "on" for row in rows):  # a server that was left, or a standby, knows nothing of late
            raise psycopg.errors.ReadOnlySqlTransaction("the server takes no writes")
        return [Held(*row[:3]) for row in rows]

    return book.written(unit)


def anybody_waits(book: Book, host_id: int) -> bool:
    """Whether a unit waits on the host whose process shows life."""
    return bool(book.value(_ANYBODY_WAITS, (host_id,)))


def anything_to_fold(book: Book, host_id: int) -> bool:
    """Whether leases ended on the host whose capacity no admission has seen yet."""
    return bool(book.value(_ANYTHING_TO_FOLD, (host_id,)))


def find(book: Book, host_id: int, lease_id: UUID) -> Lease | None:
    """The lease `lease_id` of this host, live or ended."""
    row = book.written(lambda pg: pg.execute(_FIND, (lease_id, host_id)).fetchone())
    return None if row is None else read_row(row)


def read_lease(gate: Gate, lease_id: UUID) -> Lease:
    """The lease `lease_id`, which exists."""
    [row] = gate.execute(_LEASE, (lease_id,))
    return read_row(row)


def read_row(row: Sequence[Any]) -> Lease:
    """The lease of one row: id, epoch, execution, position, and its shares; ids as UUID or as JSON has them."""
    key, epoch, execution_id, position, shares = row
    return Lease(_uuid(key), epoch, _uuid(execution_id), position, tuple(LeasedShare(*share) for share in shares))


def leased(shares: Iterable[Share], uuids: Mapping[int, str | None]) -> tuple[LeasedShare, ...]:
    """What was just granted, as the lease has it; `uuids` by the keys of the devices."""
    return tuple(
        LeasedShare(share.device_id, share.host_index, uuids[share.device_id], share.memory_bytes, share.exclusive)
        for share in shares
    )


def _uuid(value: UUID | str) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)
