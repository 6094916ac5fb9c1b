"""The dead are known by facts: doubt means alive."""

from __future__ import annotations

import pytest

from jayrun.domain.liveness import Incarnation, Sighting, Verdict, judge

HOLDER = Incarnation("boot", 4026531836, 1234, 5000)


@pytest.mark.parametrize(
    ("sighting", "verdict"),
    [
        (Sighting("boot", 4026531836, 5000, False), Verdict.ALIVE),
        pytest.param(Sighting("boot", 4026531836, None, False), Verdict.ALIVE, id="unreadable"),
        pytest.param(Sighting("boot", 4026531836, None, True), Verdict.DEAD, id="absent"),
        pytest.param(Sighting("boot", 4026531836, 5001, False), Verdict.DEAD, id="pid used again"),
        pytest.param(Sighting("boot", 4026531836, 4999, False), Verdict.DEAD, id="another start"),
        pytest.param(Sighting("other", 4026531836, None, True), Verdict.UNSEEN, id="another boot"),
        pytest.param(Sighting("boot", 1, None, True), Verdict.UNSEEN, id="another namespace"),
        pytest.param(Sighting("boot", 1, 5000, False), Verdict.UNSEEN, id="the same pid in another namespace"),
    ],
)
def test_the_verdict_follows_the_facts(sighting: Sighting, verdict: Verdict) -> None:
    assert judge(HOLDER, sighting) is verdict
