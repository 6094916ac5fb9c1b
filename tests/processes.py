"""Real processes for tests: one preloaded fork server, so that a child costs milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any

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
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
        child.join(PATIENCE)
        child.close()


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
