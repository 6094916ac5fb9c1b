"""The settings of the whole book: one row, whose columns say themselves what they mean and what they may be."""

from __future__ import annotations

import math
import re
from typing import Any

from psycopg import Connection as PgConnection
from psycopg import sql
from psycopg.errors import CheckViolation, NumericValueOutOfRange

from jayrun.domain.checks import whole_number
from jayrun.store import admission, withheld
from jayrun.store.transactions import Book

Row = dict[str, Any]

MOST_SECONDS = 30 * 86_400.0
"""No setting is longer than that, so that every instant can be written down: 30 days."""
_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, NULL), pg_get_expr(x.adbin, x.adrelid),
       coalesce(col_description(a.attrelid, a.attnum), '')
FROM pg_attribute a LEFT JOIN pg_attrdef x ON x.adrelid = a.attrelid AND x.adnum = a.attnum
WHERE a.attrelid = 'jayrun.settings'::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> 'only_row'
ORDER BY a.attnum
"""
_VALUES = "SELECT to_jsonb(s) FROM jayrun.settings s"
_RULE = """
SELECT coalesce(obj_description(oid, 'pg_constraint'), pg_get_constraintdef(oid)) FROM pg_constraint
WHERE conrelid = 'jayrun.settings'::regclass AND conname = %s
"""
_HOSTS = "SELECT DISTINCT host_id FROM jayrun.devices WHERE removed_at IS NULL ORDER BY host_id"


def read(book: Book) -> list[Row]:
    """Every setting: `name`, `value`, its `default`, and in `meaning` what it is for."""

    def unit(pg: PgConnection[Any]) -> list[Row]:
        row = pg.execute(_VALUES).fetchone()
        assert row is not None
        return [
            {
                "name": name,
                "value": row[0][name],
                "default": _parsed(name, default.strip("'"), kind),
                "meaning": meaning,
            }
            for name, kind, default, meaning in pg.execute(_COLUMNS).fetchall()
        ]

    return book.written(unit)


def change(book: Book, name: str, value: str) -> None:
    """Give the setting `name` the `value`, as a person writes it, and let it take effect.

    Raises ValueError, saying which there are, or what the value must be; then nothing has changed.
    """

    def unit(pg: PgConnection[Any]) -> None:
        kinds = {row[0]: row[1] for row in pg.execute(_COLUMNS).fetchall()}
        if name not in kinds:
            raise ValueError(f"no setting is called {name!r}; there are: {', '.join(kinds)}")
        parsed = _parsed(name, value, kinds[name])
        statement = sql.SQL("UPDATE jayrun.settings SET {} = %s").format(sql.Identifier(name))
        try:
            pg.execute(statement, (parsed,))
        except CheckViolation as refusal:
            row = pg.execute(_RULE, (refusal.diag.constraint_name,)).fetchone()
            raise ValueError(f"{name} must not be {value}: {_readable(row[0] if row else str(refusal))}") from None
        except NumericValueOutOfRange:
            raise ValueError(f"{name} must not be {value}: it is too large") from None

    book.written(unit)
    for (host_id,) in book.written(lambda pg: pg.execute(_HOSTS).fetchall()):
        withheld.withhold(book, host_id)
        admission.combine(book, host_id)


def _parsed(name: str, value: str, kind: str) -> bool | int | float:
    if kind == "boolean":
        if value.lower() not in _WORDS:
            raise ValueError(f"{name} must be on or off, but is {value!r}")
        return _WORDS[value.lower()]
    try:
        number = int(value) if kind == "integer" else float(value)
    except ValueError:
        noun = "a whole number" if kind == "integer" else "a number"
        raise ValueError(f"{name} must be {noun}, but is {value!r}") from None
    if kind == "integer":
        return whole_number(number, name, minimum=-(2**31))
    if not math.isfinite(number) or number > MOST_SECONDS:
        raise ValueError(f"{name} must be at most {MOST_SECONDS:.0f} (30 days), but is {value}")
    return number


def _readable(rule: str) -> str:
    """A constraint as PostgreSQL writes it, without its brackets and casts."""
    return re.sub(r"^CHECK|::[a-z ]+|[()']", "", rule).strip()
