"""JSON documents: what executions are given and what they return, as far as the book can store it."""

from __future__ import annotations

import json

MAX_BYTES = 1_000_000
"""The largest document that the book stores, in bytes of UTF-8 JSON. It is a book of work, not a store of data."""


def to_json(value: object, argument: str) -> str:
    """`value` as JSON text.

    Raises TypeError for what JSON has no form for (other keys than text among them), ValueError for what PostgreSQL
    cannot store (NaN, infinity, NUL, halves of surrogate pairs) and for more than `MAX_BYTES`; `argument` names the
    value in the message.
    """
    _check(value, argument)
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    if (size := len(text.encode())) > MAX_BYTES:
        raise ValueError(
            f"{argument} is {size:,} bytes of JSON, and the book stores at most {MAX_BYTES:,}: "
            "put it where both sides can read it, and pass its name"
        )
    return text


def _check(value: object, where: str) -> None:
    match value:
        case None | bool() | int():
            pass
        case float():
            if value != value or value in (float("inf"), float("-inf")):
                raise ValueError(f"{where} is {value!r}, which JSON has no form for")
        case str():
            check_text(value, where)
        case list() | tuple():
            for place, each in enumerate(value):
                _check(each, f"{where}[{place}]")
        case dict():
            for key, each in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where} has the key {key!r} ({type(key).__name__}); JSON's keys are text")
                check_text(key, f"a key of {where}")
                _check(each, f"{where}[{key!r}]")
        case _:
            raise TypeError(f"{where} is {value!r} ({type(value).__name__}), which JSON has no form for")


def check_text(value: object, where: str) -> None:
    """Refuse what is no text (TypeError), or none that PostgreSQL can store (ValueError); `where` names the value."""
    if not isinstance(value, str):
        raise TypeError(f"{where} must be text, not {value!r} ({type(value).__name__})")
    if "\0" in value:
        raise ValueError(f"{where} contains NUL, which PostgreSQL cannot store")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} contains half of a surrogate pair, which is no text") from None
