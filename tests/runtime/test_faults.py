"""Faults that were found by attacking it, each with the right outcome."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from processes import PATIENCE, until
from test_waiting import Probe, Take, parked

from jayrun import Operator, kernel, probes
from jayrun.errors import BookUnreachable, PlacementSignalSwallowed, PlacementUnavailableHere
from jayrun.settings import child_environment
from jayrun.store import audit
from jayrun.store.engine import is_lost
from jayrun.store.transactions import Book

SCRIPT = """
import atexit, os, sys, threading, time
late = []
atexit.register(lambda: [each() for each in late])  # runs after everything that jayrun registers
from jayrun import Data, Operator, Runtime, RuntimeDevice
from jayrun.errors import PlacementTimeout
from jayrun.placement import Backend, Device

class Take(Operator):
    memory_gb: Data
    def execute(self):
        return Data("taken", self.placement.cuda(self.memory_gb.value))

url = sys.argv[1]
gpus = [RuntimeDevice(Device.GPU, [Backend.CUDA], 0, 24)]
"""


def run_script(url: str, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + textwrap.dedent(body), url],
        env=child_environment({}, without=("JAYRUN_",)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


# --- texts that PostgreSQL cannot store ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\0b", "half \ud800 of a pair", "caf\udce9"])
def test_a_failure_that_cannot_be_stored_as_it_is_keeps_nothing(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    runtime = make_runtime(devices=gpus(1))

    def body(self: Operator) -> None:
        self.placement.cuda(24)
        raise ValueError(text)

    with pytest.raises(ValueError, match=r"."):
        runtime.run(Probe, body=body)
    assert runtime.run(Take, memory_gb=24, timeout=PATIENCE).value == "taken"
    assert runtime.flush(PATIENCE)
    row = sql.execute("SELECT failure ->> 'message' FROM jayrun.executions WHERE state = 'failed'").fetchone()
    assert row is not None
    assert row[0][:1] == text[:1]
    assert "unexpected" not in caplog.text


def test_a_swallowed_signal_with_such_an_error_leaves_nothing(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)

    def body(self: Operator) -> None:
        try:
            self.placement.cuda(1)
        except BaseException:
            raise ValueError("a\0b") from None

    with pytest.raises(PlacementSignalSwallowed):
        runtime.run(Probe, body=body)
    assert audit.queue(book) == []
    del blocker


# --- answers and moments lost ----------------------------------------------------------------------------------------


def test_a_lost_answer_to_a_claim_is_found_again(
    make_runtime: MakeRuntime, book: Book, sql: psycopg.Connection
) -> None:
    runtime = make_runtime(devices=gpus(1))
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    lost: list[None] = []

    def lose() -> None:
        if not lost:
            lost.append(None)
            raise psycopg.OperationalError("the connection was cut after the claim")

    with probes.arm("claim.updated", lose):
        del blocker
        assert future.result(PATIENCE).value == "taken"
    assert lost
    del future
    until(lambda: not audit.leases(book))


def test_a_future_cancelled_between_grant_and_resumption_keeps_nothing(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1), threads=1)
    blocker = runtime.run(Take, memory_gb=24)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    busy, go_on = threading.Event(), threading.Event()

    def body(self: Operator) -> str:
        busy.set()
        assert go_on.wait(PATIENCE)
        return "done"

    runtime.start(Probe, body=body)  # the one thread there is
    assert busy.wait(PATIENCE)
    del blocker
    parked(book, 0)  # granted, and nobody to go on with it
    while runtime._service._waits:
        threading.Event().wait(0.01)
    assert future.cancel()
    go_on.set()
    runtime.close()
    until(lambda: not audit.leases(book))


def test_no_waiting_sees_what_the_process_let_go_a_moment_ago(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(devices=gpus(1))
    for _ in range(20):
        data = runtime.run(Take, memory_gb=24, timeout=0)
        assert data.placement.reserved_memory_bytes == 24 * 10**9
        del data


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_process_with_many_open_files_waits_and_times_out(url: str) -> None:
    done = run_script(
        url,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
        with Runtime(url, devices=gpus) as runtime:
            data = runtime.run(Take, memory_gb=24)
            waiting = runtime.start(Take, memory_gb=24)
            try:
                runtime.run(Take, memory_gb=24, timeout=0.1)
            except PlacementTimeout:
                print("timed out")
            del data
            print(waiting.result(30).value)
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "timed out\ntaken\n", "")


def test_a_forked_child_cannot_use_its_parents_runtime(make_runtime: MakeRuntime, book: Book) -> None:
    runtime = make_runtime(devices=gpus(1))
    pid = os.fork()
    if pid == 0:
        try:
            with runtime:  # leaving the block neither waits nor closes anything of the parent's
                runtime.run(Take, memory_gb=1)
            os._exit(1)
        except PlacementUnavailableHere:
            os._exit(0)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert audit.leases(book) == []
    assert runtime.run(Take, memory_gb=1).value == "taken"


@pytest.mark.parametrize(
    "body",
    [
        "runtime = Runtime(url, devices=gpus); late.append(runtime.close); runtime.run(Take, memory_gb=1)",
        "runtime = Runtime(url, devices=gpus); late.append(runtime.flush); data = runtime.run(Take, memory_gb=1)",
        """
        def later():
            with Runtime(url, devices=gpus) as runtime:
                threading.main_thread().join()
                try:
                    runtime.start(Take, memory_gb=1)
                except Exception as error:
                    print(type(error).__name__)
        threading.Thread(target=later).start()
        """,
    ],
)
def test_the_interpreter_ends_whatever_is_called_late(url: str, body: str) -> None:
    done = run_script(url, body)
    assert done.returncode == 0, done.stderr


def test_a_program_that_executes_another_keeps_no_lease_of_the_first(url: str, book: Book) -> None:
    """execv: pid and start ticks stay, and everything that knew of the lease is gone."""
    done = run_script(
        url,
        """
        if len(sys.argv) < 3:
            data = Runtime(url, devices=gpus).run(Take, memory_gb=24)
            program = open("/proc/self/cmdline").read().split("\\0")[4]
            os.execv(sys.executable, [sys.executable, "-c", program, url, "again"])
        with Runtime(url, devices=gpus) as runtime:
            print(runtime.run(Take, memory_gb=24, timeout=20).value)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr


def test_refusals_that_mean_a_lost_connection_are_known(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET idle_in_transaction_session_timeout = '10ms'")
        connection.execute("BEGIN")
        connection.execute("SELECT 1")
        kernel.readable(PATIENCE, connection.fileno())  # the server says goodbye
        with pytest.raises(psycopg.Error) as ended:
            connection.execute("SELECT 1")
    assert is_lost(ended.value)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = on")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction) as read_only:
            connection.execute("UPDATE jayrun.settings SET bypass_limit = 1")
        assert is_lost(read_only.value)
        with pytest.raises(psycopg.errors.UndefinedTable) as undefined:
            connection.execute("SELECT FROM nothing")
        assert not is_lost(undefined.value)


# --- what errors keep ------------------------------------------------------------------------------------------------


class Held:
    """Something that a user has in a variable."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What only the collector would find is kept too long."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_kept_log_record_keeps_nothing_of_its_callers(
    book: Book, sql: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg logs the error of a pipeline that cannot be left; who keeps the record must not keep data by it."""

    def caller() -> weakref.ref[Held]:
        held = Held()
        cut: list[None] = []

        def unit(pg: psycopg.Connection[Any]) -> None:
            with pg.pipeline():
                if not cut:
                    cut.append(None)
                    sql.execute("SELECT pg_terminate_backend(%s)", (pg.info.backend_pid,))
                    kernel.readable(PATIENCE, pg.fileno())
                pg.execute("SELECT 1").fetchone()

        book.written(unit)
        return weakref.ref(held)

    kept = caller()
    assert "error ignored" in caplog.text
    assert kept() is None


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("way", ["written", "read", "listen"])
def test_a_connection_that_cannot_be_had_keeps_nothing_of_its_callers(tmp_path: Any, way: str) -> None:
    nobody = Book(f"postgresql:///jayrun?host={tmp_path}", role="test", patience_seconds=0)

    def caller() -> weakref.ref[Held]:
        held = Held()
        if way == "listen":
            with nobody.listen("name") as listener:
                listener.open()
                assert not listener.is_open
        else:
            with pytest.raises(BookUnreachable):
                getattr(nobody, way)(lambda connection: connection)
        return weakref.ref(held)

    assert caller()() is None
