"""What the kernel says about processes: who this one is, and whether a recorded one still lives. Linux only."""

from __future__ import annotations

import ctypes
import getpass
import os
import select
import signal
import socket
import sys
from functools import cache
from pathlib import Path

from jayrun.domain.liveness import Incarnation, Sighting, Verdict, judge

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@cache
def boot_id() -> str:
    """The kernel's id of this boot; another one after every restart of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """The installation's id from /etc/machine-id, else the boot id (a container image without one)."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            if found := Path(path).read_text().strip():
                return found
        except OSError:
            continue
    return boot_id()


def host_name() -> str:
    return socket.gethostname()


def user_name() -> str:
    """The login name of this process's user, else its number (a uid without a passwd entry)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def command_line() -> str:
    """What this process was started as, shortened to 200 characters for people."""
    return " ".join([os.path.basename(sys.argv[0] or sys.executable), *sys.argv[1:]])[:200]


@cache
def pid_namespace() -> int:
    """The inode number of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


os.register_at_fork(after_in_child=pid_namespace.cache_clear)  # a child may be the first in a namespace of its own


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat: when the process started, in clock ticks since boot. None when it cannot be read."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_absent(pid: int) -> bool:
    """Whether the kernel says that no such process exists, or that only its exit status is left (a zombie)."""
    return _is_absent(pid, _stat(pid))


def _is_absent(pid: int, fields: list[bytes] | None) -> bool:
    if fields is None:  # gone, or not ours to see
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
    if fields[0] not in (b"Z", b"X"):
        return False
    # The first thread of a living process may have ended before the others; then it looks like a zombie too.
    try:
        return len(os.listdir(_PROC / str(pid) / "task")) <= 1
    except OSError:
        return False


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on: the command before them may hold spaces and brackets."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = os.read(descriptor, 4096)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return stat[stat.rindex(b")") + 2 :].split()


def incarnation(pid: int | None = None) -> Incarnation:
    """The identity of a living process (default: this one), as the book records it.

    Raises ProcessLookupError when the process is gone.
    """
    pid = os.getpid() if pid is None else pid
    ticks = start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return Incarnation(boot_id=boot_id(), pid_namespace=pid_namespace(), pid=pid, start_ticks=ticks)


def verdict(recorded: Incarnation) -> Verdict:
    """The kernel's judgement of a recorded process: alive, dead, or unseen from here.

    It is asked behind the gate, so it reads one file (some 10 microseconds).
    """
    fields = _stat(recorded.pid)
    sighting = Sighting(
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        start_ticks=None if fields is None else int(fields[19]),
        absent=_is_absent(recorded.pid, fields),
    )
    return judge(recorded, sighting)


def kill(recorded: Incarnation) -> bool:
    """Kill a recorded process if it is alive and this process may; whether it was killed."""
    try:
        pidfd = os.pidfd_open(recorded.pid)
    except OSError:  # gone, or no process that could be named so
        return False
    try:
        # Only now is it sure that the signal goes to the process that is looked at.
        if verdict(recorded) is not Verdict.ALIVE or recorded.pid_namespace != pid_namespace():
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    except (PermissionError, ProcessLookupError):
        return False
    finally:
        os.close(pidfd)


def readable(seconds: float, *descriptors: int) -> bool:
    """Wait until one of the file descriptors is readable, at most so many seconds; whether one is.

    By poll(2): select(2) refuses descriptors from 1024 on, which a program with many open files reaches.
    """
    waiter = select.poll()
    for descriptor in descriptors:
        waiter.register(descriptor, select.POLLIN)
    return bool(waiter.poll(max(seconds, 0) * 1000))


def become_subreaper() -> None:
    """Let orphaned descendants of this process become its children, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def describe_signal(number: int) -> str:
    """The usual name of a signal, "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
