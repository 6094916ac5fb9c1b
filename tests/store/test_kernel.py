"""What the kernel says: who lives, who is dead, and who only looks dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import PATIENCE

from jayrun import kernel
from jayrun.domain.liveness import Verdict

# The first thread ends, another goes on: `ps` shows the process as a zombie, but it lives.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_living_process_is_alive_stopped_or_not() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        who = kernel.incarnation(child.pid)
        assert kernel.verdict(who) is Verdict.ALIVE
        child.send_signal(signal.SIGSTOP)
        assert kernel.verdict(who) is Verdict.ALIVE
        child.kill()


def test_a_zombie_and_a_gone_process_are_dead() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        who = kernel.incarnation(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not looked
        assert kernel.verdict(who) is Verdict.DEAD
    assert kernel.verdict(who) is Verdict.DEAD
    with pytest.raises(ProcessLookupError):
        kernel.incarnation(child.pid)


def test_a_process_whose_first_thread_ended_is_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        who = kernel.incarnation(child.pid)
        for _ in range(int(PATIENCE * 100)):
            fields = kernel._stat(child.pid)
            assert fields is not None
            if fields[0] == b"Z":
                break
            os.sched_yield()
            signal.sigtimedwait([], 0.01)
        else:
            raise AssertionError("its first thread did not end, so nothing was shown")
        assert kernel.verdict(who) is Verdict.ALIVE
        child.kill()


def test_a_reused_pid_is_another_process_and_another_boot_or_namespace_is_unseen() -> None:
    me = kernel.incarnation()
    assert kernel.verdict(me) is Verdict.ALIVE
    assert kernel.verdict(replace(me, start_ticks=me.start_ticks - 2)) is Verdict.DEAD
    assert kernel.verdict(replace(me, boot_id="another")) is Verdict.UNSEEN
    assert kernel.verdict(replace(me, pid_namespace=1)) is Verdict.UNSEEN
