"""How many admissions a second: reserve and release of a single device, against the least that they can cost.

    python -m benchmarks.admission [--seconds 5] [--repeats 5] [--processes 1,8,64] [--json FILE]

The floor is pgbench with the same row changes made by one prepared server-side call (`floor.sql`) behind the same gate,
on the same server, with the same durability, in turns with jayrun. Each jayrun process is a real one with its own Book.
The server is a throwaway one on the disk of TMPDIR.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import subprocess
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
from jayrun.store.admission import reserve
from jayrun.store.asks import Ask, Execution, Granted, Member
from jayrun.store.ids import new_id
from jayrun.store.leases import release
from jayrun.store.transactions import Book

HERE = Path(__file__).parent
HOST = "benchmark"
DEVICES = [RuntimeDevice(Device.GPU, [Backend.CUDA], number, memory_limit_gb=1000) for number in range(8)]
REQUEST = Request.single(device=Device.GPU, backend=Backend.CUDA, memory_gb=1)
WARM_CYCLES = 20


@dataclass(frozen=True, slots=True)
class Result:
    """One number of processes: medians over the turns, rates with the lowest and highest.

    `ratio` is the median of the ratios of turns that followed each other. `aborts_per_success` counts every transaction
    that the server rolled back, of either side, and all that happened while warming up.
    """

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
class StoreClient:
    """A process that reserves and releases through the store."""

    book: Book
    holder: holders.Holder

    @classmethod
    def enter(cls, url: str) -> StoreClient:
        """A warm client of the book at `url`."""
        book = Book(url, role="benchmark")
        client = cls(book, holders.register(book, holders.attest_host(book, HOST), role="worker"))
        for _ in range(WARM_CYCLES):
            client.cycle()
        return client

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
        outcome = reserve(
            self.book, Ask(asker=Member(execution=execution, invocation=1, recorded=(REQUEST,)), position=0)
        )
        took = time.perf_counter() - asked_at
        assert isinstance(outcome, Granted), outcome
        release(self.book, self.holder.host_id, self.holder.id, [(outcome.lease.id, outcome.lease.epoch)])
        return took


_client: StoreClient
_start: Barrier


def _enter(url: str, start: Barrier) -> None:
    global _client, _start
    _client, _start = StoreClient.enter(url), start


def _serve(seconds: float) -> list[float]:
    """Cycle for so long, beginning together with all others; returns how long each reserve took."""
    _start.wait()
    until = time.perf_counter() + seconds
    took: list[float] = []
    while True:
        reserving = _client.cycle()
        if time.perf_counter() > until:
            return took
        took.append(reserving)


# --- the two sides, in turns -----------------------------------------------------------------------------------------


def measure(server: Throwaway, *, processes: int, seconds: int, repeats: int) -> Result:
    """Run both sides in turns, `repeats` times for `seconds` each, after a second of each that does not count."""
    spawning = multiprocessing.get_context("forkserver")
    spawning.set_forkserver_preload(["jayrun.store.admission", "jayrun.embedded"])
    floor, jayrun, unevenness, reserving = [], [], [], []
    aborted = -_rollbacks(server.url)
    with ProcessPoolExecutor(
        processes, spawning, initializer=_enter, initargs=(server.url, spawning.Barrier(processes))
    ) as pool:
        for turn in [1, *[seconds] * repeats]:
            floor.append(_pgbench(server, clients=processes, seconds=turn))
            serving = [pool.submit(_serve, turn) for _ in range(processes)]
            served = [each.result() for each in serving]
            jayrun.append(sum(map(len, served)) / turn)
            unevenness.append(max(map(len, served)) / max(min(map(len, served)), 1))
            reserving += [took for each in served for took in each]
    aborted += _rollbacks(server.url)
    percentiles = quantiles(reserving, n=100)
    return Result(
        processes=processes,
        floor_per_second=_spread(floor[1:]),
        jayrun_per_second=_spread(jayrun[1:]),
        ratio=median(ours / least for ours, least in zip(jayrun[1:], floor[1:], strict=True)),
        most_to_least_served=median(unevenness[1:]),
        aborts_per_success=aborted / len(reserving),
        reserve_p50_ms=percentiles[49] * 1e3,
        reserve_p99_ms=percentiles[98] * 1e3,
    )


def _pgbench(server: Throwaway, *, clients: int, seconds: int) -> float:
    """Transactions per second of the floor."""
    command: list[str | Path] = [
        server.bindir / "pgbench",
        "--no-vacuum",
        "--protocol=prepared",
        f"--file={HERE / 'floor.pgbench'}",
    ]
    command += [f"--client={clients}", f"--jobs={min(clients, os.cpu_count() or 1)}", f"--time={seconds}", server.url]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"^tps = ([\d.]+)", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


def _rollbacks(url: str) -> int:
    """Transactions rolled back in the database so far; every session but this one has ended and told its number."""
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(
            "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchone():
            time.sleep(0.01)
        row = connection.execute("SELECT pg_stat_get_db_xact_rollback(oid) FROM pg_database WHERE datname = 'jayrun'")
        return int(row.fetchone()[0])  # type: ignore[index]


def _spread(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


# --- around it -------------------------------------------------------------------------------------------------------


def prepare(url: str) -> None:
    """A book with eight empty devices of ample capacity, and the floor's functions in it."""
    schema.upgrade(url)
    book = Book(url, role="benchmark")
    devices.declare(book, holders.attest_host(book, HOST), DEVICES)
    book.close()
    with psycopg.connect(url) as connection:
        connection.execute((HERE / "floor.sql").read_text())


def durable_commit_ms(url: str, *, commits: int = 300, rest_seconds: float = 0) -> float:
    """The median of the shortest durable commit that this server can do, with its round trip, after such a rest."""
    with psycopg.connect(url, autocommit=True) as connection:
        took = []
        for _ in range(commits):
            time.sleep(rest_seconds)
            began_at = time.perf_counter()
            connection.execute("SELECT pg_logical_emit_message(true, 'benchmark', '')", prepare=True)
            took.append(time.perf_counter() - began_at)
    return median(took) * 1e3


def facts(url: str) -> dict[str, str | float]:
    """Where the figures come from."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    with psycopg.connect(url) as connection:
        version = connection.info.parameter_status("server_version") or ""
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count() or 1,
        "load_before": os.getloadavg()[0],
        "postgresql": version,
        "python": platform.python_version(),
        "durable_commit_ms": durable_commit_ms(url),
    }


def opened(folder: Path) -> Path:
    """`folder`, which may be entered by the account that the server runs as, so that TMPDIR chooses the disk."""
    folder.chmod(0o755)
    return folder


def line(result: Result) -> str:
    rates = ("{:.0f} ({:.0f}-{:.0f})".format(*spread) for spread in (result.floor_per_second, result.jayrun_per_second))
    return (
        f"{result.processes:>9}  {next(rates):>20}  {next(rates):>20}  {result.ratio:>5.2f}"
        f"  {result.most_to_least_served:>10.2f}  {result.aborts_per_success:>14.4f}"
        f"  {result.reserve_p50_ms:>6.2f}  {result.reserve_p99_ms:>6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission")
    parser.add_argument("--seconds", type=int, default=5, help="length of a turn of each side")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--processes", default="1,8,64", help="numbers of processes, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="jayrun-benchmark-") as name,
        start_throwaway(
            opened(Path(name)), settings=Settings.load(), configuration={"synchronous_commit": "on"}
        ) as server,
    ):
        prepare(server.url)
        where = facts(server.url)
        print(*(f"{name}: {value}" for name, value in where.items()), sep="\n")
        print("\ncycles of reserve and release a second, median (lowest-highest), and milliseconds to reserve")
        print(
            "processes                 floor                jayrun  ratio  most/least  aborts/success     p50     p99"
        )
        results = []
        for processes in map(int, options.processes.split(",")):
            results.append(measure(server, processes=processes, seconds=options.seconds, repeats=options.repeats))
            print(line(results[-1]), flush=True)
        print("   wanted                                             0.70        1.50          0.0100")
    if options.json:
        options.json.write_text(json.dumps({**where, "results": [asdict(each) for each in results]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
