"""Chance in tests, from one seed: SEED in the environment, and SOAK_SECONDS for how long the soak test lasts."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

SEED = int(os.environ.get("SEED", "1"))
SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """For `parametrize`: `count` of the cases, drawn by the seed, are left to `make test`; the others are slow."""
    drawn = random.Random(SEED).sample(range(len(cases)), count)
    slow = pytest.mark.slow
    return [case if number in drawn else pytest.param(case, marks=slow) for number, case in enumerate(cases)]
