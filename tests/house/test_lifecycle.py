"""docs/lifecycle.md names the states, moves and tests that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from jayrun.domain.devices import DeviceState
from jayrun.domain.lifecycle import EXECUTION_MOVES, EndReason, ExecutionState

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/lifecycle.md").read_text()
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", PAGE)))


def section(title: str) -> str:
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def tables(title: str) -> Iterator[list[list[str]]]:
    """The tables of a section: their rows as cells, heads first."""
    for table in re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        yield [rows[0], *rows[2:]]


def moves(title: str) -> set[tuple[str, str]]:
    """A row of two cells with several words each stands for all pairs."""
    [(_, *rows)] = tables(title)
    return {(start, end) for first, second, *_ in rows for start in first.split(", ") for end in second.split(", ")}


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in functions


def test_every_fault_names_its_test() -> None:
    [(head, *rows)] = tables("What holds under which fault")
    assert head == ["fault", "what happens", "what is guaranteed", "shown by"]
    assert len(NAMED) > 40
    for fault, *_, shown in rows:
        assert fault.startswith("**") or re.fullmatch(r"`tests/\S+::\w+`(, `tests/\S+::\w+`)*", shown), fault
    for (fault, *_), (after, *_) in pairwise(rows):
        assert not (fault.startswith("**") and after.startswith("**")), f"nothing is said of {fault}"


def test_the_moves_of_executions_are_those_of_the_book() -> None:
    assert moves("Executions") == {(start.value, end.value) for start, ends in EXECUTION_MOVES.items() for end in ends}
    chart = [line for line in section("Executions").split("```")[1].splitlines() if "►" in line]
    assert set(re.findall(r"[a-z]+", " ".join(chart))) == {state.value for state in ExecutionState}


def test_the_ends_of_leases_and_holders_are_those_of_the_book() -> None:
    assert moves("Leases") == {("live", reason.value) for reason in EndReason}
    chart = section("Leases").split("```")[1]
    assert set(re.findall(r"(?<=[:·] )\w+", chart)) == {reason.value for reason in EndReason}
    schema = (ROOT / "migrations/versions/0001_the_book.py").read_text()
    holders = schema[schema.index("CREATE TABLE jayrun.holders") : schema.index("CREATE INDEX holders_alive")]
    ends = re.search(r"end_reason IN \((.*?)\)", holders)
    assert ends is not None
    assert moves("Holders") == {("alive", reason) for reason in re.findall(r"\w+", ends[1])}


def test_the_states_of_devices_and_hosts_are_those_of_the_book() -> None:
    (_, *devices), (_, *hosts) = tables("Devices and hosts")
    assert [row[0] for row in devices] == [*(state.value for state in DeviceState), "removed"]
    assert [row[0] for row in hosts] == ["online", "silent", "forgotten"]
