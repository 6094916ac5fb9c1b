"""The operating system account that a server's programs run as."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jayrun.errors import ServerError
from jayrun.settings import child_environment

# What a caller's shell says about PostgreSQL, languages and clocks must not reach the programs: a PGPORT or an
# LC_MESSAGES changes what they do. Our own variables may carry a password and are not theirs to read.
FOREIGN = ("PG", "LC_", "LANG", "TZ", "JAYRUN_")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the operating system: `name`, `uid` and its first group's `gid`."""

    name: str
    uid: int
    gid: int

    @classmethod
    def from_uid(cls, uid: int) -> Account:
        """The account of `uid`; raises `ServerError` when the password database does not know it."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise ServerError(
                f"user id {uid} has no entry in /etc/passwd, and PostgreSQL refuses to run without one: "
                "add an entry, or set JAYRUN_DATABASE_URL to a server run by somebody else"
            ) from None
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)

    def make_folder(self, path: Path, *, mode: int) -> None:
        """Make the folder `path` (it may exist) and give it to this account; `ServerError` if it is somebody else's."""
        with contextlib.suppress(FileExistsError):  # what is there is judged by its handle
            path.mkdir(parents=True)
        os.close(self._take(path, flags=os.O_RDONLY | os.O_DIRECTORY, mode=mode))

    def make_file(self, path: Path, *, mode: int) -> int:
        """Like `make_folder` for a file; returns a handle to append to it."""
        return self._take(path, flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=mode)

    def _take(self, path: Path, *, flags: int, mode: int) -> int:
        # By handle and without following links: in a folder of somebody else, root must not be led to another file.
        try:
            handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except OSError as error:
            raise ServerError(f"cannot open {path} for {self.name}: {error.strerror}; see what is there") from error
        with contextlib.ExitStack() as unless_it_fails:
            unless_it_fails.callback(os.close, handle)
            if os.fstat(handle).st_uid not in (os.geteuid(), self.uid):
                raise ServerError(f"{path} belongs neither to you nor to {self.name}: remove it")
            if os.geteuid() == 0:
                os.fchown(handle, self.uid, self.gid)
            os.fchmod(handle, mode)
            unless_it_fails.pop_all()
        return handle

    def spawn(
        self,
        args: Sequence[str | Path],
        *,
        stdin: int | None = subprocess.DEVNULL,
        output: int = subprocess.PIPE,
        keep_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a program as this account, in `/`, with an environment free of the caller's database settings.

        `output` takes stdout and stderr together; `keep_fds` are the handles the program inherits. Raises
        `PermissionError` when the account cannot reach the program.
        """
        switch = os.geteuid() != self.uid
        return subprocess.Popen(
            [str(arg) for arg in args],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env=child_environment({}, without=FOREIGN),
            pass_fds=tuple(keep_fds),
            start_new_session=new_session,
            user=self.uid if switch else None,
            group=self.gid if switch else None,
            extra_groups=[] if switch else None,
        )

    def run(
        self, args: Sequence[str | Path], *, text: str | None = None, keep_fds: Sequence[int] = ()
    ) -> tuple[int, str]:
        """Run a program to its end with `text` as its input; its exit status and everything it printed."""
        stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
        with self.spawn(args, stdin=stdin, keep_fds=keep_fds) as process:
            printed, _ = process.communicate(text)
        return process.returncode, printed

    def can_enter(self, folder: Path) -> bool:
        """Whether this account may pass through every folder on the way to `folder` and enter it."""
        return self.run(["/bin/sh", "-c", 'cd "$1"', "sh", folder])[0] == 0


def service_account(*, create: bool, name: str = "jayrun") -> Account:
    """The account that runs the programs for this caller: the caller, or for root `name`, `postgres` or `nobody`.

    PostgreSQL refuses to run as root. With `create`, root makes the system account `name` when there is none;
    where that is not possible the next one is taken. Raises `ServerError` when there is none at all.
    """
    if os.geteuid() != 0:
        return Account.from_uid(os.geteuid())
    if create and _find(name) is None:
        _create(name)
    account = _find(name) or _find("postgres") or _find("nobody")
    if account is None:
        raise ServerError(f"PostgreSQL does not run as root: make an account for it (useradd --system {name})")
    return account


def _find(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _create(name: str) -> None:
    command = [
        "useradd",
        "--system",
        "--user-group",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
        name,
    ]
    try:
        # No check: a read-only /etc or a rival that was faster are both answered by looking the name up again.
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, cwd="/")
    except FileNotFoundError:
        return
