"""`jayrun why` and `jayrun can`, on real books: what they say is what admission does, and `can` changes nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from cli_helpers import Holder, Jayrun, wait_for
from fleet import Scene, cuda, cuda_group, gpus, scene
from processes import PATIENCE
from processes import command as process

from jayrun import kernel
from jayrun.domain.requests import Request
from jayrun.store import admission, holders, leases
from jayrun.store.admission import Execution, Granted, Impossible, Parked
from jayrun.store.ids import new_id
from jayrun.store.transactions import Book

GB = 10**9
OUTLOOK = ["answer", "host", "shares", "reason", "fewest", "room", "before", "workers", "devices"]
WHO = ["execution_id", "execution", "pid", "user", "label"]
EXPLAINED = [*WHO, "kind", "state", "priority", "seconds", "failure"]
WAITING = ["position", "waiting", "queue", "asks", "dormant"]


@pytest.fixture
def room(book: Book) -> Scene:
    """This host with two GPUs of 24 GB, and this process as a holder."""
    return scene(book, gpus(2))


def waiting(room: Scene, request: Request, *, priority: int = 0) -> UUID:
    execution_id, outcome = room.reserve(request, priority=priority)
    assert outcome == Parked()
    return execution_id


def detached(room: Scene, request: Request, operator: str = "Embed") -> UUID:
    key = new_id()
    execution = Execution(
        id=key,
        kind="operator",
        name=operator,
        host_id=room.host_id,
        holder_id=room.holder.id,
        unit_id=key,
        detached=True,
        operator=operator,
    )
    assert admission.reserve(room.book, room.ask(request, execution=execution)) == Parked()
    return key


def worker(room: Scene, sql: psycopg.Connection, *operators: str) -> UUID:
    key = holders.register(room.book, room.host_id, role="worker").id
    sql.execute("UPDATE jayrun.holders SET operators = %s WHERE id = %s", (list(operators), key))
    return key


def ready(sql: psycopg.Connection, operator: str, *, priority: int = 0, pause_seconds: float | None = None) -> UUID:
    key = uuid4()
    sql.execute(
        """
        INSERT INTO jayrun.executions (id, kind, detached, name, unit_id, state, priority, user_name, not_before)
        VALUES (%s, 'operator', true, %s, %s, 'ready', %s, 'ann', clock_timestamp() + make_interval(secs => %s))
        """,
        (key, operator, key, priority, pause_seconds),
    )
    return key


def run_by(sql: psycopg.Connection, execution_id: UUID, worker_id: UUID, host_id: int) -> None:
    sql.execute(
        "UPDATE jayrun.executions SET state = 'running', holder_id = %s, host_id = %s WHERE id = %s",
        (worker_id, host_id, execution_id),
    )


# --- why -------------------------------------------------------------------------------------------------------------


def test_the_leases_it_names_are_those_whose_end_admits(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    assert jayrun("devices", "declare", "--simulate", "2x8GB").code == 0
    first = hold("\x1b[31mfirst", 5).wait_until_held()
    second = hold("second", 3, 4).wait_until_held()  # the second fits beside the first, best fit
    third = hold("third", 1).wait_until_held()
    third.ask(6)
    row = wait_for(lambda: jayrun("queue", "--json").json)[0]

    told = jayrun("why", row["execution_id"], "--json").json
    assert list(told) == [*EXPLAINED, *WAITING, *OUTLOOK]
    assert {key: told[key] for key in (*WHO[1:3], "label", "kind", "state", "position", "waiting", "queue")} == {
        "execution": "Hold",
        "pid": third.pid,
        "label": "third",
        "kind": "operator",
        "state": "waiting",
        "position": 1,
        "waiting": 1,
        "queue": kernel.host_name(),
    }
    assert 0 <= told["seconds"] < 60
    assert told["asks"] == ["cuda(memory_gb=6)"]
    assert (told["answer"], told["reason"], told["before"], told["workers"]) == ("after", None, [], None)
    assert [
        (each["device"], each["device_id"], each["state"], each["free_bytes"], each["unmet"], each["promises"])
        for each in told["devices"]
    ] == [
        ("gpu", 0, "online", 0, ["0 GB free, needs 6 GB"], []),
        ("gpu", 1, "online", 3 * GB, ["3 GB free, needs 6 GB"], []),
    ]
    held = [[(each["pid"], each["label"]) for each in device["leases"]] for device in told["devices"]]
    assert held == [
        [(first.pid, "\x1b[31mfirst"), (second.pid, "second")],
        [(second.pid, "second"), (third.pid, "third")],
    ]
    [freed] = told["fewest"]
    assert list(freed) == ["id", *WHO, "age", "shares"]
    assert (freed["pid"], freed["shares"]) == (
        second.pid,
        [{"device_id": 1, "memory_bytes": 4 * GB, "exclusive": False}],
    )

    text = jayrun("why", row["execution_id"][-12:]).out
    assert text.startswith(f"Hold (pid {third.pid} of ")
    assert "\n  gpu 1: 3 GB free, needs 6 GB\n" in text
    assert f"pid {first.pid} of {freed['user']}, \N{REPLACEMENT CHARACTER}[31mfirst), lease " in text
    assert f"\nwould be admitted after the end of Hold (pid {second.pid} of {freed['user']}, second), lease " in text

    second.kill()
    wait_for(lambda: jayrun("queue", "--json").json == [])
    told = jayrun("why", row["execution_id"], "--json").json
    wait_for(lambda: jayrun("why", row["execution_id"], "--json").json["state"] == "succeeded")


def test_only_the_named_set_admits_it(jayrun: Jayrun, room: Scene, book: Book) -> None:
    held = [room.granted(cuda(memory_gb)) for memory_gb in (20, 10, 10)]
    older = waiting(room, cuda_group(2, 24))
    mine = waiting(room, cuda(14))
    told = jayrun("why", str(mine), "--json").json
    assert [each["execution_id"] for each in told["before"]] == [str(older)]
    assert (told["position"], told["waiting"]) == (2, 2)
    [lease_id] = [UUID(each["id"]) for each in told["fewest"]]
    assert lease_id in {each.id for each in held[1:]}
    leases.release(book, room.host_id, room.holder.id, [(each.id, each.epoch) for each in held if each.id == lease_id])
    admission.combine(book, room.host_id)
    told = jayrun("why", str(mine), "--json").json
    assert (told["state"], told["host"]) == ("admitted", kernel.host_name())
    assert [each["shares"][0]["memory_bytes"] for each in told["leases"]] == [14 * GB]
    assert jayrun("why", str(older), "--json").json["state"] == "waiting"
    assert "granted and not claimed yet" in jayrun("why", str(mine)).out


def test_kept_for_who_was_passed_too_often(jayrun: Jayrun, room: Scene, sql: psycopg.Connection) -> None:
    room.granted(cuda(1, device_id=0))
    older = waiting(room, cuda_group(2, 24))
    sql.execute("UPDATE jayrun.executions SET bypassed = 16 WHERE id = %s", (older,))
    mine = waiting(room, cuda(1))
    told = jayrun("why", str(mine), "--json").json
    for device in told["devices"]:
        assert device["unmet"] == [f"kept for Test (pid {room_pid(sql, room)} of {kernel.user_name()})"]
        [promise] = device["promises"]
        assert (promise["execution_id"], promise["memory_bytes"], promise["granted"]) == (str(older), 24 * GB, False)
    assert (told["fewest"], told["room"]) == (None, [])
    can = jayrun("can", "--memory-gb", "1", "--json")
    assert (can.code, can.json["answer"]) == (4, "after")
    assert [each["execution_id"] for each in can.json["before"]] == [str(older), str(mine)]
    assert jayrun("can", "--memory-gb", "1", "--priority", "1").code == 0
    assert room.reserve(cuda(1), wait=False)[1] == admission.Unavailable()


def room_pid(sql: psycopg.Connection, room: Scene) -> int:
    found = sql.execute("SELECT pid FROM jayrun.holders WHERE id = %s", (room.holder.id,)).fetchone()
    assert found is not None
    return int(found[0])


def test_devices_that_changed_meanwhile(jayrun: Jayrun, room: Scene, sql: psycopg.Connection) -> None:
    assert jayrun("devices", "drain", "0", "1").code == 0
    mine = str(waiting(room, cuda(20)))
    told = jayrun("why", mine, "--json").json
    assert [(each["state"], each["unmet"]) for each in told["devices"]] == [("draining", ["draining"])] * 2
    assert (told["answer"], told["fewest"], told["room"]) == ("after", None, None)
    # Nobody has judged it since: so the next pass will.
    sql.execute("UPDATE jayrun.devices SET capacity_bytes = 5000000000")
    sql.execute("UPDATE jayrun.executions SET dormant = true")
    told = jayrun("why", mine, "--json").json
    assert (told["answer"], told["dormant"], told["devices"]) == ("never", True, [])
    assert told["reason"].splitlines()[1:] == ["  gpu 0: 5 GB, cuda: too small", "  gpu 1: 5 GB, cuda: too small"]


def test_a_set_up_is_explained_by_the_unit_that_it_waits_with(
    jayrun: Jayrun, room: Scene, sql: psycopg.Connection
) -> None:
    unit = waiting_after(room, cuda(24))
    member = uuid4()
    sql.execute(
        """
        INSERT INTO jayrun.executions (id, kind, name, unit_id, host_id, holder_id, state, waiting_since)
        SELECT %s, 'resource', 'Model', id, host_id, holder_id, 'waiting', clock_timestamp()
        FROM jayrun.executions WHERE id = %s
        """,
        (member, unit),
    )
    sql.execute(
        """
        INSERT INTO jayrun.placement_requests
        SELECT %s, 0, device, backend, is_group, min_devices, max_devices, prefer_max_devices, group_bytes,
               2000000000, exclusive, device_id
        FROM jayrun.placement_requests WHERE execution_id = %s
        """,
        (member, unit),
    )
    told = jayrun("why", str(member), "--json").json
    assert (told["execution_id"], told["kind"]) == (str(unit), "operator")
    assert told["asks"] == ["cuda(memory_gb=2)", "cuda(memory_gb=24)"]


def waiting_after(room: Scene, request: Request) -> UUID:
    """Somebody who waits because all is taken."""
    room.granted(cuda_group(2, 24))
    return waiting(room, request)


def test_how_it_ended(jayrun: Jayrun, hold: Callable[..., Holder]) -> None:
    assert jayrun("devices", "declare", "--simulate", "1x8GB").code == 0
    holder = hold("victim", 5).wait_until_held()
    holder.ask(4)
    execution_id = wait_for(lambda: jayrun("queue", "--json").json)[0]["execution_id"]
    holder.kill()
    told = jayrun("why", execution_id, "--json").json
    assert list(told) == EXPLAINED
    assert (told["state"], told["pid"]) == ("failed", holder.pid)
    assert told["failure"] == {"type": "ProcessDied", "message": "its process ended without finishing it"}
    lines = jayrun("why", execution_id).out.splitlines()
    assert re.fullmatch(r"failed \d+ s ago", lines[1])
    assert lines[2:] == ["ProcessDied: its process ended without finishing it"]


def test_one_that_runs(jayrun: Jayrun, room: Scene) -> None:
    lease = room.granted(cuda(20))
    told = jayrun("why", str(lease.execution_id), "--json").json
    assert list(told) == [*EXPLAINED, "host", "leases", "cancelled_seconds"]
    assert (told["state"], told["cancelled_seconds"]) == ("running", None)
    assert [each["id"] for each in told["leases"]] == [str(lease.id)]
    text = jayrun("why", str(lease.execution_id)).out
    assert re.search(rf"\nholds device {lease.shares[0].host_index} \(20 GB\) for \d+ s: Test \(pid ", text)


def test_a_detached_one_that_waits(jayrun: Jayrun, room: Scene, sql: psycopg.Connection) -> None:
    room.granted(cuda_group(2, 20))
    mine = str(detached(room, cuda(10)))
    told = jayrun("why", mine, "--json").json
    assert (told["queue"], told["pid"], told["state"]) == (None, None, "waiting")
    assert told["reason"] == "no running worker knows operator Embed"
    assert told["workers"] == {"operator": "Embed", "count": 0, "idle": 0, "silent": 0}
    assert (told["fewest"], len(told["room"])) == (None, 1)

    mate = worker(room, sql, "Embed", "Other")
    worker(room, sql, "Other")
    told = jayrun("why", mine, "--json").json
    assert (told["reason"], told["workers"]["idle"]) == (None, 1)
    assert len(told["fewest"]) == 1
    run_by(sql, ready(sql, "Other"), mate, room.host_id)
    told = jayrun("why", mine, "--json").json
    assert told["reason"] == "the only worker that knows operator Embed is busy"
    assert "\n  the only worker that knows operator Embed is busy\n" in jayrun("why", mine).out
    sql.execute("UPDATE jayrun.holders SET operators = '{}' WHERE id = %s", (mate,))  # it drains
    assert jayrun("why", mine, "--json").json["reason"] == "no running worker knows operator Embed"


def test_a_detached_one_that_is_ready(jayrun: Jayrun, room: Scene, sql: psycopg.Connection) -> None:
    first, urgent, mine = ready(sql, "Embed"), ready(sql, "Embed", priority=1), ready(sql, "Embed")
    ready(sql, "Other")
    ready(sql, "Embed", priority=2, pause_seconds=500)
    told = jayrun("why", str(mine), "--json").json
    assert list(told) == [*EXPLAINED, "position", "attempt", "max_attempts", "pause_seconds", "workers", "reason"]
    assert (told["state"], told["user"], told["position"]) == ("ready", "ann", 3)
    assert told["reason"] == "no running worker knows operator Embed"
    assert told["pause_seconds"] == 0
    assert [jayrun("why", str(each), "--json").json["position"] for each in (urgent, first)] == [1, 2]

    mate = worker(room, sql, "Embed", "Another")
    ready(sql, "Another", priority=1)  # its worker takes this one before
    told = jayrun("why", str(mine), "--json").json
    assert (told["position"], told["reason"], told["workers"]["idle"]) == (4, None, 1)
    run_by(sql, first, mate, room.host_id)
    told = jayrun("why", str(mine), "--json").json
    assert (told["position"], told["reason"]) == (3, "the only worker that knows operator Embed is busy")

    pausing = ready(sql, "Embed", pause_seconds=3601)
    sql.execute(
        """UPDATE jayrun.executions SET attempt = 2, max_attempts = 3, failure = '{"type": "E", "message": "bad"}'
        WHERE id = %s""",
        (pausing,),
    )
    told = jayrun("why", str(pausing), "--json").json
    assert 3500 < told["pause_seconds"] <= 3601
    assert jayrun("why", str(pausing)).out.splitlines()[2:] == [
        "attempt 2 of 3",
        "not tried again before 1 h have passed",
        "the only worker that knows operator Embed is busy",
        "an attempt failed: E: bad",
    ]


def test_submitted_work_and_its_worker(jayrun: Jayrun, room: Scene, url: str, tmp_path: Path) -> None:
    def submit(operator: str, *inputs: str) -> str:
        told = jayrun("executions", "submit", operator, *(word for each in inputs for word in ("--input", each)))
        return told.out.strip()

    running = submit("Meet", f"folder={tmp_path}")
    assert "\nno running worker knows operator Meet\n" in jayrun("why", running).out
    with process("worker", "work_for_workers", JAYRUN_DATABASE_URL=url, JAYRUN_HOST_ID="test-host"):
        wait_for(lambda: list(tmp_path.glob("began-*")), seconds=PATIENCE)
        told = jayrun("why", running, "--json").json
        assert (told["state"], told["host"], told["leases"]) == ("running", kernel.host_name(), [])
        behind = submit("Hold", "memory_gb=20")
        told = jayrun("why", behind, "--json").json
        assert (told["state"], told["position"]) == ("ready", 1)
        assert told["reason"] == "the only worker that knows operator Hold is busy"
        held = [room.granted(cuda(memory_gb)) for memory_gb in (20, 23)]
        (tmp_path / "go").touch()
        wait_for(lambda: jayrun("why", behind, "--json").json["state"] == "waiting", seconds=PATIENCE)
        told = jayrun("why", behind, "--json").json
        assert (told["workers"]["idle"], told["queue"], told["pid"]) == (1, None, None)
        assert [each["id"] for each in told["fewest"]] == [str(held[0].id)]
        assert jayrun("why", running).out.splitlines()[1].startswith("succeeded ")


def test_executions_that_do_not_exist(jayrun: Jayrun, room: Scene) -> None:
    for wanted in (str(uuid4()), "abcdef", "abc", "not-an-id", "%%%%", "'; --"):
        told = jayrun("why", "--", wanted)
        assert (told.code, told.out) == (2, "")
        assert "execution" in told.err
        assert "`jayrun executions list`" in told.err
    ids = [str(room.granted(cuda(1)).execution_id) for _ in range(2)]
    told = jayrun("why", ids[0][:6])
    assert told.code == 2
    assert "several executions" in told.err
    for part in (ids[0], ids[0].upper(), ids[0][-12:]):
        assert jayrun("why", part, "--json").json["execution_id"] == ids[0]


# --- can -------------------------------------------------------------------------------------------------------------


ASKED = {
    (): cuda(0, exclusive=True),
    ("--memory-gb", "4"): cuda(4),
    ("--memory-gb", "5"): cuda(5),
    ("--memory-gb", "25"): cuda(25),
    ("--memory-gb", "5", "--device-id", "1"): cuda(5, device_id=1),
    ("--memory-gb", "5", "--device-id", "7"): cuda(5, device_id=7),
    ("--memory-gb", "5", "--exclusive"): cuda(5, exclusive=True),
    ("--gpus", "2", "--memory-gb", "4"): cuda_group(2, 4),
    ("--gpus", "2", "--memory-gb", "5"): cuda_group(2, 5),
    ("--gpus", "3", "--memory-gb", "1"): cuda_group(3, 1),
    ("--gpus", "2"): cuda_group(2, 0, exclusive=True),
}


@pytest.mark.parametrize("arguments", ASKED)
@pytest.mark.parametrize("waits", [None, 10, 24])
def test_it_answers_what_admission_would(
    jayrun: Jayrun, room: Scene, arguments: tuple[str, ...], waits: float | None
) -> None:
    room.granted(cuda(20))
    if waits is not None:
        room.reserve(cuda_group(2, waits))
    told = jayrun("can", *arguments, "--json")
    assert list(told.json) == ["asks", *OUTLOOK]
    assert told.json["asks"] == ASKED[arguments].describe()
    _, outcome = room.reserve(ASKED[arguments], wait=False)
    match outcome:
        case Granted(lease):
            assert (told.code, told.json["answer"], told.json["host"]) == (0, "now", kernel.host_name())
            assert told.json["shares"] == [
                {"device_id": share.host_index, "memory_bytes": share.memory_bytes, "exclusive": share.exclusive}
                for share in lease.shares
            ]
        case Impossible(reason):
            assert (told.code, told.json["answer"], told.json["reason"]) == (3, "never", reason)
        case _:
            assert (told.code, told.json["answer"]) == (4, "after")
            assert len(told.json["room"]) == 1
            assert len(told.json["devices"]) == 2


def test_the_words_of_the_three_answers(jayrun: Jayrun, room: Scene) -> None:
    host = kernel.host_name()
    lease = room.granted(cuda(20))
    now = jayrun("can", "--gpus", "1-2", "--total-memory-gb", "8")
    asked = "cuda_group(group_memory_gb=8, max_devices=2, prefer_max_devices=True)"
    assert (now.code, now.out) == (0, f"now: {asked} gets device 0 (4 GB), device 1 (4 GB) on {host}\n")
    after = jayrun("can", "--gpus", "2", "--memory-gb", "20")
    who = f"Test (pid {after.out.partition('(pid ')[2].partition(')')[0]}), lease {lease.id.hex[-12:]}"
    assert after.code == 4
    assert re.sub(r"for \d+ s:", "for N s:", after.out).splitlines() == [
        "not now: cuda_group(per_device_memory_gb=20, max_devices=2, min_devices=2)",
        f"on {host}:",
        "  gpu 0: 4 GB free, needs 20 GB",
        f"    20 GB for N s: {who}",
        "  gpu 1: would take a share",
        "  cuda_group(per_device_memory_gb=20, max_devices=2, min_devices=2): only 1 of 2 devices would take a share",
        f"would be admitted after the end of {who}",
    ]
    never = jayrun("can", "--memory-gb", "5", "--backend", "rocm")
    asked = "reserve(device=Device.GPU, backend=Backend.ROCM, memory_gb=5)"
    assert never.code == 3
    assert never.out.splitlines() == [
        "never:",
        f"{asked} can never be placed: it needs 5 GB on one gpu with rocm",
        "  gpu 0: 24 GB, cuda: no rocm",
        "  gpu 1: 24 GB, cuda: no rocm",
    ]


def everything(sql: psycopg.Connection) -> dict[str, list[tuple[object, ...]]]:
    """Every row of the book with the transaction that wrote it."""
    tables = sql.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'jayrun'").fetchall()
    return {name: sql.execute(f"SELECT ctid, xmin, xmax, t.* FROM jayrun.{name} t").fetchall() for (name,) in tables}


def test_it_writes_nothing_and_counts_what_has_ended_as_free(
    jayrun: Jayrun, room: Scene, book: Book, sql: psycopg.Connection
) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        theirs = holders.register(book, room.host_id, role="runtime", incarnation=kernel.incarnation(sleeper.pid))
        dead = replace(room, holder=theirs).granted(cuda(24))
        released = room.granted(cuda(24))
        waiting(room, cuda_group(2, 23))
        assert jayrun("can", "--json").code == 4
        sleeper.kill()
    leases.release(book, room.host_id, room.holder.id, [(released.id, released.epoch)])
    sql.execute("UPDATE jayrun.executions SET dormant = true WHERE state = 'waiting'")  # so that it takes nothing
    assert sql.execute("SELECT count(*) FROM jayrun.lease_shares WHERE folded_at IS NOT NULL").fetchone() == (0,)

    before = everything(sql)
    assert before["leases"] != []
    told = jayrun("can", "--gpus", "2", "--json")
    assert (told.code, told.json["answer"]) == (0, "now")
    assert {share["device_id"] for share in told.json["shares"]} == {
        share.host_index for lease in (dead, released) for share in lease.shares
    }
    for more in ((), ("--gpus", "3"), ("--gpus", "2", "--memory-gb", "25"), ("--priority", "5")):
        jayrun("can", *more)
    assert everything(sql) == before
    assert isinstance(room.reserve(cuda_group(2, 0, exclusive=True), wait=False)[1], Granted)


def test_other_hosts_and_unknown_ones(
    jayrun: Jayrun, room: Scene, book: Book, monkeypatch: pytest.MonkeyPatch, sql: psycopg.Connection
) -> None:
    sql.execute("INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('far', 'far-away', 'another')")
    assert jayrun("can", "--memory-gb", "1", "--host", "test-host").code == 0
    told = jayrun("can", "--memory-gb", "1", "--host", "far-away")
    assert told.code == 3
    assert "this host has no devices in the book" in told.out
    assert jayrun("can", "--memory-gb", "1", "--host", "nowhere").code == 2
    monkeypatch.setenv("JAYRUN_HOST_ID", "not in the book")
    told = jayrun("can", "--memory-gb", "1")
    assert told.code == 3
    assert "this host has no devices in the book" in told.out
    assert sql.execute("SELECT count(*) FROM jayrun.hosts").fetchone() == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "many"), "--gpus must be a number"),
        (("--gpus", "0", "--memory-gb", "1"), "--gpus must be"),
        (("--memory-gb", "0"), "--memory-gb must be positive"),
        (("--total-memory-gb", "-1"), "--total-memory-gb must not be negative"),
        (("--gpus", "2", "--memory-gb", "1", "--device-id", "1"), "--device-id names one GPU"),
        (("--total-memory-gb", "1", "--device-id", "1"), "--total-memory-gb is for several"),
        (("--backend", "abacus"), "abacus"),
        (("--priority", str(2**40)), "--priority"),
    ],
)
def test_mistakes_are_told_at_the_door(jayrun: Jayrun, arguments: tuple[str, ...], message: str) -> None:
    told = jayrun("can", *arguments)
    assert (told.code, told.out) == (2, "")
    assert message in told.err


def test_who_may_only_read_is_answered_all_the_same(
    jayrun: Jayrun, room: Scene, sql: psycopg.Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = waiting_after(room, cuda(5))
    sql.execute("CREATE ROLE onlooker LOGIN")
    try:
        sql.execute("GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO onlooker")
        sql.execute("GRANT SELECT ON ALL TABLES IN SCHEMA jayrun, jayrun_audit TO onlooker")
        monkeypatch.setenv("JAYRUN_DATABASE_URL", f"{url}%20-crole%3Donlooker")
        assert jayrun("can", "--memory-gb", "5").code == 4
        assert jayrun("why", str(mine), "--json").json["state"] == "waiting"
    finally:
        monkeypatch.undo()
        sql.execute("DROP OWNED BY onlooker")
        sql.execute("DROP ROLE onlooker")


def test_can_answers_for_what_this_shell_sees(jayrun: Jayrun, room: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert jayrun("can", "--memory-gb", "1", "--json").json["shares"][0]["device_id"] == 1
    assert jayrun("can", "--device-id", "0", "--memory-gb", "1", "--json").json["shares"][0]["device_id"] == 1
    told = jayrun("can", "--gpus", "2")
    assert (told.code, "not visible" in told.out) == (3, True), told.out
    assert jayrun("can", "--device-id", "1").code == 2
    assert jayrun("can", "--gpus", "2", "--host", kernel.host_name()).code == 0


def test_can_answers_inside_a_lease_for_that_lease(
    jayrun: Jayrun, room: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = room.granted(cuda(20, device_id=1))
    monkeypatch.setenv("JAYRUN_LEASE", str(lease.id))
    told = jayrun("can", "--memory-gb", "20", "--json")
    assert (told.code, told.json["answer"]) == (0, "now")
    assert told.json["shares"] == [{"device_id": 1, "memory_bytes": 20 * 10**9, "exclusive": False}]
    told = jayrun("can", "--memory-gb", "21")
    assert (told.code, "inside `jayrun run`" in told.out) == (3, True), told.out
