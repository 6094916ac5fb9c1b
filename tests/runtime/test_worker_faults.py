"""Submitted work under faults: processes killed at every named point, sessions ended, restarts, answers lost.

Each test proves that its fault fired, and that then every execution was finished once, by whoever claimed it last, with
no lease left, no rule broken and a legal history.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import work_for_workers as work
from chance import SEED, sampled
from crews import QUICK, Crew, Sound, Sql, assert_done_once, crew_of
from fleet import MakeRuntime, Scene, cuda, gpus, scene
from processes import CONTEXT, PATIENCE, finished, process, until
from proxy import Proxy, nth, nth_commit

from jayrun import Runtime, Ticket, kernel, probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.liveness import Incarnation
from jayrun.domain.requests import Request
from jayrun.embedded import Throwaway, start_throwaway
from jayrun.runtime import reconciler
from jayrun.runtime.work import Work
from jayrun.settings import Settings
from jayrun.store import admission, claims, holders, leases, reclaim, schema, submissions
from jayrun.store.admission import Ask, Granted, Parked
from jayrun.store.claims import Done
from jayrun.store.holders import Holder
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

Crews = Callable[..., Crew]


@pytest.fixture
def crew(url: str, tmp_path: Path) -> Iterator[Crews]:
    """Start a crew, by default for the test's book; all are killed at the end."""
    with ExitStack() as stack:
        count = iter(range(100))

        def start(book_url: str = url, **options: Any) -> Crew:
            return stack.enter_context(crew_of(book_url, tmp_path / f"crew-{next(count)}.log", **options))

        yield start


@pytest.fixture
def runtime(make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, sql: Sql) -> Runtime:
    monkeypatch.setenv("JAYRUN_HOST_ID", "test-host")
    sql.execute(QUICK)
    made: Runtime = make_runtime()
    return made


@pytest.fixture
def sound(sql: Sql) -> Iterator[Sound]:
    return Sound(sql)


def let_go(here: Scene, lease: Lease, *, combine: bool = True) -> None:
    if leases.release(here.book, here.host_id, here.holder.id, [(lease.id, lease.epoch)]) and combine:
        admission.combine(here.book, here.host_id)


def worker_at_hand(book: Book, host_id: int, incarnation: Incarnation | None = None) -> Holder:
    """A worker at the level of the store: this process, or another one."""
    me = holders.register(book, host_id, role="worker", incarnation=incarnation)
    claims.accept(book, me.id, ["Tell"])
    return me


def take(book: Book, me: Holder) -> Work:
    taken = claims.take(book, me.id, before_waiting=True).taken
    assert taken is not None
    return Work.taken(taken, me)[0]


def reserve(book: Book, run: Work, request: Request) -> Lease | None:
    """The next request of an invocation that was taken; None when it is parked now."""
    run.recorded.append(request)
    position = len(run.recorded) - 1
    outcome = admission.reserve(book, Ask(asker=run.member(), position=position, age=run.age))
    run.booked = position + 1
    assert isinstance(outcome, Granted | Parked)
    return outcome.lease if isinstance(outcome, Granted) else None


def parked(here: Scene) -> Lease:
    """What is submitted asked for two devices, and waits for the second, which the lease returned here blocks."""
    blocker = here.granted(cuda(20, device_id=1))
    me = worker_at_hand(here.book, here.host_id)
    run = take(here.book, me)
    first = reserve(here.book, run, cuda(20))
    assert first is not None
    assert reserve(here.book, run, cuda(20)) is None
    leases.release(here.book, here.host_id, me.id, [(first.id, first.epoch)])
    holders.leave(here.book, me)
    return blocker


# --- killed at every point -------------------------------------------------------------------------------------------

# A fresh execution is claimed, gets its first lease, and is parked with its second request.
WAY_IN = [
    "worker.registered",
    "take.claimed",
    "worker.taken",
    "reserve.seen",
    "reserve.loaded",
    "reserve.granted",
    "reserve.parked",
    "settle.telling",
    "settle.told",
    "worker.parked",
]
# One that was parked is admitted, told to an idle worker, claimed, invoked and finished.
WAY_OUT = [
    "combine.loaded",
    "combine.admitted",
    "worker.woken",
    "take.claimed",
    "worker.taken",
    "worker.returned",
    "settle.telling",
    "settle.told",
    "worker.ended",
    "take.finished",
]
# What a dead worker left is freed, by the supervisor or whoever passes.
AFTER_THE_DEAD = ["supervisor.attending", "sweep.dead", "holder.freed", "holder.ending", "pass.combining"]


@pytest.mark.parametrize("point", sampled(WAY_IN, 3))
def test_killed_on_the_way_in(
    runtime: Runtime, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path, point: str
) -> None:
    here = scene(book, gpus(2))
    blocker = here.granted(cuda(20, device_id=1))
    file = tmp_path / "ends"
    ticket = runtime.submit(work.Tell, file=str(file), sizes=[20, 20])
    first = crew(probes=f"{point}=kill")
    killed = first.killed_at(point)
    first.kill()
    assert not ticket.look().has_ended
    second = crew()
    until(lambda: second.ready() and ticket.state is ExecutionState.WAITING)
    let_go(here, blocker)
    assert ticket.result(PATIENCE) != killed
    assert_done_once(sql, ticket.id, file)
    sound.check(sql)


@pytest.mark.parametrize("point", sampled(WAY_OUT, 3))
def test_killed_on_the_way_out(
    runtime: Runtime, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path, point: str
) -> None:
    runtime._service.tick_seconds = 3600  # it is the crew that admits, and not this process
    here = scene(book, gpus(2))
    file = tmp_path / "ends"
    ticket = runtime.submit(work.Tell, file=str(file), sizes=[20, 20])
    blocker = parked(here)
    if point.startswith("combine."):  # somebody of the crew admits it
        let_go(here, blocker, combine=False)
        first = crew(probes=f"{point}=kill")
    else:  # it is admitted for an idle worker
        first = crew(probes=f"worker.idle=say,{point}=kill")
        until(lambda: first.reached("worker.idle"))
        let_go(here, blocker)
    killed = first.killed_at(point)
    first.kill()
    has_ended = point == "take.finished"
    assert ticket.look().has_ended is has_ended
    crew()
    assert (ticket.result(PATIENCE) == killed) is has_ended
    assert_done_once(sql, ticket.id, file)
    sound.check(sql)


def die_running(url: str) -> None:
    """A worker that takes what there is, gets a lease for it, and is killed."""
    book = Book(url, role="test")
    run = take(book, worker_at_hand(book, holders.attest_host(book, "test-host")))
    assert reserve(book, run, cuda(20)) is not None
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", sampled(AFTER_THE_DEAD, 2))
def test_killed_while_it_ends_what_the_dead_left(
    runtime: Runtime, url: str, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path, point: str
) -> None:
    scene(book, gpus(1))
    file = tmp_path / "ends"
    ticket = runtime.submit(work.Tell, file=str(file), sizes=[20])
    runtime._service.stop()  # this process would pass, too
    with process(die_running, url) as dead:
        dead.join(PATIENCE)
        assert dead.exitcode == -signal.SIGKILL
    first = crew(probes=f"{point}=kill")
    first.killed_at(point)
    first.kill()
    crew()
    assert ticket.wait(PATIENCE).state is ExecutionState.SUCCEEDED
    assert_done_once(sql, ticket.id, file)
    assert sql.execute("SELECT crashes FROM jayrun.executions WHERE id = %s", (ticket.id,)).fetchone() >= (1,)
    sound.check(sql)


def fetch_nothing(url: str, connection: Any) -> None:
    """A worker that is given work and does not answer."""
    book = Book(url, role="test")
    worker_at_hand(book, holders.attest_host(book, "test-host"))
    connection.send("idle")
    connection.recv()


def test_killed_while_it_returns_what_nobody_fetched(
    runtime: Runtime, url: str, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path
) -> None:
    here = scene(book, gpus(2))
    file = tmp_path / "ends"
    ticket = runtime.submit(work.Tell, file=str(file), sizes=[20, 20])
    blocker = parked(here)
    runtime._service.stop()
    connection, theirs = CONTEXT.Pipe()
    with process(fetch_nothing, url, theirs):
        assert connection.recv() == "idle"
        let_go(here, blocker)
        assert ticket.state is ExecutionState.ADMITTED
        first = crew(probes="unclaimed.returning=kill")
        first.killed_at("unclaimed.returning")
        first.kill()
        assert ticket.state is ExecutionState.ADMITTED
        crew()
        assert ticket.wait(PATIENCE).state is ExecutionState.SUCCEEDED
        assert_done_once(sql, ticket.id, file)
        sound.check(sql)


def die_attached(url: str, point: str) -> None:
    """A program that asks for two devices, has to wait, and is killed at the point."""
    runtime = Runtime(url, settings=Settings(host_id="test-host"))
    with probes.arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        runtime.run(work.Hold, memory_gb=20, count=2)
        runtime.flush(PATIENCE)


@pytest.mark.parametrize(
    "point", sampled(["reserve.granted", "reserve.parked", "settle.telling", "settle.told", "claim.updated"], 2)
)
def test_a_program_killed_while_it_waits_or_works_keeps_nothing(
    url: str, book: Book, sql: Sql, sound: Sound, point: str
) -> None:
    here = scene(book, gpus(2))
    blocker = here.granted(cuda(20, device_id=1))
    with process(die_attached, url, point) as program:
        if point == "claim.updated":
            until(lambda: sql.execute("SELECT FROM jayrun.executions WHERE state = 'waiting'").fetchall())
            let_go(here, blocker)
        program.join(PATIENCE)
        assert program.exitcode == -signal.SIGKILL
    let_go(here, blocker)
    reconciler.run_pass(book, here.host_id)
    ended = "SELECT state, failure ->> 'type' FROM jayrun.executions WHERE name = 'Hold'"
    assert sql.execute(ended).fetchall() == [("failed", "ProcessDied")]
    holders.leave(book, here.holder)
    sound.check(sql)


def test_a_claim_on_its_way_while_its_worker_is_judged_dead_is_freed(
    runtime: Runtime, url: str, book: Book, sql: Sql
) -> None:
    """The worker sent its claim and was killed; the server comes to it while the dead are swept."""
    here = scene(book, gpus(1))
    ticket = runtime.submit(work.Tell, file="unused")
    runtime._service.stop()
    me = worker_at_hand(book, here.host_id, replace(kernel.incarnation(), start_ticks=1))  # dead, says the kernel
    # The claim stops where it writes, until the test lets go of the lock.
    sql.execute(
        """
        CREATE FUNCTION public.pause() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
        CREATE TRIGGER pause BEFORE UPDATE ON jayrun.executions FOR EACH ROW WHEN (NEW.state = 'running')
            EXECUTE FUNCTION public.pause();
        """
    )
    held_up = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    try:
        sql.execute("SELECT pg_advisory_lock(1)")
        claim = threading.Thread(target=claims.take, args=(book, me.id))
        claim.start()
        until(lambda: sql.execute(held_up).fetchone() == (1,))
        end = threading.Thread(target=reclaim.sweep, args=(book, here.host_id))
        end.start()
        until(lambda: not end.is_alive() or sql.execute(held_up).fetchone() == (2,))
        sql.execute("SELECT pg_advisory_unlock(1)")
        for thread in (claim, end):
            thread.join(PATIENCE)
    finally:
        sql.execute("DROP FUNCTION public.pause CASCADE")
    reclaim.sweep(book, here.host_id)  # the next pass
    assert ticket.state is ExecutionState.READY
    assert sql.execute("SELECT state FROM jayrun.holders WHERE id = %s", (me.id,)).fetchone() == ("ended",)


# --- sessions ended, the server restarted ----------------------------------------------------------------------------


def load(runtime: Runtime, folder: Path, count: int) -> list[Ticket]:
    """Executions of one and of two requests, more than there is room for."""
    sizes = [[4], [10], [20], [10, 10], [20, 4]]
    return [
        runtime.submit(work.Tell, file=str(folder / f"ends-{n}"), sizes=sizes[n % len(sizes)], seconds=0.02)
        for n in range(count)
    ]


def assert_all_done(sql: Sql, tickets: list[Ticket], folder: Path) -> None:
    for number, ticket in enumerate(tickets):
        ticket.result(PATIENCE)
        assert_done_once(sql, ticket.id, folder / f"ends-{number}")
    states = sql.execute("SELECT state, count(*) FROM jayrun.executions WHERE detached GROUP BY 1").fetchall()
    assert states == [("succeeded", len(tickets))]


def ended(sql: Sql) -> int:
    row = sql.execute("SELECT count(*) FROM jayrun.executions WHERE detached AND ended_at IS NOT NULL").fetchone()
    assert row is not None
    return int(row[0])


def test_a_storm_that_ends_sessions(
    runtime: Runtime, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    scene(book, gpus(2))
    crews = [crew(processes=2) for _ in range(2)]
    until(lambda: all(each.ready() == 2 for each in crews))
    tickets = load(runtime, tmp_path, 40)
    hit = 0
    while ended(sql) < len(tickets):
        rows = sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^jayrun:(work|super)' "
            "ORDER BY random() LIMIT %s",
            (chance.randint(1, 4),),
        ).fetchall()
        hit += sum(row[0] for row in rows)
        time.sleep(chance.uniform(0.02, 0.2))
    assert hit > 10
    assert_all_done(sql, tickets, tmp_path)
    assert sql.execute("SELECT sum(crashes) FROM jayrun.executions").fetchone() == (0,)
    sound.check(sql)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Throwaway]:
    """A server that a test may restart."""
    with start_throwaway(tmp_path / "server", settings=Settings()) as throwaway:
        schema.upgrade(throwaway.url)
        yield throwaway


def test_the_server_is_restarted_at_once_under_load(
    own_server: Throwaway, crew: Crews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.url
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(QUICK)
    with closing(Book(url, role="test")) as book:
        scene(book, gpus(2))
    first = crew(url, processes=3)
    until(lambda: first.ready() == 3)
    monkeypatch.setenv("JAYRUN_HOST_ID", "test-host")
    with Runtime(url) as runtime:
        try:
            tickets = load(runtime, tmp_path, 60)
            for share in (0.2, 0.6):
                with psycopg.connect(url, autocommit=True) as sql:
                    until(lambda share=share, sql=sql: ended(sql) >= share * len(tickets))  # type: ignore[misc]
                    assert ended(sql) < len(tickets)
                    before = sql.execute("SELECT pg_postmaster_start_time()").fetchone()
                own_server.restart()
            with psycopg.connect(url, autocommit=True) as sql:
                assert sql.execute("SELECT pg_postmaster_start_time()").fetchone() != before
                assert_all_done(sql, tickets, tmp_path)
                assert sql.execute("SELECT sum(crashes) FROM jayrun.executions").fetchone() == (0,)
                Sound(sql).check(sql)
        finally:
            runtime._service.stop()
    _, deadlock, who = own_server.log_file.read_text().partition("deadlock detected")
    assert not deadlock, who[:4000]
    first.drain()


# --- answers lost on the way -----------------------------------------------------------------------------------------


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with closing(Proxy(url)) as made:
        yield made


def cuts(seen: Counter[str], sample: int | None) -> list[tuple[str, int]]:
    """At which messages to cut, of those that were seen: all, or a sample of each side."""
    chance = random.Random(SEED)
    chosen = []
    for sender, count in sorted(seen.items()):
        numbers = range(1, count + 1)
        if sample is None or sample >= count:
            chosen += [(sender, n) for n in numbers]
        else:
            chosen += [(sender, n) for n in sorted(chance.sample(numbers, sample))]
    return chosen


def counting(seen: Counter[str]) -> Callable[[Any], bool]:
    def when(message: Any) -> bool:
        seen["commit"] += message.ends_transaction
        seen[message.sender] += 1
        return False

    return when


def cut_at(sender: str, number: int) -> Callable[[Any], bool]:
    return nth_commit(number) if sender == "commit" else nth(sender, number)


@pytest.mark.parametrize("sample", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_a_worker_whose_connection_is_cut_at_every_message(
    runtime: Runtime, proxy: Proxy, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path, sample: int | None
) -> None:
    """R19, R21: claim, two requests, the park, the claim of what was admitted, the finish."""
    here = scene(book, gpus(2))
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 1")  # its passes would be cut most of the time
    first = crew(proxy.url)
    until(lambda: first.ready())
    count = iter(range(10_000))

    def run() -> None:
        blocker = here.granted(cuda(20, device_id=1))
        file = tmp_path / f"ends-{next(count)}"
        ticket = runtime.submit(work.Tell, file=str(file), sizes=[20, 20])
        until(lambda: ticket.state is ExecutionState.WAITING)
        let_go(here, blocker)
        ticket.result(PATIENCE)
        assert_done_once(sql, ticket.id, file)
        assert len(file.read_text().split()) == 1  # nobody died, so nobody ran it again
        until(lambda: proxy.fired or time.monotonic() - proxy.seen_at > 0.1)

    run()
    seen: Counter[str] = Counter()
    proxy.cut(counting(seen), client="jayrun:worker")
    run()
    chosen = cuts(seen, sample)
    fired = 0
    for sender, number in chosen:
        proxy.cut(cut_at(sender, number), client="jayrun:worker")
        run()
        fired += proxy.fired
    assert fired > 0.7 * len(chosen)  # the way is not always equally long
    assert sql.execute("SELECT sum(crashes) FROM jayrun.executions").fetchone() == (0,)
    # Who finished it and did not hear that takes itself for no rival.
    assert "was not finished by this worker" not in first.words()
    sound.check(sql)


@pytest.mark.parametrize("sample", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_every_answer_may_be_lost(
    runtime: Runtime, proxy: Proxy, book: Book, sql: Sql, sound: Sound, sample: int | None
) -> None:
    """R19, R21: submitting, cancelling, retrying, taking, reserving, releasing and finishing, cut at every message."""
    here = scene(book, gpus(1))
    me = worker_at_hand(book, here.host_id)
    keys = iter(range(10_000))

    def run(cut: Book) -> None:
        submitted = submissions.submission("Tell", {}, key=f"job-{next(keys)}")
        execution_id = submissions.submit(cut, submitted)
        assert submissions.cancel(cut, execution_id, who="a test").state is ExecutionState.CANCELLED
        assert submissions.retry(cut, execution_id).state is ExecutionState.READY
        taken = claims.take(cut, me.id).taken
        assert taken is not None
        assert taken.id == execution_id
        work = Work.taken(taken, me)[0]
        held = [reserve(cut, work, cuda(8)) for _ in range(2)]
        leases.release(cut, here.host_id, me.id, [(lease.id, lease.epoch) for lease in held if lease is not None])
        done = Done(id=taken.id, claim=taken.claim, state=ExecutionState.SUCCEEDED, result="1", result_kind="json")
        assert claims.take(cut, me.id, done).finished
        rows = "SELECT state, result FROM jayrun.executions WHERE key = %s", (submitted.key,)
        assert sql.execute(*rows).fetchall() == [("succeeded", 1)]
        granted = sql.execute("SELECT count(*) FROM jayrun.leases WHERE execution_id = %s", (execution_id,)).fetchone()
        assert granted == (2,)

    with closing(Book(proxy.url, role="cut", patience_seconds=PATIENCE)) as cut:
        run(cut)
        seen: Counter[str] = Counter()
        proxy.cut(counting(seen), client="jayrun:cut")
        run(cut)
        for sender, number in cuts(seen, sample):
            proxy.cut(cut_at(sender, number), client="jayrun:cut")
            run(cut)
            assert proxy.fired, (sender, number)
    sound.check(sql)


# --- reconcilers -----------------------------------------------------------------------------------------------------


def reconcile(url: str, connection: Any, point: str) -> None:
    """Passes for ever; with a `point`, until it is killed there in the middle of one."""
    book = Book(url, role="test")
    host_id = holders.attest_host(book, "test-host")
    connection.send("ready")
    passes = 0

    def die() -> None:
        connection.send(point)
        os.kill(os.getpid(), signal.SIGKILL)

    with ExitStack() as stack:
        if point:
            stack.enter_context(probes.arm(point, die))
        while not connection.poll(0.02):  # the processor is for the workers, too
            reconciler.run_pass(book, host_id)
            passes += 1
    connection.recv()
    connection.send(passes)


def test_eight_reconcilers_and_one_of_them_is_killed_in_the_middle(
    runtime: Runtime, url: str, crew: Crews, book: Book, sql: Sql, sound: Sound, tmp_path: Path
) -> None:
    scene(book, gpus(2))
    with ExitStack() as stack:
        connections = []
        children = []
        for point in ["holder.ending", *[""] * 7]:
            connection, theirs = CONTEXT.Pipe()
            children.append(stack.enter_context(process(reconcile, url, theirs, point)))
            connections.append(connection)
        assert [connection.recv() for connection in connections] == ["ready"] * 8
        first = crew(processes=3)
        until(lambda: first.ready() == 3)
        tickets = load(runtime, tmp_path, 40)
        killed = 0
        victim = connections[0]
        while ended(sql) < len(tickets) or not victim.poll():
            for pid in first.workers()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            until(
                lambda killed=killed: first.ready() >= 3 + killed or (ended(sql) == len(tickets) and victim.poll())  # type: ignore[misc]
            )
        assert victim.recv() == "holder.ending"
        children[0].join(PATIENCE)
        assert children[0].exitcode == -signal.SIGKILL
        for connection in connections[1:]:
            connection.send("enough")
        passes = [connection.recv() for connection in connections[1:]]
        assert all(count > 10 for count in passes), passes
        for child in children[1:]:
            finished(child)
    assert killed
    assert_all_done(sql, tickets, tmp_path)
    first.drain()
    sound.check(sql)
