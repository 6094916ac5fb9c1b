"""By which order CUDA numbers GPUs, and whether masks still count: seen to in time, or told when it is too late."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from jayrun import kernel
from jayrun.devices.visible import Numbering
from jayrun.domain.devices import Backend, Device
from jayrun.settings import MASKS, ORDER_VARIABLE, PCI_ORDER, device_order, set_device_order, started_with

log = logging.getLogger("jayrun")

_CUDA_DEVICE_FILE = "/dev/nvidia-uvm"  # opened by CUDA when it is initialised, and by nothing that only asks the driver
_told: set[str] = set()
_is_ours = False


def keep_pci_order(numbering: Numbering) -> None:
    """Let CUDA number the GPUs of this process in PCI order, as the book does. Once it is initialised, or where another
    order is set, that is only told, once.

    Does nothing on a host without CUDA devices in the book.
    """
    global _is_ours
    cuda = [each for each in numbering.fleet if each.kind is Device.GPU and Backend.CUDA in each.backends]
    if not cuda:
        return
    is_late = cuda_is_initialised()
    if device_order() is None and not is_late:
        set_device_order(PCI_ORDER)
        _is_ours = True
    order = device_order()
    if len(cuda) > 1 and not _is_named(numbering.masks.get("CUDA_VISIBLE_DEVICES")):  # else it changes nothing
        was = order if _is_ours or not is_late else started_with(ORDER_VARIABLE)
        if was != PCI_ORDER:
            _tell(
                f"{ORDER_VARIABLE} is {was or 'not set'}"
                + (f", and CUDA is initialised already, so it is too late to set it to {PCI_ORDER}" if is_late else "")
                + f": where the GPUs differ CUDA may number them otherwise than jayrun, which counts in PCI order; "
                f"set {ORDER_VARIABLE}={PCI_ORDER} before the program starts"
            )
    if is_late:
        changed = [name for name in MASKS if numbering.masks.get(name) != started_with(name)]
        if changed:
            _tell(
                f"{', '.join(changed)} was changed by the program itself, and CUDA is initialised already: a change "
                "after that has no effect on CUDA, but jayrun cannot tell when it came and believes it; set it before "
                "the program starts"
            )


def misread_order(masks: Mapping[str, str]) -> str | None:
    """What is told of an inherited mask of numbers that were meant in another order than jayrun reads them."""
    mask, order = masks.get("CUDA_VISIBLE_DEVICES"), device_order()
    if mask is None or _is_named(mask) or order in (None, PCI_ORDER):
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={mask!r} is read in PCI order, though {ORDER_VARIABLE} is {order}: name the GPUs by "
        f"UUID, or set {ORDER_VARIABLE}={PCI_ORDER}"
    )


def _is_named(mask: str | None) -> bool:
    """Whether a mask means the same in every order."""
    return mask is not None and (not mask.strip() or mask.lstrip().startswith(("GPU-", "MIG-")))


def changed_masks(taken: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is told of masks that were changed after this process was entered in the book."""
    changed = [name for name in MASKS if taken.get(name) != now.get(name)]
    return (
        f"{', '.join(changed)} was changed after this process had been entered in the book; jayrun goes on with what "
        f"was set then ({', '.join(f'{name}={taken.get(name)!r}' for name in changed)}), and so does CUDA if it is "
        "initialised"
    )


def cuda_is_initialised() -> bool:
    """Whether CUDA reads its variables no more in this process. Imports nothing, and creates no context."""
    if kernel.has_open(_CUDA_DEVICE_FILE):
        return True
    is_initialised = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return bool(is_initialised and is_initialised())


def _tell(what: str) -> None:
    if what not in _told:
        _told.add(what)
        log.warning("%s", what)
