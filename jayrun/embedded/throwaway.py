"""A server for tests and demos that ends with the process that made it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

from psycopg.pq import Ping

from jayrun.embedded import alive, cluster, deathbound
from jayrun.embedded.accounts import Account, service_account
from jayrun.embedded.places import OWNER_ROLE, TEMPORARY, Place
from jayrun.embedded.programs import Programs, find_bindir, programs_for
from jayrun.errors import ServerError
from jayrun.settings import Settings

START_SECONDS = 60.0
STOP_SECONDS = 30.0


class Throwaway:
    """A running server; as a context manager it is stopped at the end. Made by `start_throwaway`."""

    def __init__(
        self,
        place: Place,
        *,
        programs: Programs,
        account: Account,
        configuration: Mapping[str, str],
        temporary: Collection[Path],
    ) -> None:
        self._place = place
        self._programs = programs
        self._account = account
        # Shared memory in files of the data folder: in /dev/shm it would outlive a server that is killed.
        self._configuration = {"logging_collector": "off", "dynamic_shared_memory_type": "mmap", **configuration}
        self._process: subprocess.Popen[str] | None = None
        for folder in temporary:
            weakref.finalize(self, _remove, folder, os.getpid())

    @property
    def url(self) -> str:
        """The address of the database `jayrun`, as its owner."""
        return self._place.url(role=OWNER_ROLE)

    @property
    def bindir(self) -> Path:
        """The folder of the programs that the server runs with: psql, pg_dump and so on."""
        return self._programs.bindir

    @property
    def data_folder(self) -> Path:
        """The data folder; once the server is stopped it may be the template of another one."""
        return self._place.data

    @property
    def log_file(self) -> Path:
        """What the server wrote to its log since it was first started."""
        return self._place.start_log

    @property
    def pid(self) -> int | None:
        """The postmaster's pid, or None while it is not running."""
        return self._process.pid if self._process is not None and self._running() else None

    def start(self) -> None:
        """Start it again after `stop` or `kill`; does nothing while it runs.

        Only from the main thread: the kernel ends the server with the thread that started it. Raises `ServerError`.
        """
        if self._running():
            return
        if threading.current_thread() is not threading.main_thread():
            raise ServerError("start a throwaway server from the main thread: it ends with the thread that starts it")
        handle = alive.claim(self._place, self._account, wait_seconds=STOP_SECONDS)
        if handle is None:
            raise ServerError(f"another server already runs in {self._place.root}: choose another folder")
        cluster.remove_leftovers(self._place)
        command = cluster.server_command(self._place, self._programs, configuration=self._configuration)
        wrapper = [sys.executable, "-I", "-S", deathbound.__file__, os.getpid(), self._account.uid, self._account.gid]
        output = self._account.make_file(self._place.start_log, mode=0o644)
        try:
            self._process = Account.from_uid(os.geteuid()).spawn(
                [str(arg) for arg in (*wrapper, *command)],
                output=output,
                keep_fds=[handle],
                new_session=True,  # Ctrl-C in the terminal is for the parent alone
            )
        finally:
            os.close(output)
            os.close(handle)
        deadline = time.monotonic() + START_SECONDS
        while self._place.ping() is not Ping.OK:
            if not self._running() or time.monotonic() > deadline:
                self.kill()
                tail = self._place.start_log.read_text(errors="replace")[-2000:]
                raise ServerError(f"the throwaway server in {self._place.root} did not start:\n{tail}")
            time.sleep(alive.POLL_SECONDS)

    def stop(self) -> None:
        """Stop it with a checkpoint, ending every session; the data stay."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL to the postmaster, as a crash would; the next start recovers."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop at once, without a checkpoint and cutting every session, then start on the same data."""
        self._end(signal.SIGQUIT)
        self.start()

    def __enter__(self) -> Throwaway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self, signal_number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal_number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not alive.wait_until_gone(self._place, self._account, wait_seconds=STOP_SECONDS):
            raise ServerError(f"processes of the throwaway server in {self._place.root} do not end")


def start_throwaway(
    folder: Path,
    *,
    settings: Settings,
    configuration: Mapping[str, str] | None = None,
    template: Path | None = None,
) -> Throwaway:
    """Start a server in `folder` that dies with this process, however that ends; to be called from the main thread.

    `configuration` goes over the server's settings, for example `{"fsync": "off"}`. `template` is the data folder of
    a throwaway that was stopped; it is copied instead of making a new cluster. A server that was in `folder` before
    is started again. As root the programs run as `jayrun`, `postgres` or `nobody`; where that account cannot enter
    `folder`, a folder in /tmp is used instead and removed at the end of this process. Raises `ServerError`.
    """
    account = service_account(create=False)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    temporary: set[Path] = set()
    if not account.can_enter(folder):
        folder = Path(tempfile.mkdtemp(prefix="jayrun-throwaway-", dir=TEMPORARY))
        folder.chmod(0o755)
        temporary.add(folder)
    place = Place.at("home", folder)
    if place.sockets.parent == TEMPORARY:
        temporary.add(place.sockets)
    for path in (place.sockets, place.logs):
        account.make_folder(path, mode=0o755)
    programs = programs_for(account, bindir=find_bindir(settings), copies=folder)
    if not place.data.exists():
        if template is None:
            cluster.create_cluster(place, programs=programs, account=account, durable=False)
        else:
            cluster.copy_cluster(template, place, account=account)
    cluster.check_version(place, programs)
    server = Throwaway(
        place, programs=programs, account=account, configuration=configuration or {}, temporary=temporary
    )
    server.start()
    return server


def _remove(folder: Path, maker_pid: int) -> None:
    """Remove `folder`, but not when a forked child of its maker comes to its end."""
    if os.getpid() == maker_pid:
        shutil.rmtree(folder, ignore_errors=True)
