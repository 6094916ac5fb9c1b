"""The reconciler: one pass that ends what the dead left behind, re-admits who waits, and makes way for who cannot be.

Every process with a Runtime runs a pass at each tick, and so does `jayrun reconciler`; any number of them at once is
harmless. A pass derives everything from rows, so one that is killed is finished by the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from jayrun import probes
from jayrun.store import admission, blockers, everywhere, executions, leases, reclaim
from jayrun.store.transactions import Book


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass did: holders reclaimed, unclaimed grants given back, units admitted, idle resources flagged because
    they are in somebody's way, and units failed because nobody in their circle could go on."""

    reclaimed: int
    returned: int
    admitted: int
    flagged: int
    failed: int


def run_pass(book: Book, host_id: int) -> Pass:
    """Judge the host's holders by the kernel, give back what nobody claimed, admit who fits, make way for the rest."""
    reclaimed = reclaim.sweep(book, host_id)
    returned = executions.return_unclaimed(book, host_id)
    probes.reach("pass.combining")
    somebody_waits = leases.anybody_waits(book, host_id)
    admitted = admission.combine(book, host_id) if somebody_waits or leases.anything_to_fold(book, host_id) else 0
    everywhere.fail_impossible(book)
    flagged, failed = blockers.make_way(book, host_id) if somebody_waits else (0, 0)
    return Pass(reclaimed, returned, admitted, flagged, failed)
