"""A room for each test, without a process left in it afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_helpers import ROOT, Room, account_named, command_lines, new_folder, shared_memory, wait_for

from jayrun import embedded
from jayrun.embedded import alive
from jayrun.embedded.accounts import Account


@pytest.fixture
def room() -> Iterator[Room]:
    folder = new_folder()
    yield Room(folder)
    for pid, command in command_lines().items():
        if os.fsencode(folder) in command and pid != os.getpid():
            left = shared_memory(pid)
            alive.kill([pid], signal.SIGKILL)
            for path in left:
                path.unlink(missing_ok=True)
    for lock in folder.rglob("alive.lock"):
        handle = wait_for(lambda lock=lock: alive.try_lock(lock))
        os.close(handle)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster_home() -> Iterator[Path]:
    """A JAYRUN_HOME whose server was made and stopped, for copying: making one takes most of a second."""
    folder = new_folder()
    settings = Room(folder).settings()
    embedded.up(settings)
    embedded.down(settings)
    Room(folder).place().held_down.unlink()
    yield folder / "home"
    shutil.rmtree(folder)


@pytest.fixture
def made(room: Room, cluster_home: Path) -> Room:
    """A room whose JAYRUN_HOME has a server that is not running."""
    subprocess.run(["cp", "-a", "--reflink=auto", cluster_home, room.home], check=True)
    return room


@pytest.fixture
def stranger() -> Account | None:
    """Somebody who is neither root nor the owner of the host's server; None when this user is one already."""
    return account_named("nobody") if ROOT else None
