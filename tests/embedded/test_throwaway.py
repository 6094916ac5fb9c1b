"""The server for tests and demos: it ends with its maker, and comes back on the same data."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from embedded_helpers import Room, exists, query, shared_memory, wait_for

from jayrun import embedded
from jayrun.embedded import Throwaway, alive, start_throwaway
from jayrun.embedded.accounts import Account
from jayrun.embedded.places import Place
from jayrun.errors import ServerError
from jayrun.settings import Settings

MAKER = """
server = embedded.start_throwaway(settings.home, settings=settings)
print(server.pid, flush=True)
"""


@pytest.fixture
def throwaway(room: Room, cluster_home: Path) -> Iterator[Throwaway]:
    with start_throwaway(room.home, settings=Settings(), template=cluster_home / "data") as server:
        yield server


def test_it_has_the_database_both_roles_and_durable_settings(throwaway: Throwaway) -> None:
    assert query(throwaway.url, "SELECT current_user, current_setting('fsync')") == [("jayrun", "on")]
    as_worker = throwaway.url.replace("//jayrun@", "//jayrun_worker@")
    assert query(as_worker, "SELECT current_user") == [("jayrun_worker",)]
    assert (throwaway.bindir / "postgres").exists()


def test_restart_cuts_sessions_and_keeps_what_was_committed(throwaway: Throwaway) -> None:
    query(throwaway.url, "CREATE TABLE kept (n) AS VALUES (1)")
    before = throwaway.pid
    with psycopg.connect(throwaway.url, autocommit=True) as session:
        throwaway.restart()
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")
    assert throwaway.pid != before
    assert query(throwaway.url, "SELECT n FROM kept") == [(1,)]


def test_kill_and_stop_end_everything_and_start_brings_it_back(throwaway: Throwaway, room: Room) -> None:
    query(throwaway.url, "CREATE TABLE kept (n) AS VALUES (1)")
    for end in (throwaway.kill, throwaway.stop):
        end()
        assert throwaway.pid is None
        assert not alive.is_alive(room.place())
        end()  # twice is once
        throwaway.start()
        throwaway.start()
        assert query(throwaway.url, "SELECT n FROM kept") == [(1,)]


def test_a_killed_one_leaves_no_shared_memory_behind(throwaway: Throwaway) -> None:
    assert throwaway.pid is not None
    assert list((throwaway.data_folder / "pg_dynshmem").iterdir())
    assert shared_memory(throwaway.pid) == set()


def test_a_lasting_server_uses_the_hosts_shared_memory(made: Room) -> None:
    embedded.ensure(made.settings())
    pid = embedded.status(made.settings()).pid
    assert pid is not None
    assert all(path.exists() for path in shared_memory(pid))
    assert shared_memory(pid)


def test_configuration_goes_over_the_settings_and_a_bad_one_says_why(room: Room, cluster_home: Path) -> None:
    template = cluster_home / "data"
    told = {"fsync": "off", "max_connections": "20"}
    with start_throwaway(room.home, settings=Settings(), configuration=told, template=template) as server:
        shown = query(server.url, "SELECT current_setting('fsync'), current_setting('max_connections')")
        assert shown == [("off", "20")]
    with pytest.raises(ServerError, match="no_such_setting"):
        start_throwaway(room.home, settings=Settings(), configuration={"no_such_setting": "1"})


def test_a_running_server_is_no_template_and_its_folder_is_taken(throwaway: Throwaway, room: Room) -> None:
    with pytest.raises(ServerError, match="not stopped"):
        start_throwaway(room.folder / "other", settings=Settings(), template=throwaway.data_folder)
    with pytest.raises(ServerError, match="another server already runs"):
        start_throwaway(room.home, settings=Settings())


def test_it_starts_only_from_the_main_thread(throwaway: Throwaway) -> None:
    throwaway.stop()
    errors: list[BaseException] = []

    def start() -> None:
        try:
            throwaway.start()
        except ServerError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.parametrize("other_user", [False, True])
def test_it_dies_with_its_maker(made: Room, stranger: Account | None, other_user: bool) -> None:
    account = stranger if other_user else None
    if account is not None:
        made.folder.joinpath("theirs").mkdir()
        os.chown(made.folder / "theirs", account.uid, account.gid)
    home = made.folder / "theirs" if account else made.home
    with made.caller(MAKER + "sys.stdin.read()", account=account, environment={"JAYRUN_HOME": str(home)}) as maker:
        assert maker.stdout is not None
        server = int(maker.stdout.readline() or 0)
        assert server, maker.stderr and maker.stderr.read()
        place = Place.at("home", home)
        assert alive.is_alive(place)
        maker.kill()
    wait_for(lambda: not exists(server))
    wait_for(lambda: not alive.is_alive(place))


def test_a_forked_child_of_its_maker_ends_without_harming_it(made: Room) -> None:
    code = """
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
with psycopg.connect(server.url) as connection:
    print(connection.execute("SELECT 1").fetchone()[0])
server.stop()
"""
    printed, _ = made.call(MAKER + code)
    assert printed.split()[1] == "1"


def test_where_the_service_account_cannot_enter_another_folder_is_used_and_removed(room: Room) -> None:
    closed = room.folder / "closed"
    closed.mkdir(mode=0o700)
    code = """
print(server.data_folder, server.data_folder.exists())
server.stop()
"""
    printed, _ = room.call(MAKER + code, environment={"JAYRUN_HOME": str(closed / "server")})
    used, existed = printed.splitlines()[1].split()
    assert existed == "True"
    assert closed.stat().st_mode & 0o777 == 0o700
    if not used.startswith(str(closed)):
        assert not Path(used).parent.exists()
