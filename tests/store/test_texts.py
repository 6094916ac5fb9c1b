"""Values as SQL literals: the server reads back what was meant, whatever its settings."""

from __future__ import annotations

import json
from uuid import UUID

import psycopg
import pytest

from jayrun.store.texts import literal, rendered

TEXTS = [
    "plain",
    "it's",
    'a "quoted" one',
    "back\\slash",
    "\\'; DROP TABLE jayrun.leases; --",
    "%s 100 %",
    "$$",
    "ünï ☃",
    "",
]


@pytest.mark.parametrize("standard", ["on", "off"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back_as_it_was(sql: psycopg.Connection, text: str, standard: str) -> None:
    sql.execute(f"SET standard_conforming_strings = {standard}")
    assert sql.execute(f"SELECT {literal(text)}").fetchone() == (text,)
    document = {"text": text, "list": [text, None, True, 1.5]}
    assert sql.execute(f"SELECT {literal(document)}::jsonb").fetchone() == (document,)
    assert sql.execute(f"SELECT {literal([text, text])}").fetchone() == ([text, text],)
    assert sql.execute(rendered("SELECT %s, %s", (text, 7))).fetchone() == (text, 7)


def test_other_values(sql: psycopg.Connection) -> None:
    key = UUID("01890000-0000-7000-8000-000000000000")
    assert sql.execute(
        f"SELECT {literal(key)}::uuid, {literal(None)}::text, {literal(True)}, {literal(2**62)}"
    ).fetchone() == (
        key,
        None,
        True,
        2**62,
    )
    assert json.loads(literal({"a": 1})[2:-1]) == {"a": 1}


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"no SQL literal is known for b'x'"):
        literal(b"x")
