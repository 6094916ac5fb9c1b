"""What a command of `jayrun run` leaves running keeps its lease until it is gone, or is ended as asked."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from cli_helpers import Jayrun
from processes import PATIENCE, process, until
from run_helpers import (
    JAYRUN,
    QUICK_BEAT,
    SHORT_GRACE,
    ended,
    lives,
    nothing_left,
    read_error,
    read_line,
    reclaimed,
    started,
)

from jayrun import probes
from jayrun.embedded import Throwaway
from jayrun.errors import StillAlive
from jayrun.runtime import reconciler
from jayrun.store import audit, levers, reclaim
from jayrun.store.transactions import Book

LEAVES_ONE = "setsid sleep 1000 & echo $!; exit 3"
STUBBORN = "trap 'echo heard >> \"$0\"' TERM HUP; while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def nothing_runs_on(book: Book) -> Iterator[None]:
    """Whatever a test left running by mistake ends with it: everything that bears a lease of its own book."""
    yield
    for (lease,) in book.written(lambda pg: pg.execute("SELECT id FROM jayrun.leases").fetchall()):
        for number in bearing(lease):
            os.kill(number, signal.SIGKILL)


def bearing(lease: UUID) -> list[int]:
    """The processes that were started with this lease in their environment."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"JAYRUN_LEASE={lease}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
    return sorted(found)


def holders_of(book: Book, lease: UUID) -> list[int]:
    """The pids that hold it, the first first."""
    rows = audit.lease(book, lease)["holders"]
    return [row["pid"] for row in rows if row["left_at"] is None]


@contextmanager
def orphaned(url: str, book: Book, script: str = LEAVES_ONE) -> Iterator[tuple[int, UUID]]:
    """A command has ended, its wrapper was killed, and one process goes on; its pid, and the lease."""
    with started(url, "--", "sh", "-c", script) as wrapper:
        left = int(read_line(wrapper))
        until(lambda: [row["state"] for row in audit.executions(book)] == ["failed"])
        [lease] = audit.leases(book)
        assert lease["pid"] == wrapper.pid
        wrapper.kill()
        wrapper.wait(PATIENCE)
        yield left, lease["id"]
        if lives(left):
            os.kill(left, signal.SIGKILL)


# --- waited for ------------------------------------------------------------------------------------------------------


def test_a_running_command_is_one_lease_and_its_own_pid_is_shown(
    jayrun: Jayrun, url: str, book: Book, host_id: int
) -> None:
    with started(url, "--gpus", "2", "--label", "me", "--", "sh", "-c", "echo $$; exec sleep 1000") as wrapper:
        command = int(read_line(wrapper))
        [lease] = audit.leases(book)
        assert (lease["pid"], lease["command"], lease["holders"]) == (command, "sh -c echo $$; exec sleep 1000", 2)
        assert holders_of(book, lease["id"]) == [command, wrapper.pid]
        assert {(row["leases"], row["reserved_bytes"]) for row in audit.capacity(book)} == {(1, 0)}
        with started(url, "--", "true"):
            until(lambda: audit.queue(book))
            [waiting] = audit.queue(book)
            found = jayrun("why", str(waiting["execution_id"]), "--json").json
            assert [each["id"] for each in found["fewest"]] == [str(lease["id"])]


def test_what_the_command_left_keeps_the_lease_until_it_is_gone(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    with started(url, "--", "sh", "-c", LEAVES_ONE) as wrapper:
        left = int(read_line(wrapper))
        assert f"left 1 process running, and the lease stays until all is gone: sleep (pid {left})" in read_error(
            wrapper
        )
        [execution] = audit.executions(book)
        assert (execution["state"], execution["failure"]["message"]) == ("failed", "exit code 3")
        reconciler.run_pass(book, host_id)
        [lease] = audit.leases(book)
        assert holders_of(book, lease["id"]) == [wrapper.pid]
        os.kill(left, signal.SIGTERM)
        code, _, err = ended(wrapper)
        assert (code, err) == (3, "")
    nothing_left(book, host_id)
    assert audit.lease(book, lease["id"])["state"] == "released"


def test_generations_and_sessions_do_not_matter(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000 & exit' & wait; exit 0") as wrapper:
        assert "left 2 processes running" in read_error(wrapper)
        [lease] = audit.leases(book)
        first, second = bearing(lease["id"])
        os.kill(first, signal.SIGKILL)
        until(lambda: not lives(first))
        assert len(audit.leases(book)) == 1
        os.kill(second, signal.SIGKILL)
        assert ended(wrapper)[0] == 0
    nothing_left(book, host_id)


def test_what_ends_at_once_is_not_worth_a_word(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "sleep 0.1 & exit 4") as wrapper:
        assert ended(wrapper) == (4, "", "")
    nothing_left(book, host_id)


def test_children_of_a_shell_that_became_jayrun_are_not_the_commands(url: str, book: Book, host_id: int) -> None:
    def fork_a_stranger() -> None:
        if os.fork() == 0:
            os.execlp("sleep", "sleep", "1000")

    # The command tells the oldest child of its parent.
    oldest = "read children < /proc/$PPID/task/$PPID/children; echo ${children%% *}"
    with started(url, "--on-exit=kill", "--", "sh", "-c", oldest, before=fork_a_stranger) as wrapper:
        stranger = int(read_line(wrapper))
        assert wrapper.wait(PATIENCE) == 0
        assert lives(stranger)
        os.kill(stranger, signal.SIGKILL)
    nothing_left(book, host_id)


def test_a_first_signal_ends_what_is_left_and_a_second_one_kills_it(
    url: str, book: Book, host_id: int, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    with started(url, "--", "sh", "-c", 'sh -c "$1" "$0" & exit 3', str(heard), STUBBORN) as wrapper:
        assert "left" in read_error(wrapper)
        for number, words in ((signal.SIGHUP, 1), (signal.SIGTERM, 2)):
            wrapper.send_signal(number)
            until(lambda words=words: heard.exists() and heard.read_text().count("heard") == words)
            assert wrapper.poll() is None
        wrapper.send_signal(signal.SIGINT)
        assert ended(wrapper)[0] == 3
    nothing_left(book, host_id)


def test_a_stopped_process_is_ended_too(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", LEAVES_ONE) as wrapper:
        left = int(read_line(wrapper))
        os.kill(left, signal.SIGSTOP)
        read_error(wrapper)
        wrapper.terminate()
        assert ended(wrapper)[0] == 3
    nothing_left(book, host_id)


# --- ended -----------------------------------------------------------------------------------------------------------


def test_on_exit_kill_ends_the_whole_tree(
    url: str, book: Book, host_id: int, sql: psycopg.Connection, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    script = 'sh -c "$1" "$0" & setsid sh -c "sleep 1000 & sleep 1000" & echo $$; exit 3'
    arguments = ("--on-exit=kill", "--", "sh", "-c", script, str(heard), STUBBORN)
    with started(url, *arguments, jayrun=SHORT_GRACE) as wrapper:
        assert ended(wrapper)[0] == 3
    [(lease,)] = sql.execute("SELECT id FROM jayrun.leases").fetchall()
    assert bearing(lease) == []
    nothing_left(book, host_id)
    assert [row["failure"]["message"] for row in audit.executions(book)] == ["exit code 3"]


def test_on_exit_kill_gives_time_to_end_well(url: str, book: Book, host_id: int, tmp_path: Path) -> None:
    well = tmp_path / "well"
    ends_well = "trap 'sleep 1; echo well > $0; exit' TERM; > $0; while :; do sleep 0.05; done"
    script = 'sh -c "$1" $0 & while [ ! -e $0 ]; do sleep 0.05; done; exit 3'
    with started(url, "--on-exit=kill", "--", "sh", "-c", script, str(well), ends_well) as wrapper:
        assert ended(wrapper)[0] == 3
    assert well.read_text() == "well\n"
    nothing_left(book, host_id)


# --- without the wrapper ---------------------------------------------------------------------------------------------


def test_with_the_wrapper_killed_heirs_hold_the_lease(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    with orphaned(url, book) as (left, lease):
        for _ in range(3):
            reconciler.run_pass(book, host_id)
            assert holders_of(book, lease) == [left]
        [row] = audit.leases(book)
        assert (row["pid"], row["command"], row["user"]) == (left, "sleep 1000", os.environ.get("USER", row["user"]))
        os.kill(left, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)
    [(rows,)] = sql.execute("SELECT count(*) FROM jayrun.holders WHERE pid = %s", (left,)).fetchall()
    assert rows == 1


def test_with_the_wrapper_killed_while_the_command_runs_heirs_hold_after_it(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "setsid sleep 1000 & echo $!; echo $$; exec sleep 1000") as wrapper:
        left, command = int(read_line(wrapper)), int(read_line(wrapper))
        [lease] = audit.leases(book)
        wrapper.kill()
        wrapper.wait(PATIENCE)
        reconciler.run_pass(book, host_id)
        assert holders_of(book, lease["id"])[0] == command
        assert [row["state"] for row in audit.executions(book)] == ["running"]
        os.kill(command, signal.SIGKILL)
        until(lambda: not lives(command))
        reconciler.run_pass(book, host_id)
        assert holders_of(book, lease["id"]) == [left]
        assert [row["failure"]["type"] for row in audit.executions(book)] == ["ProcessDied"]
        os.kill(left, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_heirs_of_heirs_hold_it_too(url: str, book: Book, host_id: int, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"setsid sh -c 'while [ ! -e {go} ]; do sleep 0.05; done; sleep 1000 & exit' & echo $!; exit 3"
    with orphaned(url, book, script) as (left, lease):
        reconciler.run_pass(book, host_id)
        assert left in holders_of(book, lease)
        go.touch()
        until(lambda: not lives(left))
        until(lambda: len(bearing(lease)) == 1)
        [heir] = bearing(lease)
        reconciler.run_pass(book, host_id)
        assert holders_of(book, lease) == [heir]
        os.kill(heir, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def sweep(url: str, host_id: int, armed: str) -> None:
    probes.arm_from_settings(armed)
    reclaim.sweep(Book(url, role="test"), host_id)


@pytest.mark.parametrize("probe", ["heirs.joined", "holder.freed", "holder.ending"])
def test_a_pass_killed_on_the_way_is_finished_by_the_next(url: str, book: Book, host_id: int, probe: str) -> None:
    with orphaned(url, book) as (left, lease):
        with process(sweep, url, host_id, f"{probe}=kill") as killed:
            killed.join(PATIENCE)
            assert killed.exitcode == -signal.SIGKILL
        assert left in holders_of(book, lease)
        assert reconciler.run_pass(book, host_id).reclaimed == 1
        assert holders_of(book, lease) == [left]


def test_passes_at_once_make_one_holder_of_one_process(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    with orphaned(url, book) as (left, lease):
        together = threading.Barrier(4)

        def run_pass() -> None:
            together.wait()
            reclaim.sweep(book, host_id)

        threads = [threading.Thread(target=run_pass) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert holders_of(book, lease) == [left]
        [(rows,)] = sql.execute("SELECT count(*) FROM jayrun.holders WHERE pid = %s", (left,)).fetchall()
        assert rows == 1


def test_a_command_whose_wrapper_lives_is_left_to_it(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "exit 3", probes="command.ended=stop") as wrapper:
        assert "command.ended" in read_error(wrapper)
        assert reconciler.run_pass(book, host_id).reclaimed == 0
        assert [row["state"] for row in audit.executions(book)] == ["running"]
        wrapper.send_signal(signal.SIGCONT)
        assert ended(wrapper)[0] == 3
        assert [row["failure"]["type"] for row in audit.executions(book)] == ["ExitCode"]
    nothing_left(book, host_id)


def test_who_is_declared_gone_leaves_its_lease_to_its_heirs(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    """Before any pass looked: an administrator's word ends the dead as a pass does."""
    with orphaned(url, book) as (left, lease):
        dead = [row[0] for row in sql.execute("SELECT id FROM jayrun.holders WHERE state = 'alive'")]
        assert [levers.end_holder(book, each) for each in dead] == [True] * len(dead)
        assert holders_of(book, lease) == [left]
        with pytest.raises(StillAlive, match=rf"pid {left} .*is alive, says the kernel"):
            levers.end_holder(book, audit.holders(book)[0]["id"])
        os.kill(left, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_a_host_is_not_forgotten_while_a_dead_command_has_heirs(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    with orphaned(url, book) as (left, lease):
        sql.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp() - interval '1 hour'")
        with pytest.raises(StillAlive, match=rf"{left}.* alive, says the kernel"):
            levers.forget_host(book, host_id)
        assert left in holders_of(book, lease)


def test_a_dead_command_is_not_declared_gone_while_its_wrapper_lives(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "exit 3", probes="command.ended=stop") as wrapper:
        assert "command.ended" in read_error(wrapper)
        [command] = [row["id"] for row in audit.holders(book) if row["pid"] != wrapper.pid]
        with pytest.raises(StillAlive, match="the `jayrun run` that started it is alive"):
            levers.end_holder(book, command)
        wrapper.send_signal(signal.SIGCONT)
        assert ended(wrapper)[0] == 3
        assert [row["failure"]["type"] for row in audit.executions(book)] == ["ExitCode"]
    nothing_left(book, host_id)


def test_a_cleared_environment_is_no_heir(url: str, book: Book, host_id: int) -> None:
    """The limit: only a living wrapper keeps the lease for a process that does not bear it."""
    with orphaned(url, book, "env -i setsid sleep 1000 & echo $!; exit 3") as (left, _):
        assert lives(left)
        assert reclaimed(book, host_id)


def test_what_runs_in_a_nested_run_keeps_the_lease_around_it(url: str, book: Book, host_id: int) -> None:
    inner = f"{shlex.join([sys.executable, '-c', JAYRUN])} run --memory-gb 1 -- setsid sleep 1000"
    with started(url, "--memory-gb", "1", "--", "sh", "-c", f"{inner} & echo $!; echo $$; exec sleep 1000") as outer:
        wrapper, command = int(read_line(outer)), int(read_line(outer))
        until(lambda: audit.leases(book)[0]["holders"] == 4)
        [lease] = audit.leases(book)
        [sleeper] = set(holders_of(book, lease["id"])) - {command, outer.pid, wrapper}
        outer.kill()
        outer.wait(PATIENCE)
        os.kill(command, signal.SIGKILL)
        until(lambda: not lives(command))
        reconciler.run_pass(book, host_id)
        assert sorted(holders_of(book, lease["id"])) == sorted([wrapper, sleeper])
        assert [row["failure"]["type"] for row in audit.executions(book)] == ["ProcessDied"]
        os.kill(wrapper, signal.SIGKILL)
        until(lambda: not lives(wrapper))
        reconciler.run_pass(book, host_id)
        assert holders_of(book, lease["id"]) == [sleeper]
        os.kill(sleeper, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


# --- taken away ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lever", ["holders", "hosts"])
def test_a_lease_that_was_taken_away_is_told(
    jayrun: Jayrun, url: str, book: Book, host_id: int, sql: psycopg.Connection, lever: str
) -> None:
    with started(url, "--", "sh", "-c", "echo $$; exec sleep 1000", jayrun=QUICK_BEAT) as wrapper:
        command = int(read_line(wrapper))
        [lease] = audit.leases(book)
        [(holder, host)] = sql.execute(
            "SELECT o.id::text, h.name FROM jayrun.holders o JOIN jayrun.hosts h ON h.id = o.host_id WHERE o.pid = %s",
            (command,),
        ).fetchall()
        words = ("holders", "end", holder) if lever == "holders" else ("hosts", "forget", host)
        assert jayrun(*words, "--force").code == 0
        assert f"lease {lease['id']} was taken away" in read_error(wrapper)
        told = jayrun("leases", "show", str(lease["id"])).out
        assert told.count(f"declared (pid {command}): ") == 1
        assert "gone" in told
        assert ", by force" in told
        until(lambda: not audit.leases(book))
        assert lives(command)
        os.kill(command, signal.SIGTERM)
        code, _, err = ended(wrapper)
        assert (code, err) == (128 + signal.SIGTERM, "")
    assert (audit.leases(book), audit.violations(book)) == ([], [])


def test_a_lease_that_was_taken_away_from_a_short_command_is_told_at_its_end(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    slow_beat = f"from jayrun.runtime import command; command.BEAT_SECONDS = 3600; {JAYRUN}"
    with started(url, "--", "sh", "-c", "echo $$; exec sleep 1000", jayrun=slow_beat) as wrapper:
        command = int(read_line(wrapper))
        for (holder,) in sql.execute("SELECT id FROM jayrun.holders WHERE state = 'alive'").fetchall():
            levers.end_holder(book, holder, force=True)
        os.kill(command, signal.SIGTERM)
        code, _, err = ended(wrapper)
        assert code == 128 + signal.SIGTERM
        assert err.count("was taken away") == 1
    nothing_left(book, host_id)


# --- the book is away ------------------------------------------------------------------------------------------------


def test_the_book_comes_back_while_it_waits(url: str, book: Book, host_id: int, server: Throwaway) -> None:
    with started(url, "--gpus", "2", "--", "sh", "-c", "echo $$; exec sleep 1000") as other:
        command = int(read_line(other))
        with started(url, "--", "echo", "my turn") as waiting:
            assert "place 1 of 1" in read_error(waiting)
            server.kill()
            assert "out of reach; the place in the queue is kept" in read_error(waiting)
            server.start()
            assert read_error(waiting).startswith("jayrun: the book is back after ")
            os.kill(command, signal.SIGKILL)
            code, out, err = ended(waiting)
            assert (code, out, err.count("back")) == (0, "my turn\n", 0)
    until(lambda: reclaimed(book, host_id))


def test_the_book_is_away_when_the_command_ends(url: str, book: Book, host_id: int, server: Throwaway) -> None:
    with started(url, "--", "sh", "-c", "echo $$; exec sleep 1000") as wrapper:
        command = int(read_line(wrapper))
        server.kill()
        os.kill(command, signal.SIGTERM)
        code, _, err = ended(wrapper)
        server.start()
        assert code == 128 + signal.SIGTERM
        assert err.count("the command has ended, but the book could not be told yet") == 1
    until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_the_book_comes_back_while_something_is_left(url: str, book: Book, host_id: int, server: Throwaway) -> None:
    with started(url, "--", "sh", "-c", "echo $$; setsid sleep 1000 & echo $!; exec sleep 1000") as wrapper:
        command, left = int(read_line(wrapper)), int(read_line(wrapper))
        server.kill()
        os.kill(command, signal.SIGTERM)
        try:
            assert "could not be told yet" in read_error(wrapper)
        finally:
            server.start()
        os.kill(left, signal.SIGTERM)
        assert ended(wrapper)[0] == 128 + signal.SIGTERM
    nothing_left(book, host_id)
    assert [row["failure"]["type"] for row in audit.executions(book)] == ["ExitCode"]
