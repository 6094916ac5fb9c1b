"""What `self.placement` adds on top of the store, in durable commits of the same server.

    python -m benchmarks.placement [--cycles 300] [--repeats 5]

Three ways of reserving and releasing one device, in turns: through the store; through `Runtime.run` with a flush after
each run (the release is committed before the next one starts); and without (the release is committed meanwhile).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.admission import DEVICES, HOST, StoreClient, durable_commit_ms, facts, prepare
from jayrun import Data, Operator, Runtime
from jayrun.embedded import start_throwaway
from jayrun.settings import Settings


class Take(Operator):
    def execute(self) -> Data:
        return Data(None, self.placement.cuda(memory_gb=1))


def milliseconds(cycle: Callable[[], object], cycles: int) -> float:
    """How long one cycle takes on average."""
    began_at = time.perf_counter()
    for _ in range(cycles):
        cycle()
    return (time.perf_counter() - began_at) / cycles * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement")
    parser.add_argument("--cycles", type=int, default=300, help="cycles in a turn of each way")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way, after one that does not count")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="jayrun-benchmark-") as folder,
        start_throwaway(Path(folder), settings=Settings.load()) as server,
    ):
        prepare(server.url)
        print(*(f"{name}: {value}" for name, value in facts(server.url).items()), sep="\n")
        store = StoreClient.enter(server.url)
        with Runtime(server.url, devices=DEVICES, settings=Settings(host_id=HOST)) as runtime:

            def flushed() -> None:
                runtime.run(Take)
                runtime.flush()

            ways: dict[str, Callable[[], object]] = {
                "the store": store.cycle,
                "run, flushed": flushed,
                "run": lambda: runtime.run(Take),
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            commits = []
            for turn in range(options.repeats + 1):
                commits.append(durable_commit_ms(server.url))
                for name, cycle in ways.items():
                    spent = milliseconds(cycle, options.cycles)
                    if turn:
                        took[name].append(spent)
        commit, base = median(commits), median(took["the store"])
        print(f"\ndurable commit: {commit:.3f} ms\n\nway              ms a cycle   on top, in durable commits")
        for name, turns in took.items():
            added = (median(turns) - base) / commit
            print(f"{name:<14} {median(turns):>12.2f}   {added:>26.1f}   ({min(turns):.2f}-{max(turns):.2f} ms)")


if __name__ == "__main__":
    main()
