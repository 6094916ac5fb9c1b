"""The rooms of the house: who may import whom, and which libraries live in which room.

A module imports from its own room and from lower floors only: every room can be read, and tested, without those above.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"jayrun": ROOT / "jayrun", "jayrun.cli": ROOT / "cli", "jayrun.migrations": ROOT / "migrations"}

# Lowest first. The migrations are read by the store and import nothing of the house.
FLOORS = [
    {"errors", "frames", "probes", "migrations"},
    {"domain"},
    {"settings", "kernel"},
    {"descendants"},
    {"store", "devices", "embedded"},
    {"runtime"},
    {"placement"},
    {"__init__"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# A library (or an attribute of `os`) and the modules or rooms that may use it; the standard library is everybody's.
KEEPERS = {
    "sqlalchemy": ("jayrun.store", "jayrun.migrations"),
    "psycopg": ("jayrun.store", "jayrun.migrations", "jayrun.embedded"),
    "alembic": ("jayrun.store.schema", "jayrun.migrations"),
    "pynvml": ("jayrun.devices.nvml",),
    "typer": ("jayrun.cli",),
    "rich": ("jayrun.cli",),
    **dict.fromkeys(("os.environ", "os.environb", "os.getenv", "os.putenv"), ("jayrun.settings",)),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the house by its installed name."""
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


MODULES = dict(modules())


def room_of(module: str) -> str:
    """`jayrun.store.leases` is in the room store, `jayrun` itself in the room `__init__`."""
    return [*module.split("."), "__init__"][1]


def uses(module: str) -> Iterator[str]:
    """Full names of what a module imports, and of the attributes of `os` that it uses."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = [*package[: len(package) + 1 - level], source] if level else [source]
                yield from (".".join(filter(None, [*base, name.name])) for name in names)
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute):
                yield f"os.{attribute}"


def test_every_module_has_a_room() -> None:
    assert {room_of(module) for module in MODULES} <= set(FLOOR)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_room_and_below(module: str) -> None:
    def is_above(name: str) -> bool:
        here, there = room_of(module), room_of(name)
        # `from jayrun import Runtime`: a public name, which is no module, is kept by the front door.
        return there != here and FLOOR.get(there, FLOOR["__init__"]) >= FLOOR[here]

    assert [name for name in uses(module) if is_within(name, ["jayrun"]) and is_above(name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_library_stays_in_its_rooms(module: str) -> None:
    closed = [library for library, keepers in KEEPERS.items() if not is_within(module, keepers)]
    assert [name for name in uses(module) if is_within(name, closed)] == []


def is_within(name: str, parents: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)
