"""Admission against the real book: outcomes, order, hand-over, idempotence, and what interleaves with it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import cuda, cuda_group, gpus, scene
from history import replay
from processes import CONTEXT, PATIENCE, finished, process, until

from jayrun import probes
from jayrun.domain.devices import DeviceState
from jayrun.domain.lifecycle import ExecutionState
from jayrun.store import admission, at_once, audit, devices, executions, holders, leases, reclaim, submissions
from jayrun.store.admission import Ask, Ended, Granted, Impossible, Member, Parked, Unavailable
from jayrun.store.executions import Attended, Claimed
from jayrun.store.transactions import Book


def state_of(sql: psycopg.Connection, execution_id: object) -> str:
    row = sql.execute("SELECT state FROM jayrun.executions WHERE id = %s", (execution_id,)).fetchone()
    assert row is not None
    return str(row[0])


def claim(book: Book, unit_id: UUID) -> Claimed | None:
    return executions.attend(book, [unit_id]).claimed.get(unit_id)


# --- outcomes --------------------------------------------------------------------------------------------------------


def test_a_grant_is_a_lease_with_shares_a_holder_and_an_event(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(2))
    lease = stage.granted(cuda_group(2, 3))
    assert [share.host_index for share in lease.shares] == [0, 1]
    [row] = audit.leases(book)
    assert (row["id"], row["epoch"], row["memory_bytes"], row["pid"]) == (lease.id, lease.epoch, 6 * 10**9, os.getpid())
    assert [r["reserved_bytes"] for r in audit.capacity(book)] == [3 * 10**9] * 2
    assert replay(sql) == 1


def test_unavailable_without_waiting_leaves_nothing(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    stage.granted(cuda(20))
    execution_id, outcome = stage.reserve(cuda(5), wait=False)
    assert outcome == Unavailable()
    assert sql.execute("SELECT 1 FROM jayrun.executions WHERE id = %s", (execution_id,)).fetchone() is None


def test_impossible_is_told_at_once_with_numbers_and_leaves_nothing(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(2))
    stage.granted(cuda(1))
    for request in (cuda(25), cuda_group(3, 1), cuda(1, device_id=7)):
        _, outcome = stage.reserve(request)
        assert isinstance(outcome, Impossible)
        assert "24 GB" in outcome.reason
    assert len(sql.execute("SELECT 1 FROM jayrun.executions").fetchall()) == 1


def test_priority_then_age_decide_who_is_admitted(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    low = [stage.reserve(cuda(24))[0] for _ in range(2)]
    high, _ = stage.reserve(cuda(24), priority=5)
    assert [row["execution_id"] for row in audit.queue(book)] == [high, *low]
    order = []
    for _ in range(3):
        assert leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
        assert admission.combine(book, stage.host_id) == 1
        [admitted] = [key for key in (high, *low) if state_of(sql, key) == "admitted"]
        claimed = claim(book, admitted)
        assert claimed is not None
        [lease] = claimed.leases
        order.append(admitted)
    assert order == [high, *low]


def test_a_sequence_is_admitted_as_a_whole_or_not_at_all(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(2))
    blockers = [stage.granted(cuda(24)), stage.granted(cuda(24))]
    asked = stage.ask(cuda(20))
    member = asked.asker.__class__(
        execution=asked.asker.execution, invocation=1, recorded=(cuda(20), cuda(20)), booked=None
    )
    assert admission.reserve(book, Ask(asker=member, position=0)) == Parked()
    for blocker, expected in zip(blockers, ("waiting", "admitted"), strict=True):
        leases.release(book, stage.host_id, stage.holder.id, [(blocker.id, blocker.epoch)])
        admission.combine(book, stage.host_id)
        assert state_of(sql, asked.asker.execution.id) == expected
    claimed = claim(book, asked.asker.execution.id)
    assert claimed is not None
    assert [lease.position for lease in claimed.leases] == [0, 1]


# --- idempotence -----------------------------------------------------------------------------------------------------


def test_asking_again_with_the_same_id_gives_the_same_lease(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    ask = stage.ask(cuda(2))
    first, second = admission.reserve(book, ask), admission.reserve(book, ask)
    assert isinstance(first, Granted)
    assert first == second
    assert len(audit.leases(book)) == 1


def test_asking_again_for_a_lease_that_has_ended_is_no_lease(book: Book) -> None:
    stage = scene(book, gpus(1))
    ask = stage.ask(cuda(2))
    first = admission.reserve(book, ask)
    assert isinstance(first, Granted)
    leases.release(book, stage.host_id, stage.holder.id, [(first.lease.id, first.lease.epoch)])
    assert admission.reserve(book, ask) == Ended("released")
    assert audit.leases(book) == []


def test_asking_again_while_parked_stays_parked(book: Book) -> None:
    stage = scene(book, gpus(1))
    stage.granted(cuda(24))
    ask = stage.ask(cuda(2))
    assert admission.reserve(book, ask) == admission.reserve(book, ask) == Parked()
    assert len(audit.queue(book)) == 1


@pytest.mark.parametrize("crowded", [False, True], ids=["at once", "behind the gate"])
def test_a_lost_answer_to_commit_is_found_again(book: Book, sql: psycopg.Connection, crowded: bool) -> None:
    stage = scene(book, gpus(1))
    at_once.note(book, stage.holder.id, is_crowded=crowded)
    cut = []

    def lose_the_answer() -> None:
        if not cut:
            cut.append(True)
            raise psycopg.OperationalError("the connection was cut after COMMIT")

    with probes.arm("gate.committed", lose_the_answer):
        lease = stage.granted(cuda(2))
    assert cut
    assert [row["id"] for row in audit.leases(book)] == [lease.id]


def test_release_twice_after_reclaim_or_with_a_wrong_epoch_changes_nothing(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(10))
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch + 1)])
    assert len(audit.leases(book)) == 1
    for _ in range(2):
        leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
        admission.combine(book, stage.host_id)
        assert audit.capacity(book)[0]["reserved_bytes"] == 0
    assert replay(sql) == 1


# --- 40001, at every statement and at COMMIT -------------------------------------------------------------------------

REFUSE_ONCE = """
CREATE SEQUENCE public.refusals;
CREATE FUNCTION public.refuse_twice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('public.refusals') <= 2 THEN
        RAISE EXCEPTION 'injected' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN NULL;
END $$;
"""


@pytest.mark.parametrize(
    "where",
    [
        "AFTER INSERT ON jayrun.executions FOR EACH STATEMENT",
        "AFTER INSERT ON jayrun.placement_requests FOR EACH STATEMENT",
        "AFTER INSERT ON jayrun.leases FOR EACH STATEMENT",
        "AFTER INSERT ON jayrun.lease_shares FOR EACH STATEMENT",
        "AFTER INSERT ON jayrun.lease_holders FOR EACH STATEMENT",
        "AFTER UPDATE ON jayrun.devices FOR EACH STATEMENT",
        "AFTER UPDATE ON jayrun.lease_shares FOR EACH STATEMENT",  # the fold
        "COMMIT",
    ],
)
@pytest.mark.parametrize("crowded", [False, True], ids=["at once", "behind the gate"])
def test_a_serialization_failure_replays_the_whole_unit(
    book: Book, sql: psycopg.Connection, crowded: bool, where: str
) -> None:
    stage = scene(book, gpus(1))
    at_once.note(book, stage.holder.id, is_crowded=crowded)
    first = stage.granted(cuda(10))
    leases.release(book, stage.host_id, stage.holder.id, [(first.id, first.epoch)])
    sql.execute(REFUSE_ONCE)
    try:
        if where == "COMMIT":  # a deferred constraint trigger fires inside COMMIT itself
            sql.execute(
                "CREATE CONSTRAINT TRIGGER injected AFTER INSERT ON jayrun.leases DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION public.refuse_twice()"
            )
        else:
            sql.execute(f"CREATE TRIGGER injected {where} EXECUTE FUNCTION public.refuse_twice()")
        lease = stage.granted(cuda(20))
    finally:
        row = sql.execute("SELECT last_value FROM public.refusals").fetchone()
        sql.execute("DROP FUNCTION public.refuse_twice() CASCADE; DROP SEQUENCE public.refusals")
    assert row is not None
    assert row[0] >= 3, "the fault did not fire"
    assert [live["id"] for live in audit.leases(book)] == [lease.id]
    assert replay(sql) == 2
    assert audit.violations(book) == []


# --- interleavings ---------------------------------------------------------------------------------------------------


def test_a_release_after_the_combiners_snapshot_is_not_lost(book: Book, sql: psycopg.Connection) -> None:
    """The combiner has looked, the holder lets go, the combiner finds nothing free: the releaser must see who waits."""
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    waiter, _ = stage.reserve(cuda(24))
    told: list[bool] = []

    def release_now() -> None:
        if not told:
            told.append(leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)]))

    with probes.arm("combine.loaded", release_now):
        assert admission.combine(book, stage.host_id) == 0
    assert told == [True]  # somebody waits: so the releaser combines
    assert admission.combine(book, stage.host_id) == 1
    assert state_of(sql, waiter) == "admitted"


def test_a_release_between_snapshot_and_park_is_seen_by_who_parks(book: Book, sql: psycopg.Connection) -> None:
    """The asker has looked, the holder lets go before the asker is in the queue: the asker must see the release."""
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    seen: list[bool] = []
    looks: list[None] = []

    def release_at_the_second_look() -> None:  # the first finds nothing free and lets the dead be judged
        looks.append(None)
        if len(looks) == 2:
            seen.append(leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)]))

    with probes.arm("reserve.loaded", release_at_the_second_look):
        waiter, outcome = stage.reserve(cuda(24))
    assert seen == [False]  # the releaser saw nobody
    assert outcome == Parked()
    assert state_of(sql, waiter) == "admitted"


@pytest.mark.parametrize("asked", [1, 99])
def test_an_ask_that_gets_nothing_still_serves_whom_its_fold_made_room_for(
    book: Book, sql: psycopg.Connection, asked: int
) -> None:
    """The author of a release died before it combined; the next ask is refused, or impossible, and folds it."""
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    waiter, _ = stage.reserve(cuda(24))
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    _, outcome = stage.reserve(cuda(asked), wait=False)
    assert isinstance(outcome, Unavailable | Impossible)
    assert state_of(sql, waiter) == "admitted"


def test_an_ask_queues_behind_an_open_admission_and_sees_what_it_did(book: Book) -> None:
    """Two asks for the last device at once: the second waits at the gate, then decides on a fresh picture."""
    stage = scene(book, gpus(1))
    at_once.note(book, stage.holder.id, is_crowded=True)
    inside, go_on = threading.Event(), threading.Event()
    outcomes: list[Any] = []

    def pause_the_first() -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(PATIENCE)

    with probes.arm("reserve.loaded", pause_the_first):
        threads = [threading.Thread(target=lambda: outcomes.append(stage.reserve(cuda(24))[1])) for _ in range(2)]
        threads[0].start()
        assert inside.wait(PATIENCE)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Granted", "Parked"]


# --- the queue -------------------------------------------------------------------------------------------------------


def test_a_big_request_is_served_within_its_bypass_bound(book: Book, sql: psycopg.Connection) -> None:
    """R34: an endless stream of small ones goes past the big one so often and no more; other devices are never idle."""
    sql.execute("UPDATE jayrun.settings SET bypass_limit = 5")
    stage = scene(book, [*gpus(1, 24), *gpus(2, 8)[1:]])  # the big one can never use the second device
    held = [stage.granted(cuda(12, device_id=0))]
    big, outcome = stage.reserve(cuda(24))
    assert outcome == Parked()
    past = 0
    for _ in range(20):
        _, small = stage.reserve(cuda(12, device_id=0), wait=False)
        if isinstance(small, Granted):
            past += 1
            oldest, held = held[0], [*held[1:], small.lease]
            leases.release(book, stage.host_id, stage.holder.id, [(oldest.id, oldest.epoch)])
    assert past == 5
    elsewhere = stage.granted(cuda(4, device_id=1))  # what the big one cannot use is never kept from others
    held.append(elsewhere)
    for lease in held:
        leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    admission.combine(book, stage.host_id)
    assert state_of(sql, big) == "admitted"
    assert replay(sql) == 1 + 5 + 1 + 1


def test_adding_resizing_draining_and_removing_devices_judge_every_waiter(book: Book, sql: psycopg.Connection) -> None:
    """R32."""
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    small, _ = stage.reserve(cuda(10))
    big, _ = stage.reserve(cuda(20))
    devices.declare(book, stage.host_id, gpus(2, 12)[1:])
    admission.combine(book, stage.host_id)
    assert (state_of(sql, small), state_of(sql, big)) == ("admitted", "waiting")
    devices.declare(book, stage.host_id, gpus(1, 16))  # below what is in use: nothing new, the lease stays
    admission.combine(book, stage.host_id)
    assert state_of(sql, big) == "failed"
    failure = sql.execute("SELECT failure FROM jayrun.executions WHERE id = %s", (big,)).fetchone()
    assert failure is not None
    assert failure[0]["type"] == "PlacementImpossible"
    assert "16 GB" in failure[0]["message"]
    [live] = [row for row in audit.leases(book) if row["id"] == lease.id]
    assert live["memory_bytes"] == 24 * 10**9
    waiter, _ = stage.reserve(cuda(16))
    devices.set_state(book, stage.host_id, kind="gpu", host_indexes=[0], state=DeviceState.DRAINING)
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    admission.combine(book, stage.host_id)
    assert state_of(sql, waiter) == "waiting"  # draining is unavailable, not impossible
    devices.set_state(book, stage.host_id, kind="gpu", host_indexes=[0], state=DeviceState.ONLINE)
    admission.combine(book, stage.host_id)
    assert state_of(sql, waiter) == "admitted"


def test_a_batch_bounds_one_transaction_and_not_who_is_admitted(book: Book, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.settings SET grants_per_batch = 3")
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    waiting = [stage.reserve(cuda(2))[0] for _ in range(8)]
    transactions: list[None] = []
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    with probes.arm("combine.loaded", lambda: transactions.append(None)):
        assert admission.combine(book, stage.host_id) == 8
    assert {state_of(sql, each) for each in waiting} == {"admitted"}
    assert len(transactions) == 3


def test_an_ask_serves_the_waiters_that_its_own_batch_left_behind(book: Book, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.settings SET grants_per_batch = 3")
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    waiting = [stage.reserve(cuda(2))[0] for _ in range(8)]
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])  # and its author dies
    _, outcome = stage.reserve(cuda(2), wait=False)  # behind them all, and there is room for it too
    assert isinstance(outcome, Granted)
    assert {state_of(sql, each) for each in waiting} == {"admitted"}
    assert audit.queue(book) == []


# --- grants that nobody fetches --------------------------------------------------------------------------------------


def test_an_unclaimed_grant_goes_back_and_its_waiter_sleeps_until_it_shows_life(
    book: Book, sql: psycopg.Connection
) -> None:
    """R4, R50: not given back and forth, and nothing is kept for one that does not answer."""
    sql.execute("UPDATE jayrun.settings SET claim_seconds = 0.001")
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    sleeper, _ = stage.reserve(cuda(24))
    other, _ = stage.reserve(cuda(24))
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    admission.combine(book, stage.host_id)
    assert state_of(sql, sleeper) == "admitted"
    sql.execute("SELECT pg_sleep(0.01)")
    assert executions.return_unclaimed(book, stage.host_id) == 1
    admission.combine(book, stage.host_id)
    assert (state_of(sql, sleeper), state_of(sql, other)) == ("waiting", "admitted")
    [row] = [row for row in audit.queue(book) if row["execution_id"] == sleeper]
    assert row["dormant"]
    assert row["position"] == 1  # it keeps its age
    claimed = claim(book, other)
    assert claimed is not None
    leases.release(book, stage.host_id, stage.holder.id, [(claimed.leases[0].id, claimed.leases[0].epoch)])
    assert admission.combine(book, stage.host_id) == 0
    assert executions.attend(book, [sleeper]) == Attended({}, [], woken=True)
    assert admission.combine(book, stage.host_id) == 1
    assert claim(book, sleeper) is not None
    assert replay(sql) == 4


def test_a_unit_admitted_while_others_are_claimed_is_claimed_next(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(2))
    first, second = stage.granted(cuda(24)), stage.granted(cuda(24))
    (older, _), (younger, _) = stage.reserve(cuda(24)), stage.reserve(cuda(24))
    leases.release(book, stage.host_id, stage.holder.id, [(first.id, first.epoch)])
    admission.combine(book, stage.host_id)
    with ThreadPoolExecutor(1) as pool:
        with sql.transaction():
            sql.execute("SELECT FROM jayrun.executions WHERE id = %s FOR UPDATE", (older,))
            attending = pool.submit(executions.attend, book, [older, younger])
            until(lambda: sql.execute("SELECT FROM pg_locks WHERE NOT granted").fetchone() is not None)
            leases.release(book, stage.host_id, stage.holder.id, [(second.id, second.epoch)])
            assert admission.combine(book, stage.host_id) == 1
        attended = attending.result(PATIENCE)
    assert list(attended.claimed) == [older]
    assert attended.ended == []
    assert executions.attend(book, [older, younger]).claimed.keys() == {older, younger}


def test_a_withdrawn_waiter_or_unclaimed_grant_leaves_nothing(book: Book, sql: psycopg.Connection) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    waiting, _ = stage.reserve(cuda(24))
    later, _ = stage.reserve(cuda(24))
    assert executions.withdraw(book, waiting, state=ExecutionState.CANCELLED, failure=None)
    leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
    admission.combine(book, stage.host_id)
    assert state_of(sql, later) == "admitted"
    assert executions.withdraw(book, later, state=ExecutionState.CANCELLED, failure=None)
    admission.combine(book, stage.host_id)
    assert audit.leases(book) == []
    assert audit.capacity(book)[0]["reserved_bytes"] == 0


@pytest.mark.parametrize("cancels", [False, True])
def test_what_is_kept_of_an_invocation_that_waits_outlives_its_withdrawal(
    book: Book, sql: psycopg.Connection, cancels: bool
) -> None:
    """Somebody still uses what the invocation had been granted: its process, or one that it was handed to."""
    stage = scene(book, gpus(2))
    stage.granted(cuda(24, device_id=1))
    waiting, first = stage.execution(), cuda(20, device_id=0)
    asker = Member(execution=waiting, invocation=1, recorded=(first,))
    outcome = admission.reserve(book, Ask(asker=asker, position=0))
    assert isinstance(outcome, Granted)
    asker = Member(execution=waiting, invocation=1, recorded=(first, cuda(5, device_id=1)), booked=1)
    assert admission.reserve(book, Ask(asker=asker, position=1)) == Parked()
    if cancels:
        submissions.cancel(book, waiting.id, who="me")
    else:
        assert executions.withdraw(book, waiting.id, state=ExecutionState.FAILED, failure=None)
    assert outcome.lease.id in {row["id"] for row in audit.leases(book)}
    assert stage.reserve(cuda(20, device_id=0), wait=False)[1] == Unavailable()
    replay(sql)


# --- real processes --------------------------------------------------------------------------------------------------


def hammer(url: str, seed: int, rounds: int) -> None:
    """Reserve and release in a process of its own, waiting where it must."""
    import random

    random.seed(seed)
    book = Book(url, role="test", patience_seconds=10)
    host_id = holders.attest_host(book, "test-host")
    me = holders.register(book, host_id, role="runtime")
    from fleet import Scene

    stage = Scene(book, host_id, me)
    for _ in range(rounds):
        request = random.choice([cuda(7), cuda(3), cuda(24, exclusive=True), cuda_group(2, 9)])
        execution_id, outcome = stage.reserve(request)
        if isinstance(outcome, Granted):
            taken = [outcome.lease]
        else:
            assert outcome == Parked()
            with book.listen(str(me.id)) as listener:
                while (claimed := claim(book, execution_id)) is None:
                    listener.open()
                    listener.wait(0.05)
            taken = list(claimed.leases)
        if leases.release(book, host_id, me.id, [(lease.id, lease.epoch) for lease in taken]):
            admission.combine(book, host_id)
    holders.leave(book, me)
    book.close()


def test_many_processes_on_few_devices_keep_every_rule(url: str, book: Book, sql: psycopg.Connection) -> None:
    """R17, R29, R33, R35: 16 processes, an observer of `violations`, no deadlock, one legal serial history."""
    scene(book, gpus(2))
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = sql.execute(deadlocks).fetchone()
    children = [CONTEXT.Process(target=hammer, args=(url, seed, 12), daemon=True) for seed in range(16)]
    for child in children:
        child.start()
    looks = 0
    while any(child.is_alive() for child in children):
        assert audit.violations(book) == []
        looks += 1
        children[0].join(0.05)
        if not children[0].is_alive():
            children.sort(key=lambda child: not child.is_alive())
    for child in children:
        finished(child)
    assert looks > 3
    assert replay(sql) == 16 * 12
    assert audit.leases(book) == []
    assert audit.queue(book) == []
    sql.execute("SELECT pg_stat_clear_snapshot()")
    assert sql.execute(deadlocks).fetchone() == before
    admission.combine(book, holders.attest_host(book, "test-host"))
    assert {row["reserved_bytes"] for row in audit.capacity(book)} == {0}


def hold_for_ever(url: str, connection: Any, memory_gb: float, wait: bool) -> None:
    book = Book(url, role="test")
    host_id = holders.attest_host(book, "test-host")
    from fleet import Scene

    stage = Scene(book, host_id, holders.register(book, host_id, role="runtime"))
    execution_id, outcome = stage.reserve(cuda(memory_gb))
    assert isinstance(outcome, Parked if wait else Granted)
    connection.send(execution_id)
    connection.recv()


def test_admission_reclaims_the_dead_before_it_answers_unavailable(
    url: str, book: Book, sql: psycopg.Connection
) -> None:
    """R1: the capacity of a killed process is there for the next ask, without a reconciler."""
    stage = scene(book, gpus(1))
    ours, theirs = CONTEXT.Pipe()
    with process(hold_for_ever, url, theirs, 24, False) as child:
        ours.recv()
        child.kill()
        child.join(PATIENCE)
        stage.granted(cuda(24))
    ends = sql.execute("SELECT end_reason FROM jayrun.leases WHERE ended_at IS NOT NULL").fetchall()
    assert ends == [("reclaimed",)]
    row = sql.execute("SELECT state, end_reason FROM jayrun.holders WHERE role = 'runtime' ORDER BY registered_at DESC")
    assert row.fetchone() == ("ended", "dead")
    assert replay(sql) == 2


def test_a_dead_waiter_is_never_granted(url: str, book: Book, sql: psycopg.Connection) -> None:
    """R5: it died in the queue, and nobody had the time to notice before the capacity came back."""
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    ours, theirs = CONTEXT.Pipe()
    with process(hold_for_ever, url, theirs, 24, True) as child:
        dead = ours.recv()
        behind, _ = stage.reserve(cuda(24))
        child.kill()
        child.join(PATIENCE)
        leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])
        assert admission.combine(book, stage.host_id) == 1
        assert state_of(sql, behind) == "admitted"
        assert reclaim.sweep(book, stage.host_id) == 1
        assert state_of(sql, dead) == "failed"


def test_only_the_dead_are_reclaimed(url: str, book: Book) -> None:
    stage = scene(book, gpus(1))
    ours, theirs = CONTEXT.Pipe()
    with process(hold_for_ever, url, theirs, 24, False):
        ours.recv()
        assert reclaim.sweep(book, stage.host_id) == 0
        _, outcome = stage.reserve(cuda(1), wait=False)
        assert outcome == Unavailable()


def test_waiters_of_one_shape_are_kept_for_also_behind_others(book: Book, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.settings SET bypass_limit = 2")
    here = scene(book, gpus(1))
    here.granted(cuda(10))
    assert here.reserve(cuda(20))[1] == Parked()
    for _ in range(2):
        here.granted(cuda(1))
    assert here.reserve(cuda(1), wait=False)[1] == Unavailable()
    for _ in range(2):  # they come before it, and nobody has bypassed them
        assert here.reserve(cuda(20), priority=5)[1] == Parked()
    assert here.reserve(cuda(1), wait=False)[1] == Unavailable()
