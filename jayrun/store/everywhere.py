"""What waits for any host: judged by the devices of all of them, which no single host's admission sees."""

from __future__ import annotations

from typing import Any

from psycopg import Connection as PgConnection
from psycopg.types.json import Jsonb

from jayrun.domain.devices import BookedDevice
from jayrun.domain.planner import Impossible, judge
from jayrun.store.picture import booked_device
from jayrun.store.requests import from_row
from jayrun.store.transactions import Book

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
       d.exclusive_count > 0, d.exclusive_only, d.state
FROM jayrun.hosts h LEFT JOIN jayrun.devices d ON d.host_id = h.id AND d.removed_at IS NULL
ORDER BY h.id, d.kind, d.host_index
"""
_FAIL = """
SELECT jayrun.fail_waiting(w.id, %(why)s), CASE WHEN w.watched THEN pg_notify('jayrun', w.id::text) END
FROM (SELECT id, watched FROM jayrun.executions
      WHERE state = 'waiting' AND id = unit_id AND queue_id = 0 AND shape = %(shape)s ORDER BY id FOR UPDATE) w
"""


def fail_impossible(book: Book) -> int:
    """Let those fail who wait for any host and could be served by none, were it empty; returns how many shapes."""

    def unit(pg: PgConnection[Any]) -> int:
        waiting = pg.execute(_FREE).fetchall()
        if not waiting:
            return 0
        hosts: dict[tuple[int, str], list[BookedDevice]] = {}
        for host_id, name, *device in pg.execute(_DEVICES).fetchall():
            on_host = hosts.setdefault((host_id, name), [])
            if device[0] is not None:
                on_host.append(booked_device(host_id, device))
        failed = 0
        for shape, requests in waiting:
            wanted = [from_row(row) for row in requests or ()]
            verdicts = {host: judge(wanted, devices) for host, devices in hosts.items()}
            reasons = {host: verdict.reason for host, verdict in verdicts.items() if isinstance(verdict, Impossible)}
            if len(reasons) == len(hosts):
                message = "\n".join(f"on {name}: {reason}" for (_, name), reason in reasons.items())
                why = Jsonb({"type": "PlacementImpossible", "message": message})
                pg.execute(_FAIL, {"why": why, "shape": shape})
                failed += 1
        return failed

    return book.written(unit)
