"""What the tests of the embedded server share: a folder every account can enter, callers in their own processes."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest

import jayrun
from jayrun.embedded.accounts import Account
from jayrun.embedded.places import Place
from jayrun.settings import Settings, child_environment

T = TypeVar("T")

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root changes accounts")

IMPORTS = """
import json, logging, os, signal, sys, time, traceback
from pathlib import Path
from typing import TypeVar
import psycopg
from jayrun import embedded
from jayrun.settings import Settings
settings = Settings.load()
"""


def new_folder() -> Path:
    """A folder that every account can enter (pytest's are closed), in memory where there is room: clusters are big."""
    memory = Path("/dev/shm")
    facts = os.statvfs(memory) if memory.is_dir() else None
    roomy = facts and facts.f_bavail * facts.f_frsize > 2**30 and not facts.f_flag & os.ST_NOEXEC
    folder = Path(tempfile.mkdtemp(prefix="jayrun-test-", dir=memory if roomy else "/tmp"))
    folder.chmod(0o755)
    return folder


def wait_for(condition: Callable[[], T], *, seconds: float = 15) -> T:
    """The first true answer of `condition`; fails when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.005)
    return answer


def exists(pid: int) -> bool:
    """Whether a process that is not a zombie has this pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_lines() -> dict[int, bytes]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def shared_memory(pid: int) -> set[Path]:
    """PostgreSQL's files in /dev/shm that a process uses; a server that is killed leaves them to its next start."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {Path(word) for word in maps.split() if word.startswith("/dev/shm/PostgreSQL.")}


def query(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def account_named(name: str) -> Account:
    entry = pwd.getpwnam(name)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


@dataclass(frozen=True)
class Room:
    """A folder for the servers of one test, which every account can enter; its processes end with the test."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that keep a caller inside the room, without JAYRUN_HOME."""
        return {
            "JAYRUN_STATE_ROOT": str(self.folder / "state"),
            "JAYRUN_RUN_ROOT": str(self.folder / "run"),
            "XDG_DATA_HOME": str(self.folder / "data-home"),
        }

    def settings(self, **more: str) -> Settings:
        return Settings.load({**self.environment, "JAYRUN_HOME": str(self.home), **more})

    def place(self) -> Place:
        return Place.at("home", self.home)

    def caller(
        self, code: str, *, account: Account | None = None, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A Python process that runs `code` after `IMPORTS`; in JAYRUN_HOME unless `environment` says otherwise."""
        told = {**self.environment, "JAYRUN_HOME": str(self.home), **(environment or {})}
        inherited = child_environment({"PYTHONPATH": os.pathsep.join(_import_paths())}, without=("JAYRUN_", "XDG_"))
        return subprocess.Popen(
            [_interpreter(account), "-W", "error", "-c", IMPORTS + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
            env={**inherited, **{name: value for name, value in told.items() if value}},
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )

    def call(
        self, code: str, *, account: Account | None = None, environment: dict[str, str] | None = None
    ) -> tuple[str, str]:
        """What a caller that must succeed printed to stdout and to stderr."""
        with self.caller(code, account=account, environment=environment) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out.strip(), err


def _import_paths() -> list[str]:
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return [str(Path(next(iter(jayrun.__path__))).parent), *packages]


def _interpreter(account: Account | None) -> str:
    """A Python of this version that the account can reach: ours may lie in root's home folder."""
    if account is None:
        return sys.executable
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            if account.run([path, "-c", "import ssl, ctypes"])[0] == 0:
                return path
        except (PermissionError, FileNotFoundError):
            continue
    pytest.skip(f"no Python that {account.name} can run")
