"""The operators that the workers of the benchmarks run: `jayrun worker benchmarks.work`."""

from __future__ import annotations

import time
from pathlib import Path

from jayrun import Data, Operator

WHOLE_GB = 1000  # the memory of the device that is handed over


class Empty(Operator):
    """Does nothing, on the CPU."""

    def execute(self) -> Data:
        return Data(None)


class Keep(Operator):
    """Takes the whole device for as long as its Data lives; the value is when its last invocation began."""

    def execute(self) -> Data:
        began_at = time.monotonic()  # one clock for all processes of a machine
        return Data(began_at, self.placement.cuda(memory_gb=WHOLE_GB))


class Handed(Operator):
    """Takes the whole device, writes when its last invocation began to the file `began`, and keeps it until there is a
    file `go`; both are in the folder `folder`."""

    folder: Data

    def execute(self) -> Data:
        began_at = time.monotonic()
        placement = self.placement.cuda(memory_gb=WHOLE_GB)
        folder = Path(self.folder.value)
        (folder / "writing").write_text(str(began_at))
        (folder / "writing").rename(folder / "began")
        while not (folder / "go").exists():
            time.sleep(0.002)
        del placement
        return Data(None)


class Killed(Operator):
    """Adds the time at which it began to the file `log`; the first time it goes on until it is killed."""

    log: Data

    def execute(self) -> Data:
        began_at = time.monotonic()
        with Path(self.log.value).open("a") as lines:
            lines.write(f"{began_at}\n")
        if len(Path(self.log.value).read_text().splitlines()) == 1:
            time.sleep(3600)
        return Data(None)
