"""Submitted work, run by real workers: `jayrun worker` with its processes, killed, stopped, drained and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import work_for_workers as work
from fleet import MakeRuntime, Scene, cuda, gpus, scene
from history import replay
from processes import PATIENCE, command, until

from jayrun import RetryPolicy, Runtime, Ticket
from jayrun.domain.lifecycle import ExecutionState
from jayrun.errors import (
    ExecutionFailed,
    KeyTaken,
    NotRetryable,
    PlacementCancelled,
    PlacementImpossible,
    UnknownHost,
)
from jayrun.runtime import reconciler
from jayrun.runtime.work import Work
from jayrun.store import admission, claims, devices, holders, submissions
from jayrun.store.admission import Granted
from jayrun.store.claims import Done
from jayrun.store.leases import Lease, release
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Crew = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def crew(url: str, sql: Sql) -> Iterator[Crew]:
    """Start `jayrun worker`; returns once its workers are ready. All are killed at the end."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2, claim_seconds = 1, cancel_seconds = 0.5")
    with ExitStack() as stack:

        def start(
            *options: str, processes: int = 1, host: str = "test-host", before: Sequence[str] = (), **more: str
        ) -> subprocess.Popen[str]:
            known = workers(sql)
            arguments = ["worker", "work_for_workers", "--processes", str(processes), *options]
            environment = {"JAYRUN_DATABASE_URL": url, "JAYRUN_HOST_ID": host, **more}
            started = stack.enter_context(command(*arguments, before=before, **environment))
            until(lambda: len(workers(sql).keys() - known) == processes or started.poll() is not None)
            return started

        yield start


@pytest.fixture
def runtime(make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setenv("JAYRUN_HOST_ID", "test-host")
    made: Runtime = make_runtime()
    return made


def workers(sql: Sql) -> dict[int, UUID]:
    """The workers that take work: pid and holder."""
    rows = sql.execute("SELECT pid, id FROM jayrun.holders WHERE state = 'alive' AND operators <> '{}'").fetchall()
    return {row[0]: row[1] for row in rows}


def one(sql: Sql, column: str, execution_id: UUID) -> Any:
    row = sql.execute(f"SELECT {column} FROM jayrun.executions WHERE id = %s", (execution_id,)).fetchone()
    assert row is not None
    return row[0]


def began(folder: Path) -> list[int]:
    """The pids of those who met in the folder, in order."""
    names = sorted((path.name.split("-") for path in folder.glob("began-*")), key=lambda name: int(name[2]))
    return [int(name[1]) for name in names]


def go(folder: Path) -> None:
    (folder / "go").touch()


def let_go(here: Scene, lease: Lease) -> None:
    """Release what the test held, and hand it on."""
    release(here.book, here.host_id, here.holder.id, [(lease.id, lease.epoch)])
    admission.combine(here.book, here.host_id)


def assert_clean(sql: Sql) -> None:
    assert sql.execute("SELECT * FROM jayrun_audit.violations").fetchall() == []
    until(lambda: sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL").fetchone() == (0,))
    replay(sql)


# --- submitting ------------------------------------------------------------------------------------------------------


def test_a_result_comes_back(runtime: Runtime, crew: Crew, sql: Sql) -> None:
    crew()
    ticket = runtime.submit(work.Add, a=[1, {"k": None}], b=["ü"])
    assert ticket.result(PATIENCE) == [1, {"k": None}, "ü"]
    assert runtime.submit("Add", a=0.5, b=1).result(PATIENCE) == 1.5
    assert runtime.ticket(str(ticket.id)).state is ExecutionState.SUCCEEDED
    strange = runtime.submit(work.Strange)
    assert strange.result(PATIENCE) is None
    assert strange.look().result_kind == "set"
    # By default a process can say who asked for the work and on which host it ran.
    assert one(sql, "user_name <> '' AND host_id IS NOT NULL AND holder_id IS NOT NULL", ticket.id) is True


def test_what_stays_on_a_device_is_named_and_dropped(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    scene(book, gpus(1))
    crew()
    ticket = runtime.submit(work.OnDevice)
    assert ticket.result(PATIENCE) is None
    assert ticket.look().result_kind == "str on gpu"
    assert_clean(sql)


def test_a_result_that_is_too_large_fails_the_execution(runtime: Runtime, crew: Crew) -> None:
    crew()
    with pytest.raises(ExecutionFailed, match=r"ValueError: the result is 2,000,002 bytes of JSON.*at most 1,000,000"):
        runtime.submit(work.Huge).result(PATIENCE)


def test_a_key_submits_once(runtime: Runtime, sql: Sql) -> None:
    first = runtime.submit(work.Add, a=1, b={"x": 1.0}, key="job-42", priority=3)
    assert runtime.submit(work.Add, b={"x": 1.0}, a=1, key="job-42", priority=3).id == first.id
    with pytest.raises(KeyTaken) as caught:
        runtime.submit(work.Add, a=2, b={"x": 1.0}, key="job-42", priority=4)
    message = str(caught.value)
    assert f"the key 'job-42' belongs to execution {first.id}" in message
    assert "priority: 3 in the book, 4 now" in message
    assert '"a": 1' in message
    assert '"a":2' in message
    assert "max_attempts" not in message
    assert sql.execute("SELECT count(*) FROM jayrun.executions").fetchone() == (1,)


@pytest.mark.parametrize(
    ("operator", "arguments", "kind", "message"),
    [
        (work.Add, {"a": {1}, "b": 1}, TypeError, r"inputs\['a'\] is \{1\} \(set\), which JSON has no form for"),
        (work.Add, {"a": float("nan"), "b": 1}, ValueError, r"inputs\['a'\] is nan"),
        (work.Add, {"a": {1: 2}, "b": 1}, TypeError, r"has the key 1 \(int\)"),
        (work.Add, {"a": ["x\0"], "b": 1}, ValueError, r"inputs\['a'\]\[0\] contains NUL"),
        (work.Add, {"a": "\ud800", "b": 1}, ValueError, "half of a surrogate pair"),
        (work.Add, {"a": "x" * 1_000_000, "b": 1}, ValueError, "at most 1,000,000"),
        (work.Add, {"a": 1}, TypeError, "Add needs the input 'b'"),
        (work.Add, {"a": 1, "b": 1, "c": 1}, TypeError, "Add has no input 'c'"),
        (work.Infer, {"model": 1}, TypeError, "Infer takes the resource 'model' as its class declares it"),
        (work.Add, {"a": 1, "b": 1, "key": ""}, ValueError, "key must be text of 1 to 1000 bytes, not ''"),
        (work.Add, {"a": 1, "b": 1, "key": 5}, TypeError, r"key must be text, not 5 \(int\)"),
        (work.Add, {"a": 1, "b": 1, "priority": 2**31}, ValueError, "priority must be at most"),
        (work.Add, {"a": 1, "b": 1, "retry": 3}, TypeError, "retry must be a RetryPolicy, not 3"),
        (work.Add, {"a": 1, "b": 1, "host": "nowhere"}, UnknownHost, "no host in the book is called 'nowhere'"),
        ("os.system", {}, ValueError, "operator must be the name of a class, not 'os.system'"),
        (int, {}, TypeError, "operator must be a subclass of Operator or the name of one"),
    ],
)
def test_bad_submissions_write_nothing(
    runtime: Runtime, sql: Sql, operator: Any, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        runtime.submit(operator, **arguments)
    assert sql.execute("SELECT count(*) FROM jayrun.executions").fetchone() == (0,)


def test_an_operator_that_nobody_knows_waits_for_a_worker_that_does(runtime: Runtime, crew: Crew) -> None:
    unknown, known = runtime.submit("Elsewhere"), runtime.submit(work.Add, a=1, b=1)
    crew()
    assert known.result(PATIENCE) == 2
    assert unknown.state is ExecutionState.READY
    with pytest.raises(TimeoutError, match=r"Elsewhere\) is still ready after 0 s"):
        unknown.result(timeout=0)


def test_priority_then_age(runtime: Runtime, crew: Crew, sql: Sql) -> None:
    tickets = [runtime.submit(work.Add, a=n, b=0, priority=n % 3) for n in range(9)]
    crew()
    # Looked at, and not waited for: a worker passes over the row that a ticket just marks as watched.
    until(lambda: all(ticket.look().has_ended for ticket in tickets))
    rows = sql.execute("SELECT inputs -> 'a' FROM jayrun.executions ORDER BY claimed_at").fetchall()
    assert [row[0] for row in rows] == [2, 5, 8, 1, 4, 7, 0, 3, 6]


def test_a_module_without_operators_is_refused(url: str) -> None:
    with command("worker", "json", JAYRUN_DATABASE_URL=url) as started:
        assert started.wait(PATIENCE) == 1
        assert started.stderr is not None
        assert "module json has no operators" in started.stderr.read()


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_what_waits_occupies_no_worker(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    waits = runtime.submit(work.Hold, memory_gb=10)
    until(lambda: waits.state is ExecutionState.WAITING)
    assert one(sql, "holder_id IS NULL AND host_id IS NULL", waits.id) is True
    assert runtime.submit(work.Add, a=1, b=2).result(PATIENCE) == 3
    let_go(here, lease)
    assert waits.result(PATIENCE) == [0]
    assert (one(sql, "claim", waits.id), one(sql, "invocation", waits.id), one(sql, "attempt", waits.id)) == (2, 2, 1)
    assert_clean(sql)


def test_the_whole_sequence_is_admitted_together(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    here = scene(book, gpus(2))
    taken = [here.granted(cuda(20)), here.granted(cuda(20))]
    crew(processes=2)
    waits = runtime.submit(work.Hold, memory_gb=20, count=2)
    until(lambda: waits.state is ExecutionState.WAITING)
    for lease in taken:
        let_go(here, lease)
    assert waits.result(PATIENCE) == [0, 1]
    rows = sql.execute(
        "SELECT invocation, count(*) FROM jayrun.leases WHERE execution_id = %s GROUP BY 1 ORDER BY 1", (waits.id,)
    )
    assert dict(rows.fetchall())[one(sql, "invocation", waits.id)] == 2
    assert_clean(sql)


def test_who_waited_comes_before_what_is_ready_and_after_what_is_more_urgent(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    waits = runtime.submit(work.Hold, memory_gb=10, priority=1)
    until(lambda: waits.state is ExecutionState.WAITING)
    busy = runtime.submit(work.Meet, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    later = runtime.submit(work.Add, a=0, b=0)
    urgent = runtime.submit(work.Add, a=0, b=0, priority=2)
    # Its capacity is free now, but no worker is: nobody is granted, nothing is kept idle.
    let_go(here, lease)
    assert waits.state is ExecutionState.WAITING
    go(tmp_path)
    for ticket in (busy, later, urgent, waits):
        ticket.wait(PATIENCE)
    order = sql.execute("SELECT id FROM jayrun.executions WHERE detached ORDER BY claimed_at").fetchall()
    assert [row[0] for row in order] == [busy.id, urgent.id, waits.id, later.id]
    assert_clean(sql)


def test_resources_are_admitted_with_the_run_that_needs_them(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql
) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(10))
    first = crew()
    waits = runtime.submit(work.Infer)  # a model of 10 GB fits, its own 10 GB do not
    until(lambda: waits.state is ExecutionState.WAITING)
    # Another process goes on with it, one that has no model.
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE) == 0
    crew()
    let_go(here, lease)
    model_pid, pid, index = waits.result(PATIENCE)
    assert (model_pid, index) == (pid, 0)
    [worker] = workers(sql)
    assert pid == worker
    # The second run finds the model there.
    assert runtime.submit(work.Infer).result(PATIENCE)[0] == pid
    setups = sql.execute("SELECT state, count(*) FROM jayrun.executions WHERE kind = 'resource' GROUP BY 1").fetchall()
    assert dict(setups)["succeeded"] >= 1
    assert sql.execute("SELECT * FROM jayrun_audit.violations").fetchall() == []


def test_impossible_fails_at_once_by_the_policy(runtime: Runtime, crew: Crew, book: Book) -> None:
    scene(book, gpus(1))
    crew()
    with pytest.raises(ExecutionFailed, match=r"PlacementImpossible: cuda\(memory_gb=30\)") as caught:
        runtime.submit(work.Hold, memory_gb=30).result(PATIENCE)
    assert caught.value.failure["attempt"] == 1
    retried = runtime.submit(
        work.Hold, memory_gb=30, retry=RetryPolicy(max_attempts=2, retry_on=(PlacementImpossible,))
    )
    with pytest.raises(ExecutionFailed) as caught:
        retried.result(PATIENCE)
    assert caught.value.failure["attempt"] == 2


def test_a_grant_that_its_worker_does_not_fetch_goes_to_another(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql
) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    waits = runtime.submit(work.Hold, memory_gb=20)
    until(lambda: waits.state is ExecutionState.WAITING)
    [(stopped, holder_id)] = workers(sql).items()
    os.kill(stopped, signal.SIGSTOP)
    try:
        let_go(here, lease)
        assert one(sql, "holder_id", waits.id) == holder_id
        crew()
        assert waits.result(PATIENCE) == [0]
        assert one(sql, "holder_id", waits.id) != holder_id
        assert sql.execute("SELECT silent FROM jayrun.holders WHERE id = %s", (holder_id,)).fetchone() == (True,)
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: sql.execute("SELECT silent FROM jayrun.holders WHERE id = %s", (holder_id,)).fetchone() == (False,))
    returned = sql.execute("SELECT count(*) FROM jayrun.leases WHERE end_reason = 'returned'").fetchone()
    assert returned == (1,)
    assert_clean(sql)


# --- workers that end ------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_followed_by_another(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    scene(book, gpus(1))
    crew()
    ticket = runtime.submit(work.Hold, memory_gb=24, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    os.kill(began(tmp_path)[0], signal.SIGKILL)
    until(lambda: len(began(tmp_path)) == 2)
    go(tmp_path)
    assert ticket.result(PATIENCE) == [0]
    assert (one(sql, "claim", ticket.id), one(sql, "crashes", ticket.id), one(sql, "attempt", ticket.id)) == (2, 1, 1)
    assert len(set(began(tmp_path))) == 2
    assert_clean(sql)


def test_only_the_newest_claim_finishes(runtime: Runtime, sql: Sql, book: Book) -> None:
    ticket = runtime.submit(work.Add, a=1, b=2)
    here = holders.attest_host(book, "test-host")
    first, second = (holders.register(book, here, role="worker") for _ in range(2))
    for worker in (first, second):
        claims.accept(book, worker.id, ["Add"])
    old = claims.take(book, first.id).taken
    assert old is not None
    assert old.claim == 1
    claims.accept(book, first.id, [])  # it drains, so that it does not take it once more
    given_back = Done(id=old.id, claim=1, state=ExecutionState.READY)
    assert claims.take(book, first.id, given_back).finished is True
    new = claims.take(book, second.id).taken
    assert new is not None
    assert (new.id, new.claim) == (old.id, 2)
    late = Done(id=old.id, claim=1, state=ExecutionState.SUCCEEDED, result='"old"', result_kind="json")
    for worker in (first, second):
        assert claims.take(book, worker.id, late).finished is False
    assert ticket.state is ExecutionState.RUNNING


def test_what_crashes_its_worker_again_and_again_fails(runtime: Runtime, crew: Crew, sql: Sql) -> None:
    crew()
    ticket = runtime.submit(work.Crash)
    with pytest.raises(
        ExecutionFailed, match="WorkerDied: its worker process ended while it ran it \\(crash 3 of 3\\)"
    ):
        ticket.result(PATIENCE)
    assert {"host", "pid", "at", "attempt"} <= set(ticket.look().failure or {})
    assert runtime.submit(work.Add, a=1, b=2).result(PATIENCE) == 3


def test_a_drain_finishes_what_runs_and_takes_nothing_new(
    runtime: Runtime, crew: Crew, sql: Sql, tmp_path: Path
) -> None:
    started = crew()
    running = runtime.submit(work.Meet, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    # As systemd does it: the whole group is told at once.
    os.killpg(started.pid, signal.SIGTERM)
    left = runtime.submit(work.Add, a=1, b=2)
    go(tmp_path)
    assert started.wait(PATIENCE) == 0
    assert running.result(PATIENCE) == began(tmp_path)[0]
    assert left.state is ExecutionState.READY
    assert sql.execute(
        "SELECT count(*) FROM jayrun.holders WHERE state = 'alive' AND role <> 'runtime'"
    ).fetchone() == (0,)


@pytest.mark.parametrize("by", ["second signal", "drain timeout"])
def test_what_does_not_end_in_time_is_given_back(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path, by: str
) -> None:
    scene(book, gpus(1))
    started = crew(*(["--drain-timeout", "0.2"] if by == "drain timeout" else []))
    ticket = runtime.submit(work.Hold, memory_gb=24, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    started.send_signal(signal.SIGTERM)
    if by == "second signal":
        until(lambda: "draining" in line(started))
        started.send_signal(signal.SIGTERM)
    assert started.wait(PATIENCE) == 0
    assert ticket.state is ExecutionState.READY
    assert one(sql, "crashes", ticket.id) == 0
    assert_clean(sql)
    crew()
    go(tmp_path)
    assert ticket.result(PATIENCE) == [0]


def line(started: subprocess.Popen[str]) -> str:
    assert started.stderr is not None
    return started.stderr.readline()


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_killed_supervisor_loses_nothing(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path, whole_group: bool
) -> None:
    scene(book, gpus(1))
    started = crew(processes=2)
    ticket = runtime.submit(work.Hold, memory_gb=24, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    waits = runtime.submit(work.Hold, memory_gb=24)
    until(lambda: waits.state is ExecutionState.WAITING)
    if whole_group:
        os.killpg(started.pid, signal.SIGKILL)
        crew(processes=2)
        until(lambda: len(began(tmp_path)) == 2)
    else:
        os.kill(started.pid, signal.SIGKILL)
        until(lambda: len(workers(sql)) == 1)  # the idle one has gone, the other goes on with what it runs
        crew(processes=2)
    go(tmp_path)
    assert ticket.result(PATIENCE) == [0]
    assert waits.result(PATIENCE) == [0]
    assert len(began(tmp_path)) == (2 if whole_group else 1)
    assert_clean(sql)


def test_only_a_reconciler_brings_capacity_back(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    here = scene(book, gpus(1))
    started = crew()
    ticket = runtime.submit(work.Hold, memory_gb=24, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    os.killpg(started.pid, signal.SIGKILL)
    started.wait(PATIENCE)
    until(lambda: reconciler.run_pass(book, here.host_id) and not workers(sql))
    assert ticket.state is ExecutionState.READY
    _, outcome = here.reserve(cuda(24))
    assert isinstance(outcome, Granted)


# --- failing, cancelling, retrying -----------------------------------------------------------------------------------


def test_a_failure_is_stored_and_retried_by_the_policy(runtime: Runtime, crew: Crew, sql: Sql, tmp_path: Path) -> None:
    crew()
    policy = RetryPolicy(max_attempts=3, retry_on=(OSError,), delay_seconds=0.2, backoff=2)
    ticket = runtime.submit(work.Fail, folder=str(tmp_path), times=2, retry=policy)
    assert ticket.result(PATIENCE) == "at last"
    assert one(sql, "attempt", ticket.id) == 3
    assert one(sql, "extract(epoch FROM ended_at - submitted_at) >= 0.6", ticket.id) is True
    assert one(sql, "failure", ticket.id) is None

    (tmp_path / "failures").unlink()
    failed = runtime.submit(work.Fail, folder=str(tmp_path), retry=RetryPolicy(max_attempts=2, retry_on=(ValueError,)))
    with pytest.raises(ExecutionFailed, match="FileNotFoundError: failure 1") as caught:
        failed.result(PATIENCE)
    failure = caught.value.failure
    assert (failure["type"], failure["message"], failure["attempt"]) == ("FileNotFoundError", "failure 1", 1)
    assert "in execute" in failure["traceback"]
    assert {"host", "pid", "at"} <= set(failure)


def test_what_failed_is_run_again_when_a_person_asks(runtime: Runtime, crew: Crew, book: Book, tmp_path: Path) -> None:
    crew()
    ticket = runtime.submit(work.Fail, folder=str(tmp_path), times=1)
    assert ticket.wait(PATIENCE).state is ExecutionState.FAILED
    submissions.retry(book, ticket.id)
    assert ticket.result(PATIENCE) == "at last"
    with pytest.raises(NotRetryable, match="has succeeded; submit it again"):
        submissions.retry(book, ticket.id)


def test_what_lived_in_a_process_is_not_retried(book: Book) -> None:
    here = scene(book, gpus(1))
    execution_id, _ = here.reserve(cuda(1))
    with pytest.raises(NotRetryable, match="belonged to a process"):
        submissions.retry(book, execution_id)


def test_cancel_while_ready(runtime: Runtime, crew: Crew) -> None:
    ticket = runtime.submit(work.Add, a=1, b=1)
    assert ticket.cancel() is ExecutionState.CANCELLED
    assert ticket.cancel() is ExecutionState.CANCELLED
    with pytest.raises(PlacementCancelled, match="cancelled by"):
        ticket.result()
    crew()
    assert runtime.submit(work.Add, a=1, b=2).result(PATIENCE) == 3
    assert ticket.state is ExecutionState.CANCELLED


def test_cancel_while_waiting(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    ticket = runtime.submit(work.Hold, memory_gb=20)
    until(lambda: ticket.state is ExecutionState.WAITING)
    assert ticket.cancel() is ExecutionState.CANCELLED
    let_go(here, lease)
    assert ticket.state is ExecutionState.CANCELLED
    assert_clean(sql)


def test_cancel_while_admitted(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    ticket = runtime.submit(work.Hold, memory_gb=20)
    until(lambda: ticket.state is ExecutionState.WAITING)
    [stopped] = workers(sql)
    os.kill(stopped, signal.SIGSTOP)
    try:
        let_go(here, lease)
        assert ticket.state is ExecutionState.ADMITTED
        assert ticket.cancel() is ExecutionState.CANCELLED
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert runtime.submit(work.Hold, memory_gb=24).result(PATIENCE) == [0]
    assert ticket.state is ExecutionState.CANCELLED
    assert_clean(sql)


def test_cancel_while_running_ends_a_worker_that_goes_on(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    scene(book, gpus(1))
    crew()
    ticket = runtime.submit(work.Hold, memory_gb=24, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    assert ticket.cancel() is ExecutionState.RUNNING
    with pytest.raises(PlacementCancelled):
        ticket.result(PATIENCE)
    assert len(began(tmp_path)) == 1
    assert_clean(sql)
    assert runtime.submit(work.Hold, memory_gb=24).result(PATIENCE) == [0]


def test_what_is_cancelled_while_it_runs_is_not_tried_again(
    runtime: Runtime, crew: Crew, sql: Sql, tmp_path: Path
) -> None:
    crew()
    sql.execute("UPDATE jayrun.settings SET cancel_seconds = 1000")
    ticket = runtime.submit(work.MeetAndFail, folder=str(tmp_path), retry=RetryPolicy(max_attempts=3))
    until(lambda: began(tmp_path))
    assert ticket.cancel() is ExecutionState.RUNNING
    go(tmp_path)
    with pytest.raises(PlacementCancelled):
        ticket.result(PATIENCE)
    assert (one(sql, "attempt", ticket.id), len(began(tmp_path))) == (1, 1)


@pytest.mark.parametrize("room", [True, False])
def test_cancel_while_a_resource_is_set_up_refuses_its_request(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path, room: bool
) -> None:
    here = scene(book, gpus(1))
    lease = None if room else here.granted(cuda(20))
    crew(MEETING_PLACE=str(tmp_path))
    sql.execute("UPDATE jayrun.settings SET cancel_seconds = 1000")
    ticket = runtime.submit(work.UseSlowModel)
    until(lambda: began(tmp_path))
    assert ticket.cancel() is ExecutionState.RUNNING
    go(tmp_path)
    with pytest.raises(PlacementCancelled):
        ticket.result(PATIENCE)
    if lease is not None:
        let_go(here, lease)
    assert_clean(sql)


def test_a_drain_takes_nothing_new_though_what_ran_has_to_wait(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    here = scene(book, gpus(1))
    here.granted(cuda(20))
    started = crew()
    waits = runtime.submit(work.MeetThenHold, folder=str(tmp_path))
    until(lambda: began(tmp_path))
    left = [runtime.submit(work.Hold, memory_gb=20), runtime.submit(work.Add, a=1, b=2)]
    started.send_signal(signal.SIGTERM)
    until(lambda: "draining" in line(started))
    go(tmp_path)
    assert started.wait(PATIENCE) == 0
    assert waits.state is ExecutionState.WAITING
    assert [one(sql, "claim", ticket.id) for ticket in left] == [0, 0]


def test_a_worker_that_the_book_has_ended_is_replaced(runtime: Runtime, crew: Crew, sql: Sql) -> None:
    crew()
    [(pid, holder_id)] = workers(sql).items()
    sql.execute(
        "UPDATE jayrun.holders SET state = 'ended', ended_at = clock_timestamp(), end_reason = 'dead' WHERE id = %s",
        (holder_id,),
    )
    assert runtime.submit(work.Add, a=1, b=2).result(PATIENCE) == 3
    assert list(workers(sql)) != [pid]


def test_a_set_up_of_an_older_claim_leaves_the_newest_alone(runtime: Runtime, book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    here.granted(cuda(20))
    first, second = (holders.register(book, here.host_id, role="worker") for _ in range(2))
    for worker in (first, second):
        claims.accept(book, worker.id, ["Infer"])
    ticket = runtime.submit(work.Infer)
    old = claims.take(book, first.id).taken
    assert old is not None
    holders.leave(book, first)  # declared dead, though it runs on
    new = claims.take(book, second.id).taken
    assert new is not None
    [run] = Work.taken(old, first)
    setup = run.set_up_for("Model", "described")
    setup.recorded.append(cuda(10))
    ask = admission.Ask(asker=setup.member(), position=0, companions=(run.member(),))
    assert admission.reserve(book, ask) == admission.Parked()
    assert ticket.state is ExecutionState.RUNNING
    done = Done(id=new.id, claim=new.claim, state=ExecutionState.SUCCEEDED, result="1", result_kind="json")
    assert claims.take(book, second.id, done).finished is True


def test_what_is_given_back_or_left_by_the_dead_wakes_an_idle_worker(runtime: Runtime, book: Book, url: str) -> None:
    here = holders.attest_host(book, "test-host")
    first, second = (holders.register(book, here, role="worker") for _ in range(2))
    claims.accept(book, first.id, ["Add"])
    runtime.submit(work.Add, a=1, b=2)
    taken = claims.take(book, first.id).taken
    assert taken is not None
    claims.accept(book, second.id, ["Add"])
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute(f'LISTEN "jayrun:{second.id}"')
        claims.accept(book, first.id, [])
        claims.take(book, first.id, Done(id=taken.id, claim=taken.claim, state=ExecutionState.READY))
        assert list(listener.notifies(timeout=PATIENCE, stop_after=1))
        again = claims.take(book, second.id).taken
        assert again is not None
        claims.accept(book, second.id, [])
        third = holders.register(book, here, role="worker")
        claims.accept(book, third.id, ["Add"])
        listener.execute(f'LISTEN "jayrun:{third.id}"')
        holders.leave(book, second)
        [called] = listener.notifies(timeout=PATIENCE, stop_after=1)
        assert called.channel == f"jayrun:{third.id}"


def test_failing_fast_ends_the_intake(runtime: Runtime, crew: Crew, tmp_path: Path) -> None:
    started = crew("--fail-fast", processes=2)
    failed = runtime.submit(work.Fail, folder=str(tmp_path))
    assert failed.wait(PATIENCE).state is ExecutionState.FAILED
    assert started.wait(PATIENCE) == 1
    assert runtime.submit(work.Add, a=1, b=1).state is ExecutionState.READY


def test_waiting_on_the_second_attempt_is_no_attempt(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    crew()
    ticket = runtime.submit(work.FailThenHold, folder=str(tmp_path), retry=RetryPolicy(max_attempts=2))
    until(lambda: ticket.state is ExecutionState.WAITING)
    assert one(sql, "attempt", ticket.id) == 2
    let_go(here, lease)
    assert ticket.result(PATIENCE) == 0
    assert (one(sql, "attempt", ticket.id), one(sql, "claim", ticket.id)) == (2, 3)


def test_a_supervisor_shows_life_for_a_worker_that_cannot(runtime: Runtime, crew: Crew, sql: Sql) -> None:
    sql.execute("UPDATE jayrun.settings SET holder_ttl_seconds = 1.5")
    crew()
    [(pid, holder_id)] = workers(sql).items()
    os.kill(pid, signal.SIGSTOP)
    try:
        seen = "SELECT seen_at FROM jayrun.holders WHERE id = %s"
        before = sql.execute(seen, (holder_id,)).fetchone()
        until(lambda: sql.execute(seen, (holder_id,)).fetchone() != before)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_ticket_tells_what_it_waits_for(runtime: Runtime, crew: Crew, book: Book) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(20))
    ticket = runtime.submit(work.Hold, memory_gb=10)
    assert "no running worker knows operator Hold" in ticket.why().text()
    crew()
    until(lambda: ticket.state is ExecutionState.WAITING)
    text = ticket.why().text()
    assert "4 GB free" in text
    assert str(lease.id)[-12:] in text


# --- several hosts ---------------------------------------------------------------------------------------------------


def test_work_without_a_host_runs_wherever_it_fits_first(
    runtime: Runtime, crew: Crew, book: Book, sql: Sql, tmp_path: Path
) -> None:
    # Nothing but the database connects the two hosts: where the machine allows it, each has a network of its own.
    apart = ["unshare", "--net"]
    before = apart if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode == 0 else []
    small = scene(book, gpus(1, 24))
    large_id = holders.attest_host(book, "large")
    devices.declare(book, large_id, gpus(1, 80))
    crew(before=before)
    # Impossible here, possible there, where nobody works yet.
    ticket = runtime.submit(work.Hold, memory_gb=60)
    until(lambda: ticket.state is ExecutionState.WAITING)
    crew(host="large", before=before)
    assert ticket.result(PATIENCE) == [0]
    assert one(sql, "host_id", ticket.id) == large_id
    # Pinned work stays where it was told to be.
    pinned = runtime.submit(work.Hold, memory_gb=60, host="test-host")
    with pytest.raises(ExecutionFailed, match="PlacementImpossible"):
        pinned.result(PATIENCE)
    there = runtime.submit(work.Hold, memory_gb=20, host="large")
    assert there.result(PATIENCE) == [0]
    assert one(sql, "host_id", there.id) == large_id
    # Impossible everywhere is impossible.
    with pytest.raises(ExecutionFailed, match=r"PlacementImpossible: on .*: cuda\(memory_gb=90\) can never be placed"):
        runtime.submit(work.Hold, memory_gb=90).result(PATIENCE)
    # The first host is full: what waits there for any host is taken by the other.
    full = small.granted(cuda(24))
    moved = [runtime.submit(work.Hold, memory_gb=20) for _ in range(4)]
    assert [ticket.result(PATIENCE) for ticket in moved] == [[0]] * 4
    assert {one(sql, "host_id", ticket.id) for ticket in moved} == {large_id}
    let_go(small, full)
    assert_clean(sql)


def test_many_of_them_all_end(runtime: Runtime, crew: Crew, book: Book, sql: Sql) -> None:
    scene(book, gpus(2))
    crew(processes=4)
    tickets: list[Ticket] = [
        runtime.submit(work.Hold, memory_gb=size, count=count)
        for count in (1, 2)
        for size in (4, 10, 20)
        for _ in range(6)
    ]
    for ticket in tickets:
        ticket.wait(PATIENCE)
    states = sql.execute("SELECT state, count(*) FROM jayrun.executions WHERE detached GROUP BY 1").fetchall()
    assert dict(states) == {"succeeded": len(tickets)}, json.dumps(dict(states))
    assert_clean(sql)
