"""Machines with GPUs that are not there: a stand-in for NVIDIA's library under the real binding.

`Machine` says what there is. For other processes it is written into a file that a small C library reads at every call
(`stub_environment`); in this process an object takes the library's place (`FakeNvml`). Both show the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pynvml
import pytest

SOURCE = Path(__file__).with_name("libnvidia_ml.c")
GB = 10**9
_LEVELS = {"board": 0, "switch": 10, "switches": 20, "bridge": 30, "node": 40, "system": 50}

OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TOO_SMALL = 0, 1, 2, 3, 4, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST, VERSION_MISMATCH = 9, 13, 15, 18


@dataclass
class Running:
    """A process on a device; `used_bytes` None: the driver does not tell. `type`: compute, graphics or mps."""

    pid: int
    used_bytes: int | None
    type: str = "compute"


@dataclass
class Slice:
    """A MIG slice in its slot of a card."""

    slot: int
    uuid: str
    total_bytes: int | None = 20 * GB
    used_bytes: int = 0
    processes: list[Running] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)


@dataclass
class Gpu:
    """A card. None: the driver answers NotSupported. `slots`: how many slices MIG may make of it; 0: MIG is off.

    `fails`: by function (handle, uuid, name, pci, memory, memory_v2, utilization, mig, processes; "*" for all), the
    code with which the driver answers.
    """

    uuid: str | None
    bus: str | None
    name: str | None = "NVIDIA H100 80GB HBM3"
    total_bytes: int | None = 80 * GB
    reserved_bytes: int | None = GB
    used_bytes: int = 0
    utilization: int | None = 0
    slots: int | None = 0
    slices: list[Slice] = field(default_factory=list)
    processes: list[Running] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)


@dataclass
class Machine:
    """What the driver shows, cards in its own order. `nvlinks`: pairs of their positions; `levels`: by pair, the
    word of `device_links` for how they reach each other. `fails`: init, count."""

    gpus: list[Gpu] = field(default_factory=list)
    driver: str | None = "580.65.06"
    cuda: int | None = 13000
    nvlinks: set[tuple[int, int]] = field(default_factory=set)
    levels: dict[tuple[int, int], str] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """The same as the C library reads it."""
        lines = [_line("system", self.fails, driver=self.driver, cuda=self.cuda)]
        slices = [(at, part) for at, gpu in enumerate(self.gpus) for part in gpu.slices]
        for gpu in self.gpus:
            lines.append(_line("gpu", gpu.fails, uuid=gpu.uuid, bus=gpu.bus, name=gpu.name, slots=gpu.slots,
                               total=gpu.total_bytes, reserved=gpu.reserved_bytes, used=gpu.used_bytes,
                               utilization=gpu.utilization))  # fmt: skip
        for at, part in slices:
            lines.append(_line("slice", part.fails, gpu=at, slot=part.slot, uuid=part.uuid, name="NVIDIA H100 MIG",
                               total=part.total_bytes, reserved=0, used=part.used_bytes))  # fmt: skip
        owners = [(str(at), gpu.processes) for at, gpu in enumerate(self.gpus)]
        owners += [(f"s{at}", part.processes) for at, (_, part) in enumerate(slices)]
        for on, processes in owners:
            lines += [_line("process", {}, on=on, pid=p.pid, used=p.used_bytes, type=p.type) for p in processes]
        for one in range(len(self.gpus)):
            for other in range(one + 1, len(self.gpus)):
                level = _LEVELS.get(self.levels.get((one, other), ""))
                nvlink = 0 if (one, other) in self.nvlinks else 5
                lines.append(_line("link", {}, one=one, other=other, nvlink=nvlink, level=level))
        return "".join(f"{line}\n" for line in lines)


def machine(count: int = 8) -> Machine:
    """So many equal cards, the first at the first place of the bus; the driver shows them in the order of the bus."""
    return Machine([Gpu(uuid(at), f"00000000:{16 + at:02X}:00.0") for at in range(count)])


def uuid(number: int) -> str:
    """The UUID of the card that `machine` puts at this place."""
    return f"GPU-{number:08d}-aaaa-bbbb-cccc-dddddddddddd"


class Stub:
    """A machine as other processes see it: start them with `environment`, and `show` them another one at any time."""

    def __init__(self, folder: Path, shown: Machine, library: Path) -> None:
        self._file = folder / "gpus.txt"
        self.environment = {"LD_LIBRARY_PATH": str(library), "JAYRUN_TEST_GPUS": str(self._file)}
        self.show(shown)

    def show(self, shown: Machine) -> None:
        """From now on this is there; a reader sees the old or the new one, never half of it."""
        new = self._file.with_suffix(".new")
        new.write_text(shown.text())
        new.replace(self._file)

    def unload(self) -> None:
        """From now on the driver is not loaded."""
        self._file.unlink()


def stub_environment(folder: Path, shown: Machine) -> Stub:
    """The machine for other processes; skips the test where there is no C compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no `cc` here: the stand-in for libnvidia-ml.so.1 cannot be built")
    return Stub(folder, shown, _built(compiler))


@cache
def _built(compiler: str) -> Path:
    """The folder of the library, built once for its text, however many test processes there are."""
    text = SOURCE.read_bytes()
    folder = Path(gettempdir()) / f"jayrun-nvml-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"new.{os.getpid()}"
        options = ("-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libnvidia-ml.so.1")
        subprocess.run([compiler, *options, "-o", str(new), str(SOURCE)], check=True)
        new.replace(library)
    return folder


@contextmanager
def standing_in(shown: Machine) -> Iterator[FakeNvml]:
    """The machine as this process sees it, until the end of the block."""
    before = pynvml.nvmlLib, pynvml._nvmlLib_refcount
    fake = FakeNvml(shown)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = fake
    try:
        yield fake
    finally:
        pynvml.nvmlLib, pynvml._nvmlLib_refcount = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


class FakeNvml:
    """Takes the place of the loaded library in the binding; `machine` may be changed at any time."""

    def __init__(self, shown: Machine) -> None:
        self.machine = shown
        self.opened = 0
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            function = getattr(type(self), f"_{name}")
        except AttributeError:
            raise AttributeError(name) from None

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if not self.opened and name not in ("nvmlInitWithFlags", "nvmlErrorString"):
                return UNINITIALIZED
            try:
                return int(function(self, *arguments) or OK)
            except _Code as code:
                return code.code

        return call

    def _nvmlInitWithFlags(self, flags: int) -> None:  # noqa: N802
        _fail(self.machine.fails, "init", all_too=False)
        self.opened += 1

    def _nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> None:  # noqa: N802
        text.value = _known(self.machine.driver).encode()

    def _nvmlSystemGetCudaDriverVersion(self, version: Any) -> None:  # noqa: N802
        version._obj.value = _known(self.machine.cuda)

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:  # noqa: N802
        _fail(self.machine.fails, "count", all_too=False)
        count._obj.value = len(self.machine.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:  # noqa: N802
        _fail(self.machine.gpus[index.value].fails, "handle")
        self._give(handle, index.value + 1)

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> None:  # noqa: N802
        text.value = _known(self._of(handle, "uuid").uuid).encode()

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> None:  # noqa: N802
        text.value = _known(getattr(self._of(handle, "name"), "name", "NVIDIA H100 MIG")).encode()

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> None:  # noqa: N802
        pci._obj.busId = _known(self._of(handle, "pci").bus).encode()

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:  # noqa: N802
        of = self._of(handle, "memory")
        memory._obj.total = _known(of.total_bytes)
        memory._obj.used = of.used_bytes + (getattr(of, "reserved_bytes", 0) or 0)

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> None:  # noqa: N802
        of = self._of(handle, "memory_v2")
        memory._obj.reserved = _known(getattr(of, "reserved_bytes", 0))
        memory._obj.total = _known(self._of(handle, "memory").total_bytes)
        memory._obj.used = of.used_bytes

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:  # noqa: N802
        rates._obj.gpu = _known(getattr(self._of(handle, "utilization"), "utilization", None))

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:  # noqa: N802
        current._obj.value = pending._obj.value = int(_known(self._of(handle, "mig").slots) > 0)

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:  # noqa: N802
        count._obj.value = _known(self._of(handle, "mig").slots)

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, slot: Any, part: Any) -> None:  # noqa: N802
        for number, (gpu, each) in enumerate(self._slices(), 1001):
            if gpu is self._of(handle, "") and each.slot == slot.value:
                return self._give(part, number)
        raise _Code(NOT_FOUND)

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, to: Any) -> None:  # noqa: N802
        self._processes(handle, "compute", count, to)

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, to: Any) -> None:  # noqa: N802
        self._processes(handle, "graphics", count, to)

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, to: Any) -> None:  # noqa: N802
        self._processes(handle, "mps", count, to)

    def _nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, status: Any) -> None:  # noqa: N802
        status._obj.value = 0 if self._pair(one, other) in self.machine.nvlinks else 5

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, level: Any) -> None:  # noqa: N802
        level._obj.value = _known(_LEVELS.get(self.machine.levels.get(self._pair(one, other), "")))

    def _slices(self) -> Iterable[tuple[Gpu, Slice]]:
        return [(gpu, part) for gpu in self.machine.gpus for part in gpu.slices]

    def _give(self, handle: Any, number: int) -> None:
        ctypes.memmove(ctypes.byref(handle._obj), ctypes.byref(ctypes.c_void_p(number)), ctypes.sizeof(ctypes.c_void_p))

    def _number(self, handle: Any) -> int:
        return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)

    def _of(self, handle: Any, function: str) -> Any:
        number = self._number(handle)
        of = list(self._slices())[number - 1001][1] if number > 1000 else self.machine.gpus[number - 1]
        _fail(of.fails, function)
        return of

    def _pair(self, one: Any, other: Any) -> tuple[int, int]:
        first, second = sorted((self._number(one) - 1, self._number(other) - 1))
        return first, second

    def _processes(self, handle: Any, type_: str, count: Any, to: Any) -> None:
        found = [each for each in self._of(handle, "processes").processes if each.type == type_]
        room, count._obj.value = count._obj.value, len(found)
        if len(found) > room:
            raise _Code(TOO_SMALL)
        for at, each in enumerate(found):
            unknown = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
            to[at].pid, to[at].usedGpuMemory = each.pid, unknown if each.used_bytes is None else each.used_bytes


class _Code(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


def _fail(fails: Mapping[str, int], function: str, *, all_too: bool = True) -> None:
    code = fails.get(function, fails.get("*", OK) if all_too else OK)
    if code:
        raise _Code(code)


def _known(value: Any) -> Any:
    if value is None:
        raise _Code(NOT_SUPPORTED)
    return value


def _line(word: str, fails: Mapping[str, int], **fields: object) -> str:
    told = {name: value for name, value in fields.items() if value is not None}
    told |= {f"no.{function}": code for function, code in fails.items()}
    return "\t".join([word, *(f"{name}={value}" for name, value in told.items())])
