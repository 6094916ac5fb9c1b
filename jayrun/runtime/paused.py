"""A paused child: it waits on a pipe until it is told to become the command, or to leave."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections.abc import Collection, Sequence
from typing import NoReturn

from jayrun import kernel
from jayrun.runtime.exported import DOCKER_VARIABLE
from jayrun.settings import child_environment

FORWARDED = (signal.SIGTERM, signal.SIGHUP)
FOR_THE_CHILD_ALONE = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends these to both; the child answers them


class CannotExecute(Exception):
    """The command could not be executed; `number` is the errno that says why."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"{command}: {os.strerror(number)}")
        self.number = number


class PausedChild:
    """A child of this process that waits on a pipe before it executes `command`. Fork it before anything is opened.

    `heeded` are the signals that were not ignored when this process started (as by nohup): what was, stays so, for the
    command too. Raises `CannotExecute` when there is no such command: better before it waits for its turn than after.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        if _is_unknown(command[0]):
            raise CannotExecute(command[0], errno.ENOENT)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose the exit code
        signals = (*FORWARDED, *FOR_THE_CHILD_ALONE)
        self.heeded = frozenset(each for each in signals if signal.getsignal(each) is not signal.SIG_IGN)
        go_reader, self._go = os.pipe()
        self._failed, failed_writer = os.pipe()
        # Held back until the child has its own answers: Python's would be a traceback, and the wrong exit code.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._go)
                os.close(self._failed)
                _execute_when_told(self._command, go_reader, failed_writer, self.heeded, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(go_reader)
        os.close(failed_writer)
        self.pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None

    def take_signals(self) -> None:
        """From now on, what ends a service goes on to the child, and what the terminal sends is left to it."""
        for number in FORWARDED:
            if number in self.heeded:
                signal.signal(number, self._forward)
        for number in FOR_THE_CHILD_ALONE:
            signal.signal(number, signal.SIG_IGN)

    def _forward(self, number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def execute(self, environment: dict[str, str]) -> None:
        """Let it go. Raises `CannotExecute`; after that the child is gone."""
        with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile; its status tells
            os.write(self._go, json.dumps(environment).encode())
        os.close(self._go)
        self._go = -1
        with os.fdopen(self._failed, "rb") as failed:
            number = failed.read()
        if number:
            self.wait()
            raise CannotExecute(self._command[0], int(number))

    def ended(self, timeout_seconds: float) -> bool:
        """Whether it has ended, waiting for that up to `timeout_seconds`."""
        return kernel.readable(timeout_seconds, self.pidfd)

    def wait(self) -> int:
        """Its exit code, 128 + the signal's number if a signal ended it; waits for the end."""
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self._status = 128 - code if code < 0 else code
        return self._status

    def dismiss(self) -> None:
        """End it before it was told to go."""
        if self._go >= 0:
            os.close(self._go)  # the end of the pipe is its sign to leave
            self._go = -1
        self.wait()


def _is_unknown(program: str) -> bool:
    # A folder in PATH that may not be searched is no answer to whether the command exists.
    return not os.path.lexists(program) if "/" in program else shutil.which(program, os.F_OK) is None


def _execute_when_told(
    command: list[str],
    go_reader: int,
    failed_writer: int,
    heeded: frozenset[signal.Signals],
    mask: Collection[int],
) -> NoReturn:
    """In the child: default signals, wait for the environment, become the command. Never returns."""
    try:
        for number in (*heeded, signal.SIGPIPE, signal.SIGXFSZ):  # the last two are ignored by Python itself
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(go_reader, "rb") as go:
            told = go.read()
        if told:
            # Flags that it inherited from a command around it are for other devices.
            os.execvpe(command[0], command, child_environment(json.loads(told), without=(DOCKER_VARIABLE,)))
    except OSError as error:
        os.write(failed_writer, str(errno.ENOENT if _is_unknown(command[0]) else error.errno).encode())
    finally:
        os._exit(127)
