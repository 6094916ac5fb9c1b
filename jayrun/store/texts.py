"""Texts for PostgreSQL: what it cannot store replaced (NUL, halves of surrogate pairs), and values as SQL literals.

Literals are for messages of several statements, which take no parameters. Rendering them here is several times quicker
than psycopg's ClientCursor, and the admission's messages are rendered while others wait for the gate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID


def plain(text: str) -> str:
    """`text` with what PostgreSQL cannot store replaced: undecodable bytes of a command line, NUL in a message."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def plain_failure(failure: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A failure to be stored as JSON, its texts made plain."""
    if failure is None:
        return None
    return {name: plain(value) if isinstance(value, str) else value for name, value in failure.items()}


def rendered(statement: str, parameters: Sequence[object]) -> str:
    """`statement` with each `%s` replaced by the literal of its parameter. Raises TypeError as `literal` does."""
    return statement % tuple(map(literal, parameters)) if parameters else statement


def literal(value: object) -> str:
    """`value` as an SQL literal: None, bool, int, float, UUID, text, a list of these, or a dict as JSON.

    Raises TypeError for anything else.
    """
    match value:
        case str():
            # As E'' it means the same whatever `standard_conforming_strings` says.
            return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
        case None:
            return "NULL"
        case bool() | int() | float():
            return str(value)
        case UUID():
            return f"'{value}'"
        case dict():
            return literal(json.dumps(value))
        case list():
            return f"ARRAY[{', '.join(map(literal, value))}]"
    raise TypeError(f"no SQL literal is known for {value!r}")
