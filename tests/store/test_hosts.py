"""Hosts: which machine is which, who of them speaks, and what an administrator may declare."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from agents import Agent, agent, need
from fleet import Scene, cuda, gpus, let_silence_count, scene
from history import replay
from processes import PATIENCE, until

from jayrun import kernel, probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.domain.requests import Request
from jayrun.domain.why import Later, Never, Now
from jayrun.embedded import Throwaway
from jayrun.errors import DeviceInUse, StillAlive, UnknownId
from jayrun.store import admission, at_once, audit, claims, devices, everywhere, holders, leases, levers, reclaim
from jayrun.store.admission import Ended, Granted, Parked, Unavailable
from jayrun.store.explain import explain, forecast
from jayrun.store.ids import new_id
from jayrun.store.submissions import cancel, submission, submit
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Start = Callable[..., Agent]

QUICK = "UPDATE jayrun.settings SET holder_ttl_seconds = 4, tick_seconds = 0.1"
HOUR_AGO = "clock_timestamp() - interval '1 hour'"
HOLD = "me = holders.register(book, host_id, role='runtime'); here = Scene(book, host_id, me)"


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """`start("boot-1")` starts an agent on a machine of that boot id (None: this one's); all have one machine id."""
    with ExitStack() as stack:

        def starting(boot: str | None = None, *before: str, machine: str = "machine") -> Agent:
            started = stack.enter_context(agent(url, tmp_path, before=before))
            if boot is not None:
                started(f"kernel.boot_id = lambda: {boot!r}; kernel.machine_id = lambda: {machine!r}")
            return started

        yield starting


def the_host(sql: Sql, columns: str) -> tuple[Any, ...]:
    [row] = sql.execute(f"SELECT {columns} FROM jayrun.hosts").fetchall()
    return row


ATTEST = "host_id = holders.attest_host(book, None)"


# --- one machine, whatever it is called ------------------------------------------------------------------------------


def test_a_renamed_host_is_the_same_host(sql: Sql, start: Start) -> None:
    """R11."""
    renamed = ("unshare", "--uts", "sh", "-c", 'hostname another-name && exec "$@"', "sh")
    need(*renamed)
    start()(ATTEST)
    before = the_host(sql, "id, identity")
    assert the_host(sql, "name") == (kernel.host_name(),)
    start(None, *renamed)(ATTEST)
    assert the_host(sql, "id, identity") == before
    assert the_host(sql, "name") == ("another-name",)


def test_after_a_restart_the_same_machine_is_the_same_host(sql: Sql, start: Start) -> None:
    """R11: what ran before the restart ends once it was silent for the TTL, and had time to speak."""
    sql.execute(QUICK)
    first, second = start("boot-1"), start("boot-2")
    first(ATTEST)
    first(HOLD)
    first("devices.declare(book, host_id, gpus(1)); lease = here.granted(cuda(24))")
    host = the_host(sql, "id")
    seen = the_host(sql, "seen_at")
    until(lambda: first("holders.beat(book, me)") and the_host(sql, "seen_at") != seen)
    seen = the_host(sql, "seen_at")
    first.kill()
    second(ATTEST)
    assert the_host(sql, "id, boot_id") == (*host, "boot-2")
    assert "host " in second.words()
    assert "was heard of" in second.words()
    assert "at most" in second.words()
    assert len(second.words().splitlines()) == 1
    silent = "SELECT watched_since - %s >= interval '4 s' FROM jayrun.hosts"
    assert sql.execute(silent, seen).fetchone() == (True,)
    assert second("reclaim.sweep(book, host_id)") == 0  # perhaps the database was away, and it speaks now
    second(HOLD)
    assert second("type(here.reserve(cuda(24), wait=False)[1]).__name__") == "Unavailable"
    until(lambda: second("reclaim.sweep(book, host_id)") == 1)
    assert second("type(here.reserve(cuda(24), wait=False)[1]).__name__") == "Granted"
    assert replay(sql) == 2


def test_a_restart_long_ago_is_not_waited_for(sql: Sql, start: Start) -> None:
    first = start("boot-1")
    first(ATTEST)
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}, watched_since = {HOUR_AGO}")
    let_silence_count(sql)
    second = start("boot-2")
    second(ATTEST)
    assert second.words() == ""
    assert the_host(sql, "boot_id, watched_since > clock_timestamp() - interval '1 minute'") == ("boot-2", True)


def test_two_machines_that_pass_for_one_are_refused(sql: Sql, start: Start) -> None:
    """R11: clones with one machine id, both of which run."""
    sql.execute(QUICK)
    one, clone = start("boot-1"), start("boot-2")
    one("runtime = Runtime(url)")  # its service speaks at each tick
    refused = clone(ATTEST)
    assert refused.startswith("HostClash: two machines pass for one host: ")
    for named in ("boot-1", "boot-2", kernel.host_name(), "'machine'", "JAYRUN_HOST_ID", "/etc/machine-id"):
        assert named in refused
    assert the_host(sql, "boot_id") == ("boot-1",)
    # Told apart by the setting, they are two.
    assert isinstance(clone("holders.attest_host(book, 'the-clone')"), int)
    assert sql.execute("SELECT count(*) FROM jayrun.hosts").fetchone() == (2,)


def test_one_host_id_given_to_two_machines_is_the_same_clash(sql: Sql, start: Start) -> None:
    sql.execute(QUICK)
    one, other = start("boot-1", machine="one"), start("boot-2", machine="other")
    one("host_id = holders.attest_host(book, 'shared')")
    one(HOLD)
    other.tell("holders.attest_host(book, 'shared')")
    until(lambda: "was heard of" in other.words())
    before = the_host(sql, "seen_at")
    until(lambda: one("holders.beat(book, me)") and the_host(sql, "seen_at") != before)
    assert other.hear().startswith("HostClash: ")


def test_who_meets_a_clone_later_says_so_once_and_leaves_the_host_alone(sql: Sql, start: Start) -> None:
    one = start("boot-1")
    one(ATTEST)
    one(HOLD)
    sql.execute(f"UPDATE jayrun.hosts SET boot_id = 'boot-2', seen_at = {HOUR_AGO}, watched_since = {HOUR_AGO}")
    before = the_host(sql, "seen_at, watched_since, boot_id")
    for _ in range(3):
        assert one("holders.beat(book, me)") is True
        assert one("reclaim.sweep(book, host_id)") == 0
    assert the_host(sql, "seen_at, watched_since, boot_id") == before
    assert one.words().count("two machines pass for one host") == 1
    assert "JAYRUN_HOST_ID" in one.words()


def test_a_machine_judges_nobody_of_its_clone(sql: Sql, start: Start) -> None:
    """One that was asleep while the other took its place in the book is told nothing by the other's silence."""
    one, clone = start("boot-1"), start("boot-2")
    one(ATTEST)
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    let_silence_count(sql)
    clone(ATTEST)
    clone(HOLD)
    sql.execute(f"UPDATE jayrun.holders SET seen_at = {HOUR_AGO}")
    sql.execute(f"UPDATE jayrun.hosts SET watched_since = {HOUR_AGO}")
    assert one("reclaim.sweep(book, host_id)") == 0


def test_who_has_lost_its_place_to_a_clone_is_admitted_nothing(book: Book, sql: Sql) -> None:
    """It took the other's silence for a restart; what this one is granted would be granted by the other as well."""
    here = scene(book, gpus(1))
    ask = _taken(here, submit(book, submission("Test", {})), cuda(4))
    idle = holders.register(book, here.host_id, role="worker")
    claims.accept(book, idle.id, ["Test"])
    submit(book, submission("Test", {}))
    sql.execute("UPDATE jayrun.hosts SET boot_id = 'boot-2'")
    assert here.reserve(cuda(4), wait=False)[1] == Ended("lost")
    assert admission.reserve(book, ask) == Ended("lost")
    refused = claims.take(book, idle.id)
    assert (refused.is_alive, refused.taken) == (False, None)
    sql.execute("UPDATE jayrun.hosts SET boot_id = %s", (kernel.boot_id(),))
    assert isinstance(here.reserve(cuda(4), wait=False)[1], Granted)
    assert claims.take(book, idle.id).taken is not None


# --- who speaks ------------------------------------------------------------------------------------------------------


def test_every_pass_shows_that_the_host_lives(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    for show in (
        lambda: reclaim.sweep(book, here.host_id),
        lambda: holders.beat(book, here.holder),
        lambda: here.reserve(cuda(48), wait=False) and here.reserve(cuda(24)) and here.reserve(cuda(24), wait=False),
        lambda: holders.attest_host(book, "test-host"),
    ):
        sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}, forgotten_at = {HOUR_AGO}")
        show()
        assert the_host(sql, "seen_at > clock_timestamp() - interval '1 minute', forgotten_at") == (True, None)


def test_a_gap_of_half_a_ttl_is_remembered(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    watched = f"watched_since = {HOUR_AGO}"
    for silent, is_gap in ((14, False), (16, True)):
        sql.execute(f"UPDATE jayrun.hosts SET seen_at = clock_timestamp() - interval '{silent} s', {watched}")
        reclaim.sweep(book, here.host_id)
        assert the_host(sql, "watched_since > clock_timestamp() - interval '1 minute'") == (is_gap,)


def test_heartbeats_of_many_write_the_host_a_few_times_in_a_tick(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    before = the_host(sql, "xmin::text")
    for _ in range(20):
        holders.beat(book, here.holder)
        reclaim.sweep(book, here.host_id)
    after = the_host(sql, "xmin::text")
    assert after == before or the_host(sql, "clock_timestamp() - registered_at > interval '0.5 s'") == (True,)


def test_heartbeats_notify_nobody(book: Book, sql: Sql, url: str) -> None:
    """R30; that they stay HOT is in test_refusals."""
    here = scene(book, gpus(1))
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 1e-9, holder_ttl_seconds = 4e-9")
    with psycopg.connect(url, autocommit=True) as listener:
        for name in (str(here.holder.id), "workers"):
            listener.execute(f'LISTEN "jayrun:{name}"')
        for _ in range(5):
            assert holders.beat(book, here.holder) is True
            assert reclaim.sweep(book, here.host_id) == 0  # which attests for it
        book.value("SELECT jayrun.tell(ARRAY['workers'])")
        heard = [each.channel for each in listener.notifies(timeout=PATIENCE, stop_after=1)]
    assert heard == ["jayrun:workers"]
    assert the_host(sql, "seen_at > registered_at") == (True,)


def test_a_beat_tells_that_the_holder_was_ended(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    assert holders.beat(book, here.holder) is True
    levers.end_holder(book, here.holder.id, force=True)
    assert holders.beat(book, here.holder) is False


def test_a_ttl_is_at_least_three_ticks(sql: Sql) -> None:
    """Else everybody would be silent between two ticks, and nobody ever be judged by time."""
    for refused in ("tick_seconds = 11", "holder_ttl_seconds = 5"):
        with pytest.raises(psycopg.errors.CheckViolation, match="settings_ttl_of_three_ticks"):
            sql.execute(f"UPDATE jayrun.settings SET {refused}")
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 11, holder_ttl_seconds = 33")


# --- a silent host ---------------------------------------------------------------------------------------------------


@pytest.fixture
def far(book: Book, sql: Sql) -> Scene:
    """Another machine, which holds all it has and has been silent for an hour."""
    [(host_id,)] = sql.execute(
        "INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('far', 'far-away', 'its-boot') RETURNING id"
    )
    devices.declare(book, host_id, gpus(1))
    who = replace(kernel.incarnation(), boot_id="its-boot")
    there = Scene(book, host_id, holders.register(book, host_id, role="runtime", incarnation=who))
    there.granted(cuda(20))
    silence(sql)
    return there


def silence(sql: Sql) -> None:
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO} WHERE identity = 'far'")
    sql.execute(f"UPDATE jayrun.holders SET seen_at = {HOUR_AGO} WHERE boot_id = 'its-boot'")


def shown(book: Book, name: str) -> dict[str, Any]:
    [row] = [row for row in audit.hosts(book) if row["host"] == name]
    return row


def test_the_devices_of_a_silent_host_are_offline_and_its_leases_stay(book: Book, sql: Sql, far: Scene) -> None:
    here = scene(book, gpus(1, 8))
    states = {row["host"]: (row["state"], row["free_bytes"], row["leases"]) for row in audit.capacity(book)}
    assert states == {kernel.host_name(): ("online", 8 * 10**9, 0), "far-away": ("offline", 0, 1)}
    assert (shown(book, "far-away")["state"], shown(book, kernel.host_name())["state"]) == ("silent", "online")
    assert reclaim.sweep(book, here.host_id) == 0
    # Offline means not now, and not never.
    assert isinstance(forecast(book, far.host_id, cuda(4)), Later)
    assert isinstance(forecast(book, far.host_id, cuda(40)), Never)
    free = submit(book, submission("Test", {}))
    _wait_for_any_host(here, free, cuda(20))
    assert everywhere.fail_impossible(book) == 0
    text = explain(book, free).text()
    assert "offline" in text
    assert live(sql) == 1
    # Nothing is written: it is back when it speaks.
    sql.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp() WHERE identity = 'far'")
    assert {row["state"] for row in audit.capacity(book)} == {"online"}
    assert isinstance(forecast(book, far.host_id, cuda(4)), Now)


def _wait_for_any_host(here: Scene, execution_id: UUID, request: Request) -> None:
    """A worker of this host has taken it, and parked it: it waits for any host."""
    _park(here, execution_id, request, pinned_host_id=None)


def _park(here: Scene, execution_id: UUID, request: Request, *, pinned_host_id: int | None) -> None:
    asked = _taken(here, execution_id, request, pinned_host_id=pinned_host_id)
    assert admission.reserve(here.book, asked) == Parked()


def _taken(here: Scene, execution_id: UUID, request: Request, *, pinned_host_id: int | None = None) -> admission.Ask:
    """A worker of the host has taken it, and is to ask for that."""
    worker = holders.register(here.book, here.host_id, role="worker")
    claims.accept(here.book, worker.id, ["Test"])
    taken = claims.take(here.book, worker.id).taken
    assert taken is not None
    assert taken.id == execution_id
    execution = admission.Execution(
        id=execution_id,
        kind="operator",
        name="Test",
        host_id=here.host_id,
        holder_id=worker.id,
        unit_id=execution_id,
        detached=True,
        operator="Test",
        pinned_host_id=pinned_host_id,
    )
    member = admission.Member(execution=execution, invocation=1, recorded=(request,), booked=0)
    return admission.Ask(asker=member, position=0)


def live(sql: Sql) -> int:
    [(count,)] = sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL")
    return int(count)


@pytest.mark.parametrize("lever", ["end a holder", "declare devices"])
def test_nothing_is_granted_on_a_silent_host(book: Book, sql: Sql, far: Scene, lever: str) -> None:
    """What an administrator does there frees capacity, but nobody would come for what is given."""
    who = replace(kernel.incarnation(), boot_id="its-boot", pid=4)
    claims.accept(book, holders.register(book, far.host_id, role="worker", incarnation=who).id, ["Test"])
    here = scene(book, gpus(1, 20))
    here.granted(cuda(20))
    free = submit(book, submission("Test", {}))
    _wait_for_any_host(here, free, cuda(20))
    if lever == "end a holder":
        levers.end_holder(book, far.holder.id, force=True)
    else:
        devices.declare(book, far.host_id, gpus(2))
        assert admission.combine(book, far.host_id) == 0
    place = "SELECT state, host_id FROM jayrun.executions WHERE id = %s"
    assert sql.execute(place, (free,)).fetchone() == ("waiting", None)
    sql.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp() WHERE identity = 'far'")
    assert admission.combine(book, far.host_id) == 1  # nothing but the silence stood in its way
    assert sql.execute(place, (free,)).fetchone() == ("admitted", far.host_id)


def test_who_asks_shows_that_its_host_is_not_silent(book: Book, sql: Sql) -> None:
    """A process that was stopped, all of its host with it, and goes on: it is served at its first look."""
    here = scene(book, gpus(1))
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    before = the_host(sql, "seen_at")
    assert isinstance(here.reserve(cuda(4), wait=False)[1], Granted)
    assert the_host(sql, "seen_at") == before, "its host was seen otherwise, so nothing was shown"


def test_this_very_host_is_never_silent_to_its_own(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    assert isinstance(forecast(book, here.host_id, cuda(4), judged=True), Now)


# --- what an administrator declares ----------------------------------------------------------------------------------


def declared(sql: Sql) -> list[tuple[Any, ...]]:
    return sql.execute(
        "SELECT holder_id, detail FROM jayrun.lease_events WHERE kind = 'declared' ORDER BY id"
    ).fetchall()


def test_a_silent_host_is_forgotten_with_all_that_it_has(book: Book, sql: Sql, far: Scene) -> None:
    worker = holders.register(
        book, far.host_id, role="worker", incarnation=replace(kernel.incarnation(), boot_id="its-boot", pid=4)
    )
    claims.accept(book, worker.id, ["Test"])
    running = submit(book, submission("Test", {}))
    assert claims.take(book, worker.id).taken is not None
    pinned = submit(book, submission("Test", {}, host_id=far.host_id))
    silence(sql)
    let_silence_count(sql)
    assert levers.forget_host(book, far.host_id) == 2
    assert live(sql) == 0
    states = sql.execute("SELECT id, state, crashes FROM jayrun.executions WHERE detached ORDER BY age").fetchall()
    assert states == [(running, "ready", 0), (pinned, "ready", 0)]
    attached = sql.execute("SELECT state, failure ->> 'message' FROM jayrun.executions WHERE NOT detached").fetchall()
    assert attached == [("failed", "its process was declared gone by an administrator")]
    assert audit.capacity(book) == []
    assert shown(book, "far-away")["state"] == "forgotten"
    ends = sql.execute("SELECT DISTINCT state, end_reason FROM jayrun.holders").fetchall()
    assert ends == [("ended", "declared")]
    assert sql.execute("SELECT end_reason FROM jayrun.leases").fetchall() == [("reclaimed",)]
    told = declared(sql)
    assert {row[0] for row in told} == {None, far.holder.id, worker.id}
    for _, detail in told:
        assert kernel.user_name() in detail
        assert "database user " in detail
        assert "far-away" in detail
        assert "by force" not in detail
    assert replay(sql) == 1
    assert audit.violations(book) == []
    # It comes back by itself, with nothing; declared again its devices are back.
    sql.execute("UPDATE jayrun.hosts SET boot_id = %s WHERE identity = 'far'", (kernel.boot_id(),))
    reclaim.sweep(book, far.host_id)
    assert shown(book, "far-away")["state"] == "online"
    devices.declare(book, far.host_id, gpus(1))
    again = Scene(book, far.host_id, holders.register(book, far.host_id, role="runtime"))
    again.granted(cuda(24))


def test_what_was_submitted_for_a_forgotten_host_waits_for_it(book: Book, sql: Sql, far: Scene) -> None:
    sql.execute("UPDATE jayrun.hosts SET boot_id = %s WHERE identity = 'far'", (kernel.boot_id(),))  # of its workers
    waiting = submit(book, submission("Test", {}, host_id=far.host_id))
    _park(far, waiting, cuda(20), pinned_host_id=far.host_id)
    cancelled = submit(book, submission("Test", {}, host_id=far.host_id, priority=1))
    _park(far, cancelled, cuda(20), pinned_host_id=far.host_id)
    ready = submit(book, submission("Test", {}, host_id=far.host_id))
    levers.forget_host(book, far.host_id, force=True)
    cancel(book, cancelled, who="me")  # and whoever may have what was kept for it is looked for
    states = dict(sql.execute("SELECT id, state FROM jayrun.executions WHERE detached").fetchall())
    assert states == {waiting: "waiting", cancelled: "cancelled", ready: "ready"}
    # It is back.
    reclaim.sweep(book, far.host_id)
    devices.declare(book, far.host_id, gpus(1))
    worker = holders.register(book, far.host_id, role="worker")
    claims.accept(book, worker.id, ["Test"])
    assert admission.combine(book, far.host_id) == 1
    assert sql.execute("SELECT state FROM jayrun.executions WHERE id = %s", (waiting,)).fetchone() == ("admitted",)


def test_a_host_that_shows_life_is_not_forgotten(book: Book, sql: Sql, far: Scene) -> None:
    sql.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp() WHERE identity = 'far'")
    with pytest.raises(StillAlive, match=r"far-away was heard of 0 s ago.* 30 s.*two programs in one GPU's memory"):
        levers.forget_host(book, far.host_id)
    assert (live(sql), declared(sql)) == (1, [])
    assert levers.forget_host(book, far.host_id, force=True) == 1
    assert (live(sql), audit.capacity(book)) == (0, [])
    assert all("by force" in detail for _, detail in declared(sql))


def test_this_host_is_not_forgotten_while_the_kernel_sees_a_holder(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    here.granted(cuda(20))
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    sql.execute(f"UPDATE jayrun.holders SET seen_at = {HOUR_AGO}")
    with pytest.raises(StillAlive, match=rf"pid {kernel.incarnation().pid} is alive, says the kernel"):
        levers.forget_host(book, here.host_id)
    assert live(sql) == 1
    assert levers.forget_host(book, here.host_id, force=True) == 1
    assert holders.beat(book, here.holder) is False
    assert live(sql) == 0


def test_forgetting_ends_also_what_is_granted_meanwhile(book: Book, sql: Sql, url: str, far: Scene) -> None:
    """A living process of a host that is forgotten by force introduces itself again, and takes what became free."""
    other = Book(url, role="test")
    again: list[Granted] = []

    def take_again() -> None:
        if not again:
            who = replace(kernel.incarnation(), boot_id="its-boot")
            me = holders.register(other, far.host_id, role="runtime", incarnation=who)
            outcome = admission.reserve(other, Scene(other, far.host_id, me).ask(cuda(24)))
            assert isinstance(outcome, Granted)
            again.append(outcome)

    with probes.arm("holder.ending", take_again):
        assert levers.forget_host(book, far.host_id, force=True) == 2
    other.close()
    assert again
    assert (live(sql), audit.capacity(book)) == (0, [])
    assert audit.violations(book) == []


def test_forgetting_ends_though_a_device_stays_in_use(book: Book, sql: Sql, far: Scene) -> None:
    """A lease that nobody can end stands for processes that take what is freed as fast as it is ended."""
    sql.execute("ALTER TABLE jayrun.holders DISABLE TRIGGER holders_end_without_leases")
    sql.execute("UPDATE jayrun.holders SET state = 'ended', ended_at = clock_timestamp(), end_reason = 'left'")
    sql.execute("ALTER TABLE jayrun.holders ENABLE TRIGGER holders_end_without_leases")
    let_silence_count(sql)
    with pytest.raises(DeviceInUse, match="end what still runs there"):
        levers.forget_host(book, far.host_id)
    assert shown(book, "far-away")["state"] == "silent"


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_the_end_of_a_holder_sees_the_lease_that_it_waited_for(book: Book, sql: Sql, url: str, isolation: str) -> None:
    """Whatever isolation the database gives to those who ask for none."""
    sql.execute(f"ALTER DATABASE {sql.info.dbname} SET default_transaction_isolation = '{isolation}'")
    with ExitStack() as stack:
        stack.callback(sql.execute, f"ALTER DATABASE {sql.info.dbname} RESET default_transaction_isolation")
        here = scene(book, gpus(1))
        lease = here.granted(cuda(24))
        doomed = holders.register(book, here.host_id, role="runtime")
        hand = Book(url, role="hand")  # all of its connections have the new default
        stack.callback(hand.close)
        assert hand.value("SELECT current_setting('transaction_isolation')") == isolation
        joining = stack.enter_context(psycopg.connect(url))
        joining.execute("SELECT jayrun.join_lease(%s, %s, %s, 1)", (doomed.id, lease.id, lease.epoch))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        ending = pool.submit(hand.written, lambda pg: reclaim.end_holder(pg, doomed.id, reason="declared"))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        until(lambda: sql.execute(waits, (joining.info.backend_pid,)).fetchone() == (1,))
        joining.commit()
        ending.result(PATIENCE)
        assert audit.violations(book) == []
        state = "SELECT state FROM jayrun.holders WHERE id = %s"
        assert sql.execute(state, (doomed.id,)).fetchone() == ("alive",)
        hand.written(lambda pg: reclaim.end_holder(pg, doomed.id, reason="declared"))
        assert sql.execute(state, (doomed.id,)).fetchone() == ("ended",)
        leases.release(hand, here.host_id, here.holder.id, [(lease.id, lease.epoch)])
        again = Scene(hand, here.host_id, holders.register(hand, here.host_id, role="runtime"))
        again.granted(cuda(24))
    assert audit.violations(book) == []


def test_after_an_outage_every_host_has_time_to_speak(sql: Sql, server: Throwaway, start: Start) -> None:
    """R10: neither is it forgotten, nor does a clone take it for one that has restarted."""
    sql.execute("UPDATE jayrun.settings SET holder_ttl_seconds = 5, tick_seconds = 0.5")
    one, clone = start("boot-1"), start("boot-2")
    one(ATTEST)
    one(HOLD)
    [host_id] = the_host(sql, "id")
    holder_id = UUID(one("str(me.id)"))
    server.stop()
    time.sleep(5.5)
    server.start()
    after = Book(server.url, role="test", patience_seconds=10)
    try:
        with pytest.raises(StillAlive, match="it can be forgotten once it has been silent for 5 s"):
            levers.forget_host(after, host_id)
        with pytest.raises(StillAlive, match="it can be ended once it has been silent for 5 s"):
            levers.end_holder(after, holder_id)
        clone.tell(ATTEST)
        until(lambda: "was heard of" in clone.words())
        assert one("holders.beat(book, me)") is True
        assert clone.hear().startswith("HostClash: ")

        def forgotten() -> bool:
            try:
                return levers.forget_host(after, host_id) == 1
            except StillAlive:
                return False

        until(forgotten)
    finally:
        after.close()


def test_who_was_cut_off_with_all_others_has_time_to_speak(book: Book, sql: Sql, far: Scene) -> None:
    here = scene(book, gpus(1))
    let_silence_count(sql)
    sql.execute(f"UPDATE jayrun.hosts SET seen_at = {HOUR_AGO}")
    reclaim.sweep(book, here.host_id)  # the first to be heard of again
    with pytest.raises(StillAlive, match="it can be forgotten once it has been silent"):
        levers.forget_host(book, far.host_id)
    let_silence_count(sql)
    assert levers.forget_host(book, far.host_id) == 1


def test_a_dead_holder_is_ended_as_dead(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    with subprocess.Popen(["sleep", "600"]) as child:
        doomed = holders.register(book, here.host_id, role="command", incarnation=kernel.incarnation(child.pid))
        with pytest.raises(StillAlive, match=r"is alive, says the kernel: end the process itself"):
            levers.end_holder(book, doomed.id)
        child.kill()
    assert levers.end_holder(book, doomed.id) is True
    assert levers.end_holder(book, doomed.id) is False
    ends = sql.execute("SELECT end_reason FROM jayrun.holders WHERE id = %s", (doomed.id,)).fetchall()
    assert ends == [("dead",)]
    [(holder_id, detail)] = declared(sql)
    assert holder_id == doomed.id
    assert "which the kernel calls dead" in detail
    with pytest.raises(UnknownId):
        levers.end_holder(book, new_id())


def test_a_living_holder_is_ended_by_force_and_what_it_had_is_handed_on(book: Book, sql: Sql) -> None:
    here = scene(book, gpus(1))
    with subprocess.Popen(["sleep", "600"]) as child:
        other = holders.register(book, here.host_id, role="runtime", incarnation=kernel.incarnation(child.pid))
        taken = admission.reserve(book, here.ask(cuda(24), execution=here.execution(holder=other)))
        assert isinstance(taken, Granted)
        waiting, outcome = here.reserve(cuda(24))
        assert isinstance(outcome, Parked)
        with pytest.raises(StillAlive, match="two programs in one GPU's memory"):
            levers.end_holder(book, other.id)
        assert levers.end_holder(book, other.id, force=True) is True
        child.kill()
    state = sql.execute("SELECT state FROM jayrun.executions WHERE id = %s", (waiting,)).fetchone()
    assert state == (ExecutionState.ADMITTED,)
    ends = sql.execute("SELECT end_reason FROM jayrun.holders WHERE state = 'ended'").fetchall()
    assert ends == [("declared",)]
    assert "by force" in declared(sql)[0][1]
    assert replay(sql) == 2


def test_who_cannot_be_seen_is_ended_once_it_was_silent(book: Book, sql: Sql, far: Scene) -> None:
    sql.execute("UPDATE jayrun.holders SET seen_at = clock_timestamp()")
    with pytest.raises(StillAlive, match=r"cannot be seen from here and was heard of 0 s ago"):
        levers.end_holder(book, far.holder.id)
    assert live(sql) == 1
    silence(sql)
    let_silence_count(sql)
    assert levers.end_holder(book, far.holder.id) is True
    assert live(sql) == 0
    assert "which the kernel calls unseen" in declared(sql)[0][1]


# --- who was ended gets nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["granted", "parked"])
def test_who_was_ended_is_admitted_nothing(book: Book, sql: Sql, full: bool) -> None:
    here = scene(book, gpus(1))
    ended = holders.register(book, here.host_id, role="runtime")
    holders.leave(book, ended)
    if full:
        here.granted(cuda(24))
    execution = here.execution(holder=ended)
    assert admission.reserve(book, here.ask(cuda(24), execution=execution)) == Ended("lost")
    assert sql.execute("SELECT count(*) FROM jayrun.executions WHERE id = %s", (execution.id,)).fetchone() == (0,)
    admission.combine(book, here.host_id)


@pytest.mark.parametrize("full", [False, True], ids=["granted", "parked"])
def test_who_is_ended_while_it_asks_is_admitted_nothing(book: Book, sql: Sql, url: str, full: bool) -> None:
    """Between the look behind the gate and what is written, at each look."""
    here = scene(book, gpus(1))
    if full:
        here.granted(cuda(24))
    looks = 0
    hand = Book(url, role="test")
    doomed = holders.register(book, here.host_id, role="runtime")
    at_once.note(book, doomed.id, is_crowded=True)
    last = 2 if full else 1  # a full device is looked at once more after the dead were judged

    def end_it() -> None:
        nonlocal looks
        looks += 1
        if looks == last:
            hand.written(lambda pg: reclaim.end_holder(pg, doomed.id, reason="declared"))

    execution = here.execution(holder=doomed)
    with probes.arm("reserve.loaded", end_it):
        assert admission.reserve(book, here.ask(cuda(24), execution=execution)) == Ended("lost")
    hand.close()
    assert looks == last + 1, "the transaction that saw it alive was not refused"
    assert sql.execute("SELECT count(*) FROM jayrun.executions WHERE id = %s", (execution.id,)).fetchone() == (0,)
    # Nobody else is held up by it.
    assert isinstance(here.reserve(cuda(24), wait=False)[1], Unavailable if full else Granted)
    assert audit.violations(book) == []


def test_a_waiter_whose_holder_is_ended_while_it_is_admitted_gets_nothing(book: Book, sql: Sql, url: str) -> None:
    here = scene(book, gpus(1))
    lease = here.granted(cuda(24))
    with subprocess.Popen(["sleep", "600"]) as child:
        doomed = holders.register(book, here.host_id, role="runtime", incarnation=kernel.incarnation(child.pid))
        outcome = admission.reserve(book, here.ask(cuda(24), execution=here.execution(holder=doomed)))
        assert isinstance(outcome, Parked)
        hand = Book(url, role="test")
        once: list[bool] = []

        def end_it() -> None:
            if not once:
                once.append(True)
                hand.written(lambda pg: reclaim.end_holder(pg, doomed.id, reason="declared"))

        leases.release(book, here.host_id, here.holder.id, [(lease.id, lease.epoch)])
        with probes.arm("combine.loaded", end_it):
            assert admission.combine(book, here.host_id) == 0
        hand.close()
        child.kill()
    assert once
    assert live(sql) == 0
    assert isinstance(here.reserve(cuda(24), wait=False)[1], Granted)
