"""Keys that sort by when they were made, so that a growing table is written at its end."""

from __future__ import annotations

import os
import time
from uuid import UUID


def new_id() -> UUID:
    """A UUID of version 7 (RFC 9562): 48 bits of milliseconds, the rest random.

    The clock only helps the index; no two clocks are compared, and order never depends on it.
    """
    stamp = time.time_ns() // 1_000_000
    noise = int.from_bytes(os.urandom(10), "big")
    value = (stamp << 80 | noise) & ~(0xF << 76) & ~(0x3 << 62)
    return UUID(int=value & (1 << 128) - 1 | 0x7 << 76 | 0x2 << 62)
