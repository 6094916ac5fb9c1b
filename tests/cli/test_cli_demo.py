"""`jayrun demo`, as a program, in a terminal, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from cli_helpers import COMMAND, in_terminal, wait_for

from jayrun.settings import child_environment


def session_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[3])


def left_over(session: int) -> list[int]:
    """The processes of a session that are still there."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and session_of(int(name)) == session]


def test_nothing_is_lost_though_a_worker_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--seconds", "4", "--workers", "6", "--seed", "7", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment({"TMPDIR": str(tmp_path)}),
        start_new_session=True,
    ) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["ok"] is True
    assert summary["complaints"] == []
    assert (summary["seed"], summary["workers"], summary["seconds"]) == (7, 6, 4.0)
    assert summary["requests"] > 12
    assert summary["leases"] >= summary["requests"] - 1  # the killed one may have waited
    assert summary["reclaimed_leases"] >= 1
    assert 0 < summary["reclaim_seconds"] < 5
    assert (summary["violations"], summary["reserved_bytes"], summary["live_leases"]) == (0, 0, 0)
    assert "with SIGKILL" in err
    assert "its lease was reclaimed" in err
    assert "0 violations" in err
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not left_over(process.pid))


def test_a_terminal_gets_a_live_table() -> None:
    code, shown = in_terminal("demo", "--seconds", "2", "--workers", "4", columns=100, env={})
    assert code == 0, shown
    assert shown.count("█") > 24
    assert "░" in shown
    for words in ("gpu 3", "24 GB", "OPERATOR", "worker 1", "with SIGKILL", "\x1b["):
        assert words in shown
    assert "violations: 0\r\n" in shown.rpartition("still reserved")[2]
    kept = shown.rpartition("DEVICE")[2]  # the last picture: nothing is drawn over it
    assert "POS" in kept
    assert "\x1b[1A" not in kept


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--seconds", "60", "--workers", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment({"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "violations" in line:
                break
        assert len(left_over(process.pid)) > 3
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everyone
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "stopped; the demo's database is removed\n"
    assert list(tmp_path.iterdir()) == []
    wait_for(lambda: not left_over(process.pid))
