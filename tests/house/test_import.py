"""Importing the package is free: no driver is touched, nothing is connected, and what only some need is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, os, sys
events = set()
sys.addaudithook(lambda event, args: events.add(event))
import jayrun
handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
print(json.dumps({
    "modules": list(sys.modules),
    "events": list(events),
    "handles": [os.readlink(handle) for handle in handles if os.path.exists(handle)],
    "libraries": [line.split()[-1] for line in open("/proc/self/maps")],
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What a fresh process has loaded, done and opened after `import jayrun`."""
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout
    seen: dict[str, Any] = json.loads(printed)
    return seen


def test_nothing_is_loaded_that_only_some_need(imported: dict[str, list[str]]) -> None:
    assert "jayrun" in imported["modules"]
    packages = {name.split(".")[0] for name in imported["modules"]}
    assert packages.isdisjoint({"pynvml", "alembic", "mako", "typer", "rich", "numpy", "torch"})


def test_no_driver_is_touched(imported: dict[str, list[str]]) -> None:
    assert [name for name in imported["libraries"] if "libcuda" in name or "nvidia-ml" in name] == []


def test_nothing_is_connected_or_started(imported: dict[str, list[str]]) -> None:
    assert "import" in imported["events"]  # the hook was listening
    started = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.exec", "_thread.start")
    assert [event for event in imported["events"] if event.startswith(started)] == []
    assert [handle for handle in imported["handles"] if handle.startswith("socket:")] == []


def test_the_command_line_starts_without_the_binding_of_the_driver() -> None:
    program = "import sys, jayrun.cli.app; print('jayrun.devices.nvml' in sys.modules, 'pynvml' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout
    assert printed == "True False\n"
