"""The history check: the log of the book replayed into one legal serial history.

Why in the order of the ids. An id is drawn when its line is written, and the line is seen when its transaction commits;
the two orders may differ, and this is all by which they do:

- Grants are written behind the gate, which is held until the commit. So admissions do not overlap, and the ids and
  epochs of grants rise as they commit.
- What one lease goes through (joined, left, its end) is written under the lock of its row, held until the commit. So
  those ids rise as they commit, too.
- An end commits later than its id says, and outside of the gate. An admission gives away what has ended only when it
  sees the end committed, and draws its own ids after that; so here, too, no grant stands before the end that made room
  for it. An admission that came in between saw the lease live, and took nothing of it; here it comes after the end and
  finds more room than it used. That is legal as well: the order of the ids is one in which everything could have
  happened one by one.
- A wait may begin outside of the gate (a grant that nobody fetched). Whoever grants has seen it committed.

So nothing is tolerated here but this: when an execution was ended because its process had died, a grant to it may have
been on its way and come after it. It must have been taken back since.

The log does not tell everything. How a wait ended without a grant (withdrawn, failed, tried again), and what devices
were declared as when, must come from the tables as they stand now, or from the test (`declared`); which backends a
device had, and whether it was online, is not checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import namedtuple_row

ENDS = ("released", "reclaimed", "returned")
TERMINAL = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Declared:
    """What a device was declared as, from the line after `event_id` on."""

    event_id: int
    device_id: int
    capacity_bytes: int
    exclusive_only: bool


def last_event(sql: psycopg.Connection) -> int:
    """The newest line of the log; 0 when it is empty."""
    row = sql.execute("SELECT coalesce(max(id), 0) FROM jayrun.lease_events").fetchone()
    assert row is not None
    return int(row[0])


def replay(sql: psycopg.Connection, declared: Sequence[Declared] = ()) -> int:
    """Replay every line; AssertionError where the history is not legal, or does not lead to what the tables say.

    `declared`, in order, tells of the devices whose declaration has changed; others were always what they are now.
    Returns how many leases it saw.
    """
    with sql.transaction():
        sql.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        history = _History(sql, declared)
    history.check()
    return len(history.granted)


class _History:
    """The log and the tables at one moment, and the book as it was after each line."""

    def __init__(self, sql: psycopg.Connection, declared: Sequence[Declared]) -> None:
        cursor = sql.cursor(row_factory=namedtuple_row)

        def rows(query: str) -> list[Any]:
            return cursor.execute(query).fetchall()

        self.events = rows("SELECT *, xmin::text AS made_by FROM jayrun.lease_events ORDER BY id")
        self.devices = {row.id: row for row in rows("SELECT * FROM jayrun.devices")}
        self.leases = {row.id: row for row in rows("SELECT * FROM jayrun.leases")}
        self.holders = {row.id: row for row in rows("SELECT * FROM jayrun.holders")}
        self.executions = {row.id: row for row in rows("SELECT * FROM jayrun.executions")}
        self.shares = _by(rows("SELECT * FROM jayrun.lease_shares ORDER BY lease_id, device_id"), "lease_id")
        self.holds = _by(rows("SELECT * FROM jayrun.lease_holders"), "lease_id")
        self.requests: dict[UUID, list[Any]] = _by(
            rows("SELECT *, xmin::text AS made_by FROM jayrun.placement_requests ORDER BY execution_id, position"),
            "execution_id",
        )
        self.declared = declared
        # A line bears the transaction that wrote it, and so does a request; both were written together.
        self.began: dict[str, int] = {}
        for event in self.events:
            self.began.setdefault(event.made_by, event.id)

        self.joined: dict[UUID, list[UUID]] = defaultdict(list)
        for event in self.events:
            if event.kind == "joined":
                self.joined[event.lease_id].append(event.holder_id)

        self.granted: dict[UUID, Any] = {}
        self.ended: set[UUID] = set()
        self.last_epoch = 0
        self.carried: dict[int, dict[UUID, Any]] = defaultdict(dict)
        self.held_by: dict[UUID, Counter[UUID]] = {}
        self.latest: dict[UUID, tuple[int, int]] = {}
        self.parked: set[UUID] = set()
        self.readmitted: dict[tuple[str, UUID], set[UUID]] = {}
        self.granted_in: dict[tuple[str, UUID], list[int]] = defaultdict(list)

    def check(self) -> None:
        steps: dict[str, Callable[[Any], None]] = {
            "granted": self._grant,
            "joined": self._join,
            "left": self._leave,
            "parked": self._park,
            "declared": lambda event: None,
            **dict.fromkeys(ENDS, self._end),
        }
        for event in self.events:
            steps[event.kind](event)
        self._readmissions()
        self._as_the_tables_say()

    # --- what a line does ----------------------------------------------------------------------------------------

    def _grant(self, event: Any) -> None:
        lease = self._lease(event)
        assert lease.id not in self.granted, f"lease {lease.id} was granted twice"
        assert event.epoch > self.last_epoch, f"epoch {event.epoch} of lease {lease.id} came after {self.last_epoch}"
        self.last_epoch = event.epoch
        self.granted[lease.id] = event
        self._asked_for(lease, event)
        for share in self.shares[lease.id]:
            self._carry(lease, share, event)
        self.held_by[lease.id] = Counter([self._first_holder(lease)])
        self._in_sequence(lease, event)
        execution = self.executions[lease.execution_id]
        if execution.ended_at is not None and event.at > execution.ended_at:
            assert lease.end_reason in ("reclaimed", "returned"), (
                f"lease {lease.id} was granted after its execution had ended, and was not taken back"
            )

    def _asked_for(self, lease: Any, event: Any) -> None:
        """Its shares are all of its request and nothing else, on distinct devices of one host."""
        shares = self.shares[lease.id]
        requests = self.requests[lease.execution_id]
        assert lease.position < len(requests), f"lease {lease.id} answers no request"
        request = requests[lease.position]
        assert request.min_devices <= len(shares) <= request.max_devices, (
            f"lease {lease.id} has {len(shares)} shares of {request.min_devices} to {request.max_devices}"
        )
        sizes = [share.memory_bytes for share in shares]
        wanted = request.group_bytes + len(shares) * request.per_device_bytes
        assert (sum(sizes), max(sizes) - min(sizes) <= 1) == (wanted, True), (
            f"lease {lease.id} has shares of {sizes} bytes, which are not {wanted} divided among them"
        )
        for share in shares:
            device = self.devices[share.device_id]
            assert device.host_id == lease.host_id, f"lease {lease.id} has a share on another host"
            assert device.kind == request.device, f"lease {lease.id} has a {device.kind} and asked for {request.device}"
            assert request.device_id in (None, device.host_index), (
                f"lease {lease.id} has device {device.host_index} and asked for {request.device_id}"
            )
            alone = request.exclusive or self._declaration(device, event).exclusive_only
            assert share.exclusive == alone, f"lease {lease.id} is exclusive={share.exclusive} and must be {alone}"

    def _carry(self, lease: Any, share: Any, event: Any) -> None:
        carried = self.carried[share.device_id]
        assert not (share.exclusive and carried), f"lease {lease.id} is exclusive beside others"
        assert not any(each.exclusive for each in carried.values()), f"lease {lease.id} came beside an exclusive one"
        carried[lease.id] = share
        reserved = sum(each.memory_bytes for each in carried.values())
        capacity = self._declaration(self.devices[share.device_id], event).capacity_bytes
        assert reserved <= capacity, f"lease {lease.id} over-books device {share.device_id}: {reserved} of {capacity}"

    def _first_holder(self, lease: Any) -> UUID:
        """Whoever holds or held it and is not told to have joined."""
        holders = Counter(hold.holder_id for hold in self.holds[lease.id])
        holders.subtract(self.joined[lease.id])
        assert holders.total() == (+holders).total() == 1, (
            f"lease {lease.id} is held by others than whom it was granted and who joined"
        )
        [holder_id] = +holders
        return holder_id

    def _in_sequence(self, lease: Any, event: Any) -> None:
        """Requests are answered in their order; a wait ends an invocation, and what follows answers all of them."""
        key, unit_id = lease.execution_id, self.executions[lease.execution_id].unit_id
        now, before = (lease.invocation, lease.position), self.latest.get(key, (0, -1))
        assert now > before, f"lease {lease.id} answers invocation and request {now} after {before}"
        if key in self.parked:
            waiting = {each for each in self.parked if self.executions[each].unit_id == unit_id}
            self.readmitted[event.made_by, unit_id] = waiting
            self.parked -= waiting
        if key in self.readmitted.get((event.made_by, unit_id), ()):
            new = bool(self.granted_in[event.made_by, key]) or now[0] > before[0]
            assert new, f"lease {lease.id} is of invocation {now[0]}, which had ended in a wait"
        else:
            expected = 0 if now[0] > before[0] else before[1] + 1
            assert now[1] == expected, f"lease {lease.id} answers request {now[1]} before request {expected}"
        self.latest[key] = now
        self.granted_in[event.made_by, key].append(lease.position)

    def _join(self, event: Any) -> None:
        holders = self._live(event)
        holder = self.holders[event.holder_id]
        assert holder.ended_at is None or event.at <= holder.ended_at, f"holder {holder.id} joined after its end"
        holders[event.holder_id] += 1

    def _leave(self, event: Any) -> None:
        holders = self._live(event)
        assert holders[event.holder_id], f"holder {event.holder_id} left lease {event.lease_id} and did not hold it"
        holders[event.holder_id] -= 1
        assert holders.total(), f"the last holder left lease {event.lease_id}, and it did not end"

    def _end(self, event: Any) -> None:
        self._live(event)
        lease = self._lease(event)
        assert lease.end_reason == event.kind, f"lease {lease.id} was {event.kind}, and is {lease.end_reason}"
        self.ended.add(lease.id)
        del self.held_by[lease.id]
        for share in self.shares[lease.id]:
            del self.carried[share.device_id][lease.id]

    def _park(self, event: Any) -> None:
        execution = self.executions[event.execution_id]
        # Only what a worker runs leaves a wait unnoticed and comes back: it failed, and was to be tried again.
        comes_back = execution.detached and execution.id == execution.unit_id
        assert execution.id not in self.parked or comes_back, f"execution {execution.id} was parked twice at once"
        self.parked.add(execution.id)

    # --- what they all led to ------------------------------------------------------------------------------------

    def _readmissions(self) -> None:
        """Whoever had waited was granted all that it had recorded, together with all that waited with it."""
        for (made_by, unit_id), waiting in self.readmitted.items():
            for key in waiting:
                execution, got = self.executions[key], self.granted_in[made_by, key]
                recorded = sum(self.began.get(each.made_by, 0) <= self.began[made_by] for each in self.requests[key])
                # Withdrawn before, so it never got anything again; or it had nothing recorded to be granted.
                gone = not got and (execution.state in TERMINAL and not self._granted_after(key, self.began[made_by]))
                # One that failed while it waited and is tried again starts from its first request, on its own.
                anew = got == [0] and execution.detached and key == unit_id
                assert got == list(range(recorded)) or gone or anew, (
                    f"execution {key} had recorded {recorded} requests, and was re-admitted with {got}"
                )

    def _as_the_tables_say(self) -> None:
        assert self.granted.keys() == self.leases.keys(), "there are leases that were never granted"
        live = {lease.id for lease in self.leases.values() if lease.ended_at is None}
        assert self.granted.keys() - self.ended == live, "other leases live than by the log"
        for key, holders in self.held_by.items():
            holds = Counter(hold.holder_id for hold in self.holds[key] if hold.ended_at is None)
            assert +holders == holds, f"lease {key} is held by others than by the log"
            assert self.leases[key].holder_count == holds.total(), f"lease {key} miscounts its holders"
        for holder_id in {each for holders in self.held_by.values() for each in +holders}:
            assert self.holders[holder_id].ended_at is None, f"holder {holder_id} has ended and holds"
        for share in (share for shares in self.shares.values() for share in shares):
            assert (share.ended_at is None) == (share.lease_id in live), (
                f"a share of lease {share.lease_id} did not end with it"
            )
        unfolded = _by(
            (each for shares in self.shares.values() for each in shares if each.ended_at and not each.folded_at),
            "device_id",
        )
        for device in self.devices.values():
            shares = [*self.carried[device.id].values(), *unfolded[device.id]]
            counted = (device.reserved_bytes, device.share_count, device.exclusive_count)
            replayed = (sum(each.memory_bytes for each in shares), len(shares), sum(each.exclusive for each in shares))
            assert counted == replayed, f"device {device.id} counts {counted}, and by the log it is {replayed}"
        for execution in self.executions.values():
            assert execution.state != "waiting" or execution.id in self.parked, f"{execution.id} waits unparked"

    # --- looking things up ---------------------------------------------------------------------------------------

    def _lease(self, event: Any) -> Any:
        assert event.lease_id in self.leases, f"line {event.id} tells of lease {event.lease_id}, which is none"
        lease = self.leases[event.lease_id]
        assert (event.execution_id, event.epoch) == (lease.execution_id, lease.epoch), (
            f"line {event.id} tells of another execution or epoch of lease {lease.id}"
        )
        return lease

    def _live(self, event: Any) -> Counter[UUID]:
        """The holders of the lease that a line tells of, which lives."""
        lease = self._lease(event)
        assert lease.id in self.granted, f"lease {lease.id} {event.kind} before it was granted"
        assert lease.id not in self.ended, f"lease {lease.id} {event.kind} after it had ended"
        return self.held_by[lease.id]

    def _declaration(self, device: Any, event: Any) -> Any:
        told = [each for each in self.declared if each.device_id == device.id and each.event_id < event.id]
        return told[-1] if told else device

    def _granted_after(self, execution_id: UUID, event_id: int) -> bool:
        return any(
            event.id > event_id and event.kind == "granted" and event.execution_id == execution_id
            for event in self.events
        )


def _by(rows: Any, column: str) -> dict[Any, list[Any]]:
    grouped = defaultdict(list)
    for row in rows:
        grouped[getattr(row, column)].append(row)
    return grouped
