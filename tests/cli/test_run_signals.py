"""`jayrun run` in a terminal: Ctrl-C, SIGTERM, SIGHUP, a closed window and SIGKILL, each at every stage."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from processes import until
from run_helpers import Terminal, is_stopped, lives, nothing_left, reclaimed, run, started

from jayrun.store import audit
from jayrun.store.transactions import Book

EVENTS: dict[str, tuple[int, Callable[[Terminal], None]]] = {
    "Ctrl-C": (signal.SIGINT, lambda terminal: terminal.type(b"\x03")),
    "SIGTERM": (signal.SIGTERM, lambda terminal: terminal.process.send_signal(signal.SIGTERM)),
    "SIGHUP": (signal.SIGHUP, lambda terminal: terminal.process.send_signal(signal.SIGHUP)),
    "closed": (signal.SIGHUP, Terminal.close),
    "SIGKILL": (signal.SIGKILL, lambda terminal: terminal.process.send_signal(signal.SIGKILL)),
}

every_event = pytest.mark.parametrize("event", EVENTS)


def happens(event: str, terminal: Terminal) -> int:
    """Let it happen; the exit code of a process that it ends."""
    number, act = EVENTS[event]
    act(terminal)
    return 128 + number


def nobody_is_left(book: Book, host_id: int, event: str) -> None:
    """What it left is nothing; killed, what the next pass finds to be dead."""
    if event == "SIGKILL":
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)
    assert {row["state"] for row in audit.executions(book)} <= {"succeeded", "failed", "cancelled"}


@contextmanager
def stopped_at(probe: str, url: str, *arguments: str) -> Iterator[Terminal]:
    with Terminal(url, *arguments, probes=f"{probe}=stop") as terminal:
        terminal.says(f"probe {probe} reached")
        until(lambda: is_stopped(terminal.process.pid))
        yield terminal


@every_event
def test_while_the_book_is_opened(event: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never says a word
        host, port = silent.getsockname()
        with Terminal(f"postgresql://me@{host}:{port}/book", "--", "echo", "never") as terminal, silent.accept()[0]:
            code = happens(event, terminal)
            assert terminal.ended() == (code, "^C" if event == "Ctrl-C" else "")


@every_event
@pytest.mark.parametrize("is_free", [True, False])
def test_before_it_asks(url: str, book: Book, host_id: int, event: str, is_free: bool) -> None:
    with started(url, "--gpus", "2", "--memory-gb", "1" if is_free else "24", "--", "sleep", "1000") as other:
        until(lambda: audit.leases(book))
        with stopped_at("command.registered", url, "--memory-gb", "1", "--", "echo", "never") as terminal:
            code = happens(event, terminal)
            terminal.process.send_signal(signal.SIGCONT)
            found, screen = terminal.ended()
            assert (found, "never" in screen, "Traceback" in screen) == (code, False, False)
        other.terminate()
        other.wait()
    nobody_is_left(book, host_id, event)


@every_event
def test_while_it_waits(url: str, book: Book, host_id: int, event: str) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "1000") as other:
        until(lambda: audit.leases(book))
        with Terminal(url, "--", "echo", "never") as terminal:
            terminal.says("place 1 of 1")
            code = happens(event, terminal)
            found, screen = terminal.ended()
            assert (found, "never" in screen, "Traceback" in screen) == (code, False, False)
        until(lambda: event != "SIGKILL" or reclaimed(book, host_id) or not audit.queue(book))
        assert audit.queue(book) == []
        other.terminate()
        other.wait()
    nobody_is_left(book, host_id, event)


@every_event
def test_between_grant_and_execution(url: str, book: Book, host_id: int, event: str) -> None:
    with stopped_at("command.granted", url, "--", "echo", "never") as terminal:
        assert [lease["holders"] for lease in audit.leases(book)] == [2]
        code = happens(event, terminal)
        terminal.process.send_signal(signal.SIGCONT)
        found, screen = terminal.ended()
        assert (found, "never" in screen, "Traceback" in screen) == (code, False, False)
    nobody_is_left(book, host_id, event)


@every_event
def test_while_the_command_runs(url: str, book: Book, host_id: int, event: str) -> None:
    with Terminal(url, "--", "sh", "-c", "echo command $$; exec sleep 1000") as terminal:
        command = terminal.says_pid("command")
        code = happens(event, terminal)
        found, screen = terminal.ended()
        assert (found, "Traceback" in screen) == (code, False)
        until(lambda: not lives(command))  # the end of the wrapper is the end of the terminal's session
    nobody_is_left(book, host_id, event)


@every_event
def test_the_command_decides_what_a_signal_means(url: str, book: Book, host_id: int, event: str) -> None:
    script = "trap 'exit 5' INT TERM HUP; echo command $$; while :; do sleep 0.05; done"
    with Terminal(url, "--", "sh", "-c", script) as terminal:
        command = terminal.says_pid("command")
        code = happens(event, terminal)
        assert terminal.ended()[0] == (code if event == "SIGKILL" else 5)
        until(lambda: not lives(command))
    nobody_is_left(book, host_id, event)


@every_event
def test_while_it_waits_for_what_the_command_left(url: str, book: Book, host_id: int, event: str) -> None:
    with Terminal(url, "--", "sh", "-c", "setsid sleep 1000 & echo left $!; exit 3") as terminal:
        left = terminal.says_pid("left")
        terminal.says("left 1 process running")
        code = happens(event, terminal)
        found, screen = terminal.ended()
        assert (found, "Traceback" in screen) == (code if event == "SIGKILL" else 3, False)
        assert lives(left) == (event == "SIGKILL")
        if event == "SIGKILL":
            assert not reclaimed(book, host_id)
            os.kill(left, signal.SIGKILL)
    nobody_is_left(book, host_id, event)


@every_event
@pytest.mark.parametrize("probe", ["command.ended", "command.told"])
def test_while_it_tells_the_end(url: str, book: Book, host_id: int, event: str, probe: str) -> None:
    with stopped_at(probe, url, "--", "sh", "-c", "exit 3") as terminal:
        code = happens(event, terminal)
        terminal.process.send_signal(signal.SIGCONT)
        found, screen = terminal.ended()
        assert (found, "Traceback" in screen) == (code if event == "SIGKILL" else 3, False)
    nobody_is_left(book, host_id, event)


def test_nobody_to_read_what_it_says_ends_nothing(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "1000") as other:
        until(lambda: audit.leases(book))
        ignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731 - as nohup does
        with Terminal(url, "--", "sh", "-c", "exit 3", before=ignored) as terminal:
            terminal.says("place 1 of 1")
            terminal.close()
            with started(url, "--priority", "1", "--", "sleep", "1000") as before_it:
                # Its place has changed, it said so, and nobody could read it.
                until(lambda: os.readlink(f"/proc/{terminal.process.pid}/fd/2") == os.devnull)
                before_it.terminate()
                before_it.wait()
            other.terminate()
            assert terminal.ended()[0] == 3
    nothing_left(book, host_id)


def test_with_standard_error_closed_it_runs_as_well(url: str, book: Book, host_id: int) -> None:
    with started(url, "--gpus", "2", "--", "sleep", "1000") as other:
        until(lambda: audit.leases(book))
        with started(url, "--", "sh", "-c", "echo done; exit 3", before=lambda: os.close(2)) as waiting:
            until(lambda: audit.queue(book))
            other.terminate()
            out, _ = waiting.communicate()
            assert (waiting.returncode, out) == (3, "done\n")
    assert run(url, "--", "true")[0] == 0
