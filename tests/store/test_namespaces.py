"""Who is dead, across pid namespaces, users and clocks: judged by the kernel wherever somebody sees it, else by time.

R9, R10, R11, R16. Everything here is real processes; time that has passed is written into the book.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from agents import BELOW, Agent, agent, need
from fleet import Scene, cuda, gpus, scene
from history import replay
from processes import until

from jayrun import kernel
from jayrun.domain.liveness import Incarnation, Verdict
from jayrun.embedded import Throwaway
from jayrun.store import reclaim
from jayrun.store.admission import Unavailable
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Start = Callable[..., Agent]

HOLD = "here = scene(book, gpus(1)); lease = here.granted(cuda(1))"
RUNTIME = "runtime = Runtime(url, devices=gpus(1)); data = runtime.run(Take, memory_gb=1)"


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """`start(*before)` starts an agent by the command `before`."""
    with ExitStack() as stack:
        yield lambda *before, **environment: stack.enter_context(agent(url, tmp_path, before=before, **environment))


@pytest.fixture
def here(book: Book) -> Scene:
    return scene(book, gpus(1))


def incarnations(sql: Sql) -> dict[UUID, Incarnation]:
    rows = sql.execute("SELECT id, boot_id, pid_namespace, pid, start_ticks FROM jayrun.holders").fetchall()
    return {row[0]: Incarnation(*row[1:]) for row in rows}


def holder_of(sql: Sql, start_agent: Callable[[], object]) -> UUID:
    """The holder that `start_agent` adds to the book."""
    before = incarnations(sql)
    start_agent()
    [new] = incarnations(sql).keys() - before.keys()
    return new


def verdict(sql: Sql, holder_id: UUID) -> Verdict:
    """What this process sees of a holder."""
    [found] = kernel.verdicts([incarnations(sql)[holder_id]])
    return found


def state(sql: Sql, holder_id: UUID) -> str:
    [(found,)] = sql.execute("SELECT state FROM jayrun.holders WHERE id = %s", (holder_id,))
    return str(found)


def live_leases(sql: Sql) -> int:
    [(count,)] = sql.execute("SELECT count(*) FROM jayrun.leases WHERE ended_at IS NULL")
    return int(count)


def let_time_pass(sql: Sql, *, holder: UUID | None = None, watched: bool = False, host: bool = False) -> None:
    """As if the holder had been silent for an hour, the host been watched for an hour, or silent for an hour."""
    hour = "clock_timestamp() - interval '1 hour'"
    if holder is not None:
        sql.execute(f"UPDATE jayrun.holders SET seen_at = {hour} WHERE id = %s", (holder,))
    if watched:
        sql.execute(f"UPDATE jayrun.hosts SET watched_since = {hour}")
    if host:
        sql.execute(f"UPDATE jayrun.hosts SET seen_at = {hour}")


SWEEP = "reclaim.sweep(book, here.host_id)"
BESIDE = "here = scene(book, gpus(1))"


# --- from above ------------------------------------------------------------------------------------------------------


def test_a_holder_in_a_namespace_below_is_seen(here: Scene, book: Book, sql: Sql, start: Start) -> None:
    need(*BELOW)
    below = start(*BELOW)
    holder = holder_of(sql, lambda: below(HOLD))
    assert incarnations(sql)[holder].pid == 1
    assert incarnations(sql)[holder].pid_namespace != kernel.pid_namespace()
    assert kernel.verdict(incarnations(sql)[holder]) is Verdict.UNSEEN  # behind the gate nobody looks so far
    assert verdict(sql, holder) is Verdict.ALIVE
    let_time_pass(sql, holder=holder, watched=True)
    assert reclaim.sweep(book, here.host_id) == 0
    assert live_leases(sql) == 1
    below.kill()
    assert verdict(sql, holder) is Verdict.DEAD
    assert reclaim.sweep(book, here.host_id) == 1
    assert (state(sql, holder), live_leases(sql)) == ("ended", 0)
    assert replay(sql) == 1


def test_who_was_seen_below_is_found_again_without_a_search(
    sql: Sql, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(*BELOW)
    below = start(*BELOW)
    holder = holder_of(sql, lambda: below(HOLD))
    who = incarnations(sql)[holder]
    assert kernel.verdicts([who]) == [Verdict.ALIVE]
    searches = []
    search = kernel._surroundings
    monkeypatch.setattr(kernel, "_surroundings", lambda: searches.append(True) or search())
    assert kernel.verdicts([who]) == [Verdict.ALIVE]
    assert searches == []
    below.kill()
    assert kernel.verdicts([who]) == [Verdict.DEAD]
    assert kernel.verdicts([who, replace(who, pid=2), replace(who, pid=3)]) == [Verdict.DEAD] * 3
    assert len(searches) <= 2


def test_who_sees_it_tells_that_it_lives(here: Scene, book: Book, sql: Sql, start: Start) -> None:
    need(*BELOW)
    below = start(*BELOW)
    holder = holder_of(sql, lambda: below(HOLD))
    seen = "SELECT seen_at FROM jayrun.holders WHERE id = %s"
    before = sql.execute(seen, (holder,)).fetchone()
    reclaim.sweep(book, here.host_id)
    assert sql.execute(seen, (holder,)).fetchone() == before  # of late it told so itself
    sql.execute("UPDATE jayrun.holders SET seen_at = clock_timestamp() - interval '11 s' WHERE id = %s", (holder,))
    reclaim.sweep(book, here.host_id)
    assert sql.execute(f"SELECT ({seen}) > clock_timestamp() - interval '10 s'", (holder,)).fetchone() == (True,)


def test_a_pid_that_is_used_again_is_another_process(book: Book, sql: Sql, start: Start) -> None:
    need(*BELOW)
    below = start(*BELOW)
    below(BESIDE)
    below("first = subprocess.Popen(['sleep', '600']); who = kernel.incarnation(first.pid)")
    holder = holder_of(sql, lambda: below("holders.register(book, here.host_id, role='command', incarnation=who)"))
    assert verdict(sql, holder) is Verdict.ALIVE
    assert below("str(kernel.verdict(who))") == "alive"
    below("first.kill(); first.wait(); time.sleep(0.05)")
    below("open('/proc/sys/kernel/ns_last_pid', 'w').write(str(first.pid - 1))")
    below("second = subprocess.Popen(['sleep', '600'])")
    assert below("second.pid == first.pid")
    assert below("str(kernel.verdict(who))") == "dead"
    assert verdict(sql, holder) is Verdict.DEAD


def test_two_first_processes_of_two_containers_are_two(here: Scene, book: Book, sql: Sql, start: Start) -> None:
    """R11: the same host name, the same pid 1."""
    need(*BELOW)
    one, other = start(*BELOW), start(*BELOW)
    first = holder_of(sql, lambda: one(HOLD))
    second = holder_of(sql, lambda: other(HOLD))
    assert {who.pid for holder, who in incarnations(sql).items() if holder in (first, second)} == {1}
    one.kill()
    assert reclaim.sweep(book, here.host_id) == 1
    assert (state(sql, first), state(sql, second), live_leases(sql)) == ("ended", "alive", 1)
    assert other("holders.beat(book, here.holder)") is True


def test_a_proc_of_the_namespace_above_is_understood(here: Scene, book: Book, sql: Sql, start: Start) -> None:
    """`unshare --pid` without a /proc of its own: there every number means another process."""
    without = ("unshare", "--pid", "--fork", "--kill-child")
    need(*without)
    below = start(*without)
    holder = holder_of(sql, lambda: below(HOLD))
    assert verdict(sql, holder) is Verdict.ALIVE
    below("other = subprocess.Popen(['sleep', '600']); who = kernel.incarnation(other.pid)")
    assert below("str(kernel.verdict(who))") == "alive"
    below("other.kill(); other.wait()")
    assert below("str(kernel.verdict(who))") == "dead"
    assert below("str(kernel.verdict(kernel.incarnation()))") == "alive"
    below.kill()
    assert reclaim.sweep(book, here.host_id) == 1


# --- from beside -----------------------------------------------------------------------------------------------------


def test_a_holder_in_a_namespace_beside_ends_by_time_alone(sql: Sql, start: Start) -> None:
    need(*BELOW)
    one, other = start(*BELOW), start(*BELOW)
    other(BESIDE)
    holder = holder_of(sql, lambda: one(HOLD))
    who = incarnations(sql)[holder]
    one.kill()
    values = f"Incarnation({who.boot_id!r}, {who.pid_namespace}, {who.pid}, {who.start_ticks})"
    assert other(f"[str(each) for each in kernel.verdicts([{values}])]") == ["unseen"]
    assert other(SWEEP) == 0
    let_time_pass(sql, holder=holder)
    assert other(SWEEP) == 0, "nobody of the host has been in touch for as long"
    let_time_pass(sql, watched=True)
    assert other(SWEEP) == 1
    assert (state(sql, holder), live_leases(sql)) == ("ended", 0)


def test_time_that_has_passed_is_no_death_where_somebody_sees_it(
    here: Scene, book: Book, sql: Sql, start: Start
) -> None:
    need(*BELOW)
    one, other = start(*BELOW), start(*BELOW)
    other(BESIDE)
    holder = holder_of(sql, lambda: one(HOLD))
    let_time_pass(sql, holder=holder, watched=True)
    reclaim.sweep(book, here.host_id)  # from above
    assert other(SWEEP) == 0
    let_time_pass(sql, holder=holder, watched=True)
    assert other(SWEEP) == 1  # and nobody did


def test_those_of_one_namespace_tell_that_the_others_of_it_live(sql: Sql, start: Start) -> None:
    need(*BELOW)
    one, other = start(*BELOW), start(*BELOW)
    other(BESIDE)
    one("child = subprocess.Popen(['sleep', '600'])")
    one(HOLD)
    by_child = "holders.register(book, here.host_id, role='command', incarnation=kernel.incarnation(child.pid))"
    holder = holder_of(sql, lambda: one(by_child))
    let_time_pass(sql, holder=holder, watched=True)
    assert one(SWEEP) == 0
    assert other(SWEEP) == 0
    assert state(sql, holder) == "alive"


def test_after_a_gap_everybody_has_time_to_show_life(sql: Sql, start: Start) -> None:
    """R10."""
    need(*BELOW)
    one, other = start(*BELOW), start(*BELOW)
    other(BESIDE)
    holder = holder_of(sql, lambda: one(HOLD))
    let_time_pass(sql, holder=holder, watched=True, host=True)
    assert other(SWEEP) == 0
    watched = sql.execute("SELECT watched_since > clock_timestamp() - interval '1 minute' FROM jayrun.hosts").fetchone()
    assert watched == (True,)
    assert one("holders.beat(book, here.holder)") is True
    let_time_pass(sql, watched=True)
    assert other(SWEEP) == 0


def test_an_outage_of_the_database_expires_nobody(sql: Sql, server: Throwaway, start: Start) -> None:
    """R10: after an outage of three TTLs the first pass ends nobody; a TTL of silence later it does."""
    need(*BELOW)
    sql.execute("UPDATE jayrun.settings SET holder_ttl_seconds = 1, tick_seconds = 0.1")
    one, other = start(*BELOW), start(*BELOW)
    other(BESIDE)
    holder = holder_of(sql, lambda: one(HOLD))
    let_time_pass(sql, watched=True)
    server.stop()
    time.sleep(3)
    server.start()
    assert other(SWEEP) == 0
    assert one("holders.beat(book, here.holder)") is True
    until(lambda: other(SWEEP) == 1)
    with psycopg.connect(server.url, autocommit=True) as after:
        silent = "SELECT ended_at - seen_at > interval '1 s' FROM jayrun.holders WHERE id = %s"
        assert after.execute(silent, (holder,)).fetchone() == (True,)


def test_a_pass_that_was_stopped_ends_nobody_who_has_been_seen_since(sql: Sql, start: Start) -> None:
    need(*BELOW)
    # The first process of a namespace cannot stop itself.
    one, other = start(*BELOW), start(*BELOW, "sh", "-c", '"$@"; exit', "sh")
    other(BESIDE)
    holder = holder_of(sql, lambda: one(HOLD))
    let_time_pass(sql, holder=holder, watched=True)
    other("from jayrun import probes; probes.arm_from_settings('sweep.dead=stop')")
    other.tell(SWEEP)
    until(lambda: "probe sweep.dead reached" in other.words())
    assert one("holders.beat(book, here.holder)") is True
    os.kill(other.pid, signal.SIGCONT)
    assert other.hear() == 0
    assert state(sql, holder) == "alive"


# --- time namespaces -------------------------------------------------------------------------------------------------

# The kernel shows start times as the clock of the reader's time namespace has them.
LATER = ("unshare", "--time", "--boottime", "100000", "--fork", "--kill-child")
# There this process was started before the zero of the clock.
_BEFORE = f"-{Path('/proc/uptime').read_text().split('.')[0]}"
EARLIER = ("unshare", "--time", "--boottime", _BEFORE, "--fork", "--kill-child")
LATER_BELOW = (*LATER, "--pid", "--mount-proc")


@pytest.mark.parametrize("before", [LATER, EARLIER, LATER_BELOW], ids=["later", "earlier", "below"])
def test_a_process_in_another_time_namespace_is_judged_by_its_true_start(
    here: Scene, book: Book, sql: Sql, start: Start, before: tuple[str, ...]
) -> None:
    need(*before)
    mine = here.holder.id
    apart = start(*before)
    read = "open('/proc/self/stat').read().rpartition(')')[2].split()[19]"
    shown = int(Path(f"/proc/{apart.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert int(apart(read)) != shown, "its clock is not shifted, so nothing was shown"
    holder = holder_of(sql, lambda: apart(HOLD))
    assert abs(incarnations(sql)[holder].start_ticks - shown) <= 1
    assert verdict(sql, holder) is Verdict.ALIVE
    assert apart(SWEEP) == 0
    assert reclaim.sweep(book, here.host_id) == 0
    assert here.reserve(cuda(24), wait=False)[1] == Unavailable()
    assert (state(sql, holder), state(sql, mine), live_leases(sql)) == ("alive", "alive", 1)
    apart.kill()
    assert reclaim.sweep(book, here.host_id) == 1


def test_who_changed_the_time_namespace_of_its_children_judges_nobody_dead(start: Start) -> None:
    need(*LATER)
    one = start()
    one("child = subprocess.Popen(['sleep', '600']); who = kernel.incarnation(child.pid)")
    one("kernel._boottime_offset_ticks.cache_clear()")
    assert one("ctypes.CDLL(None).unshare(0x80)") == 0  # CLONE_NEWTIME
    one("reused = Incarnation(who.boot_id, who.pid_namespace, who.pid, who.start_ticks + 100)")
    assert one("[str(each) for each in kernel.verdicts([who, reused])]") == ["alive", "alive"]
    assert "use jayrun in a child" in one("kernel.incarnation()")
    one("child.kill(); child.wait()")
    assert one("str(kernel.verdict(who))") == "dead"


# --- what cannot be read ---------------------------------------------------------------------------------------------

AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
# A /proc of its own: the options of one that is only mounted again are those of all its mounts.
HIDDEN = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh", *AS_NOBODY)

PYTHON = (os.path.realpath(sys.executable), "-c")
LOOK = """
import sys
from jayrun import kernel
from jayrun.domain.liveness import Incarnation
print("ready", flush=True)
for line in sys.stdin:
    print(*kernel.verdicts([Incarnation(*eval(line))]), flush=True)
"""


@pytest.fixture
def look() -> Iterator[Callable[..., Callable[[Incarnation], str]]]:
    """`look(*before)` starts a process by that command; what it returns asks it for its verdict."""
    with ExitStack() as stack:
        # Another user may not be let into this checkout, nor into its environment; this takes the standard library.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        for file in ("kernel.py", "domain/liveness.py"):
            copy = folder / "jayrun" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(kernel.__file__).parent / file, copy)

        def start_looking(*before: str) -> Callable[[Incarnation], str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [*before, *PYTHON, LOOK],
                    env={"PYTHONPATH": str(folder)},
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None
            assert stdout.readline() == "ready\n"

            def ask(who: Incarnation) -> str:
                stdin.write(f"{(who.boot_id, who.pid_namespace, who.pid, who.start_ticks)!r}\n")
                stdin.flush()
                return stdout.readline().strip()

            return ask

        yield start_looking


def test_another_users_processes_are_seen(sql: Sql, start: Start, look: Any) -> None:
    need(*BELOW)
    need(*AS_NOBODY, *PYTHON, "")
    ask = look(*AS_NOBODY)
    with subprocess.Popen(["sleep", "600"]) as child:
        who = kernel.incarnation(child.pid)
        assert ask(who) == "alive"
        child.kill()
    assert ask(who) == "dead"
    below = start(*BELOW)
    holder = holder_of(sql, lambda: below(HOLD))
    assert ask(incarnations(sql)[holder]) == "alive"
    below.kill()
    assert ask(incarnations(sql)[holder]) == "dead"


def test_what_is_hidden_is_alive(sql: Sql, start: Start, look: Any) -> None:
    need(*BELOW)
    need(*HIDDEN, *PYTHON, "")
    ask = look(*HIDDEN)
    with subprocess.Popen(["sleep", "600"]) as child:
        who = kernel.incarnation(child.pid)
        assert ask(who) == "alive"
        # Fault check: it cannot read it, for one that cannot be told from it by its start is alive to it as well.
        assert ask(Incarnation(who.boot_id, who.pid_namespace, who.pid, who.start_ticks + 2)) == "alive"
        child.kill()
    assert ask(who) == "dead"
    below = start(*BELOW)
    holder = holder_of(sql, lambda: below(HOLD))
    assert ask(incarnations(sql)[holder]) == "unseen"
    below.kill()
    assert ask(incarnations(sql)[holder]) == "unseen"


# --- silent, and alive -----------------------------------------------------------------------------------------------

QUICK = "UPDATE jayrun.settings SET holder_ttl_seconds = 0.6, tick_seconds = 0.1"
SPOKE = "SELECT max(state_change) FROM pg_stat_activity WHERE application_name LIKE %s"


@pytest.mark.parametrize("before", [(), BELOW], ids=["here", "below"])
def test_a_held_interpreter_lock_loses_no_lease(
    here: Scene, book: Book, sql: Sql, start: Start, before: tuple[str, ...]
) -> None:
    """R9."""
    if before:
        need(*before)
    sql.execute(QUICK)
    stuck = start(*before)
    holder = holder_of(sql, lambda: stuck(RUNTIME))
    mine = f"%:{stuck('os.getpid()')}"
    stuck.tell("ctypes.PyDLL(None).sleep(600)")

    def spoke() -> object:
        return sql.execute(SPOKE, (mine,)).fetchone()

    def fell_silent() -> bool:
        last = spoke()
        time.sleep(0.5)  # five ticks
        return spoke() == last

    until(fell_silent)
    last = spoke()
    began = sql.execute("SELECT clock_timestamp()").fetchone()
    assert began is not None

    def is_over() -> bool:
        assert reclaim.sweep(book, here.host_id) == 0
        return sql.execute("SELECT clock_timestamp() - %s > interval '1.8 s'", began).fetchone() == (True,)

    until(is_over)
    assert spoke() == last, "it did speak: the lock was not held"
    assert (state(sql, holder), live_leases(sql)) == ("alive", 1)


@pytest.mark.parametrize("before", [(), BELOW], ids=["here", "below"])
def test_a_stopped_holder_loses_no_lease(
    here: Scene, book: Book, sql: Sql, start: Start, before: tuple[str, ...]
) -> None:
    """R9."""
    if before:
        need(*before)
    sql.execute(QUICK)
    stopped = start(*before)
    holder = holder_of(sql, lambda: stopped(RUNTIME))
    pid = stopped.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    let_time_pass(sql, holder=holder, watched=True)
    assert reclaim.sweep(book, here.host_id) == 0
    let_time_pass(sql, holder=holder, watched=True, host=True)
    assert reclaim.sweep(book, here.host_id) == 0
    os.kill(pid, signal.SIGCONT)
    assert stopped("data.placement.reserved_memory_bytes") == 10**9
    assert stopped("holders.beat(book, runtime._service.holder)") is True
    assert live_leases(sql) == 1


# --- clocks ----------------------------------------------------------------------------------------------------------

SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("SHIFT_SECONDS"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (!r && id == CLOCK_REALTIME) t->tv_sec += shift();
    return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict z) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


def shifted(folder: Path, seconds: int) -> dict[str, str]:
    """The environment in which the clock is wrong by so many seconds; skips the test where that cannot be had."""
    if shutil.which("gcc") is not None:
        source, library = folder / "shift.c", folder / "shift.so"
        source.write_text(SHIFT)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return {"LD_PRELOAD": str(library), "SHIFT_SECONDS": str(seconds)}
    for library in Path("/usr/lib").glob("*/faketime/libfaketime.so.1"):
        return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+d}", "DONT_FAKE_MONOTONIC": "1"}
    pytest.skip("there is neither gcc nor libfaketime here")


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_clocks_of_clients_mean_nothing(
    here: Scene, book: Book, sql: Sql, start: Start, tmp_path: Path, hours: int
) -> None:
    """R16: a holder and a judge whose clock is wrong by an hour."""
    need(*BELOW)
    wrong = shifted(tmp_path, hours * 3600)
    one, other = start(*BELOW, **wrong), start(*BELOW, **wrong)
    assert abs(one("time.time()") - time.time() - hours * 3600) < 60
    holder = holder_of(sql, lambda: one(RUNTIME))
    other(BESIDE)
    for judge in (
        lambda: other("reconciler.run_pass(book, here.host_id).reclaimed"),
        lambda: reclaim.sweep(book, here.host_id),
    ):
        let_time_pass(sql, watched=True)
        assert judge() == 0
    ages = "SELECT bool_and(age BETWEEN interval '0' AND interval '1 minute') FROM jayrun_audit.holders"
    assert sql.execute(ages).fetchone() == (True,)
    assert other("holders.beat(book, here.holder)") is True
    assert (state(sql, holder), live_leases(sql)) == ("alive", 1)
    one.kill()
    let_time_pass(sql, watched=True)
    assert other(SWEEP) == 0
    let_time_pass(sql, holder=holder)
    assert other(SWEEP) == 1
