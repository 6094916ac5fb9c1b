"""How many admissions a second: reserve and release of a single device, against the least that they can cost.

    python -m benchmarks.admission [--seconds 5] [--repeats 5] [--processes 1,8,64] [--json FILE]

The floor is pgbench with the same row changes made by one prepared server-side call (`floor.sql`) behind the same gate,
on the same server, with the same durability, in turns with jayrun. Each jayrun process is a real one with its own Book.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles

import psycopg

from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.domain.requests import Request
from jayrun.embedded import Throwaway, start_throwaway
from jayrun.settings import Settings
from jayrun.store import devices, holders, schema
from jayrun.store.admission import Ask, Execution, Granted, Member, reserve
from jayrun.store.ids import new_id
from jayrun.store.leases import release
from jayrun.store.transactions import Book

HERE = Path(__file__).parent
HOST = "benchmark"
DEVICES = [RuntimeDevice(Device.GPU, [Backend.CUDA], number, memory_limit_gb=1000) for number in range(8)]
REQUEST = Request.single(device=Device.GPU, backend=Backend.CUDA, memory_gb=1)
WARM_CYCLES = 20
TARGETS = {"ratio": 0.7, "most_to_least_served": 1.5, "aborts_per_success": 0.01}


@dataclass(frozen=True, slots=True)
class Result:
    """One number of processes: medians over the repeats, with the lowest and highest of them."""

    processes: int
    floor_per_second: tuple[float, float, float]
    jayrun_per_second: tuple[float, float, float]
    ratio: float
    most_to_least_served: float
    aborts_per_success: float
    reserve_p50_ms: float
    reserve_p99_ms: float


# --- jayrun's side: what each process does ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Client:
    book: Book
    holder: holders.Holder
    start: Barrier

    def cycle(self) -> float:
        """Reserve and release once; returns the seconds that reserving took."""
        execution_id = new_id()
        execution = Execution(
            id=execution_id,
            kind="operator",
            name="benchmark",
            host_id=self.holder.host_id,
            holder_id=self.holder.id,
            unit_id=execution_id,
        )
        asked_at = time.perf_counter()
        outcome = reserve(self.book, Ask(asker=Member(execution=execution, invocation=1, recorded=(REQUEST,)), position=0))
        took = time.perf_counter() - asked_at
        assert isinstance(outcome, Granted), outcome
        release(self.book, self.holder.host_id, self.holder.id, [(outcome.lease.id, outcome.lease.epoch)])
        return took


_client: _Client


def _enter(url: str, start: Barrier) -> None:
    global _client
    book = Book(url, role="benchmark")
    _client = _Client(book, holders.register(book, holders.attest_host(book, HOST), role="runtime"), start)
    for _ in range(WARM_CYCLES):
        _client.cycle()


def _serve(seconds: float) -> list[float]:
    """Cycle for so long, beginning together with all others; returns how long each reserve took."""
    _client.start.wait()
    until = time.perf_counter() + seconds
    took = []
    while time.perf_counter() < until:
        took.append(_client.cycle())
    return took


# --- the two sides, in turns -----------------------------------------------------------------------------------------


def measure(server: Throwaway, *, processes: int, seconds: float, repeats: int) -> Result:
    """Run both sides in turns, `repeats` times for `seconds` each."""
    spawning = multiprocessing.get_context("forkserver")
    spawning.set_forkserver_preload([__spec__.name if __spec__ else __name__])
    floor: list[float] = []
    jayrun: list[float] = []
    unevenness: list[float] = []
    reserving: list[float] = []
    aborted = -_rollbacks(server.url)
    with ProcessPoolExecutor(
        processes, spawning, initializer=_enter, initargs=(server.url, spawning.Barrier(processes))
    ) as pool:
        for repeat in range(repeats + 1):
            per_second, failed = _pgbench(server, clients=processes, seconds=seconds if repeat else 1)
            served = [future.result() for future in [pool.submit(_serve, seconds if repeat else 1) for _ in range(processes)]]
            aborted -= failed
            if repeat == 0:  # to warm both up
                continue
            floor.append(per_second)
            jayrun.append(sum(map(len, served)) / seconds)
            unevenness.append(max(map(len, served)) / max(min(map(len, served)), 1))
            reserving += [took for each in served for took in each]
    aborted += _rollbacks(server.url)
    percentiles = quantiles(reserving, n=100)
    return Result(
        processes=processes,
        floor_per_second=(median(floor), min(floor), max(floor)),
        jayrun_per_second=(median(jayrun), min(jayrun), max(jayrun)),
        ratio=median(jayrun) / median(floor),
        most_to_least_served=median(unevenness),
        aborts_per_success=aborted / len(reserving),
        reserve_p50_ms=percentiles[49] * 1e3,
        reserve_p99_ms=percentiles[98] * 1e3,
    )
