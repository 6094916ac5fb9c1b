"""What waits for any host: judged by the devices of all of them, which no single host's admission sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jayrun.domain.devices import BookedDevice
from jayrun.domain.planner import Impossible, judge
from jayrun.errors import PlacementImpossible
from jayrun.store.picture import booked_device
from jayrun.store.requests import from_row
from jayrun.store.transactions import Book, Gate

# Nobody reads the devices of all hosts while no one waits for any of several. One waiter stands for all of its shape;
# what fails fails by its shape.
_FREE = """
SELECT DISTINCT ON (w.shape) w.shape, m.requests FROM jayrun.executions w CROSS JOIN LATERAL (
    SELECT json_agg(json_build_array(q.device, q.backend, q.is_group, q.min_devices, q.max_devices,
                                     q.prefer_max_devices, q.group_bytes, q.per_device_bytes, q.exclusive, q.device_id)
                    ORDER BY m.id = m.unit_id, m.age, q.position) AS requests
    FROM jayrun.executions m JOIN jayrun.placement_requests q ON q.execution_id = m.id
    WHERE m.unit_id = w.id AND m.state = 'waiting') m
WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = 0
  AND (SELECT count(*) FROM jayrun.hosts) > 1
"""
_DEVICES = """
SELECT h.id, h.name, d.id, d.host_index, d.kind, d.backends, d.capacity_bytes, d.reserved_bytes, d.share_count,
       d.exclusive_count > 0, d.exclusive_only, CASE WHEN d.fault IS NOT NULL THEN 'offline' ELSE d.state END,
       d.withheld_bytes, d.parent_uuid IS NOT NULL, d.island, d.fault
FROM jayrun.hosts h LEFT JOIN jayrun.devices d ON d.host_id = h.id AND d.removed_at IS NULL
ORDER BY h.id, d.kind, d.host_index
"""
_FAIL = """
SELECT w.id::text, w.watched, jayrun.fail_waiting(w.id, %s::jsonb)
FROM (SELECT id, watched FROM jayrun.executions
      WHERE state = 'waiting' AND id = unit_id AND queue_id = 0 AND shape = %s ORDER BY id FOR UPDATE) w
"""


def fail_impossible(book: Book) -> int:
    """Let those fail who wait for any host and could be served by none, were it empty; returns how many shapes."""
    if not book.written(lambda pg: _impossible(lambda statement: pg.execute(statement).fetchall())):
        return 0

    def unit(gate: Gate) -> int:
        # Judged again behind the gate, through which devices are declared too.
        found = _impossible(gate.execute)
        watched: set[str] = set()
        for shape, reason in found.items():
            why = {"type": PlacementImpossible.__name__, "message": reason}
            watched |= {row[0] for row in gate.execute(_FAIL, (why, shape)) if row[1]}
        gate.commit(tell=watched)
        return len(found)

    return book.gated(unit)


def _impossible(execute: Callable[[str], Sequence[Any]]) -> dict[str, str]:
    """The shapes that no host could ever serve, and why."""
    waiting = execute(_FREE)
    if not waiting:
        return {}
    hosts: dict[tuple[int, str], list[BookedDevice]] = {}
    for host_id, name, *device in execute(_DEVICES):
        on_host = hosts.setdefault((host_id, name), [])
        if device[0] is not None:
            on_host.append(booked_device(host_id, device))
    found = {}
    for shape, requests in waiting:
        wanted = [from_row(row) for row in requests or ()]
        verdicts = {host: judge(wanted, devices) for host, devices in hosts.items()}
        reasons = [(name, each.reason) for (_, name), each in verdicts.items() if isinstance(each, Impossible)]
        if len(reasons) == len(hosts):
            found[shape] = "\n".join(f"on {name}: {reason}" for name, reason in reasons)
    return found
