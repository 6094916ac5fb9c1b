"""Admission, the heart: load the picture behind the gate, let the rules decide, write what they decided.

Everyone who needs something from the gate serves all who wait on that host: a new ask is decided in its place of the
queue, together with the waiters that fit now. Releases that were committed meanwhile are folded first, so whoever
releases and then combines hands the capacity on in the same breath.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from uuid import UUID

from jayrun import kernel, probes
from jayrun.domain.liveness import Incarnation, Verdict
from jayrun.domain.queue import Admission, Waiter, admit
from jayrun.domain.requests import Request
from jayrun.domain.sequence import shape_of
from jayrun.domain.visible import EVERYTHING, Visible, asked_by
from jayrun.errors import BookError
from jayrun.store import at_once, everywhere, leases, reclaim
from jayrun.store.asks import (
    Ask,
    Ended,
    Execution,
    Granted,
    Impossible,
    Member,
    Outcome,
    Parked,
    Unavailable,
    introduce,
)
from jayrun.store.changes import Changes
from jayrun.store.leases import Lease, leased
from jayrun.store.picture import Picture, load
from jayrun.store.transactions import Book, Gate

# Reading and judging a waiter costs more than all else behind the gate, and most passes serve one or two.
_FEW = 2
_FOLLOW_UP_SECONDS = 1.0  # the patience for what an ask does for others, once it has its own answer
_HELD = """
SELECT s.device_id FROM jayrun.executions e JOIN jayrun.leases l ON l.execution_id = e.id
JOIN jayrun.lease_shares s ON s.lease_id = l.id WHERE e.unit_id = %s AND l.ended_at IS NULL
"""
_LAST_IN_LINE = 2**62  # the age of an ask whose number is not drawn yet: younger than everyone in the queue


def reserve(book: Book, ask: Ask) -> Outcome:
    """Decide `ask` in its place of the queue, and with it everyone on the host who can be served now.

    Idempotent by (execution, position, invocation): asking again after a lost answer returns the first lease. Before it
    answers that nothing is free, the dead of the host are reclaimed. Raises `BookUnreachable` and `BookBusy`.
    """
    host_id = ask.asker.execution.host_id
    if (lease := at_once.grant(book, ask)) is not None:
        probes.reach("reserve.granted")
        return Granted(lease)
    outcome = _try_reserve(book, ask, judged=False)
    if isinstance(outcome.answer, Unavailable):
        reclaim.sweep(book, host_id)
        if outcome.more:  # so many were served before it that the batch never reached it
            combine(book, host_id)
        outcome = _try_reserve(book, ask, judged=True)
    if isinstance(outcome.answer, Granted):
        probes.reach("reserve.granted")
    elif isinstance(outcome.answer, Parked):
        probes.reach("reserve.parked")
    # The answer stands, whatever becomes of the rest: a book that is away now is looked at again at the next tick.
    with contextlib.suppress(BookError):
        _serve_others(book.with_patience(_FOLLOW_UP_SECONDS), ask, outcome)
    return outcome.answer


def _serve_others(book: Book, ask: Ask, outcome: _Tried) -> None:
    host_id = ask.asker.execution.host_id
    is_parked = isinstance(outcome.answer, Parked)
    # A release that raced with a park did not see it, so the park looks for the release.
    if outcome.more or (is_parked and leases.anything_to_fold(book, host_id)):
        combine(book, host_id)
    if is_parked and ask.asker.execution.is_free:
        everywhere.fail_impossible(book)


def combine(book: Book, host_id: int, *, settling: str = "") -> int:
    """Fold what was released on the host and admit everyone who fits now; returns how many units were admitted.

    One transaction admits at most the book's `grants_per_batch`, so that the gate is never held long; as many follow as
    it takes. `settling` are statements that let go of something first (`leases.settling`), in the same transaction: so
    one flush makes both durable, and both are replayed together.
    """

    def unit(gate: Gate) -> tuple[int, bool]:
        if settling:
            probes.reach("settle.telling")
            gate.first(settling)
        picture = load(gate, host_id, of_each=_FEW)
        probes.reach("combine.loaded")
        changes = Changes(host_id)
        decided = _decide(gate, picture, host_id)
        _admit_units(changes, picture, decided, host_id)
        changes.write(gate, decided, durable=bool(settling))
        return len(decided.grants), _is_full(picture, decided)

    admitted, more = book.gated(unit)
    if settling:
        probes.reach("settle.told")
    if admitted:
        probes.reach("combine.admitted")
    return admitted + combine(book, host_id) if more else admitted


@dataclass(frozen=True, slots=True)
class _Tried:
    """What one transaction answered, and whether its batch was full, so that more waiters may fit."""

    answer: Outcome
    more: bool = False


def _try_reserve(book: Book, ask: Ask, *, judged: bool) -> _Tried:
    """One transaction. It parks nobody before the dead were `judged`: then it answers Unavailable and wrote nothing."""
    asker = ask.asker.execution
    slot = (asker.id, ask.position, ask.asker.invocation)

    def unit(gate: Gate) -> _Tried:
        picture = load(gate, asker.host_id, slot, asker.unit_id, asker.holder_id, of_each=_FEW)
        probes.reach("reserve.loaded")
        at_once.note(book, asker.holder_id, is_crowded=bool(picture.units))
        changes = Changes(asker.host_id)
        if (known := _known(gate, picture, asker)) is not None:
            decided = _decide(gate, picture, asker.host_id)
            _admit_units(changes, picture, decided, asker.host_id)
            changes.write(gate, decided, durable=True)  # what the earlier try committed may not be flushed yet
            return _Tried(known)
        waiter = Waiter(
            id=asker.id,
            priority=asker.priority,
            age=_LAST_IN_LINE if ask.age is None else ask.age,
            hosts=picture.hosts if asker.is_free else (asker.host_id,),
            requests=_asked(gate, picture, ask),
            recorded=asked_by(
                (request for member in ask.unit for request in member.recorded),
                EVERYTHING if asker.detached else picture.own_sight,  # another worker may see more
            ),
            shape="",  # no waiter has this shape: the ask is judged by itself
        )
        decided = _decide(gate, picture, asker.host_id, waiter)
        reason = decided.impossible.get(asker.id)
        own = next((grant for grant in decided.grants if grant.id == asker.id), None)
        lease_id = None
        if reason is not None or (own is None and (not judged or not ask.wait)):
            # Nothing is written for the ask. What was decided for others is, since the fold that let them in is too.
            _admit_units(changes, picture, decided, asker.host_id)
            changes.write(gate, decided)
            answer = Unavailable() if reason is None else Impossible(reason)
            return _Tried(answer, _is_full(picture, decided))
        if own is None:
            _park(changes, ask.unit, picture.own_visible)
            if asker.is_free and len(picture.hosts) > 1:
                changes.tell_workers()
        else:
            introduce(changes, ask.asker, upto=ask.position + 1, state="running")
            lease_id = changes.add_lease(slot, host_id=asker.host_id, holder_id=asker.holder_id, shares=own.plan[0])
        _admit_units(changes, picture, decided, asker.host_id)
        epochs = changes.write(gate, decided)
        more = _is_full(picture, decided)
        if own is None or lease_id is None:
            return _Tried(Parked(), more)
        lease = Lease(lease_id, epochs[lease_id], *slot[:2], leased(own.plan[0], picture.uuids))
        return _Tried(Granted(lease), more)

    return book.gated(unit)


def _asked(gate: Gate, picture: Picture, ask: Ask) -> tuple[Request, ...]:
    """The request that is asked, among the devices that its process sees; with a MIG slice it can use nothing else."""
    asked = asked_by([ask.asker.recorded[ask.position]], picture.own_sight)
    slices = frozenset(device.id for device in picture.devices if device.is_slice)
    if not slices:
        return asked
    held = {row[0] for row in gate.execute(_HELD, (ask.asker.execution.unit_id,))}
    if not held:
        return asked
    beside = held & slices or {device.id for device in picture.devices} - slices
    return tuple(
        replace(each, among=frozenset(beside if each.among is None else beside & each.among)) for each in asked
    )


def _known(gate: Gate, picture: Picture, asker: Execution) -> Outcome | None:
    """What an earlier try of the same ask did whose answer was lost, or what somebody did to the execution or to its
    holder: who has ended holds nothing any more, and waits for nothing."""
    if not picture.is_alive and not asker.detached:
        return Ended("lost")
    if picture.own_lease is not None:
        lease_id, end_reason = picture.own_lease
        return Ended(end_reason) if end_reason else Granted(leases.read_lease(gate, UUID(lease_id)))
    if picture.own_state in ("waiting", "admitted"):
        return Parked()
    if picture.own_state not in (None, "running"):
        return Ended(picture.own_state)
    if picture.own_unit is not None:
        state, holder_id, is_cancelled = picture.own_unit
        if is_cancelled:
            return Ended("cancelled")
        if asker.detached and (state != "running" or holder_id != str(asker.holder_id)):
            return Parked()  # and another worker has gone on with it
    return None if picture.is_alive else Ended("lost")


def _decide(gate: Gate, picture: Picture, host_id: int, ask: Waiter | None = None) -> Admission:
    """Let the rules decide on a picture with few waiters of each shape; more are read when it may depend on them."""
    decided = decide(picture, host_id, ask)
    if _is_full(picture, decided) or not _depends_on_more(picture, decided):
        return decided
    whole = load(gate, host_id)
    picture.units, picture.workers = whole.units, whole.workers
    return decide(picture, host_id, ask)


def _depends_on_more(picture: Picture, decided: Admission) -> bool:
    """Whether equals of the waiters that were read, behind them, may be served too, or have to be kept for.

    Not where one that was read is refused, and so would be its equals, and all of them may still be bypassed.
    """
    gone = {grant.id for grant in decided.grants} | decided.impossible.keys()
    passes = Counter(bypass.shape for bypass in decided.bypasses)
    waiters = [unit.waiter for unit in picture.units.values() if unit.waiter.id not in gone]
    refused = {each.shape for each in waiters}
    return any(
        shape not in refused or bypassed + passes[shape] >= picture.bypass_limit
        for shape, bypassed in picture.cut.items()
    )


def decide(picture: Picture, host_id: int, ask: Waiter | None = None) -> Admission:
    """Let the rules decide; dead processes are left out, waiters and workers (the next sweep ends them)."""
    while True:
        waiters = [unit.waiter for unit in picture.units.values()]
        decided = admit(
            waiters if ask is None else [*waiters, ask],
            {host_id: picture.devices},
            bypass_limit=picture.bypass_limit,
            batch=picture.batch,
            workers={host_id: [worker for worker, _ in picture.workers.values()]},
        )
        chosen = [unit for grant in decided.grants if (unit := picture.units.get(grant.id)) is not None]
        dead = [unit for unit in chosen if unit.incarnation is not None and is_dead(unit.incarnation)]
        workers = [grant.worker for grant in decided.grants if grant.worker is not None]
        dead_workers = [worker for worker in workers if is_dead(picture.workers[worker][1])]
        if not dead and not dead_workers:
            return decided
        for unit in dead:
            del picture.units[unit.waiter.id]
        for worker in dead_workers:
            del picture.workers[worker]


def is_dead(incarnation: Incarnation) -> bool:
    return kernel.verdict(incarnation) is Verdict.DEAD


def _is_full(picture: Picture, decided: Admission) -> bool:
    return len(decided.grants) >= picture.batch


def _park(changes: Changes, unit: tuple[Member, ...], visible: Visible | None) -> None:
    """Everyone of the unit waits, with all that it has recorded, for what its process sees by its mask `visible`."""
    requests = [request for member in unit for request in member.recorded]
    head = unit[-1].execution
    shape = shape_of((head.queue_id,), requests, head.operator, None if head.detached else visible)
    for member in unit:
        if member.booked is not None:
            changes.park(member.execution.id, shape=shape, invocation=member.invocation)
        introduce(changes, member, upto=len(member.recorded), state="waiting", shape=shape)


def _admit_units(changes: Changes, picture: Picture, decided: Admission, host_id: int) -> None:
    for grant in decided.grants:
        unit = picture.units.get(grant.id)
        if unit is None:  # the ask itself
            continue
        holder_id = unit.holder_id or grant.worker
        assert holder_id is not None  # the rules grant to no one who has neither
        changes.admit(grant.id, holder_id)
        for slot, shares in zip(unit.slots, grant.plan, strict=True):
            changes.add_lease(slot, host_id=host_id, holder_id=holder_id, shares=shares)
    for unit_id, reason in decided.impossible.items():
        if unit_id in picture.units:
            changes.fail(unit_id, picture.units[unit_id].holder_id, reason)
