"""What the kernel says about processes: who this one is, and whether a recorded one still lives. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jayrun.domain.liveness import (
    Incarnation,
    Inhabitant,
    Sighting,
    Surroundings,
    Verdict,
    find_below,
    judge,
    judge_below,
)

_PROC = Path("/proc")
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's PROC_PID_INIT_INO
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_WRAPPED_TICKS = 2**64 * _TICKS_PER_SECOND // 10**9  # what the kernel shows of a start before the clock's zero
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


@cache
def _proc_is_ours() -> bool:
    """Whether /proc was mounted for this process's pid namespace, and not for one above it."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


@cache
def _boottime_offset_ticks() -> int | None:
    """By how much the time namespace of this process shifts the start times that it reads. None: nobody can say."""
    try:
        # The file is about the namespace of its children, which for most is their own.
        if os.stat("/proc/self/ns/time").st_ino != os.stat("/proc/self/ns/time_for_children").st_ino:
            return None
        seconds, nanoseconds = map(int, _field("self/timens_offsets", "boottime"))
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    except (OSError, ValueError):
        return None
    return (seconds * 10**9 + nanoseconds) * _TICKS_PER_SECOND // 10**9


# A child may be the first in a namespace of its own.
os.register_at_fork(after_in_child=pid_namespace.cache_clear)
os.register_at_fork(after_in_child=_proc_is_ours.cache_clear)
os.register_at_fork(after_in_child=_boottime_offset_ticks.cache_clear)


def start_ticks(pid: int) -> int | None:
    """When a process of this pid namespace started, in clock ticks since boot, whatever time namespace this process is
    in. None when it cannot be read."""
    return _look_at(pid)[0]


def is_absent(pid: int) -> bool:
    """Whether the kernel says that no such process exists, or that only its exit status is left (a zombie)."""
    return _look_at(pid)[1]


def incarnation(pid: int | None = None) -> Incarnation:
    """The identity of a living process of this pid namespace (default: this one), as the book records it.

    Raises ProcessLookupError when the process is gone, or when its start cannot be read.
    """
    pid = os.getpid() if pid is None else pid
    if (ticks := start_ticks(pid)) is None:
        if _boottime_offset_ticks() is None:
            raise ProcessLookupError(
                "nobody can say by how much the clock of this process's time namespace is shifted: it has changed that "
                "of its children, so use jayrun in a child (unshare --time --fork)"
            )
        raise ProcessLookupError(f"no process {pid}")
    return Incarnation(boot_id=boot_id(), pid_namespace=pid_namespace(), pid=pid, start_ticks=ticks)


def inhabitant(pid: int) -> Inhabitant | None:
    """A process of this pid namespace as it would record itself, which is by the innermost one that it is in.

    None when it is not there, or /proc is not ours.
    """
    fields = _stat(str(pid)) if _proc_is_ours() else None
    if fields is None:
        return None
    try:
        numbers = _field(f"{pid}/status", "NSpid:") or [str(pid)]
        namespace: int | None = os.stat(_PROC / str(pid) / "ns/pid").st_ino
    except PermissionError:  # another user's
        namespace = pid_namespace() if len(numbers) == 1 else None
    except OSError:
        return None
    return Inhabitant(pid, int(numbers[-1]), namespace, _started(fields), _is_over(str(pid), fields))


def sees_the_drivers_pids() -> bool:
    """Whether the process numbers that a device driver tells are those that this process sees: they count in the
    kernel's first pid namespace."""
    return _proc_is_ours() and pid_namespace() == _FIRST_PID_NAMESPACE


def verdict(recorded: Incarnation) -> Verdict:
    """The kernel's judgement of a process of this very pid namespace: alive or dead; of any other it is unseen.

    It is asked behind the gate, so it reads one file (some 10 microseconds).
    """
    ticks, absent = _look_at(recorded.pid)
    return judge(recorded, Sighting(boot_id(), pid_namespace(), ticks, absent))


_seen_before: dict[Incarnation, int] = {}


def verdicts(recorded: Sequence[Incarnation]) -> list[Verdict]:
    """The kernel's complete judgement: processes of other pid namespaces are looked for in those below this one.

    Everyone recorded must have been alive already when this is called. It goes through /proc, once, if somebody is not
    where this process saw it the last time.
    """
    global _seen_before
    found = {each: verdict(each) for each in recorded}
    before, _seen_before = _seen_before, {}
    around: Surroundings | None = None
    for each, judged in list(found.items()):
        if judged is not Verdict.UNSEEN or each.boot_id != boot_id():
            continue
        view = Surroundings(_inhabitants(str(before.get(each, "")))[0], sees_all=False, is_first=False)
        if (itself := find_below(each, view.inhabitants)) is None:
            view = around = around or _surroundings()
            itself = find_below(each, view.inhabitants)
        if itself is not None:
            _seen_before[each] = itself.seen_as
        found[each] = judge_below(each, view)
    return [found[each] for each in recorded]


def _look_at(pid: int) -> tuple[int | None, bool]:
    """When the process of this pid namespace started, in clock ticks since boot (None: it cannot be read), and whether
    it is absent."""
    place = str(pid) if _proc_is_ours() else _place_in_proc(pid)
    if place is not None and (fields := _stat(place)) is not None:
        return _started(fields), _is_over(place, fields)
    try:  # gone, or not ours to see
        os.kill(pid, 0)
    except ProcessLookupError:
        return None, True
    except PermissionError:
        pass
    return None, False


def _place_in_proc(pid: int) -> str | None:
    """What a process is called in a /proc of another pid namespace."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        return next(iter(_field(f"self/fdinfo/{pidfd}", "Pid:")), None)
    except OSError:
        return None
    finally:
        os.close(pidfd)


def _surroundings() -> Surroundings:
    """What /proc shows of the pid namespaces below."""
    found, hidden = _inhabitants(*os.listdir(_PROC))
    return Surroundings(
        found,
        sees_all=not hidden and sees_other_users(),
        is_first=_proc_is_ours() and pid_namespace() == _FIRST_PID_NAMESPACE,
    )


def _inhabitants(*places: str) -> tuple[list[Inhabitant], bool]:
    """Those of these folders of /proc that are processes of pid namespaces below, and whether any would not say."""
    found, hidden = [], False
    for place in filter(str.isdigit, places):
        try:
            numbers = _field(f"{place}/status", "NSpid:")
        except PermissionError:
            hidden = True
            continue
        except OSError:  # it has ended
            continue
        if len(numbers) < 2:
            continue
        try:
            namespace = os.stat(_PROC / place / "ns/pid").st_ino
        except OSError:
            namespace = None
        fields = _stat(place)
        ticks = None if fields is None else _started(fields)
        absent = fields is not None and _is_over(place, fields)
        found.append(Inhabitant(int(place), int(numbers[-1]), namespace, ticks, absent))
    return found, hidden


def sees_other_users() -> bool:
    """Whether /proc shows us the processes of other users too: it does unless it was mounted with `hidepid`, which
    would hide pid 1 from whoever may not look into it."""
    me = os.geteuid()
    try:
        owner = os.stat("/proc/1").st_uid
    except OSError:
        return False
    return (me == 0 or owner != me) and _stat("1") is not None


def _is_over(place: str, fields: list[bytes]) -> bool:
    """Whether only the exit status is left of the process (a zombie)."""
    if fields[0] not in (b"Z", b"X"):
        return False
    # The first thread of a living process may have ended before the others; then it looks like a zombie too.
    try:
        return len(os.listdir(_PROC / place / "task")) <= 1
    except OSError:
        return False


def _stat(place: str) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on: the command before them may hold spaces and brackets."""
    try:
        descriptor = os.open(f"/proc/{place}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        stat = os.read(descriptor, 4096)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return stat[stat.rindex(b")") + 2 :].split()


def _started(fields: list[bytes]) -> int | None:
    """The start in clock ticks since boot, of which /proc shows what the reader's time namespace makes of it."""
    if (offset := _boottime_offset_ticks()) is None:
        return None
    ticks = int(fields[19])
    return (ticks - _WRAPPED_TICKS if ticks > _WRAPPED_TICKS // 2 else ticks) - offset


def _field(path: str, name: str) -> list[str]:
    """The words after `name` in a file of /proc; none when it is not there. Raises OSError."""
    for line in (_PROC / path).read_text(errors="replace").splitlines():
        if line.startswith(name):
            return line.split()[1:]
    return []


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


def has_open(path: str) -> bool:
    """Whether this process has the file at `path` open."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the list itself is closed by now
                if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                    return True
    return False


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
