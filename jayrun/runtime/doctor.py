"""Everything that jayrun stands on, looked at once and piece by piece; nothing is started, written or repaired."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from jayrun import embedded, kernel
from jayrun.devices import nvml
from jayrun.devices.visible import see
from jayrun.domain.devices import Backend, Device
from jayrun.domain.hardware import Reading
from jayrun.domain.health import (
    Finding,
    KnownDevice,
    Remark,
    Server,
    failed,
    judge_access,
    judge_clock,
    judge_connections,
    judge_devices,
    judge_driver,
    judge_hardware,
    judge_holders,
    judge_host,
    judge_listener,
    judge_server,
    judge_variables,
    ok,
    skipped,
    warning,
)
from jayrun.domain.names import Named
from jayrun.domain.units import format_bytes
from jayrun.errors import BookUnreachable, JayrunError
from jayrun.runtime import installation
from jayrun.runtime.order import misread_order
from jayrun.settings import ORDER_VARIABLE, PCI_ORDER, VARIABLES, Settings, device_order, given_variables
from jayrun.store import schema
from jayrun.store.health import Patient
from jayrun.store.listening import POLL_SECONDS

T = TypeVar("T")
Remarks = Iterator[Remark]

CHECK_SECONDS = 15.0
"""So long one check may take: a database that does not answer, or a driver that hangs, hides nothing else."""
LEAST_FREE_BYTES = 10**9
"""Less room than this where the book lies: PostgreSQL stops when there is none."""

_WHOSE = {
    "url": "the database of JAYRUN_DATABASE_URL",
    "home": "the server of JAYRUN_HOME",
    "host": "the host's server",
    "private": "your own server",
}


class _Hangs(Exception):
    """A check did not end in time; it is left to itself, with what it uses."""


class _Skipped(Exception):
    """What a check needs is not there, which another check has told."""


def examine(settings: Settings, *, check_seconds: float = CHECK_SECONDS) -> Iterator[Finding]:
    """The findings, each as soon as it is made; a check that fails to look says so, and the others go on."""
    visit = _Visit(settings)
    try:
        for name, check in visit.checks.items():
            yield Finding.of(name, _isolated(visit, check, check_seconds))
    finally:
        visit.close()


def _isolated(visit: _Visit, check: Callable[[], Remarks], seconds: float) -> list[Remark]:
    try:
        return _within(seconds, lambda: list(check()))
    except _Skipped as reason:
        return [skipped(str(reason))]
    except BookUnreachable as error:
        visit.lose_book("the database is not reachable any more")
        return [failed(_first_line(error))]
    except (_Hangs, TimeoutError) as error:
        if check in visit.of_book:
            visit.lose_book("the database did not answer an earlier check", hangs=isinstance(error, _Hangs))
        return [failed(str(error))]
    except JayrunError as error:
        return [_told(error)]
    except Exception as error:
        words = embedded.without_password(" ".join(str(error).split()))
        return [failed(f"this could not be looked at: {type(error).__name__}: {words}")]


def _first_line(error: JayrunError) -> str:
    """What has happened, without the remedy."""
    return embedded.without_password(str(error)).partition("\n")[0]


def _told(error: JayrunError) -> Remark:
    """What an error says, the remedy for itself."""
    detail, _, remedy = embedded.without_password(str(error)).partition("\n")
    return failed(detail, remedy) if remedy else _parted(detail)


def _parted(words: str) -> Remark:
    """What is wrong and, after the last colon, what to type."""
    detail, _, remedy = words.rpartition(": ")
    is_command = remedy.startswith("`") and remedy.endswith("`") and remedy.count("`") == 2
    return failed(detail, remedy.strip("`") if is_command else remedy) if detail else failed(words)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; `_Hangs` when it does not end in time."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jayrun-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise _Hangs(f"there was no answer within {seconds:g} s")
    return results[0]


class _Visit:
    """One look at everything; what a check has found is there for those after it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patient: Patient | None = None
        self._no_book = "it is not known which book applies"
        self._no_schema: str | None = None
        self._server: Server | None = None
        self._is_pooled = False
        self._host_id: int | None = None
        self._devices: list[KnownDevice] | None = None
        self._reading: Reading | None = None
        of_book = {
            "server": self._check_server,
            "connections": self._check_connections,
            "pooler": self._check_pooler,
            "listener": self._check_listener,
            "clock": self._check_clock,
            "rights": self._check_rights,
            "schema": self._check_schema,
            "host": self._check_host,
            "holders": self._check_holders,
            "devices": self._check_devices,
        }
        self.of_book = frozenset(of_book.values())
        self.checks: Mapping[str, Callable[[], Remarks]] = {
            "jayrun": self._check_jayrun,
            "settings": self._check_settings,
            "folders": self._check_folders,
            "database": self._check_database,
            **of_book,
            "driver": self._check_driver,
            "hardware": self._check_hardware,
            "device files": self._check_device_files,
            "masks": self._check_masks,
            "order": self._check_order,
            "processes": self._check_processes,
        }

    def lose_book(self, why: str, *, hangs: bool = False) -> None:
        """From now on nothing of the book is asked any more. A connection that hangs is in use by another thread."""
        if not hangs:
            self.close()
        self._patient, self._no_book = None, why

    def close(self) -> None:
        if self._patient is not None:
            self._patient.close()

    def _book(self, *, with_schema: bool = False) -> Patient:
        if self._patient is None:
            raise _Skipped(self._no_book)
        if with_schema and self._no_schema is not None:
            raise _Skipped(self._no_schema)
        return self._patient

    # --- this environment --------------------------------------------------------------------------------------------

    def _check_jayrun(self) -> Remarks:
        try:
            mine = version(installation.DISTRIBUTION)
        except PackageNotFoundError:
            mine = "of an unknown version"
        yield ok(f"jayrun {mine}, Python {platform.python_version()}")
        yield from installation.environment()

    def _check_settings(self) -> Remarks:
        given = given_variables()
        yield ok(f"set: {', '.join(sorted(given))}" if given else "no variable of jayrun's is set")
        yield from judge_variables(given, VARIABLES)
        if (folder := self._settings.pg_bindir) is not None and not (folder / "initdb").exists():
            yield failed(
                f"JAYRUN_PG_BINDIR is {folder}, which has no initdb", "unset JAYRUN_PG_BINDIR, or name the right folder"
            )

    def _check_folders(self) -> Remarks:
        if self._settings.database_url is not None:
            raise _Skipped("the server is not jayrun's own")
        found = embedded.locate(self._settings)
        root = found.place
        assert root is not None
        try:
            facts = root.stat()
        except FileNotFoundError:
            yield ok(f"{root} is made with the first start")
        except OSError as error:
            yield failed(f"{root} cannot be looked at: {error.strerror}", f"ls -ld {root}")
        else:
            yield ok(f"{root} of {_user(facts.st_uid)}")
            if facts.st_mode & 0o002:
                yield warning(f"anybody may write in {root}", f"chmod o-w {root}")
            if found.kind in ("home", "private") and os.geteuid() not in (0, facts.st_uid):
                yield warning(f"{root} is not yours: only {_user(facts.st_uid)} can start its server")
        existing = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
        room = os.statvfs(existing)
        if (free := room.f_bavail * room.f_frsize) < LEAST_FREE_BYTES:
            yield warning(f"only {format_bytes(free)} are left where the book lies", f"df -h {existing}")
        if not os.access("/dev/shm", os.W_OK | os.X_OK):
            yield warning("/dev/shm is not writable, which PostgreSQL needs to start", "sudo chmod 1777 /dev/shm")

    # --- the database ------------------------------------------------------------------------------------------------

    def _check_database(self) -> Remarks:
        found = embedded.locate(self._settings)
        whose, url = _WHOSE[found.kind], embedded.without_password(found.url)
        if not found.running and found.kind != "url":
            self._no_book = f"{whose} is not running"
            obstacle = embedded.hindrance(self._settings)
            if obstacle is None:
                yield ok(f"{whose} in {found.place} is not running: the first program that needs it starts it")
            else:
                yield _parted(obstacle)
            return
        try:
            self._patient = Patient(found.url)
        except BookUnreachable as error:
            self._no_book = "the database is not reachable"
            check = "start that server, or check JAYRUN_DATABASE_URL" if found.kind == "url" else "jayrun db status"
            yield failed(_first_line(error), check)
            return
        yield ok(f"{whose} answers: {url}")
        if (folder := embedded.forgotten(self._settings)) is not None:
            yield warning(
                f"a server of your own in {folder} still runs, beside the host's",
                f"JAYRUN_HOME={shlex.quote(str(folder))} jayrun db down",
            )

    def _check_server(self) -> Remarks:
        self._server = self._book().server()
        yield from judge_server(self._server)

    def _check_connections(self) -> Remarks:
        yield from judge_connections(*self._book().connections())

    def _check_pooler(self) -> Remarks:
        self._is_pooled = self._book().is_pooled
        if self._is_pooled:
            yield ok("one stands before the server")
        else:
            yield ok("none: the server itself answers")

    def _check_listener(self) -> Remarks:
        patient = self._book()
        if self._server is not None and self._server.is_standby:
            raise _Skipped("a standby sends no notifications")
        heard = patient.heard_seconds()
        yield from judge_listener(heard_seconds=heard, is_pooled=self._is_pooled, poll_seconds=POLL_SECONDS)

    def _check_clock(self) -> Remarks:
        yield from judge_clock(*self._book().clock())

    def _check_rights(self) -> Remarks:
        access = self._book().access()
        if access is None:
            raise _Skipped("there is no book yet to have rights in")
        if not access.may_look:
            self._no_schema = f"role {access.role} may not look into the book"
        yield from judge_access(access)

    def _check_schema(self) -> Remarks:
        found = self._book(with_schema=True).revision()
        told = schema.mismatch(found)
        if told is None:
            yield ok(f"{found}, as this jayrun needs it")
            return
        self._no_schema = "the schema is not that of this jayrun"
        if found is None and self._settings.database_url is None:
            yield ok("there is none yet: the first program makes it")
        else:
            yield failed(*told)

    # --- this host in the book ---------------------------------------------------------------------------------------

    def _check_host(self) -> Remarks:
        explicit = self._settings.host_id
        found = self._book(with_schema=True).host(explicit)
        self._host_id, host = found or (None, None)
        self._devices = None if found else []
        yield from judge_host(host, fleeting=explicit is None and kernel.machine_id() == kernel.boot_id())

    def _check_holders(self) -> Remarks:
        patient = self._book(with_schema=True)
        if self._host_id is None:
            raise _Skipped("the book does not know this host")
        found = patient.holders(self._host_id)
        verdicts = kernel.verdicts([each for each, _ in found])
        yield from judge_holders([(verdict, silent) for verdict, (_, silent) in zip(verdicts, found, strict=True)])

    def _check_devices(self) -> Remarks:
        patient = self._book(with_schema=True)
        self._devices = [] if self._host_id is None else patient.devices(self._host_id)
        yield from judge_devices(self._devices)

    # --- devices as this process sees them ---------------------------------------------------------------------------

    def _check_driver(self) -> Remarks:
        reading = nvml.read(processes=False, links=False)
        if reading.problem is not None:
            has_files = Path("/dev/nvidiactl").exists()
            yield from judge_driver(reading.problem, has_files=has_files, known=self._devices or [])
            return
        self._reading = reading
        cards = sum(seen.parent_uuid is None for seen in reading.devices)
        slices = f", {len(reading.devices) - cards} MIG slice(s)" if len(reading.devices) > cards else ""
        yield ok(f"NVIDIA {reading.driver or '?'}, CUDA {reading.cuda or '?'}: {cards} GPU(s){slices}")
        for seen in reading.devices:
            if seen.problem is not None:
                yield warning(f"GPU {seen.index} ({seen.uuid or seen.pci_bus_id or 'unknown'}): {seen.problem}")

    def _check_hardware(self) -> Remarks:
        if self._reading is None:
            raise _Skipped("no NVIDIA driver shows anything")
        if self._devices is None:
            raise _Skipped("the devices of the book are not known")
        # A card that is split is not leased, its slices are.
        usable = [seen.uuid for seen in self._reading.devices if seen.uuid is not None and not seen.is_split]
        yield from judge_hardware(self._devices, usable, sees_host=kernel.sees_the_drivers_pids())

    def _check_device_files(self) -> Remarks:
        paths = [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *Path("/dev").glob("nvidia[0-9]*"), Path("/dev/kfd")]
        existing = [path for path in paths if path.exists()]
        if not existing:
            raise _Skipped("there are none in /dev")
        yield ok(", ".join(map(str, existing)))
        for path in existing:
            if not os.access(path, os.R_OK | os.W_OK):
                facts, me = path.stat(), kernel.user_name()
                owners = f"{_user(facts.st_uid)}:{_group(facts.st_gid)}, mode {facts.st_mode & 0o777:o}"
                yield failed(
                    f"{path} ({owners}) is closed to {me}",
                    f"sudo usermod -aG {_group(facts.st_gid)} {me}, and log in again",
                )

    def _check_masks(self) -> Remarks:
        masks = self._settings.masks
        given = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        if self._devices is None:
            raise _Skipped(f"{given or 'none is set'}; the devices of the book are not known")
        fleet = [_named(device) for device in self._devices]
        shown = [
            Named(host_index=seen.index, uuid=seen.uuid, parent_uuid=seen.parent_uuid, is_split=seen.is_split)
            for seen in (self._reading.devices if self._reading is not None else ())
        ]
        numbering = see(masks, fleet, shown)
        yield ok(given or "none is set")
        for backend, names in numbering.lists.items():
            mine = {name: each for each in fleet if backend in each.backends for name in _names(each)}
            count = sum(backend in each.backends for each in fleet)
            seen_here = [mine[name].host_index for name in names if name in mine]
            unknown = [name for name in names if name not in mine]
            if not count:
                continue
            told = f"this shell sees {len(seen_here)} of the {count} {backend} devices of the book"
            if not seen_here:
                yield warning(f"{told}, so every request for one is impossible here", "change or unset the mask")
            else:
                yield ok(f"{told}: {', '.join(map(str, seen_here))}")
            if unknown:
                yield warning(f"the book does not know {', '.join(unknown)}", "jayrun devices list")
        if (misread := misread_order(masks)) is not None:
            detail, _, remedy = misread.partition(": ")
            yield warning(detail, remedy)

    def _check_order(self) -> Remarks:
        order = device_order()
        if order is None:
            yield ok(f"{ORDER_VARIABLE} is not set: a Runtime and `jayrun run` set it to {PCI_ORDER}")
        elif order == PCI_ORDER:
            yield ok(f"{ORDER_VARIABLE} is {PCI_ORDER}")
        else:
            yield warning(
                f"{ORDER_VARIABLE} is {order}: where the GPUs differ, CUDA numbers them otherwise than jayrun",
                f"export {ORDER_VARIABLE}={PCI_ORDER}",
            )

    def _check_processes(self) -> Remarks:
        try:
            kernel.incarnation()
        except ProcessLookupError as error:
            yield failed(f"this process cannot be told from others: {error}")
        if not kernel.sees_the_drivers_pids():
            yield warning(
                "this process sees its own pid namespace only (a container): who uses a GPU cannot be told from here, "
                "and whoever holds a lease in another container is judged by others, or by silence",
                "run `jayrun reconciler` on the host itself, or start the container with --pid=host",
            )
        elif not kernel.sees_other_users():
            yield warning(
                "/proc hides the processes of other users (hidepid): who uses a GPU cannot be told, nor who of another "
                "container has died",
                "run `jayrun reconciler` as root",
            )
        else:
            yield ok("all processes of this machine are seen")


def _named(device: KnownDevice) -> Named:
    return Named(
        host_index=device.host_index,
        uuid=device.uuid,
        parent_uuid=device.parent_uuid,
        kind=Device(device.kind),
        backends=frozenset(map(Backend, device.backends)),
    )


def _names(device: Named) -> list[str]:
    by_number = [] if device.parent_uuid is not None else [str(device.host_index)]
    return by_number if device.uuid is None else [device.uuid, *by_number]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"group {gid}"
