"""Texts from outside, made fit for PostgreSQL: it takes neither NUL nor halves of surrogate pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(text: str) -> str:
    """`text` with what PostgreSQL cannot store replaced: undecodable bytes of a command line, NUL in a message."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def plain_failure(failure: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A failure to be stored as JSON, its texts made plain."""
    if failure is None:
        return None
    return {name: plain(value) if isinstance(value, str) else value for name, value in failure.items()}
