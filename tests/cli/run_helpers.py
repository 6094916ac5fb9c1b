"""`jayrun run` as a person types it: with pipes, or in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from processes import PATIENCE

from jayrun.runtime import reconciler
from jayrun.settings import child_environment
from jayrun.store import admission, audit
from jayrun.store.transactions import Book

JAYRUN = "from jayrun.cli.app import main; main()"
SHORT_GRACE = f"from jayrun.runtime import leftovers; leftovers.GRACE_SECONDS = 0.3; {JAYRUN}"
"""`jayrun` with less patience for processes that do not heed SIGTERM."""
QUICK_BEAT = f"from jayrun.runtime import command; command.BEAT_SECONDS = 0.1; {JAYRUN}"
"""`jayrun` whose commands show life, and hear that they lost their lease, more often."""


@contextmanager
def started(
    url: str,
    *arguments: str,
    path: str = os.defpath,
    before: Callable[[], object] | None = None,
    probes: str = "",
    jayrun: str = JAYRUN,
) -> Iterator[subprocess.Popen[str]]:
    """`jayrun run ...` with its own process group, as from a shell with job control."""
    child = subprocess.Popen(
        [sys.executable, "-c", jayrun, "run", *arguments],
        env=_environment(url, path, probes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
        preexec_fn=before,
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(PATIENCE)
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None
            pipe.close()


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=PATIENCE)
    return child.returncode, out, err


def run(url: str, *arguments: str) -> tuple[int, str, str]:
    with started(url, *arguments) as child:
        return ended(child)


def read_line(child: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def read_error(child: subprocess.Popen[str], until: str = "") -> str:
    """The next line that it prints on standard error and that begins with `until`."""
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(until):
            return line.rstrip("\n")
    raise AssertionError(f"it ended without saying {until!r}")


def nothing_left(book: Book, host_id: int) -> None:
    assert audit.leases(book) == []
    assert audit.queue(book) == []
    assert audit.violations(book) == []
    admission.combine(book, host_id)
    assert {row["reserved_bytes"] for row in audit.capacity(book)} == {0}


def reclaimed(book: Book, host_id: int) -> bool:
    """For `until`: a pass of the host has left no lease and no waiter."""
    reconciler.run_pass(book, host_id)
    return not audit.leases(book) and not audit.queue(book)


def lives(pid: int) -> bool:
    """Whether the process runs, and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Terminal:
    """A terminal in which `jayrun run ...` is all that was started: it is what the terminal's signals go to."""

    def __init__(self, url: str, *arguments: str, probes: str = "", before: Callable[[], object] | None = None) -> None:
        self._screen, theirs = pty.openpty()
        self._seen = ""

        def enter() -> None:
            _login(theirs)
            if before is not None:
                before()

        self.process = subprocess.Popen(
            [sys.executable, "-c", JAYRUN, "run", *arguments],
            env=_environment(url, os.defpath, probes),
            preexec_fn=enter,
            pass_fds=[theirs],
        )
        os.close(theirs)

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until what `pattern` matches is on the screen."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._screen], [], [], 0.1)[0] and not self._read():
                raise AssertionError(f"it ended without saying {pattern!r}: {self._seen}")
        return found

    def says_pid(self, word: str) -> int:
        """The number that is printed after `word`."""
        return int(self.says(rf"{word} (\d+)\r\n")[1])

    def type(self, key: bytes) -> None:
        os.write(self._screen, key)

    def close(self) -> None:
        """What happens to it when its window is closed."""
        if self._screen >= 0:
            os.close(self._screen)
            self._screen = -1

    def ended(self) -> tuple[int, str]:
        """The exit code as a shell would tell it, and what was on the screen unless it was closed."""
        code = self.process.wait(PATIENCE)
        while self._screen >= 0 and select.select([self._screen], [], [], 0)[0] and self._read():
            pass
        return 128 - code if code < 0 else code, self._seen

    def _read(self) -> bool:
        try:
            text = os.read(self._screen, 65536).decode(errors="replace")
        except OSError:  # nobody has it open any more
            return False
        self._seen += text
        return bool(text)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self.close()


def _login(terminal: int) -> None:
    """In the child: the terminal becomes the controlling one of a new session, and standard input and output."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)


def _environment(url: str, path: str, probes: str) -> dict[str, str]:
    values = {"JAYRUN_DATABASE_URL": url, "PATH": path, "JAYRUN_PROBES": probes}
    return child_environment(values, without=("JAYRUN_", "CUDA_"))
