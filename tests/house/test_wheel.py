"""What is published: the wheel and the sdist hold jayrun and nothing else, and work without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the tracked files alone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    return out


@pytest.mark.wheel
def test_the_wheel_holds_jayrun_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"jayrun"}
    tracked = subprocess.run(
        ["git", "ls-files", "jayrun", "cli", "migrations"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    expected = {name if name.startswith("jayrun/") else f"jayrun/{name}" for name in tracked}
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.wheel
def test_the_sdist_can_be_built_from(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "cli/app.py", "migrations/versions/0001_the_book.py"} <= names


@pytest.mark.wheel
def test_the_wheel_works_without_the_repository(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel)],
        check=True,
    )
    code = "import jayrun, jayrun.cli.app, jayrun.store.schema as s; print(jayrun.__file__, *s.known_revisions())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    path, *revisions = done.stdout.split()
    assert path.startswith(str(tmp_path))
    assert revisions[0] == "0001"
