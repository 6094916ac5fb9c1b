"""The dead are known by facts: doubt means alive."""

from __future__ import annotations

import pytest

from jayrun.domain.liveness import (
    Incarnation,
    Inhabitant,
    Sighting,
    Surroundings,
    Verdict,
    is_over,
    judge,
    judge_below,
)

HOLDER = Incarnation("boot", 4026531836, 1234, 5000)


@pytest.mark.parametrize(
    ("sighting", "verdict"),
    [
        (Sighting("boot", 4026531836, 5000, False), Verdict.ALIVE),
        pytest.param(Sighting("boot", 4026531836, None, False), Verdict.ALIVE, id="unreadable"),
        pytest.param(Sighting("boot", 4026531836, None, True), Verdict.DEAD, id="absent"),
        pytest.param(Sighting("boot", 4026531836, 5002, False), Verdict.DEAD, id="pid used again"),
        pytest.param(Sighting("boot", 4026531836, 5001, False), Verdict.ALIVE, id="rounded up"),
        pytest.param(Sighting("boot", 4026531836, 4999, False), Verdict.ALIVE, id="rounded down"),
        pytest.param(Sighting("boot", 4026531836, 4998, False), Verdict.DEAD, id="another start"),
        pytest.param(Sighting("other", 4026531836, None, True), Verdict.UNSEEN, id="another boot"),
        pytest.param(Sighting("boot", 1, None, True), Verdict.UNSEEN, id="another namespace"),
        pytest.param(Sighting("boot", 1, 5000, False), Verdict.UNSEEN, id="the same pid in another namespace"),
    ],
)
def test_the_verdict_follows_the_facts(sighting: Sighting, verdict: Verdict) -> None:
    assert judge(HOLDER, sighting) is verdict


BELOW = Incarnation("boot", 77, 5, 5000)
ITSELF = Inhabitant(900, 5, 77, 5000, False)
NEIGHBOUR = Inhabitant(900, 1, 77, 4000, False)
STRANGER = Inhabitant(900, 5, 78, 5000, False)


@pytest.mark.parametrize(
    ("inhabitants", "sees_all", "is_first", "verdict"),
    [
        pytest.param([ITSELF], False, False, Verdict.ALIVE, id="seen"),
        pytest.param([STRANGER, NEIGHBOUR, ITSELF], True, True, Verdict.ALIVE, id="among others"),
        pytest.param([Inhabitant(900, 5, None, None, False)], True, True, Verdict.ALIVE, id="unreadable"),
        pytest.param([Inhabitant(900, 5, 77, 5000, True)], False, False, Verdict.DEAD, id="zombie"),
        pytest.param([Inhabitant(900, 5, 77, 5002, False)], True, True, Verdict.DEAD, id="pid used again"),
        pytest.param([Inhabitant(900, 5, 77, 5001, False)], True, True, Verdict.ALIVE, id="rounded"),
        pytest.param([STRANGER], True, True, Verdict.DEAD, id="the same in another namespace"),
        pytest.param([], True, True, Verdict.DEAD, id="absent below the first namespace"),
        pytest.param([NEIGHBOUR], True, False, Verdict.DEAD, id="absent in a namespace of which one is seen"),
        pytest.param([], True, False, Verdict.UNSEEN, id="a namespace beside"),
        pytest.param([STRANGER], True, False, Verdict.UNSEEN, id="a namespace beside, others below"),
        pytest.param([], False, True, Verdict.UNSEEN, id="hidden, below the first namespace"),
        pytest.param([NEIGHBOUR], False, False, Verdict.UNSEEN, id="hidden, in a namespace of which one is seen"),
    ],
)
def test_the_verdict_from_above(
    inhabitants: list[Inhabitant], sees_all: bool, is_first: bool, verdict: Verdict
) -> None:
    assert judge_below(BELOW, Surroundings(inhabitants, sees_all, is_first)) is verdict


def test_time_counts_only_where_nobody_sees_it() -> None:
    over = {
        (verdict, silent, watched)
        for verdict in Verdict
        for silent in (False, True)
        for watched in (False, True)
        if is_over(verdict, silent=silent, watched=watched)
    }
    assert over == {(Verdict.DEAD, silent, watched) for silent in (False, True) for watched in (False, True)} | {
        (Verdict.UNSEEN, True, True)
    }
