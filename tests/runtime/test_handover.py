"""Placements that are pickled: whoever unpickles one becomes a further holder, and the last one out ends the lease."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

import psycopg
import pytest
from fleet import MakeRuntime, gpus
from history import replay
from processes import CONTEXT, PATIENCE, process, until
from test_waiting import Probe, Take, parked

from jayrun import Data, Operator, Runtime, probes
from jayrun.embedded import start_throwaway
from jayrun.errors import BookUnreachable, LeaseLost, PlacementUnavailableHere
from jayrun.placement import PlacementGroup
from jayrun.runtime import handover, reconciler, service
from jayrun.settings import Settings, child_environment
from jayrun.store import audit, schema
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
SOON = 0.3  # seconds for which a lender keeps a lease in these tests
NEVER = 3600.0


def lending(sql: Sql, seconds: float) -> None:
    sql.execute("UPDATE jayrun.settings SET lend_seconds = %s", (seconds,))


def holders(book: Book) -> int:
    """How many processes hold the one lease; 0 without a lease."""
    rows = audit.leases(book)
    assert len(rows) <= 1
    return rows[0]["holders"] if rows else 0


def events(sql: Sql) -> list[Any]:
    rows = sql.execute("SELECT kind FROM jayrun.lease_events WHERE lease_id IS NOT NULL ORDER BY id")
    return [row[0] for row in rows]


def receive(url: str | None, connection: Any, queue: Any, host_id: str | None = None) -> None:
    """Unpickle what is in the queue when told, say what it is, hold it until told; by a Runtime or by the settings."""
    if url is None:
        os.environ["JAYRUN_DATABASE_URL"] = connection.recv()
    else:
        Runtime(url, settings=Settings(host_id=host_id))
    connection.recv()
    try:
        data = queue.get()
    except (LeaseLost, PlacementUnavailableHere) as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send((data.value, data.placement.device_ids, data.placement.reserved_memory_bytes, data.placement.epoch))
    connection.recv()
    del data
    connection.recv()


# --- in one process --------------------------------------------------------------------------------------------------


def test_a_copy_unpickled_in_its_own_process_is_the_same_hold(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    other = pickle.loads(pickle.dumps(data))
    assert other == data
    assert other.placement is not data.placement
    runtime._service.outbox.lent.clear()
    assert copy.deepcopy(other).placement is copy.copy(other).placement is other.placement
    assert dataclasses.asdict(other.placement)["epoch"] == other.placement.epoch
    assert not runtime._service.outbox.lent, "a copy in this process is lent to nobody"
    del data
    runtime.flush()
    assert holders(book) == 1
    del other
    until(lambda: holders(book) == 0)
    assert events(sql) == ["granted", "released"]


def test_what_was_pickled_is_kept_for_a_while_after_its_last_reference(
    make_runtime: MakeRuntime, book: Book, sql: Sql
) -> None:
    lending(sql, SOON)
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    kept = [pickle.dumps(data)]
    del data
    runtime.flush()
    assert holders(book) == 1
    again = pickle.loads(kept[0])
    until(lambda: not runtime._service.outbox.lent)
    runtime.flush()
    assert holders(book) == 1
    del again
    until(lambda: holders(book) == 0)
    with pytest.raises(LeaseLost, match="has ended"):
        pickle.loads(kept[0])


class PickledJustNow(dict[Any, Any]):
    """What is lent, and pickled once more at the moment at which it is taken back."""

    fresh: Any = None

    def pop(self, key: Any, default: Any = None) -> Any:
        self[key], self.fresh = self.fresh, None
        return super().pop(key, default)


def test_what_is_pickled_while_it_is_taken_back_stays_lent(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    outbox, presence = runtime._service.outbox, runtime._service.presence
    text = pickle.dumps(runtime.run(Take, memory_gb=2))
    [(lease, entry)] = outbox.lent.items()
    outbox.lent = PickledJustNow({lease: entry})
    outbox.lent.fresh = fresh = (entry[0] + NEVER, entry[1])
    presence.take_back_lent(0)
    assert outbox.lent == {lease: fresh}
    del entry, fresh
    runtime.flush()
    assert holders(book) == 1
    assert pickle.loads(text).value == "taken"


def test_pickling_asks_nobody_and_names_no_book(
    make_runtime: MakeRuntime, book: Book, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    threads: list[threading.Thread] = []
    ask = Book._replayed

    def noted(self: Book, attempt: Any) -> Any:
        threads.append(threading.current_thread())
        return ask(self, attempt)

    monkeypatch.setattr(Book, "_replayed", noted)
    text = pickle.dumps(data)
    assert threading.current_thread() not in threads
    pickle.loads(text)
    assert threading.current_thread() not in threads, "it is held here already"
    assert book.url.encode() not in text
    runtime.run(Take, memory_gb=1)
    assert threading.current_thread() in threads


def test_a_late_release_of_an_earlier_hold_does_not_end_a_later_one(
    make_runtime: MakeRuntime, book: Book, sql: Sql
) -> None:
    """The release of the first copy is on its way when the second one is unpickled."""
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    text = pickle.dumps(data)
    telling, go_on = Event(), Event()

    def stall() -> None:
        telling.set()
        assert go_on.wait(PATIENCE)

    with probes.arm("settle.telling", stall):
        del data
        runtime._service.outbox.lent.clear()
        assert telling.wait(PATIENCE)
        again = pickle.loads(text)
        go_on.set()
        runtime.flush()
    assert holders(book) == 1
    assert events(sql) == ["granted", "joined", "left"]
    del again
    runtime._service.outbox.lent.clear()
    until(lambda: holders(book) == 0)
    assert replay(sql) == 1


def test_a_process_may_leave_and_join_again(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    text = pickle.dumps(data)
    ours, theirs = CONTEXT.Pipe()
    queue = CONTEXT.SimpleQueue()
    with process(receive, book.url, theirs, queue):
        ours.send("go")
        queue.put(data)
        ours.recv()
        for _ in range(3):
            del data
            runtime._service.outbox.lent.clear()
            until(lambda: holders(book) == 1)
            data = pickle.loads(text)
            assert holders(book) == 2
        ours.send("drop")
        until(lambda: holders(book) == 1)
        del data
        runtime._service.outbox.lent.clear()
        until(lambda: holders(book) == 0)
        ours.send("end")
    assert replay(sql) == 1


# --- between processes -----------------------------------------------------------------------------------------------


class Pipe:
    """A pipe, put to and got from as a queue is."""

    def __init__(self) -> None:
        self.reader, self.writer = CONTEXT.Pipe(duplex=False)

    def put(self, data: Data) -> None:
        self.writer.send(data)

    def get(self) -> Data:
        return self.reader.recv()  # type: ignore[no-any-return]


@pytest.mark.parametrize("channel", [CONTEXT.SimpleQueue, CONTEXT.Queue, Pipe])
@pytest.mark.parametrize("by", ["runtime", "settings"])
def test_the_sender_may_drop_its_copy_before_the_receiver_unpickles(
    make_runtime: MakeRuntime, book: Book, sql: Sql, by: str, channel: Callable[[], Any]
) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    ours, theirs = CONTEXT.Pipe()
    queue = channel()
    data = runtime.run(Take, memory_gb=2)
    told = (data.value, data.placement.device_ids, data.placement.reserved_memory_bytes, data.placement.epoch)
    with process(receive, book.url if by == "runtime" else None, theirs, queue):
        if by == "settings":
            ours.send(book.url)
        queue.put(data)
        until(lambda: runtime._service.outbox.lent)  # a Queue pickles in a thread of its own
        del data
        runtime.flush()
        assert holders(book) == 1
        ours.send("go")
        assert ours.recv() == told
        runtime._service.outbox.lent.clear()
        runtime._service.outbox.wake()
        until(lambda: holders(book) == 1 and "left" in events(sql))
        assert events(sql) == ["granted", "joined", "left"]
        ours.send("drop")
        until(lambda: holders(book) == 0)
        ours.send("end")
    assert events(sql)[-1] == "released"
    assert replay(sql) == 1
    assert audit.violations(book) == []


def test_who_never_unpickles_holds_nothing(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, SOON)
    runtime = make_runtime(devices=gpus(1))
    ours, theirs = CONTEXT.Pipe()
    queue = CONTEXT.SimpleQueue()
    with process(receive, book.url, theirs, queue):
        queue.put(runtime.run(Take, memory_gb=2))
        until(lambda: holders(book) == 0)
        ours.send("go")
        assert "LeaseLost: lease" in ours.recv()
    assert events(sql) == ["granted", "released"]


def test_a_lease_is_of_no_use_on_another_host(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(devices=gpus(1))
    ours, theirs = CONTEXT.Pipe()
    queue = CONTEXT.SimpleQueue()
    data = runtime.run(Take, memory_gb=2)
    with process(receive, book.url, theirs, queue, "elsewhere"):
        queue.put(data)
        ours.send("go")
        assert "PlacementUnavailableHere" in ours.recv()
    assert holders(book) == 1


@pytest.mark.parametrize("killed", ["receiver", "sender"])
def test_the_lease_outlives_whichever_holder_is_killed(
    make_runtime: MakeRuntime, book: Book, sql: Sql, killed: str
) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    ours, theirs = CONTEXT.Pipe()
    queue = CONTEXT.SimpleQueue()
    with process(send, book.url, theirs, queue) as sender:
        assert ours.recv() == "sent"
        data = queue.get()
        assert holders(book) == 2
        if killed == "sender":
            sender.kill()
            sender.join(PATIENCE)
            until(lambda: holders(book) == 1)
            del data
        else:
            del data
            runtime.flush()
            assert holders(book) == 1
            sender.kill()
        until(lambda: holders(book) == 0)
    assert events(sql)[-1] == ("released" if killed == "sender" else "reclaimed")
    assert replay(sql) == 1


def send(url: str, connection: Any, queue: Any) -> None:
    runtime = Runtime(url, devices=gpus(1))
    data = runtime.run(Take, memory_gb=2)
    queue.put(data)
    connection.send("sent")
    connection.recv()


def test_a_group_and_its_members_are_one_lease(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(3))

    def body(self: Operator) -> Data:
        return Data("group", self.placement.cuda_group(group_memory_gb=7, min_devices=3, max_devices=3))

    data = runtime.run(Probe, body=body)
    ours, theirs = CONTEXT.Pipe()
    queue = CONTEXT.SimpleQueue()
    with process(receive, book.url, theirs, queue):
        queue.put(data)
        ours.send("go")
        assert ours.recv() == ("group", (0, 1, 2), 7 * 10**9, data.placement.epoch)
        assert holders(book) == 2
        ours.send("drop")
        until(lambda: holders(book) == 1)
        ours.send("end")
    same = pickle.loads(pickle.dumps(data.placement))
    assert isinstance(same, PlacementGroup)
    assert same == data.placement
    [member] = pickle.loads(pickle.dumps(data.placement[1:2]))
    del data, same
    runtime._service.outbox.lent.clear()
    runtime.flush()
    assert holders(book) == 1  # one member keeps the whole lease
    del member
    until(lambda: holders(book) == 0)
    assert replay(sql) == 1


def double(data: Data) -> Data:
    return Data(data.value * 2, data.placement)


def test_data_goes_through_a_pool_and_back(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, NEVER)
    runtime = make_runtime(devices=gpus(1))
    with ProcessPoolExecutor(2, CONTEXT, initializer=Runtime, initargs=(book.url,)) as pool:
        data = runtime.run(Take, memory_gb=2)
        for _ in range(3):
            data = pool.submit(double, data).result(PATIENCE)
        assert data.value == "taken" * 8
        del data
    runtime._service.outbox.lent.clear()
    until(lambda: holders(book) == 0 or reconciler.run_pass(book, runtime._service.host_id).reclaimed)
    until(lambda: holders(book) == 0)
    assert replay(sql) == 1


def test_a_waiter_gets_what_was_lent_once_nobody_took_it(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    lending(sql, SOON)
    runtime = make_runtime(devices=gpus(1))
    data = runtime.run(Take, memory_gb=24)
    pickle.dumps(data)
    future = runtime.start(Take, memory_gb=24)
    parked(book)
    del data
    assert future.result(PATIENCE).value == "taken"


# --- scripts: ways of starting processes ------------------------------------------------------------------------------

SCRIPT = """
import multiprocessing, os, pickle, sys, time
from jayrun import Data, Operator, Runtime, RuntimeDevice
from jayrun.errors import LeaseLost, PlacementUnavailableHere
from jayrun.placement import Backend, Device
from jayrun.store import audit
from jayrun.store.transactions import Book

class Take(Operator):
    memory_gb: Data
    def execute(self):
        return Data("taken", self.placement.cuda(self.memory_gb.value))

def holders():
    book = Book(os.environ["JAYRUN_DATABASE_URL"], role="test")
    try:
        return [row["holders"] for row in audit.leases(book)]
    finally:
        book.close()

def drop(data):
    print("child has", data.value, data.placement.reserved_memory_bytes, holders(), flush=True)

def until_free():
    while holders():
        time.sleep(0.02)
    print("free", flush=True)

if __name__ == "__main__":
    runtime = Runtime(devices=[RuntimeDevice(Device.GPU, [Backend.CUDA], 0, 24)])
"""


def run_script(folder: Path, url: str, body: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT + textwrap.indent(textwrap.dedent(body), "    "))
    # Python warns of forks beside threads, which are what is tested here.
    warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *warnings, str(script)],
        env=child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_", "PG")),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_spawned_process_gets_its_arguments(url: str, book: Book, sql: Sql, tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        url,
        """
        data = runtime.run(Take, memory_gb=2)
        child = multiprocessing.get_context("spawn").Process(target=drop, args=(data,))
        child.start()
        del data
        child.join()
        while holders() != [1]:  # what it still had when it ended goes when somebody looks
            time.sleep(0.02)
        print(child.exitcode, holders())
        """,
    )
    assert said == "child has taken 2000000000 [2]\n0 [1]\n"


FORKS = {
    "os.fork": """
pid = os.fork()
if pid == 0:
    child()
    sys.exit(0)
code = os.waitpid(pid, 0)[1]
""",
    "multiprocessing": """
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
code = process.exitcode
""",
}


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_holds_nothing_but_by_a_runtime_of_its_own(
    url: str, sql: Sql, tmp_path: Path, fork: str
) -> None:
    """After the Runtime was started, with leases and open connections: the parent notices nothing of the child."""
    child = """
data = runtime.run(Take, memory_gb=2)
def child():
    global data
    text = pickle.dumps(data)  # bytes only: a forked child has nothing to lend
    try:
        runtime.run(Take, memory_gb=1)
    except PlacementUnavailableHere:
        print("the child has no Runtime", flush=True)
    del data
    runtime.flush()
    runtime.close()
    with Runtime() as own:
        mine = own.run(Take, memory_gb=3)
        joined = pickle.loads(text)
        print("child has", joined.value, holders(), flush=True)
        del mine, joined
"""
    after = """
print(code, holders())
more = runtime.run(Take, memory_gb=1)
print(sorted(holders()))
del data, more
runtime.flush()
print(holders())
"""
    said = run_script(tmp_path, url, child + FORKS[fork] + after)
    # What the child had joined it lends to nobody, and lets go when it ends.
    assert said == "the child has no Runtime\nchild has taken [2, 1]\n0 [1]\n[1, 1]\n[]\n"
    assert replay(sql) == 3


def test_a_receiver_without_a_runtime_leaves_nothing_at_its_exit(
    url: str, book: Book, sql: Sql, tmp_path: Path
) -> None:
    said = run_script(
        tmp_path,
        url,
        """
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        child = context.Process(target=drop, args=(runtime.run(Take, memory_gb=2),))
        child.start()
        child.join()
        while holders() != [1]:  # what it still had when it ended goes when somebody looks
            time.sleep(0.02)
        print(child.exitcode, holders())
        """,
    )
    assert said == "child has taken 2000000000 [2]\n0 [1]\n"
    reconciler.run_pass(book, sql.execute("SELECT id FROM jayrun.hosts").fetchall()[0][0])
    assert holders(book) == 0
    assert replay(sql) == 1


def test_a_lease_in_a_file_is_lost_when_it_has_ended(url: str, tmp_path: Path) -> None:
    said = run_script(
        tmp_path,
        url,
        """
        data = runtime.run(Take, memory_gb=2)
        text = pickle.dumps(data)
        lease = data.placement.lease_id
        runtime._service.outbox.lent.clear()
        del data
        runtime.flush()
        try:
            pickle.loads(text)
        except LeaseLost as error:
            print(error.lease_id == lease, error)
        """,
    )
    assert said.startswith("True lease ")
    assert UUID(said.split()[2])


def test_a_forked_child_keeps_no_session_of_its_parent(url: str, book: Book, sql: Sql, tmp_path: Path) -> None:
    """The parent is killed while a child of it lives: its leases end, and so do its sessions on the server."""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT
        + textwrap.indent(
            textwrap.dedent(
                """
                data = runtime.run(Take, memory_gb=24)
                waiting = runtime.start(Take, memory_gb=24)  # so that it listens too
                while not runtime._service._listener.is_open:
                    time.sleep(0.01)
                pid = os.fork()
                if pid == 0:
                    print("child", os.getppid(), flush=True)
                    sys.stdin.readline()
                    os._exit(0)
                os.waitpid(pid, 0)
                """
            ),
            "    ",
        )
    )
    environment = child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_", "PG"))
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == f"child {parent.pid}\n"
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        name = f"jayrun:runtime:{parent.pid}"
        assert sql.execute(sessions, (name,)).fetchall()[0][0] > 0
        parent.kill()
        parent.wait(PATIENCE)
        until(lambda: sql.execute(sessions, (name,)).fetchall() == [(0,)])
        assert reconciler.run_pass(book, sql.execute("SELECT id FROM jayrun.hosts").fetchall()[0][0]).reclaimed == 1
        assert holders(book) == 0
        parent.stdin.write("end\n")


def test_a_program_that_waits_for_its_children_at_its_end_still_releases(url: str, sql: Sql, tmp_path: Path) -> None:
    """multiprocessing joins them when the script is over; until they end there may be something to let go."""
    lending(sql, 5)
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    said = run_script(
        tmp_path,
        url,
        """
        data = runtime.run(Take, memory_gb=2)
        context = multiprocessing.get_context("forkserver")
        child = context.Process(target=drop, args=(data,))
        child.start()
        child.join()
        context.Process(target=until_free).start()
        del data
        """,
    )
    assert said == "child has taken 2000000000 [2]\nfree\n"
    assert replay(sql) == 1


def test_another_book_that_is_away_is_no_obstacle(
    make_runtime: MakeRuntime, book: Book, sql: Sql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending(sql, NEVER)
    with start_throwaway(tmp_path / "other", settings=Settings()) as other:
        schema.upgrade(other.url)
        Runtime(other.url)  # the first book of this process
        try:
            runtime = make_runtime(devices=gpus(1))
            ours, theirs = CONTEXT.Pipe()
            queue = CONTEXT.SimpleQueue()
            with process(send, book.url, theirs, queue):
                assert ours.recv() == "sent"
                other.stop()
                data = queue.get()
                assert data.value == "taken"
                assert holders(book) == 2
                ours.send("end")
                del data
            runtime.flush()
            join = functools.partialmethod(service.Service.join, patience_seconds=0)
            monkeypatch.setattr(service.Service, "join", join)
            with pytest.raises(BookUnreachable, match="cannot be reached"):  # it may be in the book that is away
                handover.joined(UUID(int=1), 1)
            other.start()
            with pytest.raises(LeaseLost, match="has ended"):
                handover.joined(UUID(int=1), 1)
        finally:
            service._services.pop(other.url).stop()
