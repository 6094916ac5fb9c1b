"""What the tests of the command line share: what a command left behind, and processes that hold capacity."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jayrun.settings import child_environment

T = TypeVar("T")

COMMAND = [sys.executable, "-c", "from jayrun.cli.app import main; main()"]

HOLDER = """
import sys
from jayrun import Data, Operator, Runtime

class Hold(Operator):
    memory_gb: Data
    def execute(self) -> Data:
        return Data(None, self.placement.cuda(self.memory_gb.value, exclusive=self.memory_gb.value == 0))

runtime = Runtime(label=sys.argv[1])
kept = [runtime.run(Hold, memory_gb=float(memory_gb)) for memory_gb in sys.argv[2:]]
print("held", flush=True)
for line in sys.stdin:
    kept.append(runtime.start(Hold, memory_gb=float(line)))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Jayrun = Callable[..., Outcome]


class Holder:
    """A process that holds leases; what is written to it is asked for in the background."""

    def __init__(self, url: str, label: str, *memory_gb: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, label, *map(str, memory_gb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment({"JAYRUN_DATABASE_URL": url}),
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_held(self) -> Holder:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        return self

    def ask(self, memory_gb: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{memory_gb}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(condition: Callable[[], T], *, seconds: float = 15) -> T:
    """The first true answer of `condition`; fails when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)
    return answer


def in_terminal(*arguments: str, columns: int, env: dict[str, str]) -> tuple[int, str]:
    """Run the command in a terminal that is so wide; its exit code and everything it wrote there."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    environment = child_environment(
        {"TERM": "xterm-256color", **env},
        without=("NO_COLOR", "COLUMNS", "LINES", "JAYRUN_HOME", "JAYRUN_DATABASE_URL"),
    )
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    os.close(terminal)
    return process.returncode, seen.decode()
