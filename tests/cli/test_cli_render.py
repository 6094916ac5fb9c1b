"""Tables and JSON, as pure functions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest

from jayrun.cli.render import Column, age, local, printable, ranges, short_id, to_json, to_lines, to_table

COLUMNS = (
    Column("NAME", lambda row: row["name"]),
    Column("SIZE", lambda row: row["size"], number=True),
    Column("WORDS", lambda row: row["words"], folds=True),
    Column("EXTRA", lambda row: "something", spare=2),
    Column("MORE", lambda row: "else", spare=1),
)
ROWS = [
    {"name": "a", "size": "20 GB", "words": "one two three four five six"},
    {"name": "longer", "size": "1.5 GB", "words": "-"},
]


@pytest.fixture
def two_hours_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "EAST-2")
    time.tzset()
    yield
    monkeypatch.delenv("TZ")
    time.tzset()


def test_a_table_without_a_terminal_is_as_wide_as_it_needs() -> None:
    assert to_table(ROWS, COLUMNS).splitlines() == [
        "NAME      SIZE  WORDS                        EXTRA      MORE",
        "a        20 GB  one two three four five six  something  else",
        "longer  1.5 GB  -                            something  else",
    ]


@pytest.mark.parametrize("width", range(24, 70))
def test_a_table_fits_its_terminal_and_keeps_what_matters(width: int) -> None:
    lines = to_table(ROWS, COLUMNS, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("NAME      SIZE  WORDS")
    words = " ".join(line[16:26].strip() for line in lines[1:] if not line.startswith("longer"))
    assert words.split()[:2] == ["one", "two"]
    assert sum(line.startswith("longer  1.5 GB") for line in lines) == 1
    assert ("EXTRA" in lines[0]) <= ("MORE" in lines[0])  # the highest number goes first


def test_a_hopelessly_narrow_terminal_still_gets_an_answer() -> None:
    assert to_table(ROWS, COLUMNS, width=10)


@pytest.mark.parametrize("styled", [False, True])
def test_long_words_go_below_their_row_where_not_all_fits(styled: bool) -> None:
    columns = (*COLUMNS[:2], Column("WHY", lambda row: row["words"], folds=True, below=True), COLUMNS[4])
    assert to_table(ROWS, columns, width=60, styled=styled).count("\n") == 2
    assert to_table(ROWS, columns).count("\n") == 2
    head, *lines = to_table(ROWS, columns, width=26, styled=styled).splitlines()
    assert "WHY" not in head
    assert lines == [
        "a        20 GB  else",
        "    one two three four",
        "    five six",
        "longer  1.5 GB  else",
    ]


def test_styles_are_only_for_terminals() -> None:
    assert "\x1b[" not in to_table(ROWS, COLUMNS, width=60)
    assert "\x1b[1m" in to_table(ROWS, COLUMNS, width=60, styled=True)


def test_what_people_call_things_does_not_reach_the_terminal_as_commands() -> None:
    row = {"name": "[bold]x[/bold] :smile:", "size": "\x1b[31mred\n", "words": ""}
    text = to_table([row], COLUMNS[:3], width=80, styled=False)
    assert "[bold]x[/bold] :smile:" in text
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    assert printable("") == "-"
    assert printable("Grüße 世界") == "Grüße 世界"


def test_wide_characters_count_twice() -> None:
    rows = [{"name": "世界", "size": "1", "words": "x"}, {"name": "abcd", "size": "1", "words": "y"}]
    lines = to_table(rows, COLUMNS[:3]).splitlines()
    assert lines[1] == "世界     1  x"
    assert lines[2] == "abcd     1  y"


def test_facts_are_aligned() -> None:
    assert to_lines([("id", "1"), ("longer", "a\tb")]) == "id      1\nlonger  a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.99, "0 s"),
        (-5, "0 s"),
        (12.7, "12 s"),
        (60, "1 m"),
        (192, "3 m 12 s"),
        (3600, "1 h"),
        (7_500, "2 h 5 m"),
        (3_605, "1 h"),
        (86_400 * 3 + 4 * 3_600 + 59, "3 d 4 h"),
        (86_400 * 400, "400 d"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text
    assert age(timedelta(seconds=seconds)) == text


@pytest.mark.usefixtures("two_hours_east")
def test_times_are_local() -> None:
    assert local(datetime(2026, 3, 1, 23, 30, 59, 999_999, tzinfo=UTC)) == "2026-03-02 01:30:59"
    assert local(None) == "-"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([5, 0, 1, 3], "0-1,3,5"), ([7, 6], "6-7")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_json_is_exact() -> None:
    identity = UUID("01a22f23-b1b8-7cd7-bbfb-faf626ed9748")
    row = {
        "id": identity,
        "bytes": 2**62 + 1,
        "at": datetime(2026, 3, 1, 12, 0, 0, 123_456, tzinfo=timezone(timedelta(hours=2))),
        "age": timedelta(minutes=1, microseconds=5),
        "ids": [0, 1],
        "flag": True,
        "none": None,
        "whole": Decimal(3),
        "part": Decimal("0.25"),
        "text": "ü\x1b",
    }
    assert json.loads(to_json([row])) == [
        {
            "id": "01a22f23-b1b8-7cd7-bbfb-faf626ed9748",
            "bytes": 2**62 + 1,
            "at": "2026-03-01T12:00:00.123456+02:00",
            "age": 60.000005,
            "ids": [0, 1],
            "flag": True,
            "none": None,
            "whole": 3,
            "part": 0.25,
            "text": "ü\x1b",
        }
    ]
    assert to_json(row).isascii()
    assert to_json([]) == "[]"
    assert short_id(identity) == "faf626ed9748"
    with pytest.raises(TypeError, match="no JSON for"):
        to_json([{"odd": object()}])
