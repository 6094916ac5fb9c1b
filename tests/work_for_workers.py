"""Operators for tests of `jayrun worker`. What they are told by files, they wait for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from jayrun import Data, Operator, Resource


def meet(folder: str) -> None:
    """Say in `folder` that it has begun, and wait for the file `go`."""
    place = Path(folder)
    (place / f"began-{os.getpid()}-{time.monotonic_ns()}").touch()
    while not (place / "go").exists():
        time.sleep(0.01)


class Add(Operator):
    a: Any
    b: Any

    def execute(self) -> Data:
        return Data(self.a.value + self.b.value)


class Where(Operator):
    """By which numbers the worker uses the GPU that it was given, and which one that is."""

    device_id: Any

    def execute(self) -> Data:
        placement = self.placement.cuda(1, device_id=self.device_id.value)
        return Data([placement.device_id, placement.host_index])


class Strange(Operator):
    """A result that is no JSON."""

    def execute(self) -> Data:
        return Data({1, 2})


class Huge(Operator):
    def execute(self) -> Data:
        return Data("x" * 2_000_000)


class Meet(Operator):
    """Runs until the file `go` is in the folder."""

    folder: Any

    def execute(self) -> Data:
        meet(self.folder.value)
        return Data(os.getpid())


class MeetAndFail(Operator):
    folder: Any

    def execute(self) -> Data:
        meet(self.folder.value)
        raise OSError("in vain")


class Hold(Operator):
    """Holds memory on a device until the file `go` is in the folder; without a folder for a moment."""

    memory_gb: Any
    folder: Any = None
    count: Any = 1

    def execute(self) -> Data:
        placements = [self.placement.cuda(memory_gb=self.memory_gb.value) for _ in range(self.count.value)]
        if self.folder.value is not None:
            meet(self.folder.value)
        return Data([placement.host_index for placement in placements])


class OnDevice(Operator):
    """Its result stays on the device, so its value is not stored."""

    def execute(self) -> Data:
        return Data("tensor", self.placement.cuda(memory_gb=1))


class Crash(Operator):
    def execute(self) -> Data:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Fail(Operator):
    """Fails `times` times, counted in the folder."""

    folder: Any
    times: Any = 1_000

    def execute(self) -> Data:
        failures = Path(self.folder.value) / "failures"
        count = failures.stat().st_size if failures.exists() else 0
        if count < self.times.value:
            with failures.open("a") as file:
                file.write("x")
            raise FileNotFoundError(f"failure {count + 1}")
        return Data("at last")


class FailThenHold(Operator):
    """Fails at its first attempt, before it asks for anything."""

    folder: Any

    def execute(self) -> Data:
        tried = Path(self.folder.value) / "tried"
        if not tried.exists():
            tried.touch()
            raise OSError("not yet")
        return Data(self.placement.cuda(memory_gb=20).host_index)


class Model(Resource):
    memory_gb: int

    def setup(self) -> Data:
        return Data(os.getpid(), self.placement.cuda(memory_gb=self.memory_gb))


class SlowModel(Resource):
    """Its set-up meets in the folder that the environment of the worker names, then asks."""

    def setup(self) -> Data:
        meet(os.environ["MEETING_PLACE"])
        return Data(os.getpid(), self.placement.cuda(memory_gb=10))


class UseSlowModel(Operator):
    model: SlowModel

    def execute(self) -> Data:
        return Data("used")


class MeetThenHold(Operator):
    folder: Any

    def execute(self) -> Data:
        meet(self.folder.value)
        return Data(self.placement.cuda(memory_gb=20).host_index)


class Infer(Operator):
    model: Model = Model(memory_gb=10)

    def execute(self) -> Data:
        placement = self.placement.cuda(memory_gb=10)
        return Data([self.model.value, os.getpid(), placement.host_index])


class Tell(Operator):
    """Asks for `sizes`, one after the other, works for `seconds`, and adds a line to `file`: which process came to the
    end."""

    file: Any
    sizes: Any = ()
    seconds: Any = 0

    def execute(self) -> Data:
        placements = [self.placement.cuda(memory_gb=size) for size in self.sizes.value]
        time.sleep(self.seconds.value)
        with Path(self.file.value).open("a") as file:
            file.write(f"{os.getpid()}\n")
        del placements
        return Data(os.getpid())


class Pair(Operator):
    """A group of two devices, and then one more request."""

    memory_gb: Any

    def execute(self) -> Data:
        group = self.placement.cuda_group(per_device_memory_gb=self.memory_gb.value, max_devices=2, min_devices=2)
        one = self.placement.cuda(memory_gb=1)
        return Data([*(member.host_index for member in group), one.host_index])
