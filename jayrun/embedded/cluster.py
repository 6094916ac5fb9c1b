"""Making a data folder, and the command that serves it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from jayrun.embedded.accounts import Account
from jayrun.embedded.places import DATABASE, OWNER_ROLE, PORT, WORKER_ROLE, Place
from jayrun.embedded.programs import Programs
from jayrun.errors import ServerError

# Settings an administrator may change in postgresql.conf. What belongs to the place is in `server_command`.
CONFIGURATION = """
# --- jayrun ---
max_connections = 500
fsync = on
timezone = 'UTC'
log_timezone = 'UTC'
logging_collector = on
log_filename = 'postgresql-%a.log'   # one a weekday, written over a week later
log_rotation_age = 1d
log_rotation_size = 0
log_truncate_on_rotation = on
log_line_prefix = '%m [%p] %q%u@%d %a '
"""

ACCESS = "local all all peer map=jayrun\n"

ROLES = f"CREATE ROLE {WORKER_ROLE} LOGIN;\nCREATE DATABASE {DATABASE} OWNER {OWNER_ROLE};\n"


def create_cluster(
    place: Place, *, programs: Programs, account: Account, lock_handle: int | None = None, durable: bool = True
) -> None:
    """Make the data folder of `place`: initdb, settings, roles and database, then one rename.

    `lock_handle` is inherited by the programs, so that after the death of this process the next starter waits for
    them before it clears away what they left. `durable=False` leaves out the flush to disk. Raises `ServerError`.
    """
    unfinished = place.data.with_name("data.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    account.make_folder(unfinished, mode=0o700)
    keep = () if lock_handle is None else (lock_handle,)

    initdb: list[str | Path] = [programs.bindir / "initdb", "-D", unfinished, "-U", OWNER_ROLE, "-E", "UTF8"]
    initdb += ["--locale=C", "--auth-local=peer", "--auth-host=reject", *([] if durable else ["--no-sync"])]
    _must(account.run(initdb, keep_fds=keep), "initdb", place)

    with (unfinished / "postgresql.conf").open("a") as conf:
        conf.write(CONFIGURATION)
        _flush(conf.fileno(), durable)
    for name, text in (("pg_hba.conf", ACCESS), ("pg_ident.conf", _identities(account))):
        with (unfinished / name).open("w") as conf:
            conf.write(text)
            _flush(conf.fileno(), durable)

    single: list[str | Path] = [programs.bindir / "postgres", "--single", "-D", unfinished]
    single += ["-c", "exit_on_error=on", "-c", "logging_collector=off", "-c", f"fsync={'on' if durable else 'off'}"]
    _must(account.run([*single, "postgres"], text=ROLES, keep_fds=keep), "postgres --single", place)

    unfinished.rename(place.data)
    root = os.open(place.root, os.O_RDONLY)
    _flush(root, durable)
    os.close(root)


def copy_cluster(template: Path, place: Place, *, account: Account) -> None:
    """Make the data folder of `place` as a copy of `template`, the data folder of a server that was stopped."""
    if (template / "postmaster.pid").exists():
        raise ServerError(f"{template} cannot be copied: it belongs to a server that was not stopped")
    unfinished = place.data.with_name("data.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(template, unfinished, symlinks=True)
    if os.geteuid() == 0:
        for folder, names, files in os.walk(unfinished):
            for name in (".", *names, *files):
                os.chown(os.path.join(folder, name), account.uid, account.gid, follow_symlinks=False)
    unfinished.rename(place.data)


def check_version(place: Place, programs: Programs) -> None:
    """Raise `ServerError` unless the data folder was made by the same major version as `programs`."""
    made_by = int((place.data / "PG_VERSION").read_text())
    if made_by != programs.major:
        raise ServerError(
            f"{place.data} was made by PostgreSQL {made_by}, but {programs.bindir} is {programs.version}: set "
            f"JAYRUN_PG_BINDIR to the programs of PostgreSQL {made_by}, or move the book with pg_dump and pg_restore"
        )


def remove_leftovers(place: Place) -> None:
    """Remove the pid and socket files of a dead server; only its starter may, holding the lock of life."""
    (place.data / "postmaster.pid").unlink(missing_ok=True)
    for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
        (place.sockets / name).unlink(missing_ok=True)


def server_command(place: Place, programs: Programs, *, configuration: Mapping[str, str]) -> list[str | Path]:
    """The command line that serves the data folder of `place`, with `configuration` over its settings."""
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(place.sockets),
        "cluster_name": place.cluster_name,
        "log_directory": str(place.logs),
        **configuration,
    }
    command: list[str | Path] = [programs.bindir / "postgres", "-D", place.data, "-p", str(PORT)]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    return command


def _identities(account: Account) -> str:
    """Who may be whom: root, the server's owner and its maker are the owner; everybody else is a worker."""
    owners = dict.fromkeys(["root", account.name, Account.from_uid(os.geteuid()).name])
    lines = [f'jayrun "{name}" {OWNER_ROLE}' for name in owners]
    return "\n".join([*lines, f"jayrun /^.*$ {WORKER_ROLE}", ""])


def _flush(handle: int, durable: bool) -> None:
    if durable:
        os.fsync(handle)


def _must(result: tuple[int, str], program: str, place: Place) -> None:
    status, printed = result
    if status != 0:
        raise ServerError(f"{program} failed in {place.root} with status {status}:\n{printed.strip()[-2000:]}")
