"""When the driver is asked: not before it is needed, before and after a fork, and never with CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpus import Machine, Stub, machine, standing_in, stub_environment, uuid

from jayrun.runtime import hardware
from jayrun.settings import child_environment
from jayrun.store import holders
from jayrun.store.transactions import Book

_PROGRAM = """
import logging, os, sys
from jayrun import Data, Operator, Runtime
from jayrun.devices import nvml

class Take(Operator):
    def execute(self) -> Data:
        return Data(None, self.placement.cuda(1))

def mapped():
    maps = open("/proc/self/maps").read()
    return [name for name in ("nvidia-ml", "libcuda") if name in maps], "pynvml" in sys.modules

def names():
    data = Runtime().run(Take)
    return data.placement.device_uuid, data.placement.device_id, len(nvml.read().devices)

print(mapped())
runtime = Runtime()
print(mapped())
"""


def run(url: str, stub: Stub, program: str) -> list[str]:
    environment = child_environment({"JAYRUN_DATABASE_URL": url, **stub.environment}, without=("JAYRUN_",))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_runtime_asks_no_driver_where_the_book_knows_no_uuids(book: Book, url: str, tmp_path: Path) -> None:
    holders.attest_host(book, None)
    told = run(url, stub_environment(tmp_path, machine(2)), _PROGRAM)
    assert told == ["([], False)"] * 2


def test_the_driver_is_asked_before_and_after_a_fork_and_cuda_never(book: Book, url: str, tmp_path: Path) -> None:
    stub = stub_environment(tmp_path, machine(2))
    program = f"""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
{_PROGRAM}
print(names())
child = os.fork()
if child == 0:
    print(names(), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, names())
print(mapped())
"""
    discover(book, machine(2))
    told = run(url, stub, program)
    assert told == [
        "([], False)",
        "(['nvidia-ml'], True)",
        *[str((uuid(0), 0, 2))] * 2,
        f"0 {(uuid(0), 0, 2)}",
        "(['nvidia-ml'], True)",
    ]


def test_in_a_container_the_drivers_own_numbers_count(book: Book, url: str, tmp_path: Path) -> None:
    stub = stub_environment(tmp_path, machine(4))
    discover(book, machine(4))
    shown = machine(4)
    del shown.gpus[:2]
    stub.show(shown)
    assert run(url, stub, f"{_PROGRAM}\nprint(names())")[-1] == str((uuid(2), 0, 2))


_WATCHER = """
import os, sys, time, types
from jayrun import Runtime
from jayrun.domain.devices import Backend, Device
from jayrun.runtime import hardware
from jayrun.settings import Settings
from jayrun.store import devices
from jayrun.store.transactions import Book

runtime = Runtime()
service, book = runtime._service, Book(os.environ["JAYRUN_DATABASE_URL"], role="test")

def show(name):
    os.replace(name, os.environ["JAYRUN_TEST_GPUS"])
    hardware.look(book, service.host_id)

def follow():
    give_up_at = time.monotonic() + 30
    while list(service.numbering.fleet) != devices.names(book, service.host_id):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    cards = devices.names(book, service.host_id)
    print([service.numbering.ordinal(Device.GPU, Backend.CUDA, each.host_index, each.uuid) for each in cards])
"""


def test_a_card_that_is_back_is_counted_again_by_who_started_without_it(book: Book, url: str, tmp_path: Path) -> None:
    discover(book, machine(3))
    without = machine(3)
    del without.gpus[0]
    stub = stub_environment(tmp_path, without)
    discover(book, without)
    (tmp_path / "whole").write_text(machine(3).text())
    program = f"{_WATCHER}follow()\nshow({str(tmp_path / 'whole')!r})\nfollow()"
    assert run(url, stub, program) == ["[None, 0, 1]", "[0, 1, 2]"]


@pytest.mark.parametrize(("is_initialised", "numbers"), [(True, [1, 2, 0]), (False, [0, 1, None])])
def test_cuda_counts_as_when_it_was_initialised(
    book: Book, url: str, tmp_path: Path, is_initialised: bool, numbers: list[int | None]
) -> None:
    discover(book, machine(3))
    stub = stub_environment(tmp_path, machine(3))
    without = machine(3)
    del without.gpus[0]
    (tmp_path / "without").write_text(without.text())
    program = f"""{_WATCHER}
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {is_initialised}))
show({str(tmp_path / "without")!r})
devices.remove(book, service.host_id, kind="gpu", host_indexes=[0])
hardware.look(book, service.host_id)
follow()
"""
    assert run(url, stub, program) == [str(numbers)]


def discover(book: Book, shown: Machine) -> None:
    """As a person does on this host."""
    with standing_in(shown):
        hardware.look(book, holders.attest_host(book, None), adds=True)
