"""Real processes for tests: one preloaded fork server, so that a child costs milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from jayrun.settings import child_environment

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["jayrun.runtime.runtime", "jayrun.runtime.command"])

PATIENCE = 60.0
"""How long a test waits for an event that must come; on a slow machine nothing takes near as long."""


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[ForkServerProcess]:
    """A child that runs `target(*arguments)`; killed at the end of the block if it is still there."""
    child = CONTEXT.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join(PATIENCE)
        child.close()


@contextmanager
def command(
    *arguments: str, before: Sequence[str] = (), log: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`jayrun ARGUMENTS` in a process group of its own, its words on `stderr` or in the file `log`; the group is killed
    at the end.

    `before` comes before it on the command line.
    """
    words = subprocess.PIPE if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process = subprocess.Popen(
        [*before, sys.executable, "-c", "from jayrun.cli.app import main; main()", *arguments],
        env=child_environment(environment, without=("JAYRUN_", "PG")),
        cwd=Path(__file__).parent,
        stderr=words,
        text=True,
        start_new_session=True,
    )
    if log is not None:
        os.close(words)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        if process.stderr is not None:
            process.stderr.close()


def until(true: Callable[[], object]) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finished(child: ForkServerProcess) -> None:
    """Wait for the child to end by itself, and well."""
    child.join(PATIENCE)
    assert child.exitcode == 0, f"the child ended with {child.exitcode}"
