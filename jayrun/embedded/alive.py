"""Which processes of a server are alive, told by a lock they inherit and never by a remembered pid."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.pq import Ping

from jayrun.embedded.accounts import Account
from jayrun.embedded.places import Place
from jayrun.errors import ServerError

POLL_SECONDS = 0.01


def try_lock(path: Path) -> int | None:
    """A handle holding the lock on the file `path` (made if missing), or None when somebody else holds it.

    The lock lasts until the handle and every copy that a child inherited are closed. Raises `ServerError` where the
    file cannot be opened or its file system has no locks.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ServerError(f"cannot open {path}: {error.strerror}; see who owns the folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise ServerError(f"cannot lock {path}: {error.strerror}; choose a folder on another file system") from error
    return handle


@contextmanager
def locked(path: Path, *, wait_seconds: float) -> Iterator[int]:
    """Hold the lock on `path`; raises `ServerError` when it is not free within `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while (handle := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise ServerError(f"{path} has been locked for {wait_seconds:.0f} s: another jayrun is stuck there; end it")
        time.sleep(POLL_SECONDS)
    try:
        yield handle
    finally:
        # Unlocked by word, not only by closing: a child forked meanwhile by another thread has a copy of the handle.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def is_alive(place: Place) -> bool:
    """Whether any process of the server at `place` is alive."""
    handle = try_lock(place.alive_lock)
    if handle is None:
        return True
    os.close(handle)
    return False


def claim(place: Place, account: Account, *, wait_seconds: float) -> int | None:
    """A handle on the lock of life, to be inherited by a new server; None when a server is up after all.

    Waits for a server that is starting or stopping. What outlived its postmaster is killed: such processes serve
    nobody, and a new server must not start beside them. Raises `ServerError` after `wait_seconds`.
    """
    deadline = time.monotonic() + wait_seconds
    while (handle := try_lock(place.alive_lock)) is None:
        if place.ping() is Ping.OK:
            return None
        postmaster, others = processes(place, account)
        if postmaster is None:
            kill(others)
        if time.monotonic() > deadline:
            who = f"process {postmaster}" if postmaster else "a process that is not PostgreSQL, or not visible here,"
            raise ServerError(
                f"the server in {place.root} is alive ({who} holds {place.alive_lock}) but has not answered for "
                f"{wait_seconds:.0f} s: see {place.logs}; `jayrun db down` ends it"
            )
        time.sleep(POLL_SECONDS)
    return handle


def wait_until_gone(place: Place, account: Account, *, wait_seconds: float) -> bool:
    """Wait for the last process of the server to end; False when one is left after `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while is_alive(place):
        postmaster, others = processes(place, account)
        if postmaster is None:
            kill(others)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def processes(place: Place, account: Account) -> tuple[int | None, list[int]]:
    """The postmaster's pid, if it lives, and the pids of its children, as the kernel knows them now.

    Told by the account, the data folder among the arguments, and the cluster's name in the title. Nothing is
    believed that was written down earlier, so a pid that was used again is never taken for ours.
    """
    postmasters: list[int] = []
    children: list[int] = []
    title = f"postgres: {place.cluster_name}: ".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != account.uid:
                continue
            command = Path(entry.path, "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or hidden and so not ours
        if command.startswith(title):
            children.append(int(entry.name))
        elif command.split(b"\0")[1:3] == [b"-D", os.fsencode(place.data)]:
            postmasters.append(int(entry.name))
    # A child looks like its postmaster until it has set its title; the postmaster was there first.
    postmaster = min(postmasters, key=_start_ticks, default=None)
    return postmaster, children + [pid for pid in postmasters if pid != postmaster]


def kill(pids: list[int], signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to those of `pids` that still exist."""
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 1 << 62
    return int(stat.rpartition(")")[2].split()[19])
