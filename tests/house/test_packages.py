"""What is packaged is what is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_packages_listed_are_the_folders_on_disk() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"jayrun": "jayrun", **setuptools["package-dir"]}
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sorted(setuptools["packages"]) == sorted(found)
