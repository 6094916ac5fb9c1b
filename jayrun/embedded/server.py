"""Start, stop and describe the server that keeps the book."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.pq import Ping

from jayrun.embedded import alive, cluster
from jayrun.embedded.accounts import Account, service_account
from jayrun.embedded.books import BookAddress, book_at, host_exists, locate, place_for, without_password
from jayrun.embedded.places import Place
from jayrun.embedded.programs import find_bindir, programs_for
from jayrun.errors import BookUnreachable, ServerError
from jayrun.settings import Settings

START_SECONDS = 120.0  # recovery after a crash reads the log of up to some minutes of work
STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))  # with the seconds to wait

log = logging.getLogger("jayrun")


@dataclass(frozen=True, slots=True)
class Status:
    """What is known about a book's server.

    `book`: which one. `server_version`: such as "18.6", None unless it answers. `pid`: the postmaster's, None unless
    it runs and this user may stop it. `data_folder`, `log_file`: None when the server is not one of ours.
    `held_down`: whether it was stopped by `down` and waits for `up`.
    """

    book: BookAddress
    server_version: str | None
    pid: int | None
    data_folder: Path | None
    held_down: bool
    log_file: Path | None


def ensure(settings: Settings) -> BookAddress:
    """The book that applies, its server started if it is one of ours, is not running and was not stopped by `down`.

    Raises `BookUnreachable` when it is held down or somebody else must start it, `ServerError` when it cannot start.
    """
    if settings.database_url is not None:
        return locate(settings)
    place = place_for(settings)
    if not _is_up(place):
        _start(place, settings, lift_hold=False)
    return book_at(place)


def up(settings: Settings) -> BookAddress:
    """Start the server of the book that applies, and end what `down` decreed; nothing happens if it runs.

    Raises `BookUnreachable` when somebody else must start it, `ServerError` when it cannot start.
    """
    if settings.database_url is not None:
        book = locate(settings)
        if not book.running:
            raise BookUnreachable(
                f"no server answers at {without_password(book.url)}: start it, or unset JAYRUN_DATABASE_URL"
            )
        return book
    place = place_for(settings)
    if not _is_up(place) or (_is_held_down(place) and _manages(place)):
        _start(place, settings, lift_hold=True)
    return book_at(place)


def down(settings: Settings) -> bool:
    """Stop the server and let nothing but `up` start it again; False when it was not running.

    Every session is ended; what is committed stays. Raises `ServerError` when this user may not stop it, it is not
    one of ours, or its processes do not end.
    """
    if settings.database_url is not None:
        raise ServerError("JAYRUN_DATABASE_URL is set, and its server is not jayrun's to stop: unset the variable")
    place = place_for(settings)
    if not _manages(place):
        raise ServerError(_obstacle(place) or f"the server in {place.root} is not yours to stop: {_how(place, 'down')}")
    if not place.data.exists():
        return False
    account = _account(place)
    with alive.locked(place.start_lock, wait_seconds=START_SECONDS):
        place.held_down.touch()
        if not alive.is_alive(place):
            return False
        for signal_number, wait_seconds in STOP_STEPS:
            postmaster, others = alive.processes(place, account)
            alive.kill([] if postmaster is None else [postmaster], signal_number)
            if signal_number is signal.SIGKILL:
                alive.kill(others)
            if alive.wait_until_gone(place, account, wait_seconds=wait_seconds):
                return True
    raise ServerError(
        f"the server in {place.root} does not end: see {place.logs}, and which process has files open there"
    )


def status(settings: Settings) -> Status:
    """What is known about the book that applies; starts nothing."""
    book = locate(settings)
    version = _server_version(book) if book.running else None
    if book.kind == "url":
        return Status(book, version, None, None, False, None)
    place = place_for(settings)
    pid = None
    if book.running and _manages(place):
        pid, _ = alive.processes(place, _account(place))
    return Status(book, version, pid, place.data, _is_held_down(place), _log_file(place))


def may_manage(settings: Settings) -> bool:
    """Whether this process's user may start and stop the server of the book that applies."""
    return settings.database_url is None and _manages(place_for(settings))


def how_to_start(settings: Settings) -> str:
    """That the server of the book that applies (no URL's) is not running, and what to run or to change about it."""
    place = place_for(settings)
    return _obstacle(place) or f"the server in {place.root} is not running: {_how(place, 'up')}"


def hindrance(settings: Settings) -> str | None:
    """Why `ensure` would not start the server of the book that applies (no URL's), and what to do; None: it tries."""
    place = place_for(settings)
    if (obstacle := _obstacle(place)) is not None:
        return obstacle
    if not _manages(place):
        return how_to_start(settings)
    if _is_held_down(place):
        return _held(place)
    try:
        find_bindir(settings)
    except ServerError as error:
        return str(error)
    return None


def forgotten(settings: Settings) -> Path | None:
    """The folder of this user's private server when it still runs though the host's book applies, else None."""
    if settings.database_url is not None or place_for(settings).kind != "host":
        return None
    private = Place.at("private", settings.data_home / "jayrun")
    return private.root if private.ping() is Ping.OK else None


def _manages(place: Place) -> bool:
    if _obstacle(place) is not None:
        return False
    if os.geteuid() == 0:
        return True
    try:
        return place.data.stat().st_uid == os.geteuid()
    except PermissionError:
        return False
    except FileNotFoundError:
        return place.kind != "host"


def _obstacle(place: Place) -> str | None:
    """Why nothing can be made at `place`, and what to do; None where nothing is in the way, or has to be made."""
    if os.path.exists(place.data) or (place.kind == "host" and os.geteuid() != 0):
        return None
    existing = next(folder for folder in (place.root, *place.root.parents) if os.path.exists(folder))
    if not existing.is_dir():
        return f"{existing} is a file where a folder is expected: remove it, or set JAYRUN_HOME to another folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if read_only else errno.EACCES)
        return f"cannot write in {existing} ({reason}): set JAYRUN_HOME to a folder of yours"
    return None


def _is_held_down(place: Place) -> bool:
    return os.path.exists(place.held_down)


def _is_up(place: Place) -> bool:
    """Whether the server takes sessions; waits for one that is about to."""
    deadline = time.monotonic() + START_SECONDS
    while (answer := place.ping()) is Ping.REJECT and time.monotonic() < deadline:
        time.sleep(alive.POLL_SECONDS)
    return answer is Ping.OK


def _start(place: Place, settings: Settings, *, lift_hold: bool) -> None:
    if (obstacle := _obstacle(place)) is not None:
        raise ServerError(obstacle)
    if not _manages(place):
        raise BookUnreachable(f"the server in {place.root} is not running: {_how(place, 'up')}")
    if _is_held_down(place) and not lift_hold:
        raise BookUnreachable(_held(place))
    if place.kind == "private" and host_exists(settings):
        raise ServerError("this host has a book of its own, so no private one is started beside it: try again")
    account = _account(place)
    _make_root(place)
    with alive.locked(place.start_lock, wait_seconds=START_SECONDS) as lock_handle:
        if lift_hold:
            place.held_down.unlink(missing_ok=True)
        elif _is_held_down(place):
            raise BookUnreachable(_held(place))
        if place.ping() is not Ping.OK:
            _prepare(place, account)
            _start_locked(place, settings, account=account, lock_handle=lock_handle)


def _start_locked(place: Place, settings: Settings, *, account: Account, lock_handle: int) -> None:
    programs = programs_for(account, bindir=find_bindir(settings), copies=place.root)
    if not place.data.exists():
        cluster.create_cluster(place, programs=programs, account=account, lock_handle=lock_handle)
        if place.kind == "private":
            log.warning("private book: other users are not seen")
    cluster.check_version(place, programs)
    handle = alive.claim(place, account, wait_seconds=START_SECONDS)
    if handle is None:
        return  # started by somebody who was killed before they could say so
    try:
        cluster.remove_leftovers(place)
        command = cluster.server_command(place, programs, configuration={})
        output = account.make_file(place.start_log, mode=0o644)
        try:
            os.ftruncate(output, 0)
            # The shell leaves the server behind and ends: it belongs to nobody, so no worker's exit touches it.
            leave = ["/bin/sh", "-c", '"$@" &', "sh", *command]
            account.spawn(leave, output=output, keep_fds=[handle], new_session=True).wait()
        finally:
            os.close(output)
    finally:
        os.close(handle)
    deadline = time.monotonic() + START_SECONDS
    while place.ping() is not Ping.OK:
        if not alive.is_alive(place):
            raise ServerError(f"the server in {place.root} did not start: {_last_words(place)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the server in {place.root} is not ready after {START_SECONDS:.0f} s: see {place.logs}")
        time.sleep(alive.POLL_SECONDS)


def _account(place: Place) -> Account:
    """Who runs the server at `place`: whoever owns its data, else its folder, else this caller's service account."""
    if os.geteuid() == 0:
        for path in (place.data, place.root):
            if path.exists() and path.stat().st_uid != 0:
                return Account.from_uid(path.stat().st_uid)
    return service_account(create=place.kind == "host")


def _make_root(place: Place) -> None:
    try:
        place.root.mkdir(parents=True)
        place.root.chmod(0o755 if os.geteuid() == 0 else 0o700)  # as root the service account must get in
    except FileExistsError:
        return
    except OSError as error:
        raise ServerError(f"cannot make {place.root}: {error.strerror}; choose another folder") from error


def _prepare(place: Place, account: Account) -> None:
    """Make what stands around the data folder."""
    if not account.can_enter(place.root):
        raise ServerError(
            f"the account {account.name}, which runs PostgreSQL for root, cannot enter {place.root}: let others pass "
            "through the folders on the way there (chmod o+x), or choose another one"
        )
    account.make_folder(place.logs, mode=0o700)
    account.make_folder(place.sockets, mode=0o755)
    for path in (place.start_lock, place.alive_lock):
        os.close(account.make_file(path, mode=0o600))


def _held(place: Place) -> str:
    return f"the book was stopped with `jayrun db down` and stays so until somebody says otherwise: {_how(place, 'up')}"


def _how(place: Place, command: str) -> str:
    if place.kind == "host" and os.geteuid() != 0:
        return f"`sudo jayrun db {command}`"
    return f"`jayrun db {command}`" if _manages(place) else f"`jayrun db {command}`, run by its owner or root"


def _last_words(place: Place) -> str:
    """The end of what the server printed, from the log it was writing when it ended."""
    texts = [path.read_text(errors="replace").strip() for path in (place.start_log, _log_file(place)) if path.exists()]
    return "\n".join(dict.fromkeys(text[-1500:] for text in texts))


def _log_file(place: Place) -> Path:
    """The file the server writes its log to now."""
    try:
        current = (place.data / "current_logfiles").read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return place.start_log
    return Path(current.partition(" ")[2].strip() or place.start_log)


def _server_version(book: BookAddress) -> str | None:
    try:
        with psycopg.connect(book.url, connect_timeout=5) as connection:
            return connection.info.parameter_status("server_version")
    except psycopg.OperationalError:
        return None
