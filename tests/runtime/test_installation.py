"""R51: whether an environment has our package, whole and alone."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from jayrun.domain.health import State
from jayrun.runtime.installation import judge_packages

TEXT = b"def of_ours(): ...\n"


def installed(folder: Path, name: str, *, files: str = "", editable: bool = False) -> Distribution:
    """A distribution as pip writes it down; `files`: what it says it installed."""
    facts = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (facts / "RECORD").write_text(files)
    if editable:
        (facts / "direct_url.json").write_text(json.dumps({"url": "file:///there", "dir_info": {"editable": True}}))
    return Distribution.at(facts)


def ours(folder: Path) -> Distribution:
    """Ours, with one file."""
    (folder / "jayrun").mkdir(parents=True)
    (folder / "jayrun/kernel.py").write_bytes(TEXT)
    digest = base64.urlsafe_b64encode(hashlib.sha256(TEXT).digest()).rstrip(b"=").decode()
    files = f"jayrun/kernel.py,sha256={digest},{len(TEXT)}\njayrun_leases-1.2.dist-info/RECORD,,\n"
    return installed(folder, "jayrun-leases", files=files)


def judged(folder: Path, *found: Distribution) -> dict[State, list[str]]:
    remarks: dict[State, list[str]] = {}
    for each in judge_packages(found, imported=folder / "jayrun"):
        remarks.setdefault(each.state, []).append(f"{each.detail} -> {each.next}")
    return remarks


def test_ours_alone(tmp_path: Path) -> None:
    other = installed(tmp_path, "jayrunner", files="jayrunner/__init__.py,,\n")
    assert list(judged(tmp_path, ours(tmp_path), other)) == [State.OK]


@pytest.mark.parametrize("name", ["jayrun", "Jay.Run-Tools"])
def test_another_one_with_our_module(tmp_path: Path, name: str) -> None:
    rival = installed(tmp_path, name, files="jayrun/__init__.py,,\n")
    found = judged(tmp_path, ours(tmp_path), rival)
    assert list(found) == [State.FAILED]
    assert f"{name.lower().replace('.', '-')} 1.2" in found[State.FAILED][0]


def test_files_that_another_one_left_or_took(tmp_path: Path) -> None:
    mine = ours(tmp_path)
    (tmp_path / "jayrun/kernel.py").write_text("def of_theirs(): ...\n")
    assert "not as they were installed: jayrun/kernel.py" in judged(tmp_path, mine)[State.FAILED][0]
    (tmp_path / "jayrun/kernel.py").unlink()
    assert "--force-reinstall" in judged(tmp_path, mine)[State.FAILED][0]


def test_a_second_copy(tmp_path: Path) -> None:
    found = judged(tmp_path / "one", ours(tmp_path / "one"), ours(tmp_path / "two"))
    assert f"1.2 in {tmp_path}/two" in found[State.WARNING][0]


def test_one_that_is_used_where_it_is_written(tmp_path: Path) -> None:
    mine = installed(tmp_path / "packages", "jayrun-leases", editable=True)
    assert list(judged(tmp_path / "clone", mine)) == [State.OK]


def test_one_that_is_not_installed(tmp_path: Path) -> None:
    assert "is not installed here" in judged(tmp_path)[State.WARNING][0]
