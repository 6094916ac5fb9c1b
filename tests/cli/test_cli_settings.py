"""`jayrun settings`, and what `jayrun devices ignore` sets of a device."""

from __future__ import annotations

import re

import pytest
from cli_helpers import Jayrun


def test_listing_and_changing(jayrun: Jayrun) -> None:
    listed = jayrun("settings", "list").out
    assert re.search(r"^respect_observed +off +off +Memory that processes without a lease", listed, re.MULTILINE)
    assert re.search(r"^look_seconds +30 +30 +How often", listed, re.MULTILINE)
    told = jayrun("settings", "set", "respect_observed", "on")
    assert (told.code, told.out) == (0, "respect_observed is on\n")
    told = jayrun("settings", "set", "look_seconds", "7.5", "--json")
    assert [(row["name"], row["value"], row["default"]) for row in told.json] == [("look_seconds", 7.5, 30)]
    values = {row["name"]: row["value"] for row in jayrun("settings", "list", "--json").json}
    assert (values["respect_observed"], values["look_seconds"], values["bypass_limit"]) == (True, 7.5, 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("colour red", "no setting is called 'colour'"),
        ("bypass_limit many", "must be a whole number"),
        ("bypass_limit -1", "bypass_limit must not be -1"),
        ("tick_seconds 11", "at least three times"),
    ],
)
def test_what_is_refused_is_wrong_usage(jayrun: Jayrun, arguments: str, words: str) -> None:
    told = jayrun("settings", "set", *arguments.split())
    assert told.code == 2
    assert words in told.err


def test_what_is_passed_over_on_a_device(jayrun: Jayrun) -> None:
    jayrun("devices", "declare", "--simulate", "2x24GB")

    def ignored() -> list[tuple[int, list[str]]]:
        return [(row["ignore_bytes"], row["ignore_commands"]) for row in jayrun("devices", "list", "--json").json]

    usual = ignored()[1]
    assert "Xorg" in usual[1]
    told = jayrun("devices", "ignore", "0", "--below-gb", "1.5")
    assert (told.code, told.out) == (0, "the audit of gpu 0 is changed\n")
    assert ignored() == [(1_500_000_000, usual[1]), usual]
    told = jayrun("devices", "ignore", "0", "--command", "sway", "--command", "mpv", "--json")
    assert [(row["device_id"], row["ignore_commands"]) for row in told.json] == [(0, ["sway", "mpv"])]
    jayrun("devices", "ignore", "0", "1", "--no-commands")
    assert ignored() == [(1_500_000_000, []), (usual[0], [])]
    jayrun("devices", "declare", "--simulate", "2x24GB")  # declaring again leaves that alone
    assert ignored() == [(1_500_000_000, []), (usual[0], [])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0", "give --below-gb"),
        ("0 --below-gb -1", "--below-gb must not be negative"),
        ("0 --command x --no-commands", "exclude each other"),
        ("7 --below-gb 1", "no device gpu 7"),
    ],
)
def test_what_cannot_be_passed_over(jayrun: Jayrun, arguments: str, words: str) -> None:
    jayrun("devices", "declare", "--simulate", "1x24GB")
    told = jayrun("devices", "ignore", *arguments.split())
    assert told.code == 2
    assert words in " ".join(told.err.split())
