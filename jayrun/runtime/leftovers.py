"""What a wrapped command leaves running: waited for, or ended, before its lease goes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from jayrun import descendants, kernel
from jayrun.descendants import Process
from jayrun.runtime.paused import PausedChild
from jayrun.runtime.saying import say

GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL for what is to be ended."""
_QUIET_SECONDS = 0.5  # what ends by itself so soon is not worth a word
_KILL_AGAIN_SECONDS = 0.2


class OnExit(StrEnum):
    """What becomes of the processes that a command leaves running: they are waited for, or ended."""

    WAIT = "wait"
    KILL = "kill"


class Leftovers:
    """The descendants that `child` left running when it ended; as orphans they became children of this process.

    What was started before `since_ticks`, when the child was, is none of it: children of a shell that became this
    process by `exec`.
    """

    def __init__(self, child: PausedChild, *, since_ticks: int) -> None:
        self._child = child
        self._since_ticks = since_ticks
        self._told_to_end = False
        self._kill_at: float | None = None

    def exist(self) -> bool:
        """Whether one still lives. Collects the ends of those that do not."""
        if not collect_orphans(self._child):
            return False
        ticks = [kernel.start_ticks(each) for each in descendants.children(os.getpid())]
        # A child that cannot be seen is another user's, where /proc hides those; or it became ours while we looked.
        return not ticks or any(each is None or each >= self._since_ticks for each in ticks)

    def see_out(self, on_exit: OnExit, *, show_life: Callable[[], None], beat_seconds: float) -> None:
        """Stay until all are gone. To be ended, they get SIGTERM, and SIGKILL after `GRACE_SECONDS`.

        A signal that would end this process ends them, a second one kills them; SIGHUP is passed on. `show_life()` is
        called every `beat_seconds`.
        """
        ear = self._listen()
        if on_exit is OnExit.KILL:
            self._end()
            self._kill_at = time.monotonic() + GRACE_SECONDS
        say_at: float | None = time.monotonic() + _QUIET_SECONDS
        beat_at = time.monotonic() + beat_seconds
        while self.exist():
            now = time.monotonic()
            if say_at is not None and now >= say_at:
                say(_describe(self._living(), ending=self._told_to_end))
                say_at = None
            if now >= beat_at:
                show_life()
                beat_at = now + beat_seconds
            if self._kill_at is not None and now >= self._kill_at:
                self._send(signal.SIGKILL)
                self._kill_at = now + _KILL_AGAIN_SECONDS  # for those that were started meanwhile
            due = [at for at in (say_at, beat_at, self._kill_at) if at is not None]
            kernel.readable(min(due) - now, ear)
            _drain(ear)

    def _listen(self) -> int:
        """Take this process's signals; returns what becomes readable when one comes, also the end of a child."""
        ear, mouth = os.pipe()
        os.set_blocking(ear, False)
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in self._child.heeded & {signal.SIGTERM, signal.SIGINT}:
            signal.signal(number, self._be_told_to_end)
        for number in self._child.heeded & {signal.SIGHUP}:
            signal.signal(number, lambda number, frame: self._send(number))
        return ear

    def _be_told_to_end(self, number: int, frame: object) -> None:
        if self._told_to_end:
            self._kill_at = time.monotonic()
        else:
            self._end()
            say("jayrun: what the command left running was told to end; Ctrl-C or SIGTERM once more kills it")

    def _end(self) -> None:
        self._told_to_end = True
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a stopped one hears it only then

    def _send(self, number: int) -> None:
        for process in self._living():
            descendants.send(process, number)

    def _living(self) -> list[Process]:
        return descendants.below(os.getpid(), since_ticks=self._since_ticks)


def collect_orphans(child: PausedChild) -> bool:
    """Collect the ends of all children but `child`, orphans of it that became ours; whether children are left."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None or ended.si_pid == child.pid:
            return True
        os.waitpid(ended.si_pid, 0)


def _describe(processes: Sequence[Process], *, ending: bool) -> str:
    names = [f"{process.name} (pid {process.who.pid})" for process in processes[:5]]
    named = ", ".join(names + ([f"and {len(processes) - 5} more"] if len(processes) > 5 else []))
    count = "1 process" if len(processes) == 1 else f"{len(processes) or 'hidden'} processes"
    if ending:
        return f"jayrun: the command has ended; ending {count} that it left running: {named}"
    return (
        f"jayrun: the command has ended, but left {count} running, and the lease stays until all is gone: {named} "
        "(Ctrl-C or SIGTERM ends what is left)"
    )


def _drain(ear: int) -> None:
    try:
        while os.read(ear, 4096):
            pass
    except BlockingIOError:
        pass
