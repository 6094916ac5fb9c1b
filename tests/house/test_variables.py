"""Every variable that anything reads is known, so that a mistyped one can be told."""

from __future__ import annotations

import re
from pathlib import Path

from jayrun.settings import VARIABLES

ROOT = Path(__file__).parents[2]


def test_the_variables_that_are_read_are_those_that_are_known() -> None:
    files = [*(ROOT / "jayrun").rglob("*.py"), *(ROOT / "cli").rglob("*.py"), ROOT / "compose.yaml"]
    named = {name for path in files for name in re.findall(r"\bJAYRUN_[A-Z_]*[A-Z]\b", path.read_text())}
    assert named == set(VARIABLES)
