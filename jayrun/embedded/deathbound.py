"""Run as a program: drop root's rights, ask the kernel to be signalled when the parent dies, become the command.

Its own process rather than a hook between fork and exec, which is not safe in a program with threads. The kernel
forgets the wish when the user changes, so the order matters; exec keeps it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """`arguments`: the parent's pid, the uid and gid to run as, then the command with its arguments."""
    parent, uid, gid = map(int, arguments[:3])
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the parent died before the server was started")
    os.execv(arguments[3], arguments[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
