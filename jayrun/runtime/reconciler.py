"""The reconciler: one pass that ends what the dead left behind and re-admits who waits.

Every process with a Runtime runs a pass at each tick, and so does `jayrun reconciler`; any number of them at once is
harmless. A pass derives everything from rows, so one that is killed is finished by the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from jayrun import probes
from jayrun.store import admission, everywhere, executions, leases, reclaim
from jayrun.store.transactions import Book


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass did: holders reclaimed, unclaimed grants given back, units admitted."""

    reclaimed: int
    returned: int
    admitted: int


def run_pass(book: Book, host_id: int) -> Pass:
    """Judge the host's holders by the kernel, give back what nobody claimed, and admit who fits now."""
    reclaimed = reclaim.sweep(book, host_id)
    returned = executions.return_unclaimed(book, host_id)
    probes.reach("pass.combining")
    wanted = leases.anybody_waits(book, host_id) or leases.anything_to_fold(book, host_id)
    admitted = admission.combine(book, host_id) if wanted else 0
    everywhere.fail_impossible(book)
    return Pass(reclaimed, returned, admitted)
