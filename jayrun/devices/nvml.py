"""What the NVIDIA driver shows of this machine at one moment: cards, MIG slices, memory, processes, links.

The library is loaded at the first reading, opened and closed again by each one, and never makes a CUDA context: a
program may read before it forks and its children after. Whatever a machine lacks is left out of the answer, field by
field and card by card; what it does not answer at all is told in words.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any, TypeVar

from jayrun.domain.hardware import Link, Process, Reading, Seen

T = TypeVar("T")

_LIBRARY = "libnvidia-ml.so.1"
# By NVML's error codes: why nothing is seen at all, and what to do.
_PROBLEMS = {
    4: "this user may not talk to the NVIDIA driver: look at the permissions of /dev/nvidiactl and /dev/nvidia*, and "
    "add the user to the group that owns them",
    9: "the NVIDIA driver is not loaded: try `sudo modprobe nvidia`, and `dmesg` if that fails; in a container, start "
    "it with its GPUs (docker run --gpus all)",
    12: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found): install it; in a container, start that with "
    "its GPUs (docker run --gpus all)",
    18: "the NVIDIA driver was replaced while an older one is loaded (library and kernel module do not match): restart "
    "the machine, or end all that uses its GPUs and reload the modules",
}
_LOST = {
    15: "lost: it has fallen off the bus or is not reachable (`dmesg | grep Xid`); a reset or a restart of the machine "
    "brings it back, if anything does",
    16: "it needs a reset before it works again: `sudo nvidia-smi --gpu-reset`, or restart the machine",
}
_MOST_BYTES = 1 << 56  # what is more, such as a word full of ones, is no memory but an answer that is not there
_MOST_PIDS = 1 << 31
_LINKS = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "node", 50: "system"}


def read(*, processes: bool = True, links: bool = True) -> Reading:
    """Look at the hardware once. `processes` and `links` can be left out where they are not needed.

    Raises nothing for what a machine may lack: see `Reading.problem` and `Seen.problem`.
    """
    try:
        nvml = _binding()
    except ImportError as error:
        return Reading(problem=f"the package nvidia-ml-py is not usable ({error}): install it")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Reading(problem=_problem(error))
    try:
        return _read(nvml, processes=processes, links=links)
    except nvml.NVMLError as error:
        return Reading(problem=_problem(error))
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def is_installed() -> bool:
    """Whether the driver's library can be loaded here; asks nothing of the driver."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


@cache
def _binding() -> Any:
    """The module, loaded when it is needed first."""
    import pynvml  # type: ignore[import-untyped]

    def renew() -> None:
        pynvml.libLoadLock = threading.Lock()  # another thread of the parent may have held it

    os.register_at_fork(after_in_child=renew)
    return pynvml


def _problem(error: Any) -> str:
    return _PROBLEMS.get(error.value, f"the NVIDIA driver does not answer ({error}): see whether `nvidia-smi` does")


def _read(nvml: Any, *, processes: bool, links: bool) -> Reading:
    cards = _cards(nvml)
    seen: list[Seen] = []
    uuids: set[str | None] = {None}
    slices: list[tuple[Seen, Any]] = []
    for index, (handle, problem) in enumerate(cards):
        if handle is None:
            seen.append(Seen(index=index, problem=problem))
            continue
        parts = list(_slices(nvml, handle))
        current, _ = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle) or (0, 0)
        card = _look(nvml, handle, Seen(index=index, is_split=bool(current or parts)), processes=processes)
        if card.uuid in uuids:  # two cards of one key would be taken for one
            card = replace(card, uuid=None)
        uuids.add(card.uuid)
        seen.append(card)
        slices += [(card, part) for part in parts if card.uuid is not None]
    for card, part in slices:  # a slice is known by its UUID alone, and by that of its card
        bare = Seen(index=len(seen), parent_uuid=card.uuid, pci_bus_id=card.pci_bus_id)
        found = _look(nvml, part, bare, processes=processes)
        if found.uuid not in uuids:
            uuids.add(found.uuid)
            seen.append(found)
    whole = [(card.uuid, handle) for card, (handle, _) in zip(seen, cards, strict=False) if card.uuid]
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    return Reading(
        devices=tuple(seen),
        links=tuple(_links(nvml, whole)) if links else (),
        driver=_ask(nvml, nvml.nvmlSystemGetDriverVersion),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


def _cards(nvml: Any) -> list[tuple[Any, str | None]]:
    """The handles in the order of the bus, whatever the driver's own; None, and why, in the place of a card that
    gives none."""
    cards: list[tuple[Any, str | None]] = []
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            cards.append((nvml.nvmlDeviceGetHandleByIndex(number), None))
        except nvml.NVMLError as error:
            cards.append((None, _LOST.get(error.value, f"the driver cannot open it: {error}")))
    ordered = iter(sorted((card for card in cards if card[0] is not None), key=lambda card: _bus(nvml, card[0]) or "~"))
    return [card if card[0] is None else next(ordered) for card in cards]


def _bus(nvml: Any, handle: Any) -> str | None:
    info = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    return info.busId.upper() if info is not None and info.busId else None


def _slices(nvml: Any, handle: Any) -> Iterator[Any]:
    """The MIG slices of a card; their numbers may have holes."""
    for number in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if part is not None:
            yield part


def _look(nvml: Any, handle: Any, bare: Seen, *, processes: bool) -> Seen:
    """`bare` with all that the device tells about itself."""
    problems: list[str] = []

    def ask(question: Callable[..., T]) -> T | None:
        return _ask(nvml, question, handle, problems=problems)

    total, reserved, used = ask(partial(_memory, nvml)) or (None, None, None)
    utilization = ask(nvml.nvmlDeviceGetUtilizationRates)
    running: tuple[Process, ...] | None = ()
    if not bare.is_split:
        running = ask(partial(_processes, nvml)) if processes else None
    return replace(
        bare,
        uuid=ask(nvml.nvmlDeviceGetUUID) or None,
        name=ask(nvml.nvmlDeviceGetName) or None,
        pci_bus_id=bare.pci_bus_id or _bus(nvml, handle),
        total_bytes=total,
        reserved_bytes=reserved,
        used_bytes=used,
        utilization=None if utilization is None else int(utilization.gpu),
        processes=running,
        problem=problems[0] if problems else None,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None, int | None]:
    """All, the driver's own, and what is used; an older driver counts its own as used."""
    info = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    reserved = None if info is None else _bytes(info.reserved)
    if info is None:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return _bytes(info.total) or None, reserved, _bytes(info.used)


def _bytes(told: int | None) -> int | None:
    return None if told is None or told >= _MOST_BYTES else told


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...]:
    """Those that compute, and those that only draw."""
    found: dict[int, Process] = {}
    for listed, graphics in (
        (nvml.nvmlDeviceGetComputeRunningProcesses(handle), False),
        (_ask(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or (), False),
        (_ask(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or (), True),
    ):
        for each in listed:  # a process may stand in several lists, with the same memory
            if not 0 < each.pid < _MOST_PIDS:  # one that may not be told: its memory is used by nobody who is shown
                continue
            used = _bytes(each.usedGpuMemory)
            if (before := found.get(each.pid)) is not None:
                used = max(used or 0, before.used_bytes or 0) or used
            drawn = graphics and (before is None or before.graphics)
            found[each.pid] = Process(pid=each.pid, used_bytes=used, graphics=drawn)
    return tuple(found[pid] for pid in sorted(found))


def _links(nvml: Any, cards: Sequence[tuple[str, Any]]) -> Iterator[Link]:
    for (one, handle), (other, far) in combinations(cards, 2):
        nvlink = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handle, far, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, far)
        link = "nvlink" if nvlink == nvml.NVML_P2P_STATUS_OK else _LINKS.get(-1 if level is None else level)
        if link is not None:
            yield Link(one, other, link)


def _ask(nvml: Any, question: Callable[..., T], *arguments: Any, problems: list[str] | None = None) -> T | None:
    """The answer, or None where there is none; that a card is lost or wants a reset goes into `problems`."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        if problems is not None and error.value in _LOST:
            problems.append(_LOST[error.value])
    except (nvml.NVMLLibraryMismatchError, UnicodeDecodeError):  # a driver too old for the question; a broken text
        pass
    return None
