"""Named points in the loops and transactions, which tests arm to force an interleaving or to end the process there.

Unarmed, a point costs one truth test. `arm` serves a test in the same process; `arm_from_settings` reads JAYRUN_PROBES
("point=kill,other=stop") in a child, where a point can end the process (`kill`), stop it until SIGCONT (`stop`), or do
nothing more than the others do first: tell standard error that it was reached (`say`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_armed: dict[str, Callable[[], object]] = {}


def reach(name: str) -> None:
    """Say that the program is at the point `name`; runs what a test armed there."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


@contextmanager
def arm(name: str, action: Callable[[], object]) -> Iterator[None]:
    """Run `action` each time this process reaches the point `name`, within the `with` block."""
    _armed[name] = action
    try:
        yield
    finally:
        _armed.pop(name, None)


def arm_from_settings(probes: str) -> None:
    """Arm the points named in a JAYRUN_PROBES value. Raises ValueError for an unknown action."""
    actions = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "say": None}
    for entry in filter(None, probes.split(",")):
        name, _, action = entry.partition("=")
        if action not in actions:
            raise ValueError(f"JAYRUN_PROBES: {entry!r} is not POINT=kill, POINT=stop or POINT=say")
        _armed[name] = partial(_meet, name, actions[action])


def _meet(name: str, sent: signal.Signals | None) -> None:
    os.write(2, f"probe {name} reached by process {os.getpid()}\n".encode())  # whole, whatever happens next
    if sent is not None:
        os.kill(os.getpid(), sent)
