"""Programs of jayrun inside `jayrun run`: real commands, their children, and each of them killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from processes import PATIENCE, until
from run_helpers import ended, lives, nothing_left, read_error, read_line, reclaimed, run, started

from jayrun.runtime import reconciler
from jayrun.store import audit, reclaim
from jayrun.store.transactions import Book

PRELUDE = """
import os, pickle, signal, subprocess, sys, time
from jayrun import Data, Operator, Runtime
from jayrun.errors import PlacementError

class Take(Operator):
    memory_gb: Data
    def execute(self) -> Data:
        return Data(os.getpid(), self.placement.cuda(self.memory_gb.value))

def say(*words):
    print(*words, flush=True)

def take(memory_gb, **options):
    try:
        return Runtime().run(Take, memory_gb=memory_gb, **options)
    except PlacementError as error:
        say(type(error).__name__, error)
"""


Program = Callable[[str], tuple[str, str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`program(text)` writes a program that begins like all of them here; the command that runs it."""

    def write(text: str) -> tuple[str, str]:
        path = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"{PRELUDE}\n{text}\n")
        return sys.executable, str(path)

    return write


@pytest.fixture(autouse=True)
def nothing_runs_on(book: Book) -> Iterator[None]:
    """Whatever a test left running by mistake ends with it."""
    yield
    for row in audit.holders(book):
        if row["pid"] != os.getpid() and row["state"] == "alive":
            with suppress(ProcessLookupError):
                os.kill(row["pid"], signal.SIGKILL)


def holders_of(book: Book, lease: UUID) -> list[int]:
    return [row["pid"] for row in audit.lease(book, lease)["holders"] if row["left_at"] is None]


def test_a_program_is_answered_from_the_lease_of_its_command(
    url: str, book: Book, host_id: int, program: Program, sql: psycopg.Connection
) -> None:
    text = """
data = take(6)
say(os.environ["JAYRUN_LEASE"] == str(data.placement.lease_id), data.placement.device_id, data.placement.memory_bytes)
take(11)
take(5, timeout=0)
take(5)
del data
say(take(10).placement.memory_bytes)"""
    with started(url, "--memory-gb", "10", "--", *program(text)) as wrapper:
        code, out, err = ended(wrapper)
    lines = out.splitlines()
    assert lines[0] == "True 0 6000000000", err
    assert "PlacementImpossible cuda(memory_gb=11) can never be placed" in out
    assert "inside `jayrun run`" in out
    assert "PlacementTimeout cuda(memory_gb=5) is not available now" in out
    assert "PlacementDeadlock" in out
    assert (code, lines[-1]) == (0, "10000000000")
    assert sql.execute("SELECT count(*) FROM jayrun.leases").fetchone() == (1,)
    nothing_left(book, host_id)


def test_several_children_each_count_for_themselves(url: str, book: Book, host_id: int, program: Program) -> None:
    """As torchrun starts them: every rank asks for what all of them together would not have."""
    rank = """
data = take(8)
say("rank", data.placement.device_ids)
sys.stdin.read()"""
    text = f"""
ranks = [subprocess.Popen({[*program(rank)]!r}, stdin=subprocess.PIPE) for _ in range(3)]
sys.stdin.readline()
for each in ranks:
    each.communicate(timeout=60)
    assert each.returncode == 0"""
    with started(url, "--memory-gb", "10", "--", *program(text)) as wrapper:
        assert [read_line(wrapper) for _ in range(3)] == ["rank (0,)"] * 3
        [lease] = audit.leases(book)
        assert lease["holders"] == 5
        assert audit.capacity(book)[0]["reserved_bytes"] == 10 * 10**9
        [inner, *_] = set(holders_of(book, lease["id"])) - {lease["pid"], wrapper.pid}
        os.kill(inner, signal.SIGKILL)
        until(lambda: reconciler.run_pass(book, host_id).reclaimed or audit.leases(book)[0]["holders"] == 4)
        assert inner not in holders_of(book, lease["id"])
        os.kill(lease["pid"], signal.SIGKILL)
        assert ended(wrapper)[0] == 137  # the others end with it, for nobody writes to them any more
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_data_goes_to_a_process_that_the_program_spawns(url: str, book: Book, host_id: int, program: Program) -> None:
    receiver = """
data = pickle.load(sys.stdin.buffer)
say(data.placement.memory_bytes, str(data.placement.lease_id) == os.environ.get("JAYRUN_LEASE"))
take(5, timeout=0)
say(take(4, timeout=0).placement.memory_bytes)"""
    text = f"""
data = take(6)
for lease in (os.environ["JAYRUN_LEASE"], ""):
    child = subprocess.Popen({[*program(receiver)]!r}, stdin=subprocess.PIPE, env=dict(os.environ, JAYRUN_LEASE=lease))
    child.communicate(pickle.dumps(data), timeout=60)"""
    with started(url, "--memory-gb", "10", "--", *program(text)) as wrapper:
        code, out, err = ended(wrapper)
    inside, outside = out.splitlines()[:3], out.splitlines()[3:]
    # What was sent counts there too, beside what that process takes; outside it takes leases of its own.
    assert (code, inside[0], inside[2]) == (0, "6000000000 True", "4000000000"), (out, err)
    assert inside[1].startswith("PlacementTimeout cuda(memory_gb=5)")
    assert outside == ["6000000000 False", "4000000000"]
    until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_with_the_wrapper_killed_the_program_keeps_the_lease_and_so_does_what_it_left(
    url: str, book: Book, host_id: int, program: Program
) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *about: sys.exit(0))
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
data = take(6)
say(os.getpid(), left.pid)
time.sleep(1000)"""
    script = '"$0" "$1" & wait'
    with started(url, "--memory-gb", "10", "--", "sh", "-c", script, *program(text)) as wrapper:
        inner, left = map(int, read_line(wrapper).split())
        [lease] = audit.leases(book)
        wrapper.kill()
        wrapper.wait(PATIENCE)
        os.kill(lease["pid"], signal.SIGKILL)
        until(lambda: not lives(lease["pid"]))
        reconciler.run_pass(book, host_id)
        assert {inner, left} == set(holders_of(book, lease["id"]))
        os.kill(inner, signal.SIGTERM)  # it lets go by itself, and asks nobody who else is there
        until(lambda: not lives(inner))
        reconciler.run_pass(book, host_id)
        assert holders_of(book, lease["id"]) == [left]
        os.kill(left, signal.SIGKILL)
        until(lambda: reclaimed(book, host_id))
    nothing_left(book, host_id)


def test_a_lease_that_is_taken_away_is_told_inside(url: str, book: Book, host_id: int, program: Program) -> None:
    text = """
data = take(6)
say("has")
while data.placement.hold.lost is None:
    time.sleep(0.02)
take(1)"""
    with started(url, "--memory-gb", "10", "--", *program(text)) as wrapper:
        assert read_line(wrapper) == "has"
        for row in audit.holders(book):
            book.written(lambda pg, row=row: reclaim.end_holder(pg, row["id"], reason="declared"))
        assert read_line(wrapper).startswith("LeaseLost this runs inside `jayrun run`, but lease ")
        assert "was taken away" in read_error(wrapper, "jayrun: lease")
    nothing_left(book, host_id)


def test_a_command_inside_a_command_gets_devices_of_the_lease_around_it(
    url: str, book: Book, host_id: int, sql: psycopg.Connection
) -> None:
    inner = f'{sys.executable} -c "from jayrun.cli.app import main; main()" run'
    script = (
        f"echo $JAYRUN_LEASE; {inner} --memory-gb 5 --device-id 1 -- "
        "sh -c 'echo $JAYRUN_LEASE $CUDA_VISIBLE_DEVICES; exit 7'; "
        f"echo $?; {inner} --memory-gb 11 -- true; echo $?; {inner} -- true; echo $?"
    )
    code, out, err = run(url, "--gpus", "2", "--memory-gb", "10", "--", "sh", "-c", script)
    lease, *rest = out.splitlines()
    assert (code, rest) == (0, [f"{lease} 1", "7", "123", "123"]), err
    assert "the command gets gpu 1 of lease" in err
    assert "its lease shares gpu 0, gpu 1 with others" in err
    assert sql.execute("SELECT count(*) FROM jayrun.leases").fetchone() == (1,)
    nothing_left(book, host_id)


def test_a_command_inside_a_lease_that_has_ended_is_refused(url: str, book: Book, host_id: int) -> None:
    script = f'exec {sys.executable} -c "from jayrun.cli.app import main; main()" run --memory-gb 1 -- true'
    assert run(url, "--", "true")[0] == 0
    [row] = audit.executions(book)
    [(lease,)] = book.written(lambda pg: pg.execute("SELECT id FROM jayrun.leases").fetchall())
    code, _, err = run(url, "--", "sh", "-c", f"JAYRUN_LEASE={lease} {script}")
    assert (row["state"], code) == ("succeeded", 121)
    assert f"lease {lease} has ended" in err
    unknown = "0197f6a0-0000-7000-8000-000000000000"
    code, _, err = run(url, "--memory-gb", "1", "--", "sh", "-c", f"JAYRUN_LEASE={unknown} {script}")
    assert (code, "no lease of this host in this book" in err) == (0, True)
    nothing_left(book, host_id)


def test_a_worker_does_not_start_inside(url: str, book: Book, host_id: int) -> None:
    script = f'exec {sys.executable} -c "from jayrun.cli.app import main; main()" worker json'
    code, _, err = run(url, "--", "sh", "-c", script)
    assert (code, "start it outside" in " ".join(err.replace("│", " ").split())) == (2, True), err
    nothing_left(book, host_id)
