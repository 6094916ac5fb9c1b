"""What the worker processes of `jayrun demo` do: ask for capacity, hold it for a moment, give it back, ask again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from jayrun import Data, Operator, Runtime

DEVICES = 4
DEVICE_GB = 24
MOST_PAUSE_SECONDS = 0.1


class Shared(Operator):
    """A part of one GPU, beside others."""

    memory_gb: Data
    hold_seconds: Data

    def execute(self) -> Data:
        placement = self.placement.cuda(memory_gb=self.memory_gb.value)
        time.sleep(self.hold_seconds.value)
        return Data(None, placement)


class Exclusive(Operator):
    """One whole GPU."""

    hold_seconds: Data

    def execute(self) -> Data:
        placement = self.placement.cuda(memory_gb=0, exclusive=True)
        time.sleep(self.hold_seconds.value)
        return Data(None, placement)


class Pair(Operator):
    """The same on two GPUs, or nothing."""

    memory_gb: Data
    hold_seconds: Data

    def execute(self) -> Data:
        group = self.placement.cuda_group(per_device_memory_gb=self.memory_gb.value, min_devices=2, max_devices=2)
        time.sleep(self.hold_seconds.value)
        return Data(None, group)


class Elastic(Operator):
    """So much in all, on as many GPUs as there are, from one to three."""

    memory_gb: Data
    hold_seconds: Data

    def execute(self) -> Data:
        group = self.placement.cuda_group(
            group_memory_gb=self.memory_gb.value, min_devices=1, max_devices=3, prefer_max_devices=True
        )
        time.sleep(self.hold_seconds.value)
        return Data(None, group)


def choose(chance: random.Random) -> tuple[type[Operator], dict[str, Any]]:
    """The next piece of work and its inputs."""
    inputs: dict[str, Any] = {"hold_seconds": chance.uniform(0.1, 0.6)}
    kind = chance.choices([Shared, Exclusive, Pair, Elastic], weights=[6, 1, 2, 2])[0]
    if kind is Shared:
        inputs["memory_gb"] = chance.randint(2, 10)
    elif kind is Pair:
        inputs["memory_gb"] = chance.randint(4, 16)
    elif kind is Elastic:
        inputs["memory_gb"] = chance.randint(12, 24)
    return kind, inputs


def work(url: str, number: int, seed: int, orders: Connection) -> None:
    """The life of worker `number`: says that it is ready, and works until the other end of `orders` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which then ends its workers
    threading.Thread(target=_end_with_the_demo, name="demo-watch", daemon=True).start()
    chance = random.Random(f"{seed}/{number}")
    with Runtime(url, label=f"worker {number}") as runtime:
        orders.send(None)
        while not orders.poll(chance.uniform(0, MOST_PAUSE_SECONDS)):
            operator, inputs = choose(chance)
            runtime.run(operator, **inputs)


def _end_with_the_demo() -> None:
    """Without the demo there is no server any more, and whoever waits for capacity would do so for ever."""
    demo = parent_process()
    if demo is not None:
        wait([demo.sentinel])
        os._exit(1)
