"""`tests/gpu_smoke.py` runs through on a stand-in as far as that goes, and fails when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpus import machine, stub_environment, uuid

from jayrun.settings import child_environment

SCRIPT = Path(__file__).parents[1] / "gpu_smoke.py"


def smi(folder: Path, *lines: str) -> str:
    """A folder with an `nvidia-smi` that prints these."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "".join(f"{line}\n" for line in lines) + "END\n")
    tool.chmod(0o755)
    return str(tool.parent)


def smoke(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    stub = stub_environment(folder, machine(2))
    path = f"{smi(folder, *lines)}:/usr/bin:/bin"
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=child_environment({**stub.environment, "PATH": path}),
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )


def line(number: int, name: str = "NVIDIA H100 80GB HBM3") -> str:
    return f"{number}, {uuid(number)}, {name}, {80 * 10**9 / 2**20:.0f}, 00000000:{16 + number:02X}:00.0, Disabled"


@pytest.mark.slow
def test_it_passes_where_both_say_the_same(tmp_path: Path) -> None:
    done = smoke(tmp_path, line(1), line(0))
    assert done.returncode == 0, done.stdout
    words = [each.split()[0] for each in done.stdout.splitlines()]
    assert words == [*["ok"] * 4, "skipped", "ok"]  # PyTorch is not there, or finds no GPU


@pytest.mark.slow
def test_it_fails_where_they_differ(tmp_path: Path) -> None:
    done = smoke(tmp_path, line(0), line(1, "NVIDIA A100"))
    assert done.returncode == 1
    assert "FAILED   discovery finds what nvidia smi shows: NVIDIA H100" in done.stdout


def test_without_nvidia_smi_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=child_environment({"PATH": str(tmp_path)}),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "skipped  there is a driver: there is no nvidia-smi here\n")
