"""The history check: the log of leases replayed into one legal serial history."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import psycopg


@dataclass
class Device:
    capacity: int
    shares: dict[object, tuple[int, bool]] = field(default_factory=dict)


def replay(sql: psycopg.Connection) -> int:
    """Replay every event; AssertionError where the history is not legal. Returns how many leases it saw."""
    devices = {row[0]: Device(row[1]) for row in sql.execute("SELECT id, capacity_bytes FROM jayrun.devices")}
    shares = defaultdict(list)
    for lease_id, device_id, memory_bytes, exclusive in sql.execute(
        "SELECT lease_id, device_id, memory_bytes, exclusive FROM jayrun.lease_shares"
    ):
        shares[lease_id].append((device_id, memory_bytes, exclusive))
    granted: set[object] = set()
    ended: set[object] = set()
    last_epoch = 0
    for kind, lease_id, epoch in sql.execute("SELECT kind, lease_id, epoch FROM jayrun.lease_events ORDER BY id"):
        if kind == "granted":
            assert lease_id not in granted, f"lease {lease_id} was granted twice"
            assert epoch > last_epoch, f"epoch {epoch} of lease {lease_id} came after {last_epoch}"
            assert shares[lease_id], f"lease {lease_id} has no shares"
            last_epoch = epoch
            granted.add(lease_id)
            for device_id, memory_bytes, exclusive in shares[lease_id]:
                device = devices[device_id]
                others = device.shares.values()
                assert not (exclusive and others), f"lease {lease_id} is exclusive beside others"
                assert not any(alone for _, alone in others), f"lease {lease_id} came beside an exclusive one"
                device.shares[lease_id] = (memory_bytes, exclusive)
                reserved = sum(size for size, _ in device.shares.values())
                assert reserved <= device.capacity, f"lease {lease_id} over-books device {device_id}"
        elif kind in ("released", "reclaimed", "returned"):
            assert lease_id in granted, f"lease {lease_id} ended before it was granted"
            assert lease_id not in ended, f"lease {lease_id} ended twice"
            ended.add(lease_id)
            for device_id, _, _ in shares[lease_id]:
                del devices[device_id].shares[lease_id]
    return len(granted)
