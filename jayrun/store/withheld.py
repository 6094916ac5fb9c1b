"""What is not leased and yet not granted (`devices.withheld_bytes`): in quarantine, or used without a lease."""

from __future__ import annotations

from typing import Any

from psycopg import Connection as PgConnection

from jayrun.store.transactions import Book, Gate

_WITHHOLD = "SELECT jayrun.withhold(%s)"
_TOO_MUCH = "SELECT jayrun.withholds_too_much(%s)"


def withhold(book: Book, host_id: int) -> bool:
    """Withhold on the host what is to be withheld now. Returns whether that is less than before: then combine."""

    def unit(gate: Gate) -> bool:
        [(fell,)] = gate.commit(_WITHHOLD, (host_id,))
        return bool(fell)

    return book.gated(unit)


def is_too_much(pg: PgConnection[Any], host_id: int) -> bool:
    """Whether something is withheld there that needs to be no longer: a quarantine is over, or what was seen is old."""
    return pg.execute(_TOO_MUCH, (host_id,)).fetchone() == (True,)
