"""The command line, run in this process; and other processes that hold capacity while it looks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from cli_helpers import COMMAND, Holder, Jayrun, Outcome
from fleet import gpus

from jayrun.cli.app import main
from jayrun.settings import child_environment
from jayrun.store import devices, holders
from jayrun.store.transactions import Book


@pytest.fixture
def jayrun(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Jayrun:
    """`jayrun("leases", "list")` runs it on the book at `url`, through the entry of the script."""
    for name in ("JAYRUN_HOME", "JAYRUN_HOST_ID", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAYRUN_DATABASE_URL", url)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets it

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["jayrun", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return Outcome(ended.value.code or 0, printed.out, printed.err)

    return run


@pytest.fixture
def hold(url: str) -> Iterator[Callable[..., Holder]]:
    """`hold("label", 5, 0)` starts a process that takes 5 GB, and one GPU for itself, one after the other."""
    started: list[Holder] = []

    def start(label: str, *memory_gb: float) -> Holder:
        started.append(Holder(url, label, *memory_gb))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        assert each.process.stdin is not None
        assert each.process.stdout is not None
        each.process.stdin.close()
        each.process.stdout.close()


@pytest.fixture
def command(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`command("reconciler")` starts it in a process of its own, with pipes; killed at the end if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = child_environment({"JAYRUN_DATABASE_URL": url, "PYTHONUNBUFFERED": "1", **options.pop("env", {})})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        started.append(subprocess.Popen([*COMMAND, *arguments], text=True, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def host_id(book: Book, sql: psycopg.Connection) -> int:
    """This host in the book, with two GPUs of 24 GB and a short tick."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    key = holders.attest_host(book, None)
    devices.declare(book, key, gpus(2))
    return key
