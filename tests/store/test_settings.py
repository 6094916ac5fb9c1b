"""The settings of the book: read with their meanings, and changed only to what they may be."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from fleet import cuda, gpus, scene

from jayrun.store import audit, settings
from jayrun.store.transactions import Book


def test_every_setting_says_what_it_means(book: Book) -> None:
    rows = settings.read(book)
    assert {row["name"] for row in rows} >= {"bypass_limit", "tick_seconds", "respect_observed", "quarantine_seconds"}
    assert [row["name"] for row in rows if not row["meaning"] or row["value"] != row["default"]] == []


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("bypass_limit", "3", 3),
        ("tick_seconds", "0.5", 0.5),
        ("respect_observed", "on", True),
        ("respect_observed", "False", False),
        ("quarantine_seconds", "60", 60),
    ],
)
def test_a_setting_is_changed(book: Book, name: str, value: str, stored: object) -> None:
    settings.change(book, name, value)
    assert {row["name"]: row["value"] for row in settings.read(book)}[name] == stored


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("colour", "red", "no setting is called 'colour'; there are: bypass_limit, "),
        ("only_row", "off", "no setting is called 'only_row'"),
        ("bypass_limit", "many", "bypass_limit must be a whole number, but is 'many'"),
        ("bypass_limit", "2.5", "bypass_limit must be a whole number, but is '2.5'"),
        ("bypass_limit", "-1", "bypass_limit must not be -1: bypass_limit >= 0"),
        ("bypass_limit", "99999999999", "bypass_limit must be at most"),
        ("tick_seconds", "soon", "tick_seconds must be a number, but is 'soon'"),
        ("tick_seconds", "nan", "tick_seconds must be at most 2592000 (30 days), but is nan"),
        ("tick_seconds", "inf", "tick_seconds must be at most 2592000 (30 days), but is inf"),
        ("tick_seconds", "0", "tick_seconds must not be 0: tick_seconds > 0"),
        ("tick_seconds", "11", "tick_seconds must not be 11: holder_ttl_seconds is at least three times tick_seconds"),
        ("quarantine_seconds", "-3", "quarantine_seconds must not be -3: quarantine_seconds >= 0"),
        ("respect_observed", "maybe", "respect_observed must be on or off, but is 'maybe'"),
    ],
)
def test_what_a_setting_may_not_be(book: Book, name: str, value: str, words: str) -> None:
    before = settings.read(book)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        settings.change(book, name, value)
    assert settings.read(book) == before


def test_what_was_withheld_is_granted_once_it_is_not_to_be(book: Book, sql: psycopg.Connection[Any]) -> None:
    here = scene(book, gpus(1))
    sql.execute("UPDATE jayrun.settings SET respect_observed = true")
    sql.execute(
        """
        INSERT INTO jayrun.device_observations (device_id, observed_at, finding, detail, shows_processes, foreign_bytes)
        SELECT id, clock_timestamp(), 'ok', '', true, 20000000000 FROM jayrun.devices
        """
    )
    settings.change(book, "quarantine_seconds", "60")
    assert [row["withheld_bytes"] for row in audit.capacity(book)] == [20 * 10**9]
    settings.change(book, "respect_observed", "off")
    assert [row["withheld_bytes"] for row in audit.capacity(book)] == [0]
    here.granted(cuda(24))
