"""Whose memory on a device is: by the process itself, its kin, its leaders that are gone, and what it bears."""

from __future__ import annotations

from uuid import UUID

import pytest

from jayrun.domain.liveness import Incarnation, Inhabitant
from jayrun.domain.ownership import Hold, Known, Lineage, own

HERE, BELOW = 1000, 2000
LIVE, OTHER, ENDED, OLDER = (UUID(int=number) for number in range(1, 5))
live, other = Hold(LIVE, True, 9), Hold(OTHER, True, 8)
ended, older = Hold(ENDED, False, 7), Hold(OLDER, False, 3)


def seen(pid: int, *, inner: int | None = None, namespace: int | None = HERE, ticks: int | None = 50) -> Inhabitant:
    return Inhabitant(pid, pid if inner is None else inner, namespace, ticks, False)


def holder(pid: int, *holds: Hold, namespace: int = HERE, ticks: int = 50) -> Known:
    return Known(Incarnation("boot", namespace, pid, ticks), holds)


@pytest.mark.parametrize(
    ("lineage", "known", "named", "leases", "former"),
    [
        (Lineage(pid=7, itself=seen(7)), [holder(7, live)], [], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7)), [holder(7, live, other)], [], {LIVE, OTHER}, ()),
        (Lineage(pid=7, itself=seen(7, ticks=90)), [holder(7, live)], [], set(), ()),  # the number is used again
        (Lineage(pid=7, itself=seen(7), kin=(seen(6), seen(5))), [holder(5, live)], [], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7), kin=(seen(6), seen(5))), [holder(5, live), holder(6, other)], [], {OTHER}, ()),
        (Lineage(pid=7, itself=seen(7), kin=(seen(6),)), [holder(6, live), holder(7, ended)], [], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7)), [holder(7, ended, older)], [], set(), (ENDED, OLDER)),
        (Lineage(pid=7, itself=seen(7, inner=1, namespace=BELOW)), [holder(1, live, namespace=BELOW)], [], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7, inner=1, namespace=None)), [holder(1, live, namespace=BELOW)], [], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7, inner=1, namespace=BELOW)), [holder(1, live)], [], set(), ()),
        (Lineage(pid=7, itself=seen(7, inner=1, namespace=BELOW)), [holder(7, live)], [], set(), ()),
        (Lineage(pid=7, itself=seen(7), gone=(5,)), [holder(5, ended)], [], set(), (ENDED,)),
        (Lineage(pid=7, itself=seen(7), gone=(5,)), [holder(5, ended, namespace=BELOW)], [], set(), ()),
        (Lineage(pid=7), [holder(7, ended)], [], set(), (ENDED,)),  # gone, and the driver still shows it
        (Lineage(pid=7, itself=seen(7)), [], [live], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7)), [], [ended], set(), (ENDED,)),
        (Lineage(pid=7, itself=seen(7)), [holder(7, ended)], [live], {LIVE}, ()),
        (Lineage(pid=7, itself=seen(7)), [holder(8, live)], [], set(), ()),
    ],
)
def test_whose_a_process_is(
    lineage: Lineage, known: list[Known], named: list[Hold], leases: set[UUID], former: tuple[UUID, ...]
) -> None:
    owned = own(lineage, known, named=named, pid_namespace=HERE)
    assert (owned.leases, owned.former) == (leases, former)


def test_whether_who_held_it_is_alive() -> None:
    kept = Hold(OLDER, False, 3, is_attended=True)
    process = Lineage(pid=7, itself=seen(7), kin=(seen(6),))
    assert own(process, [holder(7, ended), holder(6, kept)], named=[], pid_namespace=HERE).is_attended
    assert not own(process, [holder(7, ended), holder(6, older)], named=[], pid_namespace=HERE).is_attended
