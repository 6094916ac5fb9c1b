"""Requests as rows: the columns of `placement_requests`, in one order, both ways."""

from __future__ import annotations

from typing import Any

from jayrun.domain.devices import Backend, Device
from jayrun.domain.requests import Request


def from_row(row: list[Any] | tuple[Any, ...]) -> Request:
    """The request of one row, as `jayrun.picture` gives it: the columns in the order of the table."""
    return Request(
        device=Device(row[0]),
        backend=Backend(row[1]),
        group=row[2],
        min_devices=row[3],
        max_devices=row[4],
        prefer_max_devices=row[5],
        group_bytes=row[6],
        per_device_bytes=row[7],
        exclusive=row[8],
        device_id=row[9],
    )


def to_record(request: Request) -> dict[str, Any]:
    """The request as an object for `jayrun.write_pass`: the columns by name."""
    return {
        "device": request.device.value,
        "backend": request.backend.value,
        "is_group": request.group,
        "min_devices": request.min_devices,
        "max_devices": request.max_devices,
        "prefer_max_devices": request.prefer_max_devices,
        "group_bytes": request.group_bytes,
        "per_device_bytes": request.per_device_bytes,
        "exclusive": request.exclusive,
        "device_id": request.device_id,
    }
