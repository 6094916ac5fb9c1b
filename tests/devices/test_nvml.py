"""What is read of the hardware, under NVIDIA's own binding: in this process, and in others with a C library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpus
import pytest
from gpus import GB, Gpu, Machine, Running, Slice, machine, standing_in, stub_environment, uuid

from jayrun.devices import nvml
from jayrun.domain.hardware import Link, Process, Reading, Seen
from jayrun.settings import child_environment

Read = Callable[[Machine], Reading]

_PROGRAM = "from jayrun.devices.nvml import *; print(repr(read()))"


@pytest.fixture(params=["fake", "library"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """Reads a machine, in this process or in another one."""

    def here(shown: Machine) -> Reading:
        with standing_in(shown) as fake:
            seen = nvml.read()
            assert fake.opened == 0
        return seen

    def there(shown: Machine) -> Reading:
        told = run(_PROGRAM, stub_environment(tmp_path, shown).environment)
        seen = eval(told, vars(nvml))
        assert isinstance(seen, Reading)
        return seen

    return here if request.param == "fake" else there


def run(program: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=child_environment(environment),
        timeout=60,
    ).stdout


def test_all_that_a_card_tells(read: Read) -> None:
    shown = machine(1)
    shown.gpus[0].used_bytes = 5 * GB
    shown.gpus[0].utilization = 37
    shown.gpus[0].processes = [
        Running(40, 3 * GB),
        Running(30, 8_000_000, "graphics"),
        Running(40, 3 * GB, "graphics"),
        Running(50, None),
        Running(60, GB, "mps"),
    ]
    assert read(shown) == Reading(
        devices=(
            Seen(
                index=0,
                uuid=uuid(0),
                name="NVIDIA H100 80GB HBM3",
                pci_bus_id="00000000:10:00.0",
                total_bytes=80 * GB,
                reserved_bytes=GB,
                used_bytes=5 * GB,
                utilization=37,
                processes=(
                    Process(pid=30, used_bytes=8_000_000, graphics=True),
                    Process(pid=40, used_bytes=3 * GB, graphics=False),
                    Process(pid=50, used_bytes=None, graphics=False),
                    Process(pid=60, used_bytes=GB, graphics=False),
                ),
            ),
        ),
        driver="580.65.06",
        cuda="13.0",
    )


def test_a_card_that_tells_nothing_is_seen_all_the_same(read: Read) -> None:
    seen = read(Machine([Gpu(None, None, None, None, None, slots=None, utilization=None)], driver=None, cuda=None))
    assert seen == Reading(devices=(Seen(index=0, processes=()),))


def test_the_order_is_that_of_the_bus(read: Read) -> None:
    shown = machine(8)
    shown.gpus = [shown.gpus[at] for at in (3, 7, 0, 1, 6, 2, 5, 4)]
    assert [(each.index, each.uuid) for each in read(shown).devices] == [(at, uuid(at)) for at in range(8)]


def test_a_lost_card_keeps_its_place_and_the_others_are_read(read: Read) -> None:
    shown = machine(4)
    shown.gpus[1].fails = {"handle": gpus.LOST}
    shown.gpus[2].fails = {"*": gpus.LOST, "handle": 0, "uuid": 0, "pci": 0}
    zero, one, two, three = read(shown).devices
    assert (zero.uuid, zero.problem, three.uuid, three.problem) == (uuid(0), None, uuid(3), None)
    assert one.uuid is None
    assert one.problem is not None
    assert one.problem.startswith("lost: ")
    assert (two.uuid, two.problem, two.total_bytes) == (uuid(2), one.problem, None)


def test_fields_fail_one_by_one(read: Read) -> None:
    shown = machine(3)
    shown.gpus[0].fails = {"memory": gpus.NOT_SUPPORTED, "memory_v2": gpus.NOT_SUPPORTED}  # unified memory
    shown.gpus[1].fails = {"processes": gpus.NO_PERMISSION, "name": 999, "utilization": gpus.NOT_SUPPORTED}
    shown.gpus[2].fails = {"memory_v2": gpus.FUNCTION_NOT_FOUND}
    shown.gpus[2].used_bytes = 2 * GB
    unified, denied, old = read(shown).devices
    assert (unified.total_bytes, unified.reserved_bytes, unified.used_bytes, unified.problem) == (
        None,
        None,
        None,
        None,
    )
    assert (denied.processes, denied.name, denied.utilization) == (None, None, None)
    assert (denied.total_bytes, denied.problem) == (80 * GB, None)
    assert (old.total_bytes, old.reserved_bytes, old.used_bytes) == (80 * GB, None, 3 * GB)


def test_numbers_that_nothing_can_have_are_not_told(read: Read) -> None:
    most = 2**64 - 1
    shown = machine(2)
    shown.gpus[0].total_bytes = shown.gpus[0].reserved_bytes = shown.gpus[0].used_bytes = most
    shown.gpus[1].processes = [Running(2**32 - 1, GB), Running(0, GB), Running(7, 2**63)]
    garbled, other = read(shown).devices
    assert (garbled.total_bytes, garbled.reserved_bytes, garbled.used_bytes) == (None, None, None)
    assert other.processes == (Process(pid=7, used_bytes=None, graphics=False),)


def test_what_no_uuid_tells_apart_is_not_taken_for_another(read: Read) -> None:
    shown = machine(4)
    shown.gpus[1].uuid = uuid(0)
    shown.gpus[2].slots, shown.gpus[3].slots = 7, 7
    shown.gpus[2].slices = [Slice(0, "MIG-a"), Slice(1, "MIG-a"), Slice(2, ""), Slice(3, uuid(0)), Slice(4, "MIG-b")]
    shown.gpus[3].uuid, shown.gpus[3].slices = None, [Slice(0, "MIG-c")]
    seen = read(shown).devices
    assert [each.uuid for each in seen] == [uuid(0), None, uuid(2), None, "MIG-a", "MIG-b"]
    assert [each.index for each in seen] == list(range(6))
    assert [each.is_split for each in seen][2:4] == [True, True]


def test_mig_slices_are_devices_of_their_own_also_with_holes(read: Read) -> None:
    shown = machine(3)
    shown.gpus[1].slots = 7
    shown.gpus[1].processes = [Running(7, GB)]  # the driver shows them there too
    shown.gpus[1].slices = [
        Slice(2, "MIG-two", 40 * GB, used_bytes=GB, processes=[Running(7, GB)]),
        Slice(5, "MIG-five", 20 * GB, fails={"processes": gpus.NO_PERMISSION}),
    ]
    shown.gpus[2].slots = 7  # and no slice yet
    *cards, two, five = read(shown).devices
    assert [(card.is_split, card.uuid) for card in cards] == [(False, uuid(0)), (True, uuid(1)), (True, uuid(2))]
    assert cards[1].processes == ()
    assert (two.index, two.uuid, two.parent_uuid, two.total_bytes) == (3, "MIG-two", uuid(1), 40 * GB)
    assert (two.pci_bus_id, two.processes) == (cards[1].pci_bus_id, (Process(pid=7, used_bytes=GB, graphics=False),))
    assert (five.index, five.uuid, five.processes) == (4, "MIG-five", None)


def test_how_cards_reach_each_other(read: Read) -> None:
    shown = machine(4)
    shown.nvlinks = {(0, 1)}
    shown.levels = {(0, 1): "system", (0, 2): "switch", (1, 3): "node", (2, 3): "board"}
    assert set(read(shown).links) == {
        Link(uuid(0), uuid(1), "nvlink"),
        Link(uuid(0), uuid(2), "switch"),
        Link(uuid(1), uuid(3), "node"),
        Link(uuid(2), uuid(3), "board"),
    }


@pytest.mark.parametrize(
    ("code", "what", "to_do"),
    [
        (gpus.DRIVER_NOT_LOADED, "driver is not loaded", "modprobe nvidia"),
        (gpus.VERSION_MISMATCH, "was replaced", "restart the machine"),
        (gpus.NO_PERMISSION, "may not talk", "permissions of /dev/nvidiactl"),
        (999, "does not answer (Unknown Error)", "nvidia-smi"),
    ],
)
@pytest.mark.parametrize("function", ["init", "count"])
def test_a_driver_that_does_not_answer_is_told_with_what_to_do(
    read: Read, code: int, what: str, to_do: str, function: str
) -> None:
    shown = machine(2)
    shown.fails = {function: code}
    seen = read(shown)
    assert seen.devices == ()
    assert seen.problem is not None
    for words in (what, to_do):
        assert words in seen.problem


def test_no_driver_at_all() -> None:
    reading = run("from jayrun.devices import nvml; print(repr(nvml.read().problem))", {"LD_LIBRARY_PATH": ""})
    assert "libnvidia-ml.so.1 is not found" in ast.literal_eval(reading)


def test_what_is_not_asked_for_is_not_read() -> None:
    shown = machine(2)
    shown.nvlinks = {(0, 1)}
    shown.gpus[0].processes = [Running(1, 1)]
    with standing_in(shown) as fake:
        seen = nvml.read(processes=False, links=False)
        assert [name for name in fake.called if "Process" in name or "P2P" in name or "Topology" in name] == []
    assert (seen.links, [each.processes for each in seen.devices]) == ((), [None, None])


def test_the_machine_may_change_between_readings_and_a_fork_may_lie_between_them(tmp_path: Path) -> None:
    stub = stub_environment(tmp_path, machine(8))
    program = f"""
import os, sys
from jayrun.devices import nvml
print(len(nvml.read().devices), flush=True)
nvml._binding().libLoadLock.acquire()  # as another thread might have at that moment
child = os.fork()
if child == 0:
    os.replace({str(tmp_path / "next")!r}, {str(tmp_path / "gpus.txt")!r})
    print(len(nvml.read().devices), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
nvml._binding().libLoadLock.release()
print(status, len(nvml.read().devices))
"""
    (tmp_path / "next").write_text(machine(5).text())
    assert run(program, stub.environment).split() == ["8", "5", "0", "5"]


def test_importing_touches_neither_nvml_nor_cuda(tmp_path: Path) -> None:
    program = """
import sys, jayrun
from jayrun.devices import nvml
def mapped(): return [name for name in ("nvidia-ml", "libcuda") if name in open("/proc/self/maps").read()]
print(mapped(), "pynvml" in sys.modules)
nvml.read()
print(mapped(), "pynvml" in sys.modules)
"""
    before, after = run(program, stub_environment(tmp_path, machine(1)).environment).splitlines()
    assert (before, after) == ("[] False", "['nvidia-ml'] True")
