"""`jayrun queue`: who waits, and for what."""

from __future__ import annotations

from contextlib import closing

from jayrun.settings import Settings
from jayrun.store import audit

from .book import open_judged
from .options import AsJson
from .render import Column, age, local, short_id, show_rows

COLUMNS = (
    Column("POS", lambda row: str(row["position"]), number=True),
    Column("HOST", lambda row: row["host"] or "any", spare=1),
    Column("ID", lambda row: short_id(row["execution_id"])),
    Column("EXECUTION", lambda row: row["execution"]),
    Column("PRIORITY", lambda row: str(row["priority"]), number=True, spare=4),
    Column("USER", lambda row: row["user"] or "-"),
    Column("PID", lambda row: str(row["pid"] or "-"), number=True),
    Column("LABEL", lambda row: row["label"] or "-", folds=True, spare=2),
    Column("ASKS", lambda row: row["asks"] or "-", folds=True),
    Column("WAITING", lambda row: age(row["waiting"]), number=True),
    Column("SINCE", lambda row: local(row["waiting_since"]), spare=3),
    Column("REASON", lambda row: row["reason"], folds=True, below=True),
)


def queue(as_json: AsJson = False) -> None:
    """List who waits, in the order of admission, and why.

    The reason says how the devices stand that could serve it; `jayrun why ID` tells more.
    """
    with closing(open_judged(Settings.load())) as book:
        rows = audit.queue(book)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="nobody waits")
