"""How much of a machine a process sees: made-up folders take the place of /sys and /dev."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jayrun.devices.pci import view
from jayrun.domain.discovery import View


def machine(folder: Path, drivers: dict[str, str | None], files: int) -> tuple[Path, Path]:
    """Cards by their addresses with the driver that each has, and so many device files."""
    pci, dev = folder / "pci", folder / "dev"
    for address, driver in {"0000:00:00.0": "bridge", **drivers}.items():
        (pci / address).mkdir(parents=True)
        (pci / address / "vendor").write_text("0x8086\n" if driver == "bridge" else "0x10de\n")
        (pci / address / "class").write_text("0x030200\n")
        if driver is not None:
            (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (pci / address / "driver").symlink_to(folder / "drivers" / driver)
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(files))):
        (dev / name).touch()
    return pci, dev


CARDS: dict[str, str | None] = {"0000:10:00.0": "nvidia", "0000:11:00.0": "nvidia"}


def test_who_may_use_a_file_of_each_card_sees_all(tmp_path: Path) -> None:
    pci, dev = machine(tmp_path, {**CARDS, "0000:12:00.0": None, "0000:13:00.0": "vfio-pci"}, files=2)
    drivers = {**CARDS, "0000:12:00.0": "", "0000:13:00.0": "vfio-pci"}
    assert view(sees_the_host=True, pci=pci, dev=dev) == View(drivers=drivers, all_cards=True, all_slices=True)
    assert view(sees_the_host=False, pci=pci, dev=dev) == View(drivers=drivers, all_cards=True, all_slices=False)


def test_a_container_has_files_of_some_only(tmp_path: Path) -> None:
    pci, dev = machine(tmp_path, CARDS, files=1)
    assert view(sees_the_host=True, pci=pci, dev=dev) == View(drivers=CARDS)


def test_a_file_that_may_not_be_opened_hides_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pci, dev = machine(tmp_path, CARDS, files=2)
    (dev / "nvidia-caps").mkdir()
    for number in (1, 2, 3):
        (dev / "nvidia-caps" / f"nvidia-cap{number}").touch()
    denied = {dev / "nvidia-caps" / "nvidia-cap1"}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in denied)
    assert view(sees_the_host=True, pci=pci, dev=dev).all_slices, "only root configures"
    denied.add(dev / "nvidia-caps" / "nvidia-cap3")
    assert view(sees_the_host=True, pci=pci, dev=dev) == View(drivers=CARDS, all_cards=True)
    denied.add(dev / "nvidia1")
    assert view(sees_the_host=True, pci=pci, dev=dev) == View(drivers=CARDS)


def test_without_a_bus_to_read_nothing_is_sure(tmp_path: Path) -> None:
    assert view(sees_the_host=True, pci=tmp_path / "pci", dev=tmp_path / "dev") == View()
