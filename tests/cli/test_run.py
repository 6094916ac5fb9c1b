"""`jayrun run`, as a person types it: real processes, signals, and the parent killed."""

from __future__ import annotations

import os
import signal

import psycopg
import pytest
from processes import PATIENCE, until
from run_helpers import ended, nothing_left, run, started

from jayrun.runtime import reconciler
from jayrun.store import audit
from jayrun.store.transactions import Book


def test_a_command_gets_its_devices_and_its_exit_code_is_passed_on(url: str, book: Book, host_id: int) -> None:
    script = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER ${#JAYRUN_LEASE}"; exit 7'
    assert run(url, "--gpus", "2", "--memory-gb", "3", "--", "sh", "-c", script) == (7, "0,1 PCI_BUS_ID 36\n", "")
    nothing_left(book, host_id)


def test_uuids_are_given_where_they_are_known(url: str, book: Book, host_id: int, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-' || host_index")
    assert run(url, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")[:2] == (0, "GPU-0\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpus", "3", "--", "true"), 123, "each a gpu with cuda, and only 2 devices would do"),
        (("--memory-gb", "25", "--", "true"), 123, "24 GB"),
        (("--", "no-such-command"), 127, "no-such-command"),
        (("--", "/etc/hostname"), 126, "/etc/hostname"),
        (("--gpus", "many", "--", "true"), 122, "--gpus"),
        (("--gpus", "0", "--", "true"), 122, "--gpus must be at least 1, but is 0"),
        (("--gpus", "2-1", "--", "true"), 122, "--gpus 2-1: the first number is larger"),
        (("--gpus", "1-99999", "--", "true"), 122, "--gpus must be at most 1024"),
        (("--device-id", "-1", "--", "true"), 122, "--device-id must be at least 0"),
        (("--memory-gb", "0", "--", "true"), 122, "--memory-gb must be positive without --exclusive"),
        (("--priority", "99999999999", "--", "true"), 122, "--priority must be at most 2147483647"),
        (("--priority", "-2147483649", "--", "true"), 122, "--priority must be at least -2147483648"),
        (("--priority", "-2147483648", "--", "true"), 0, ""),
        (("--gpus", "2", "--device-id", "0", "--", "true"), 122, "--device-id"),
        (("--memory-gb", "-1", "--", "true"), 122, "--memory-gb must not be negative, but is -1"),
        (("--timeout", "-1", "--", "true"), 122, "--timeout"),
        (("--timeout", "1", "--no-wait", "--", "true"), 122, "--no-wait"),
        (("--memory-gb", "x", "--", "true"), 122, "--memory-gb"),
        ((), 122, "COMMAND"),
        (("--", "sh", "-c", "kill -9 $$"), 137, ""),
        (("--", "sh", "-c", "exit 2"), 2, ""),
    ],
)
def test_exit_codes(url: str, book: Book, host_id: int, arguments: tuple[str, ...], code: int, message: str) -> None:
    found, _, err = run(url, *arguments)
    assert (found, message in err) == (code, True), err
    nothing_left(book, host_id)


def test_a_command_that_does_not_exist_does_not_wait(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "1000"):
        until(lambda: audit.leases(book))
        code, _, err = run(url, "--", "no-such-command")
        assert (code, "no-such-command" in err) == (127, True)
        assert run(url, "--", "/no/such/command")[0] == 127


def test_a_book_that_has_no_address_is_a_usage_error() -> None:
    code, _, err = run("mysql://me:secret@somewhere/else", "--", "true")
    assert (code, "secret" in err) == (122, False)


def test_an_unreachable_book_is_told(tmp_path: object) -> None:
    code, _, err = run(f"postgresql://nobody@/none?host={tmp_path}", "--", "true")
    assert code == 125
    assert str(tmp_path) in err.replace("%2F", "/")


def test_it_waits_says_who_is_in_the_way_and_goes_on(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--label", "first", "--", "sleep", "60") as first:
        until(lambda: audit.leases(book))
        with started(url, "--memory-gb", "5", "--", "echo", "my turn") as second:
            until(lambda: audit.queue(book))
            assert run(url, "--no-wait", "--", "true")[0] == 124
            assert run(url, "--timeout", "0.1", "--", "true")[0] == 124
            assert len(audit.queue(book)) == 1
            first.send_signal(signal.SIGTERM)
            assert ended(first)[0] == 128 + signal.SIGTERM  # passed on to the command, which ended by it
            code, out, err = ended(second)
            assert (code, out) == (0, "my turn\n")
            assert "place 1 of 1" in err
            assert "sleep" in err
    nothing_left(book, host_id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_while_waiting_leaves_nothing(url: str, book: Book, host_id: int, number: signal.Signals) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "60"):
        until(lambda: audit.leases(book))
        with started(url, "--", "echo", "never") as waiting:
            until(lambda: audit.queue(book))
            os.killpg(waiting.pid, number)  # as the terminal, or a closing one, does
            code, out, _ = ended(waiting)
            assert (code, out) == (128 + number, "")
            assert audit.queue(book) == []


def test_ctrl_c_reaches_the_command_alone(url: str, book: Book, host_id: int) -> None:
    script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    with started(url, "--", "sh", "-c", script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGINT)
        code, out, _ = ended(child)
        assert (code, out) == (5, "caught\n")
    nothing_left(book, host_id)


def test_with_the_parent_killed_the_command_still_holds(url: str, book: Book, host_id: int) -> None:
    with started(url, "--", "sh", "-c", "echo $$; exec sleep 60") as child:
        assert child.stdout is not None
        command = int(child.stdout.readline())
        [lease] = audit.leases(book)
        assert lease["pid"] == command
        child.kill()
        child.wait(PATIENCE)
        assert reconciler.run_pass(book, host_id).reclaimed == 1  # the wrapper, a further holder
        assert [each["pid"] for each in audit.leases(book)] == [command]
        os.kill(command, signal.SIGKILL)
        until(lambda: reconciler.run_pass(book, host_id).reclaimed == 1)
    nothing_left(book, host_id)


def test_with_the_parent_killed_while_waiting_the_command_never_runs(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "60"):
        until(lambda: audit.leases(book))
        with started(url, "--", "echo", "never") as waiting:
            until(lambda: audit.queue(book))
            waiting.kill()
            out, _ = waiting.communicate(timeout=PATIENCE)
            assert out == ""
            until(lambda: reconciler.run_pass(book, host_id).reclaimed == 1)
            assert audit.queue(book) == []


def test_a_waiting_command_reclaims_the_dead_when_nobody_else_is_there(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--", "sh", "-c", "echo $$; exec sleep 60") as first:
        assert first.stdout is not None
        command = int(first.stdout.readline())
        with started(url, "--", "echo", "my turn") as second:
            until(lambda: audit.queue(book))
            first.kill()
            os.kill(command, signal.SIGKILL)
            assert ended(second)[:2] == (0, "my turn\n")


def test_nohup_is_respected(url: str, book: Book, host_id: int) -> None:
    script = "echo ready; sleep 0.3; echo survived"
    with started(url, "--", "sh", "-c", script, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGHUP)
        assert ended(child)[:2] == (0, "survived\n")


def test_the_exit_code_is_not_lost_where_ended_children_are_ignored(url: str, host_id: int) -> None:
    ignoring = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # noqa: E731
    with started(url, "--", "sh", "-c", "exit 3", before=ignoring) as child:
        assert ended(child)[0] == 3


def test_arguments_that_are_no_text_are_passed_on(url: str, host_id: int) -> None:
    assert run(url, "--label", "caf\udce9", "--", "printf", "%s", "caf\udce9.txt")[0] == 0
