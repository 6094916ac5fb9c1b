"""A lease lives as long as live data holds its placement, in real processes."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from history import replay
from processes import CONTEXT, PATIENCE, process
from test_waiting import Probe, Take, parked

from jayrun import Data, Runtime
from jayrun.errors import PlacementUnavailableHere
from jayrun.placement import Placement
from jayrun.runtime import reconciler
from jayrun.store import admission, audit, holders
from jayrun.store.transactions import Book


def live(book: Book) -> int:
    return len(audit.leases(book))


def until_no_lease(book: Book) -> None:
    deadline = time.monotonic() + PATIENCE
    while live(book):
        assert time.monotonic() < deadline, f"leases are left: {audit.leases(book)}"


def test_the_last_reference_ends_the_lease(make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    same = Data("other", data.placement)
    placement = copy.deepcopy(copy.copy(data.placement))
    assert placement is data.placement
    for name in ("data", "same", "placement"):
        runtime.flush()
        assert live(book) == 1, f"before {name} goes"
        if name == "data":
            del data
        elif name == "same":
            del same
        else:
            del placement
    runtime.flush()
    assert live(book) == 0
    ends = sql.execute("SELECT end_reason FROM jayrun.leases").fetchall()
    assert ends == [("released",)]


def test_weak_references_keep_nothing_and_cycles_end_with_the_collector(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    weak = weakref.ref(data)
    knot: list[Any] = [data]
    knot.append(knot)
    del data, knot
    gc.collect()
    assert weak() is None
    runtime.flush()
    assert live(book) == 0


def test_a_suspended_generator_holds_and_its_end_releases(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))

    def stream() -> Iterator[str]:
        data = runtime.run(Take, memory_gb=2)
        yield data.value
        yield "never reached"

    values = stream()
    assert next(values) == "taken"
    runtime.flush()
    assert live(book) == 1
    values.close()
    runtime.flush()
    assert live(book) == 0


def test_data_outlives_its_runtime(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    runtime.close()
    assert live(book) == 1
    del data
    until_no_lease(book)


def test_a_waiter_of_the_same_process_does_not_wait_for_the_collector(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    gc.disable()
    try:
        knot: list[Any] = [runtime.run(Take, memory_gb=24)]
        knot.append(knot)
        del knot
        assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"
    finally:
        gc.enable()


def test_releases_go_to_the_next_waiter_in_the_same_breath(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection
) -> None:
    """No tick is needed: with a tick of an hour the hand-over still happens."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 3600, holder_ttl_seconds = 36000")
    runtime = Runtime(book.url, devices=gpus(1))
    runtime_tick = runtime._service.tick_seconds
    blocker = runtime.run(Take, memory_gb=24)
    futures = [runtime.start(Take, memory_gb=24) for _ in range(5)]
    parked(book, 5)
    del blocker
    served = 0
    while futures:
        done = [future for future in futures if future.done()]
        for future in done:
            futures.remove(future)
            served += 1
        del done
        future = None  # type: ignore[assignment]
    assert served == 5
    assert runtime_tick == 3600
    runtime.close()
    from jayrun.runtime import service

    service._services.pop(book.url).stop()


def test_a_forked_child_owns_nothing(make_runtime: MakeRuntime, book: Book) -> None:
    """R27, as far as a plain fork goes: the child's exit releases nothing, its door is closed, the parent goes on."""
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    answers: list[Placement] = []

    def body(self: Any) -> Any:
        placement = self.placement.cuda(1)
        answers.append(placement)
        pid = os.fork()
        if pid == 0:
            try:
                self.placement.cuda(1)
                os._exit(1)
            except PlacementUnavailableHere:
                answers.clear()
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    assert runtime.run(Probe, body=body).value == 0
    runtime.flush()
    assert live(book) == 2
    answers.clear()
    runtime.flush()
    assert live(book) == 1
    del data


SCRIPT = """
import os, sys
from jayrun import Data, Operator, Runtime, RuntimeDevice
from jayrun.placement import Backend, Device

class Take(Operator):
    memory_gb: Data
    def execute(self):
        return Data("taken", self.placement.cuda(self.memory_gb.value))

runtime = Runtime(os.environ["BOOK"], devices=[RuntimeDevice(Device.GPU, [Backend.CUDA], 0, 24)])
"""


def run_script(url: str, body: str, *, expected: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + textwrap.dedent(body)],
        env={**os.environ, "BOOK": url},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("body", "code", "reclaimed"),
    [
        ("data = runtime.run(Take, memory_gb=2); del data", 0, 0),
        ("def f():\n    data = runtime.run(Take, memory_gb=2)\nf()", 0, 0),
        ("with runtime:\n    runtime.run(Take, memory_gb=2)", 0, 0),
        ("data = runtime.run(Take, memory_gb=2)", 0, None),  # alive at exit: gone when the process is
        ("data = runtime.run(Take, memory_gb=2); sys.exit(3)", 3, None),
        ("data = runtime.run(Take, memory_gb=2); os._exit(4)", 4, 1),
        ("data = runtime.run(Take, memory_gb=2); raise ValueError('unhandled')", 1, None),
    ],
)
def test_at_the_end_of_the_process_everything_goes(
    url: str, book: Book, sql: psycopg.Connection, body: str, code: int, reclaimed: int | None
) -> None:
    errors = run_script(url, body, expected=code)
    assert "Exception ignored" not in errors
    host_id = holders.attest_host(book, None)
    if reclaimed == 0:
        assert live(book) == 0  # flushed at exit, nobody had to reclaim it
    found = reconciler.run_pass(book, host_id)
    if reclaimed is not None:
        assert found.reclaimed == reclaimed
    assert live(book) == 0
    admission.combine(book, host_id)
    assert audit.capacity(book)[0]["reserved_bytes"] == 0
    assert sql.execute("SELECT count(*) FROM jayrun.holders WHERE state = 'alive'").fetchone() == (0,)
    assert replay(sql) == 1


# --- the dead --------------------------------------------------------------------------------------------------------


def hold_in_a_runtime(url: str, connection: Any, memory_gb: float) -> None:
    with Runtime(url, devices=gpus(1)) as runtime:
        data = runtime.run(Take, memory_gb=memory_gb)
        connection.send(data.placement.memory_bytes)
        connection.recv()


def wait_in_a_runtime(url: str, connection: Any, memory_gb: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the tests were started
    with Runtime(url, devices=gpus(1)) as runtime:
        connection.send("asking")
        try:
            runtime.run(Take, memory_gb=memory_gb)
            connection.send("granted")
        except KeyboardInterrupt:
            connection.send("interrupted")


def test_a_killed_process_makes_room_for_a_waiter_of_another(
    make_runtime: MakeRuntime, url: str, book: Book, sql: psycopg.Connection
) -> None:
    """R1: kill -9 while a waiter of another process is parked; a pass of that process reclaims within a tick."""
    runtime = make_runtime(devices=gpus(1))
    ours, theirs = CONTEXT.Pipe()
    with process(hold_in_a_runtime, url, theirs, 24) as child:
        assert ours.recv() == 24 * 10**9
        future = runtime.start(Take, memory_gb=24)
        parked(book)
        child.kill()
        assert future.result(PATIENCE).value == "taken"
    rows = sql.execute("SELECT end_reason FROM jayrun.leases WHERE ended_at IS NOT NULL").fetchall()
    assert rows == [("reclaimed",)]


def test_ctrl_c_while_waiting_leaves_nothing(make_runtime: MakeRuntime, url: str, book: Book) -> None:
    """R5."""
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    ours, theirs = CONTEXT.Pipe()
    with process(wait_in_a_runtime, url, theirs, 24) as child:
        assert ours.recv() == "asking"
        parked(book)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        assert ours.recv() == "interrupted"
        parked(book, 0)
    del blocker


def test_a_killed_waiter_is_passed_over(make_runtime: MakeRuntime, url: str, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    ours, theirs = CONTEXT.Pipe()
    with process(wait_in_a_runtime, url, theirs, 24) as child:
        assert ours.recv() == "asking"
        parked(book)
        behind = runtime.start(Take, memory_gb=24)
        parked(book, 2)
        child.kill()
        child.join(PATIENCE)
        del blocker
        assert behind.result(PATIENCE).value == "taken"
    assert audit.violations(book) == []


def test_a_stopped_waiter_does_not_freeze_the_devices(
    make_runtime: MakeRuntime, url: str, book: Book, sql: psycopg.Connection
) -> None:
    """R50: SIGSTOP while first in line; its grant goes back, the next is served; SIGCONT and it is served too."""
    sql.execute("UPDATE jayrun.settings SET claim_seconds = 0.3")
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    ours, theirs = CONTEXT.Pipe()
    with process(wait_in_a_runtime, url, theirs, 24) as child:
        assert ours.recv() == "asking"
        parked(book)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        behind = runtime.start(Take, memory_gb=24)
        parked(book, 2)
        del blocker
        assert behind.result(PATIENCE).value == "taken"
        returned = sql.execute("SELECT count(*) FROM jayrun.leases WHERE end_reason = 'returned'").fetchone()
        assert returned == (1,), "the stopped one was never granted, so nothing was shown"
        os.kill(child.pid, signal.SIGCONT)
        del behind
        assert ours.recv() == "granted"
    assert audit.violations(book) == []
    assert replay(sql) == 4
