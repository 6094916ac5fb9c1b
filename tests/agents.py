"""Agents: processes that run what a test tells them, under whatever circumstances the test starts them in.

An agent has an open book, and a test talks to it in Python: `agent("holders.beat(book, me)")`.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, until

from jayrun import kernel
from jayrun.settings import child_environment

BELOW = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Starts a process as the first of a pid namespace of its own, with a /proc of its own."""

_AGENT = """
import ctypes, logging, os, subprocess, sys, time
from uuid import UUID
from fleet import Scene, cuda, gpus, scene
from jayrun import Data, Operator, Runtime, kernel
from jayrun.domain.liveness import Incarnation
from jayrun.errors import *
from jayrun.runtime import reconciler
from jayrun.store import admission, devices, holders, reclaim
from jayrun.store.transactions import Book

class Take(Operator):
    memory_gb: Data
    def execute(self) -> Data:
        return Data(None, self.placement.cuda(self.memory_gb.value))

url = sys.argv[1]
book = Book(url, role="agent", instance=str(os.getpid()), patience_seconds=10)
print("ready", flush=True)
for told in sys.stdin:
    code = eval(told)
    try:
        try:
            answer = eval(compile(code, "told", "eval"), globals())
        except SyntaxError:
            exec(compile(code, "told", "exec"), globals())
            answer = None
        known = isinstance(answer, (int, float, str, list, type(None)))
        print(repr(answer if known else str(answer)), flush=True)
    except Exception as error:
        print(repr(f"{type(error).__name__}: {error}"), flush=True)
"""


class Agent:
    """A process that does what it is told, one thing after the other."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self.log = log
        # Its number in this process's pid namespace; it may be a child of the command that it was started by.
        self.pid = process.pid
        while children := Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            self.pid = int(children[0])

    def tell(self, code: str) -> None:
        """Let it run `code`, an expression or statements; `hear` has the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{code!r}\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next answer; an exception is told as text."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, f"the agent has ended: {self.words()}"
        return ast.literal_eval(answer)

    def __call__(self, code: str) -> Any:
        self.tell(code)
        return self.hear()

    def words(self) -> str:
        """What it has written to standard error."""
        return self.log.read_text()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: kernel.is_absent(self.pid))


@contextmanager
def agent(url: str, folder: Path, *, before: Sequence[str] = (), **environment: str) -> Iterator[Agent]:
    """An agent for the book at `url`, started by the command `before`; killed at the end."""
    log = folder / f"agent-{len(list(folder.iterdir()))}.log"
    with log.open("w") as words:
        process = subprocess.Popen(
            [*before, sys.executable, "-c", _AGENT, url],
            env=child_environment(environment, without=("JAYRUN_", "PG")),
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n", log.read_text()
        yield Agent(process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        process.stdin.close()
        process.stdout.close()


@cache
def _refusal(command: tuple[str, ...]) -> str | None:
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]} here"
    tried = subprocess.run([*command, "true"], check=False, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"`{' '.join(command)}` is refused here: {tried.stderr.strip()}"


def need(*command: str) -> None:
    """Skip the test, saying why, where a process may not be started so."""
    if (why := _refusal(command)) is not None:
        pytest.skip(why)
