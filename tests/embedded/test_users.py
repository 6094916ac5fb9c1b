"""Several users of one operating system: whose server applies, who may be whom, who may stop it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
from embedded_helpers import ROOT, Room, account_named, command_lines, needs_root

from jayrun import embedded
from jayrun.embedded.accounts import Account, service_account
from jayrun.errors import ServerError
from jayrun.settings import Settings

NO_HOME = {"JAYRUN_HOME": ""}

ASK = """
with psycopg.connect(embedded.ensure(settings).url) as connection:
    print(connection.execute("SELECT current_user").fetchone()[0])
print(embedded.locate(settings).kind)
"""


def host_settings(room: Room) -> Settings:
    """Those of the host's server, kept inside the room; its folder's owner runs it, so no account is made."""
    state = room.folder / "state"
    state.mkdir()
    account = service_account(create=False)
    os.chown(state, account.uid, account.gid)
    return Settings.load(room.environment)


def data_home_of(room: Room, account: Account | None) -> Path:
    folder = room.folder / "data-home"
    folder.mkdir()
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    return folder


def servers_in(folder: Path) -> int:
    return sum(os.fsencode(folder) in command and b"postgres\0-D" in command for command in command_lines().values())


def test_an_ordinary_user_gets_a_private_server_and_is_told_once(room: Room, stranger: Account | None) -> None:
    data_home = data_home_of(room, stranger)
    first = room.call(ASK, account=stranger, environment=NO_HOME)
    second = room.call(ASK, account=stranger, environment=NO_HOME)
    assert first[0].split() == second[0].split() == ["jayrun", "private"]
    assert first[1].count("private book: other users are not seen") == 1
    assert second[1] == ""
    assert (data_home / "jayrun").stat().st_mode & 0o777 == 0o700
    assert (data_home / "jayrun" / "data").stat().st_uid == (stranger.uid if stranger else os.geteuid())

    stop = "print(embedded.down(settings), embedded.status(settings).held_down)"
    assert room.call(stop, account=stranger, environment=NO_HOME)[0] == "True True"


@needs_root
def test_the_hosts_server_is_everybodys_and_nobody_else_may_stop_it(room: Room, stranger: Account) -> None:
    settings = host_settings(room)
    owner = settings.state_root.stat().st_uid
    data_home = data_home_of(room, stranger)
    room.call(ASK + "embedded.down(settings); embedded.up(settings)", account=stranger, environment=NO_HOME)
    room.call("embedded.down(settings)", account=stranger, environment=NO_HOME)  # a private one, from before

    book = embedded.up(settings)
    assert book.kind == "host"
    place = Path(settings.state_root)
    assert (place / "data").stat().st_mode & 0o777 == 0o700
    assert (place / "data").stat().st_uid == owner
    assert settings.run_root.stat().st_mode & 0o777 == 0o755

    # The book that applies is the host's now; the private server is neither used nor started.
    printed, _ = room.call(ASK, account=stranger, environment=NO_HOME)
    assert printed.split() == ["jayrun_worker", "host"]
    printed, _ = room.call("print(embedded.up(settings).kind)", account=stranger, environment=NO_HOME)
    assert printed == "host"
    assert servers_in(data_home) == 0

    refused = """
for act in (embedded.down, embedded.ensure):
    try:
        print(act(settings))
    except Exception as error:
        print(type(error).__name__, error)
print(embedded.status(settings).pid, embedded.status(settings).server_version is not None)
"""
    printed, _ = room.call(refused, account=stranger, environment=NO_HOME)
    down_says, ensure_says, seen = printed.splitlines()
    assert "ServerError" in down_says
    assert "sudo jayrun db down" in down_says
    assert "kind='host'" in ensure_says
    assert seen == "None True"

    assert embedded.down(settings)
    printed, _ = room.call(refused, account=stranger, environment=NO_HOME)
    assert "BookUnreachable" in printed.splitlines()[1]
    assert "sudo jayrun db up" in printed.splitlines()[1]
    assert servers_in(room.folder) == 0


@needs_root
def test_a_private_start_that_was_overtaken_by_the_hosts_is_refused(room: Room, stranger: Account) -> None:
    settings = host_settings(room)
    data_home_of(room, stranger)
    embedded.up(settings)
    overtaken = """
from jayrun.embedded import server
from jayrun.embedded.places import Place
try:
    server._start(Place.at("private", settings.data_home / "jayrun"), settings, lift_hold=True)
except Exception as error:
    print(type(error).__name__, error)
"""
    printed, _ = room.call(overtaken, account=stranger, environment=NO_HOME)
    assert printed.startswith("ServerError this host has a book of its own")
    assert servers_in(room.folder) == 1


@needs_root
def test_a_folder_one_cannot_write_in_is_told_with_what_to_do(room: Room, stranger: Account) -> None:
    ask = """
for act in (embedded.ensure, embedded.up, embedded.down):
    try:
        act(settings)
    except Exception as error:
        print(type(error).__name__, error)
print("-", embedded.how_to_start(settings))
print("-", embedded.may_manage(settings), embedded.status(settings).book.running)
"""
    says = f"cannot write in {room.folder} (Permission denied): set JAYRUN_HOME to a folder of yours"
    for environment in ({}, NO_HOME):  # JAYRUN_HOME, or the folder of a private server
        printed, _ = room.call(ask, account=stranger, environment=environment)
        assert printed.splitlines() == [*[f"ServerError {says}"] * 3, f"- {says}", "- False False"]


@needs_root
def test_a_private_server_that_the_hosts_replaced_is_found_while_it_runs(room: Room, stranger: Account) -> None:
    settings = host_settings(room)
    private = data_home_of(room, stranger) / "jayrun"
    ask = "embedded.{}(settings); print(embedded.forgotten(settings))"
    assert room.call(ask.format("up"), account=stranger, environment=NO_HOME)[0] == "None"
    embedded.up(settings)
    assert room.call(ask.format("status"), account=stranger, environment=NO_HOME)[0] == str(private)
    assert (
        room.call("print(embedded.down(settings))", account=stranger, environment={"JAYRUN_HOME": str(private)})[0]
        == "True"
    )
    assert room.call(ask.format("status"), account=stranger, environment=NO_HOME)[0] == "None"


@needs_root
def test_root_starts_a_users_server_as_that_user(room: Room, stranger: Account) -> None:
    os.mkdir(room.home)
    os.chown(room.home, stranger.uid, stranger.gid)
    room.call("embedded.up(settings); embedded.down(settings)", account=stranger)
    embedded.up(room.settings())
    assert room.place().data.stat().st_uid == stranger.uid
    printed, _ = room.call(ASK + "print(embedded.down(settings))", account=stranger)
    assert printed.split() == ["jayrun", "home", "True"]


@needs_root
def test_a_folder_the_service_account_cannot_enter_is_an_error_that_says_so(room: Room) -> None:
    closed = room.folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ServerError, match=r"cannot enter .*chmod o\+x"):
        embedded.up(room.settings(JAYRUN_HOME=str(closed / "home")))
    assert closed.stat().st_mode & 0o777 == 0o700


@needs_root
def test_root_is_not_led_to_another_file_by_a_link(room: Room, stranger: Account) -> None:
    room.home.mkdir()
    os.chown(room.home, stranger.uid, stranger.gid)
    precious = room.folder / "precious"
    precious.write_text("root's")
    (room.home / "start.log").symlink_to(precious)
    with pytest.raises(ServerError, match=r"start\.log"):
        embedded.up(room.settings())
    assert precious.read_text() == "root's"
    assert precious.stat().st_uid == 0


@needs_root
def test_a_uid_without_a_passwd_entry_is_told_what_to_do(room: Room) -> None:
    unknown = Account("unknown", 54321, 54321)
    code = """
try:
    embedded.ensure(settings)
except Exception as error:
    print(type(error).__name__, error)
"""
    room.home.mkdir()
    os.chown(room.home, unknown.uid, unknown.gid)
    printed, _ = room.call(code, account=unknown)
    assert printed.startswith("ServerError user id 54321 has no entry in /etc/passwd")


@needs_root
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("useradd") is None, reason="no useradd")
def test_root_makes_the_service_account_once() -> None:
    name = "jayrun-test-account"
    try:
        made = service_account(create=True, name=name)
        assert made.name == name
        assert made.uid != 0
        assert pwd.getpwnam(name).pw_shell.endswith("nologin")
        assert service_account(create=True, name=name) == made
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)


@needs_root
def test_without_useradd_an_account_that_exists_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    account = service_account(create=True, name="jayrun-test-account")
    assert account.name in ("postgres", "nobody")


@pytest.mark.skipif(ROOT, reason="for ordinary users")
def test_an_ordinary_user_runs_the_programs_itself() -> None:
    assert service_account(create=True).uid == os.geteuid()


@needs_root
def test_the_programs_get_none_of_roots_groups_or_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPORT", "LC_ALL", "LANG", "TZ", "JAYRUN_DATABASE_URL"):
        monkeypatch.setenv(name, "secret")
    status, printed = account_named("nobody").run(["/bin/sh", "-c", "id -u; id -G; pwd; env"])
    nobody = account_named("nobody")
    assert status == 0
    assert printed.splitlines()[:3] == [str(nobody.uid), str(nobody.gid), "/"]
    assert "secret" not in printed
