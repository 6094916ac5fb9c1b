"""Which NVIDIA cards the machine has by the word of the kernel, and how many of them this process may use.

A container or a job may be shown only some. The PCI bus is the same for all, so it tells who is shown less.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jayrun.domain.discovery import NVIDIA, View

_PCI = Path("/sys/bus/pci/devices")
_DEV = Path("/dev")
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # the class of what may be a GPU
_CONFIGURES_MIG = "nvidia-cap1"  # and is no slice; root's alone


def view(*, sees_the_host: bool, pci: Path = _PCI, dev: Path = _DEV) -> View:
    """What this process sees of the machine. `sees_the_host`: it is in no container, as far as processes go.

    It sees all cards if it may open a device file for each that NVIDIA's driver has, and all slices if moreover no
    other file of one is denied to it. Reads a few small files, and asks no driver.
    """
    drivers = _drivers(pci)
    files = [path for path in _entries(dev) if re.fullmatch(r"nvidia\d+", path.name)]
    usable = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    served = None if drivers is None else sum(driver == NVIDIA for driver in drivers.values())
    all_cards = served is not None and len(usable) >= served and len(usable) == len(files)
    slices = [path for path in _entries(dev / "nvidia-caps") if path.name != _CONFIGURES_MIG]
    all_slices = all_cards and sees_the_host and all(os.access(path, os.R_OK) for path in slices)
    return View(drivers=drivers, all_cards=all_cards, all_slices=all_slices)


def _drivers(pci: Path) -> dict[str, str] | None:
    """The driver of each card from NVIDIA, "" where it has none; None where the bus cannot be read."""
    if not pci.is_dir():
        return None
    found = {}
    for card in _entries(pci):
        try:
            kind = (card / "vendor").read_text().strip(), (card / "class").read_text()[: len(_DISPLAY)]
        except OSError:
            continue
        if kind == (_VENDOR, _DISPLAY):
            driver = card / "driver"
            found[card.name] = driver.resolve().name if driver.exists() else ""
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
