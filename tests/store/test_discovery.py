"""What discovery writes: behind the gate, once, and nothing about leases; whoever waits is judged again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import gpus
import psycopg
import pytest
from fleet import Scene, cuda, scene
from fleet import gpus as declared
from gpus import GB, LOST, Gpu, Slice, machine, standing_in, uuid

from jayrun.domain.devices import DeviceState
from jayrun.embedded import Throwaway
from jayrun.runtime import hardware
from jayrun.runtime.hardware import Look, Lookout
from jayrun.store import audit, devices, hosts
from jayrun.store.admission import Granted, Impossible, Parked
from jayrun.store.holders import attest_host
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
LEASE_TABLES = ("leases", "lease_shares", "lease_holders", "lease_events", "placement_requests", "executions")
DISCOVERER = """
CREATE ROLE discoverer;
GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO discoverer;
GRANT SELECT ON ALL TABLES IN SCHEMA jayrun TO discoverer;
GRANT UPDATE ON jayrun.gate TO discoverer;
GRANT INSERT, UPDATE ON jayrun.devices, jayrun.device_links TO discoverer;
"""


@pytest.fixture
def shown() -> Iterator[gpus.Machine]:
    """Four cards, which may be changed; the driver shows them in this process."""
    there = machine(4)
    there.nvlinks = {(0, 2), (1, 3)}
    with standing_in(there):
        yield there


@pytest.fixture
def here(book: Book, shown: gpus.Machine) -> Scene:
    """This host, and this process as a holder, after a person let its cards be discovered."""
    found = scene(book, [])
    look(found, adds=True)
    return found


def look(scene: Scene, *, adds: bool = False) -> Look:
    return hardware.look(scene.book, scene.host_id, adds=adds)


def rows(book: Book) -> list[tuple[Any, ...]]:
    return [(row["device_id"], row["device_uuid"], row["state"], row["capacity_bytes"]) for row in audit.capacity(book)]


def versions(sql: Sql, *tables: str) -> dict[str, list[Any]]:
    return {
        table: sql.execute(f"SELECT ctid, xmin::text, xmax::text, t FROM jayrun.{table} t").fetchall()
        for table in tables
    }


def test_discovering_twice_writes_once(book: Book, sql: Sql, here: Scene) -> None:
    assert rows(book) == [(number, uuid(number), "online", 79 * GB) for number in range(4)]
    linked = (
        "SELECT a.host_index, b.host_index, link FROM jayrun.device_links JOIN jayrun.devices a ON a.id = device_id"
    )
    linked += " JOIN jayrun.devices b ON b.id = other_id ORDER BY 1, 2"
    assert sql.execute(linked).fetchall() == [(0, 2, "nvlink"), (1, 3, "nvlink")]
    assert sql.execute("SELECT island FROM jayrun.devices ORDER BY host_index").fetchall() == [(0,), (1,), (0,), (1,)]
    before = versions(sql, "devices", "device_links")
    again = look(here, adds=True)
    assert (again.outcome.written, again.outcome.changes) == (False, ())
    assert versions(sql, "devices", "device_links") == before


def test_leases_are_not_touched_whatever_becomes_of_their_device(
    book: Book, sql: Sql, server: Throwaway, here: Scene, shown: gpus.Machine
) -> None:
    here.granted(cuda(50, device_id=1))
    here.granted(cuda(60, device_id=2))
    here.granted(cuda(0, exclusive=True, device_id=3))
    before = versions(sql, *LEASE_TABLES)
    shown.gpus[1].fails = {"*": LOST}
    shown.gpus[2].total_bytes = 40 * GB
    shown.gpus[3:] = []
    shown.gpus.insert(0, Gpu("GPU-new", "00000000:01:00.0"))
    sql.execute(DISCOVERER)
    try:
        theirs = Book(f"{server.url}%20-crole%3Ddiscoverer", role="test", patience_seconds=10)
        try:
            reading, view = hardware.read()
            outcome = hardware.discovery.enter(theirs, here.host_id, reading, view, adds=False)
        finally:
            theirs.close()
    finally:
        sql.execute("DROP OWNED BY discoverer; DROP ROLE discoverer")
    assert outcome.written
    assert versions(sql, *LEASE_TABLES) == before
    assert rows(book) == [
        (0, "GPU-new", "online", 79 * GB),
        (1, uuid(0), "online", 79 * GB),
        (2, uuid(1), "offline", 79 * GB),
        (3, uuid(2), "online", 39 * GB),
        (4, uuid(3), "offline", 79 * GB),
    ]
    assert [row["leases"] for row in audit.capacity(book)] == [0, 0, 1, 1, 1]
    assert audit.capacity(book)[3]["free_bytes"] == 0
    assert sql.execute("SELECT count(*) FROM jayrun_audit.violations").fetchone() == (0,)


def test_numbers_change_places_in_one_step(sql: Sql, here: Scene, shown: gpus.Machine) -> None:
    keys = dict(sql.execute("SELECT device_uuid, id FROM jayrun.devices").fetchall())
    shown.gpus[0].bus, shown.gpus[3].bus = shown.gpus[3].bus, shown.gpus[0].bus
    look(here)
    found = sql.execute("SELECT host_index, device_uuid, id FROM jayrun.devices ORDER BY host_index").fetchall()
    assert found == [(place, uuid(at), keys[uuid(at)]) for place, at in enumerate((3, 1, 2, 0))]


def test_who_waits_for_a_lost_device_waits_on_and_gets_it_when_it_is_back(
    book: Book, here: Scene, shown: gpus.Machine
) -> None:
    shown.gpus[1].fails = {"*": LOST}
    look(here)
    waiting, outcome = here.reserve(cuda(10, device_id=1))
    assert isinstance(outcome, Parked)
    [row] = audit.queue(book)
    assert "gpu 1: offline: lost" in row["reason"]
    assert isinstance(here.reserve(cuda(70, device_id=0))[1], Granted)
    shown.gpus[1].fails = {}
    look(here)
    assert audit.queue(book) == []
    assert [str(row["execution_id"]) for row in audit.leases(book) if row["memory_bytes"] == 10 * GB] == [str(waiting)]


def test_what_can_never_be_any_more_is_told_to_who_waits(
    book: Book, sql: Sql, here: Scene, shown: gpus.Machine
) -> None:
    for number in range(4):
        here.granted(cuda(10, device_id=number))
    waiting, outcome = here.reserve(cuda(75))
    assert isinstance(outcome, Parked)
    for card in shown.gpus:
        card.total_bytes = 40 * GB
    look(here)
    [(state, failure)] = sql.execute("SELECT state, failure FROM jayrun.executions WHERE id = %s", [waiting]).fetchall()
    assert (state, failure["type"]) == ("failed", "PlacementImpossible")
    assert "39 GB" in failure["message"]


def test_slices_take_the_place_of_their_card_and_give_it_back(book: Book, here: Scene, shown: gpus.Machine) -> None:
    shown.gpus[1].slots = 7
    shown.gpus[1].slices = [Slice(0, "MIG-a"), Slice(3, "MIG-b")]
    look(here)
    assert [(number, name, state) for number, name, state, _ in rows(book)] == [
        (0, uuid(0), "online"),
        (1, uuid(1), "offline"),
        (2, uuid(2), "online"),
        (3, uuid(3), "online"),
        (4, "MIG-a", "online"),
        (5, "MIG-b", "online"),
    ]
    lease = here.granted(cuda(15, device_id=5))
    assert [share.device_uuid for share in lease.shares] == ["MIG-b"]
    assert [each.uuid for each in devices.names(book, here.host_id)][4:] == ["MIG-a", "MIG-b"]
    shown.gpus[1].slots, shown.gpus[1].slices = 0, []
    look(here)
    assert [state for _, _, state, _ in rows(book)] == ["online"] * 4 + ["offline"] * 2
    assert [each.uuid for each in devices.names(book, here.host_id)] == [uuid(number) for number in range(4)]
    assert audit.capacity(book)[5]["leases"] == 1


def test_what_a_person_said_stays_said(book: Book, here: Scene, shown: gpus.Machine) -> None:
    devices.set_state(book, here.host_id, kind="gpu", host_indexes=[0], state=DeviceState.DRAINING)
    devices.remove(book, here.host_id, kind="gpu", host_indexes=[1])
    shown.gpus[0].fails = {"*": LOST}
    look(here)
    shown.gpus[0].fails = {}
    look(here)
    assert [(number, state) for number, _, state, _ in rows(book)] == [(0, "draining"), (2, "online"), (3, "online")]
    assert look(here, adds=True).outcome.changes[0].changes == ("back: NVIDIA H100 80GB HBM3, 79 GB",)
    assert rows(book)[1] == (1, uuid(1), "online", 79 * GB)


def test_without_a_driver_everything_stays(book: Book, sql: Sql, here: Scene, shown: gpus.Machine) -> None:
    before = versions(sql, "devices", "device_links")
    shown.fails = {"init": gpus.DRIVER_NOT_LOADED}
    seen = look(here, adds=True)
    assert seen.reading.problem is not None
    assert versions(sql, "devices", "device_links") == before


def test_one_look_also_observes(book: Book, here: Scene, shown: gpus.Machine) -> None:
    shown.gpus[2].used_bytes = 7 * GB
    look(here)
    assert {row["device_id"]: row["used_bytes"] for row in audit.audit(book)}[2] == 7 * GB


def test_the_audit_tells_the_fault_of_a_device_that_tells_nothing(
    book: Book, sql: Sql, here: Scene, shown: gpus.Machine
) -> None:
    sql.execute("UPDATE jayrun.settings SET look_seconds = 0.001")  # what was seen before is old
    shown.gpus[1].fails = {"*": LOST}
    look(here)
    details = [(row["finding"], row["detail"]) for row in audit.audit(book)]
    assert [finding for finding, _ in details] == ["ok", "unreadable", "ok", "ok"]
    assert details[1][1].startswith("lost: it has fallen off the bus")


def test_one_process_looks_for_all_of_its_host(book: Book, sql: Sql, here: Scene) -> None:
    assert hosts.claim_look(book, here.host_id, periods=1) == (True, 30)
    is_due, seconds = hosts.claim_look(book, here.host_id, periods=1)
    assert not is_due
    assert 25 < seconds <= 30
    sql.execute("UPDATE jayrun.hosts SET looked_at = clock_timestamp() - interval '40 s'")
    assert not hosts.claim_look(book, here.host_id, periods=2)[0], "who sees only some lets others go first"
    claims: list[bool] = []
    racers = [
        threading.Thread(target=lambda: claims.append(hosts.claim_look(book, here.host_id, periods=1)[0]))
        for _ in range(8)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(claims) == [False] * 7 + [True]


def test_nobody_looks_where_nothing_can_be_seen(book: Book, sql: Sql) -> None:
    host_id = attest_host(book, "test-host")
    assert not hosts.claim_look(book, host_id, periods=1)[0]
    assert sql.execute("SELECT looked_at FROM jayrun.hosts").fetchone() == (None,)


def test_a_lookout_marks_by_itself_and_never_waits_for_the_driver(
    book: Book, sql: Sql, here: Scene, shown: gpus.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on, real = threading.Event(), threading.Event(), hardware.nvml.read

    def hanging(**options: bool) -> Any:
        hangs.set()
        goes_on.wait(60)
        return real(**options)

    monkeypatch.setattr(hardware.nvml, "is_installed", lambda: True)
    monkeypatch.setattr(hardware.nvml, "read", hanging)
    shown.gpus[3].fails = {"*": LOST}
    lookout = Lookout(book)
    lookout.tick(here.host_id)
    assert hangs.wait(60)
    lookout.tick(here.host_id)  # and goes on
    assert rows(book)[3][2] == "online"
    goes_on.set()
    lookout.stop(60)
    assert rows(book)[3][2] == "offline"


def test_a_reserve_is_left_to_others(book: Book, here: Scene, shown: gpus.Machine) -> None:
    def reserve(gigabytes: int) -> None:
        devices.set_reserve(book, here.host_id, kind="gpu", host_indexes=[0], reserve_bytes=gigabytes * GB)

    reserve(9)
    assert rows(book)[0][3] == 70 * GB
    assert not look(here).outcome.written
    assert isinstance(here.reserve(cuda(71, device_id=0))[1], Impossible)
    reserve(0)
    assert rows(book)[0][3] == 79 * GB
    with pytest.raises(devices.NothingReserved, match="leave nothing"):
        reserve(79)
    devices.declare(book, here.host_id, declared(1))
    with pytest.raises(devices.NothingReserved, match="is declared"):
        reserve(1)
    look(here)
    assert rows(book)[0][3] == 24 * GB
