"""The server of a book: start once, survive every kind of death, stop when told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest
from embedded_helpers import Room, command_lines, exists, query, wait_for

from jayrun import embedded
from jayrun.embedded import alive, cluster, server
from jayrun.embedded.accounts import Account
from jayrun.errors import BookUnreachable, ServerError


def data_owner(room: Room) -> Account:
    return Account.from_uid(room.place().data.stat().st_uid)


def postmasters(room: Room) -> list[int]:
    argument = os.fsencode(room.place().data) + b"\0"
    return [pid for pid, command in command_lines().items() if argument in command and b"postgres\0-D" in command]


def starts(room: Room) -> int:
    return sum(path.read_text().count("LOG:  starting PostgreSQL") for path in room.place().logs.glob("*"))


def pid_of(room: Room) -> int:
    pid = embedded.status(room.settings()).pid
    assert pid is not None
    return pid


def test_a_cold_start_gives_a_durable_utc_server_with_both_roles_and_no_network(room: Room) -> None:
    book = embedded.ensure(room.settings())

    assert (book.kind, book.running, book.place) == ("home", True, room.home)
    shown = "current_user, current_database(), current_setting('fsync'), current_setting('max_connections'), "
    shown += "current_setting('listen_addresses'), current_setting('TimeZone'), current_setting('server_encoding')"
    assert query(book.url, f"SELECT {shown}") == [("jayrun", "jayrun", "on", "500", "", "UTC", "UTF8")]
    roles = query(
        book.url, "SELECT rolname, rolsuper, rolcanlogin FROM pg_roles WHERE rolname LIKE 'jayrun%' ORDER BY 1"
    )
    assert roles == [("jayrun", True, True), ("jayrun_worker", False, True)]
    place = room.place()
    assert place.data.stat().st_mode & 0o777 == 0o700
    assert place.data.stat().st_uid != 0
    assert not place.data.with_name("data.new").exists()


def test_a_second_ensure_joins_the_running_server(made: Room) -> None:
    embedded.ensure(made.settings())
    first = pid_of(made)
    embedded.ensure(made.settings())
    embedded.up(made.settings())
    assert pid_of(made) == first
    assert len(postmasters(made)) == 1


def test_eight_cold_starts_at_once_make_one_server(room: Room) -> None:
    code = """
ready, go = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        os.close(go)
        os.read(ready, 1)  # until the parent closes the other end: all at once
        try:
            with psycopg.connect(embedded.ensure(settings).url) as connection:
                number = connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone()[0]
                os.write(1, f"{number}\\n".encode())  # in one piece, unlike print
        finally:
            os._exit(sys.exc_info()[0] is not None)
os.close(go)
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(8)))
"""
    printed, _ = room.call(code)
    assert len(printed.split()) == 8
    assert len(set(printed.split())) == 1
    assert len(postmasters(room)) == 1
    assert starts(room) == 1


@pytest.mark.parametrize("appears", ["data.new/PG_VERSION", "data", "data/postmaster.pid"])
def test_a_starter_killed_half_way_leaves_nothing_in_the_way(room: Room, appears: str) -> None:
    with room.caller("embedded.ensure(settings)") as starter:
        wait_for((room.home / appears).exists)
        starter.kill()
    book = embedded.ensure(room.settings())
    assert query(book.url, "SELECT 1") == [(1,)]
    assert not (room.home / "data.new").exists()
    assert len(postmasters(room)) == 1


def test_the_server_outlives_its_starter_and_the_starters_process_group(made: Room) -> None:
    with made.caller("embedded.ensure(settings); print('up', flush=True); sys.stdin.read()") as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        os.killpg(starter.pid, signal.SIGKILL)
    assert query(embedded.locate(made.settings()).url, "SELECT 1") == [(1,)]


def test_after_sigkill_of_the_postmaster_up_clears_away_a_backend_that_cannot_notice(made: Room) -> None:
    book = embedded.ensure(made.settings())
    with psycopg.connect(book.url, autocommit=True) as session:
        session.execute("CREATE TABLE kept (n int)")
        session.execute("INSERT INTO kept VALUES (1)")
        backend = session.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        old = pid_of(made)
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: not exists(old))
        assert exists(backend)

        book = embedded.up(made.settings())
        assert query(book.url, "SELECT n FROM kept") == [(1,)]
        assert not exists(backend)
        assert pid_of(made) != old


def test_after_sigkill_of_everything_at_once_up_recovers_what_was_committed(made: Room) -> None:
    book = embedded.ensure(made.settings())
    query(book.url, "CREATE TABLE kept (n) AS VALUES (1)")
    postmaster, others = alive.processes(made.place(), data_owner(made))
    assert postmaster is not None
    assert others
    alive.kill([postmaster, *others])
    book = embedded.up(made.settings())
    assert query(book.url, "SELECT n FROM kept") == [(1,)]


def test_a_stale_pid_file_whose_pid_is_a_strangers_now_harms_nobody(made: Room) -> None:
    embedded.ensure(made.settings())
    owner, pid_file = data_owner(made), made.place().data / "postmaster.pid"
    with owner.spawn(["sleep", "60"]) as stranger:
        stale = pid_file.read_text().replace(str(pid_of(made)), str(stranger.pid), 1)
        postmaster, others = alive.processes(made.place(), owner)
        assert postmaster is not None
        # Worst case: a child that cannot notice keeps the lock of life, and the file points at the stranger.
        os.kill(others[0], signal.SIGSTOP)
        os.kill(postmaster, signal.SIGKILL)
        wait_for(lambda: not exists(postmaster))
        pid_file.write_text(stale)

        assert embedded.down(made.settings())
        pid_file.write_text(stale)
        embedded.up(made.settings())
        assert embedded.down(made.settings())
        assert stranger.poll() is None
        stranger.kill()


def test_down_holds_until_up(room: Room) -> None:
    settings = room.settings()
    assert not embedded.down(settings)  # there never was one
    embedded.ensure(settings)
    assert embedded.down(settings)
    assert not embedded.down(settings)

    found = embedded.status(settings)
    assert (found.book.running, found.held_down, found.pid, found.server_version) == (False, True, None, None)
    with pytest.raises(BookUnreachable, match="jayrun db up"):
        embedded.ensure(settings)
    assert postmasters(room) == []

    assert embedded.up(settings).running
    assert embedded.ensure(settings).running
    found = embedded.status(settings)
    assert (found.book.running, found.held_down) == (True, False)
    assert found.server_version is not None
    assert found.log_file is not None
    assert found.log_file.exists()


def test_down_ends_a_server_that_is_stopped_in_its_tracks(made: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ((signal.SIGINT, 0.1), (signal.SIGQUIT, 0.1), (signal.SIGKILL, 10.0))
    monkeypatch.setattr(server, "STOP_STEPS", steps)
    embedded.ensure(made.settings())
    postmaster = pid_of(made)
    os.kill(postmaster, signal.SIGSTOP)
    assert embedded.down(made.settings())
    wait_for(lambda: not exists(postmaster))  # its handles close before it is gone


def test_what_the_callers_environment_says_about_postgresql_does_not_matter(made: Room) -> None:
    garbage = {
        "PGHOST": "nowhere.invalid", "PGPORT": "1", "PGUSER": "nobody-here", "PGDATABASE": "none", "PGDATA": "/nowhere",
        "PGOPTIONS": "-c no_such_setting=1", "PGSYSCONFDIR": "/nowhere", "PGAPPNAME": "x",
        "LANG": "xx_XX", "LC_ALL": "C.nonsense", "LC_MESSAGES": "de_DE", "LANGUAGE": "de", "TZ": "Mars/Olympus",
    }  # fmt: skip
    code = """
book = embedded.ensure(settings)
with psycopg.connect(book.url) as connection:
    print(connection.execute("SELECT current_user, current_setting('TimeZone')").fetchone())
print(embedded.status(settings).server_version is not None, embedded.down(settings))
"""
    printed, _ = made.call(code, environment=garbage)
    assert printed.splitlines() == ["('jayrun', 'UTC')", "True True"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("PGHOSTADDR", "True"), ("PGSERVICE", "ServerError: libpq refuses to connect")],
)
def test_what_no_url_can_override_is_withstood_or_told_at_once(made: Room, name: str, says: str) -> None:
    code = """
try:
    print(embedded.ensure(settings).running)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    printed, _ = made.call(code, environment={name: "192.0.2.1"})
    assert printed.startswith(says)


def test_a_folder_too_deep_for_a_socket_gets_a_short_one(room: Room) -> None:
    deep = room.folder / ("d" * 60) / ("e" * 60)
    settings = room.settings(JAYRUN_HOME=str(deep))
    place = server.place_for(settings)
    assert len(os.fsencode(place.sockets / ".s.PGSQL.5432")) <= 103
    assert place.sockets != server.place_for(room.settings(JAYRUN_HOME=str(deep / "other"))).sockets
    try:
        assert query(embedded.ensure(settings).url, "SELECT 1") == [(1,)]
        assert embedded.down(settings)
    finally:
        place.sockets.rmdir()


def test_a_short_socket_folder_that_somebody_else_prepared_is_refused(room: Room) -> None:
    settings = room.settings(JAYRUN_HOME=str(room.folder / ("d" * 110)))
    place = server.place_for(settings)
    place.sockets.symlink_to(room.folder)
    try:
        with pytest.raises(ServerError, match="cannot open"):
            embedded.ensure(settings)
    finally:
        place.sockets.unlink()


def test_a_data_folder_of_another_major_version_is_refused_by_both_numbers(made: Room) -> None:
    embedded.ensure(made.settings())
    embedded.down(made.settings())
    version = made.place().data / "PG_VERSION"
    version.write_text("13\n")
    with pytest.raises(ServerError, match=r"made by PostgreSQL 13, but .* is \d\d\.\d.*JAYRUN_PG_BINDIR"):
        embedded.up(made.settings())


def test_a_start_that_fails_says_what_the_server_said(made: Room) -> None:
    embedded.ensure(made.settings())
    embedded.down(made.settings())
    with (made.place().data / "postgresql.conf").open("a") as conf:
        conf.write("no_such_setting = on\n")
    with pytest.raises(ServerError, match="no_such_setting"):
        embedded.up(made.settings())
    assert not alive.is_alive(made.place())


def test_a_lock_of_life_held_by_no_server_is_reported_and_not_broken(made: Room) -> None:
    embedded.ensure(made.settings())
    embedded.down(made.settings())
    handle = alive.try_lock(made.place().alive_lock)
    assert handle is not None
    try:
        with pytest.raises(ServerError, match="not PostgreSQL"):
            alive.claim(made.place(), data_owner(made), wait_seconds=0.05)
    finally:
        os.close(handle)


def test_whoever_waits_for_a_stuck_starter_is_told(room: Room) -> None:
    with (
        alive.locked(room.folder / "lock", wait_seconds=0),
        pytest.raises(ServerError, match="another jayrun is stuck"),
        alive.locked(room.folder / "lock", wait_seconds=0.05),
    ):
        pass


def test_the_start_lock_is_free_even_if_a_forked_child_still_has_its_handle(room: Room) -> None:
    with alive.locked(room.folder / "lock", wait_seconds=0) as handle:
        copy = os.dup(handle)
    with alive.locked(room.folder / "lock", wait_seconds=0):
        os.close(copy)


@pytest.mark.slow
@pytest.mark.parametrize("bindir", sorted(Path("/usr/lib/postgresql").glob("*/bin")), ids=lambda path: path.parent.name)
def test_the_systems_postgresql_serves_too(room: Room, bindir: Path) -> None:
    settings = room.settings(JAYRUN_PG_BINDIR=str(bindir))
    book = embedded.ensure(settings)
    assert str(query(book.url, "SHOW server_version")[0][0]).startswith(bindir.parent.name)
    assert embedded.down(settings)
    with pytest.raises(ServerError, match=f"made by PostgreSQL {bindir.parent.name}"):
        embedded.up(room.settings())


def test_the_access_rules_know_only_the_socket() -> None:
    rules = [line.split() for line in cluster.ACCESS.splitlines()]
    assert [rule[0] for rule in rules] == ["local"]


def test_locate_and_status_make_nothing(room: Room) -> None:
    assert embedded.locate(room.settings()).running is False
    assert embedded.status(room.settings()).book.running is False
    assert list(room.folder.iterdir()) == []
