"""The numbers of devices as a process sees them: placements, requests, what is unpickled, and what is told of CUDA."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from crews import crew_of
from fleet import MakeRuntime, gpus
from processes import PATIENCE, until
from test_waiting import Probe, Take, parked

from jayrun import Data, Operator, Runtime, RuntimeDevice, kernel
from jayrun.errors import ExecutionFailed, RequestSequenceChanged
from jayrun.placement import Backend, Device, Placement
from jayrun.runtime import order
from jayrun.settings import MASKS, Settings, child_environment
from jayrun.store import devices, holders, reclaim
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]


def masked(**masks: str) -> Settings:
    return Settings(host_id="test-host", masks=masks)


@pytest.fixture
def host_id(book: Book) -> int:
    """A host with four GPUs of 24 GB."""
    key = holders.attest_host(book, "test-host")
    devices.declare(book, key, gpus(4))
    return key


@pytest.fixture
def named(sql: Sql, host_id: int) -> int:
    """The same host, whose GPUs have UUIDs."""
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-' || chr(97 + host_index) || '000'")
    return host_id


def visible(sql: Sql) -> Any:
    [(found,)] = sql.execute("SELECT visible FROM jayrun.holders WHERE state = 'alive'").fetchall()
    return found


def numbers(group: Any) -> list[tuple[int | None, int | None]]:
    """By the process and by the host."""
    return sorted((each.device_id, each.host_index) for each in group)


@pytest.mark.parametrize(
    ("mask", "uuids", "names", "expected"),
    [
        (None, False, None, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("2", False, ["2"], [(0, 2)]),
        ("3,1", False, ["3", "1"], [(0, 3), (1, 1)]),
        ("3,1,-1,0", False, ["3", "1"], [(0, 3), (1, 1)]),
        ("9,1", False, ["9", "1"], [(1, 1)]),
        ("3,1", True, ["GPU-d000", "GPU-b000"], [(0, 3), (1, 1)]),
        ("GPU-d,GPU-b000", True, ["GPU-d000", "GPU-b000"], [(0, 3), (1, 1)]),
        ("GPU-elsewhere,GPU-c", True, ["GPU-elsewhere", "GPU-c000"], [(1, 2)]),
    ],
)
def test_a_placement_has_the_number_that_the_process_sees(
    make_runtime: MakeRuntime,
    sql: Sql,
    host_id: int,
    request: pytest.FixtureRequest,
    mask: str | None,
    uuids: bool,
    names: list[str] | None,
    expected: list[tuple[int, int]],
) -> None:
    if uuids:
        request.getfixturevalue("named")
    runtime = make_runtime(settings=masked() if mask is None else masked(CUDA_VISIBLE_DEVICES=mask))
    assert visible(sql) == (None if names is None else {"cuda": names})
    count = len(expected)

    def body(self: Operator) -> Any:
        return self.placement.cuda_group(per_device_memory_gb=1, min_devices=count, max_devices=count)

    group = runtime.run(Probe, body=body).value
    assert numbers(group) == expected
    assert sorted(group.device_ids) == [number for number, _ in expected]
    if uuids:
        assert {each.device_uuid for each in group} == {f"GPU-{'abcd'[index]}000" for _, index in expected}
    # Each of them is the same device when it is asked for by that number.
    for number, index in expected:
        pinned = runtime.run(Probe, body=lambda self, number=number: self.placement.cuda(1, device_id=number)).value
        assert (pinned.device_id, pinned.host_index) == (number, index)


@pytest.mark.parametrize(
    ("mask", "number", "words"),
    [
        ("3,1", 2, r"device_id is 2, but this process sees 2 cuda devices, 0 to 1 \(CUDA_VISIBLE_DEVICES='3,1'\)"),
        ("", 0, r"device_id is 0, but this process sees 0 cuda devices \(CUDA_VISIBLE_DEVICES=''\)"),
        ("GPU-elsewhere", 0, "device_id is 0, which is GPU-elsewhere in this process"),
    ],
)
def test_a_number_that_it_does_not_see_is_refused_before_anything_is_written(
    make_runtime: MakeRuntime, sql: Sql, named: int, mask: str, number: int, words: str
) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES=mask))
    with pytest.raises(ValueError, match=words):
        runtime.run(Probe, body=lambda self: self.placement.cuda(1, device_id=number))
    assert sql.execute("SELECT count(*) FROM jayrun.executions").fetchone() == (0,)


def test_the_recorded_sequence_is_compared_as_the_user_wrote_it(
    make_runtime: MakeRuntime, book: Book, named: int
) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="3,1"))
    blocker = runtime.run(Probe, body=lambda self: self.placement.cuda(24, device_id=1))
    seen: list[Any] = []

    def body(self: Operator) -> Placement:
        placement = self.placement.cuda(24, device_id=1)
        seen.append(self.placement.placement_requests)
        return placement

    future = runtime.start(Probe, body=body)
    parked(book)
    del blocker
    placement = future.result(PATIENCE).value
    assert (placement.device_id, placement.host_index) == (1, 1)
    assert [request.device_id for request in seen[-1]] == [1]

    def other_then(self: Operator) -> Placement:
        seen.append(1)
        return self.placement.cuda(24, device_id=1 if seen.count(1) == 1 else 0)

    seen.clear()
    future = runtime.start(Probe, body=other_then)
    parked(book)
    del placement
    with pytest.raises(RequestSequenceChanged, match=r"(?s)device_id=1\).*device_id=0\)  <-- differs"):
        future.result(PATIENCE)


def test_each_backend_has_numbers_of_its_own(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    kinds = [Backend.CUDA, Backend.ROCM, Backend.XPU, Backend.ROCM, Backend.XPU]
    declared = [RuntimeDevice(Device.GPU, [backend], index, 8) for index, backend in enumerate(kinds)]
    runtime = make_runtime(
        settings=masked(ROCR_VISIBLE_DEVICES="1,0", HIP_VISIBLE_DEVICES="1", ZE_AFFINITY_MASK="1.0"), devices=declared
    )
    assert visible(sql) == {"rocm": ["1"], "xpu": ["4"]}, "the devices came after the mask was taken"

    def body(self: Operator) -> Any:
        return [self.placement.reserve(device=Device.GPU, backend=each, memory_gb=1) for each in sorted(set(kinds))]

    placed = runtime.run(Probe, body=body).value
    assert [(each.backend, each.device_id, each.host_index) for each in placed] == [
        (Backend.CUDA, 0, 0),
        (Backend.ROCM, 0, 1),
        (Backend.XPU, 0, 4),
    ]


def test_who_becomes_another_holder_sees_the_same(make_runtime: MakeRuntime, book: Book, sql: Sql, named: int) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="3"))
    former = runtime._service.holder.id
    book.written(lambda pg: reclaim.end_holder(pg, former, reason="dead"))
    until(lambda: runtime._service.holder.id != former)
    assert visible(sql) == {"cuda": ["GPU-d000"]}


def test_a_mask_of_any_characters_is_written(make_runtime: MakeRuntime, sql: Sql, host_id: int) -> None:
    make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="GPU-\0x"))
    assert visible(sql)["cuda"][0].startswith("GPU-")


def test_what_the_book_learns_later_is_seen_at_the_next_tick(make_runtime: MakeRuntime, book: Book, sql: Sql) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="GPU-c,1"))
    devices.declare(book, runtime._service.host_id, gpus(4))
    assert visible(sql) == {"cuda": ["GPU-c"]}
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-' || chr(97 + host_index) || '000'")
    until(lambda: visible(sql) == {"cuda": ["GPU-c000"]})
    placement = runtime.run(Take, memory_gb=1).placement
    assert (placement.primary.device_id, placement.primary.host_index) == (0, 2)


def test_a_worker_reads_its_mask_too(make_runtime: MakeRuntime, url: str, named: int, tmp_path: Path) -> None:
    runtime = make_runtime(settings=masked())
    first, *pinned, refused = [runtime.submit("Where", device_id=number) for number in (None, 0, 1, 2)]
    with crew_of(url, tmp_path / "log", CUDA_VISIBLE_DEVICES="GPU-d,GPU-b"):
        assert first.result(PATIENCE) in ([0, 3], [1, 1])
        assert [each.result(PATIENCE) for each in pinned] == [[0, 3], [1, 1]]
        with pytest.raises(ExecutionFailed, match="device_id is 2, but this process sees 2 cuda devices"):
            refused.result(PATIENCE)


def test_a_forked_child_sees_by_its_own_mask(make_runtime: MakeRuntime, url: str, sql: Sql, named: int) -> None:
    make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="3"))
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            placement = Runtime(url, settings=masked(CUDA_VISIBLE_DEVICES="1")).run(Take, memory_gb=1).placement
            os._exit(10 * placement.primary.device_id + placement.primary.host_index)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


# --- unpickled elsewhere ---------------------------------------------------------------------------------------------


def receive(url: str, connection: Any, text: bytes) -> None:
    """Unpickle, by the masks in the environment, and tell what the placement is here."""
    Runtime(url, settings=Settings.load())
    data = pickle.loads(text)
    connection.send([(each.device_id, each.host_index, each.device_uuid) for each in data.placement.placements])
    connection.send((data.placement.device_ids, repr(data.placement), pickle.dumps(data)))
    connection.recv()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [(2, 2), (3, 3)]),
        ("GPU-d,0,2", [(None, 2), (0, 3)]),
        ("3,0,2", [(2, 2), (0, 3)]),
        ("", [(None, 2), (None, 3)]),
    ],
)
def test_unpickled_in_a_process_with_another_mask(
    make_runtime: MakeRuntime,
    url: str,
    named: int,
    monkeypatch: pytest.MonkeyPatch,
    mask: str | None,
    expected: list[tuple[int | None, int]],
) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="3,2"))
    data = runtime.run(Probe, body=lambda self: two(self))
    assert numbers(data.placement) == [(0, 3), (1, 2)]
    monkeypatch.setenv("JAYRUN_HOST_ID", "test-host")
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=receive, args=(url, theirs, pickle.dumps(data)))
    child.start()
    try:
        assert mine.poll(PATIENCE)
        found = mine.recv()
        device_ids, shown, back = mine.recv()
        assert sorted((number, index) for number, index, _ in found if number is not None) == sorted(
            (number, index) for number, index in expected if number is not None
        )
        assert {(index, uuid) for _, index, uuid in found} == {(2, "GPU-c000"), (3, "GPU-d000")}
        assert sorted(device_ids) == sorted(number for number, _ in expected if number is not None)
        assert shown
        returned = pickle.loads(back)  # and back again it has this process's numbers
        assert returned == data
        assert numbers(returned.placement) == [(0, 3), (1, 2)]
        mine.send(None)
        child.join(PATIENCE)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def two(self: Operator) -> Data:
    return Data("here", self.placement.cuda_group(per_device_memory_gb=1, min_devices=2, max_devices=2))


def test_what_it_cannot_see_has_no_number_and_is_told(
    make_runtime: MakeRuntime, named: int, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="1"))
    data = runtime.run(Take, memory_gb=1)
    text = pickle.dumps(data.placement)
    runtime._service.outbox.numbering = make_blind()
    with caplog.at_level(logging.WARNING, logger="jayrun"):
        again = pickle.loads(text)
    assert (again.device_id, again.device_ids, again.host_index, again.device_uuid) == (None, (), 1, "GPU-b000")
    assert "is on gpu 1 (GPU-b000), which this process cannot see (CUDA_VISIBLE_DEVICES='')" in caplog.text


def test_what_was_leased_before_its_uuid_was_known_keeps_its_number(
    make_runtime: MakeRuntime, sql: Sql, host_id: int
) -> None:
    runtime = make_runtime(settings=masked(CUDA_VISIBLE_DEVICES="3,1"))
    text = pickle.dumps(data := runtime.run(Probe, body=two))
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-' || chr(97 + host_index) || '000'")
    until(lambda: visible(sql) == {"cuda": ["GPU-d000", "GPU-b000"]})
    assert numbers(pickle.loads(text).placement) == numbers(data.placement) == [(0, 3), (1, 1)]


def make_blind() -> Any:
    from jayrun.devices.visible import see

    return see({"CUDA_VISIBLE_DEVICES": ""}, [])


# --- CUDA in this process --------------------------------------------------------------------------------------------

TELL = """
import json, logging, os, sys, types
logging.basicConfig(level=logging.WARNING, format="%(message)s")
{before}
from jayrun import Runtime
for _ in range(2):
    runtime = Runtime()
runtime.close()
print(json.dumps(os.environ.get("CUDA_DEVICE_ORDER")))
"""
CUDA_RUNS = """
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = torch
"""
LATE = "it is too late"


@pytest.mark.parametrize(
    ("before", "environment", "order", "told"),
    [
        ("", {}, "PCI_BUS_ID", None),
        ("", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "PCI_BUS_ID", None),
        ("", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST", "CUDA_DEVICE_ORDER is FASTEST_FIRST: where"),
        (CUDA_RUNS, {}, None, f"CUDA_DEVICE_ORDER is not set, and CUDA is initialised already, so {LATE}"),
        (CUDA_RUNS, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "PCI_BUS_ID", None),
        (CUDA_RUNS, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, None, None),  # their order is that of the mask
        (CUDA_RUNS, {"CUDA_VISIBLE_DEVICES": "1"}, None, LATE),
        (CUDA_RUNS + "os.environ['CUDA_DEVICE_ORDER'] = 'PCI_BUS_ID'", {}, "PCI_BUS_ID", LATE),
        (
            CUDA_RUNS + "os.environ['CUDA_VISIBLE_DEVICES'] = '1'",
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES was changed by the program itself, and CUDA is initialised already",
        ),
    ],
)
def test_the_order_of_cuda(
    url: str, named: int, before: str, environment: dict[str, str], order: str | None, told: str | None
) -> None:
    ended = in_a_program(url, TELL.format(before=before), **environment)
    assert json.loads(ended.stdout) == order
    lines = ended.stderr.splitlines()
    assert len(lines) == (told is not None), ended.stderr  # once
    assert told is None or told in lines[0]


def in_a_program(url: str, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"JAYRUN_DATABASE_URL": url, "JAYRUN_HOST_ID": "test-host", **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(variables, without=("JAYRUN_", "CUDA_", *MASKS)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )


def test_without_cuda_devices_nothing_is_set(url: str, book: Book) -> None:
    key = holders.attest_host(book, "test-host")
    devices.declare(book, key, [RuntimeDevice(Device.GPU, [Backend.ROCM], 0, 8)])
    ended = in_a_program(url, TELL.format(before=CUDA_RUNS))
    assert (json.loads(ended.stdout), ended.stderr) == (None, "")


def test_a_mask_that_is_changed_after_it_was_taken_is_told(url: str, host_id: int) -> None:
    code = TELL.replace("runtime = Runtime()", "runtime = Runtime(); os.environ['CUDA_VISIBLE_DEVICES'] = '2'")
    ended = in_a_program(url, code.format(before=""), CUDA_VISIBLE_DEVICES="0,1")
    assert "CUDA_VISIBLE_DEVICES was changed after" in ended.stderr
    assert "CUDA_VISIBLE_DEVICES='0,1'" in ended.stderr


def test_a_mask_of_names_that_the_book_does_not_know_is_told(url: str, host_id: int) -> None:
    ended = in_a_program(url, TELL.format(before=""), CUDA_VISIBLE_DEVICES="GPU-a")
    assert (
        "of the cuda devices that this process sees (CUDA_VISIBLE_DEVICES='GPU-a') the book knows none" in ended.stderr
    )
    assert "jayrun devices discover" in ended.stderr


def test_whether_cuda_is_initialised_is_seen_by_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    file = tmp_path / "nvidia-uvm"
    file.write_text("")
    monkeypatch.setattr(order, "_CUDA_DEVICE_FILE", str(file))
    assert not order.cuda_is_initialised()
    with file.open():
        assert kernel.has_open(str(file))
        assert order.cuda_is_initialised()
    assert not order.cuda_is_initialised()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    assert order.cuda_is_initialised()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # half imported
    assert not order.cuda_is_initialised()


def test_the_environment_of_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    from jayrun.settings import started_with

    monkeypatch.setenv("JAYRUN_NEVER_SET_BEFORE", "now")
    assert started_with("JAYRUN_NEVER_SET_BEFORE") is None
    assert started_with("PATH") is not None or "PATH" not in os.environ
