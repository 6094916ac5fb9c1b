"""`jayrun doctor`: each thing that may be wrong is told, with what to type, and hides nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cli_helpers import Holder, Jayrun
from fleet import gpus
from gpus import Slice, machine, standing_in, uuid
from poolers import needs_pgbouncer, pooler
from standby import standby_of

from jayrun import embedded, kernel
from jayrun.devices import nvml
from jayrun.domain.hardware import Reading
from jayrun.embedded import Throwaway, start_throwaway
from jayrun.runtime import doctor
from jayrun.settings import MASKS, ORDER_VARIABLE, Settings, child_environment
from jayrun.store import devices, health, holders, schema
from jayrun.store.transactions import Book

CHECKS = (
    *("jayrun", "settings", "folders", "database", "server", "connections", "pooler", "listener", "clock", "rights"),
    *("schema", "host", "holders", "devices", "driver", "hardware", "device files", "masks", "order", "processes"),
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

AS_NOBODY = """
import json, os
from jayrun.runtime.doctor import examine
from jayrun.settings import Settings
from jayrun.store import schema
list(examine(Settings.load()))  # nothing can be imported later, where root's home is closed
schema.known_revisions()
os.chdir("/")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(json.dumps([(each.check, each.state, f"{each.detail} -> {each.next}") for each in examine(Settings.load())]))
"""

Examine = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*MASKS, ORDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"), prepend=":")
    monkeypatch.setattr(kernel, "machine_id", lambda: "a machine of its own")


@pytest.fixture
def examine(jayrun: Jayrun) -> Examine:
    """The findings by check; the exit code tells whether one has failed."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        done = jayrun("doctor", "--json", *arguments)
        assert [each["check"] for each in done.json] == list(CHECKS)
        assert all(set(each) == {"check", "state", "detail", "next"} for each in done.json)
        bad = {"failed", "warning"} if "--strict" in arguments else {"failed"}
        assert done.code == int(any(each["state"] in bad for each in done.json))
        return {each["check"]: each for each in done.json}

    return run


def told(found: dict[str, dict[str, Any]], check: str) -> tuple[str, str]:
    """The state of a check, and all its words."""
    return found[check]["state"], f"{found[check]['detail']} -> {found[check]['next']}"


@contextmanager
def of_role(url: str, sql: psycopg.Connection, role: str, grants: str = "") -> Iterator[str]:
    """The URL by which one is that role, which is made and has these rights."""
    sql.execute(f"CREATE ROLE {role}")
    try:
        sql.execute(grants)
        assert "-cTimeZone" in url
        yield url.replace("-cTimeZone", f"-crole%3D{role}%20-cTimeZone")
    finally:
        sql.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@contextmanager
def database_of(server: Throwaway, sql: psycopg.Connection, statements: str) -> Iterator[str]:
    """The URL of another database of the server, in which these were run."""
    sql.execute("CREATE DATABASE another")
    try:
        other = server.url.replace("/jayrun?", "/another?")
        with psycopg.connect(other, autocommit=True) as connection:
            connection.execute(statements)
        yield other
    finally:
        sql.execute("DROP DATABASE another WITH (FORCE)")


# --- the book --------------------------------------------------------------------------------------------------------


def test_a_healthy_book(examine: Examine, host_id: int) -> None:
    found = examine()
    for check in ("jayrun", "database", "connections", "pooler", "listener", "clock", "rights", "schema", "host"):
        assert found[check]["state"] == "ok", found[check]
    for check in ("holders", "devices", "masks", "order"):
        assert (found[check]["state"], found[check]["next"]) == ("ok", None), found[check]
    assert "a notification arrives" in found["listener"]["detail"]
    assert "2 (2 declared)" in found["devices"]["detail"]
    assert found["schema"]["detail"].startswith(schema.REVISION)


def test_a_look_changes_nothing(examine: Examine, sql: psycopg.Connection) -> None:
    found = examine()
    assert "does not know this host yet" in found["host"]["detail"]
    assert told(found, "devices")[0] == "warning"
    assert "jayrun devices discover" in found["devices"]["next"]
    assert found["holders"]["state"] == "skipped"
    for table in ("hosts", "holders", "devices"):
        assert sql.execute(f"SELECT count(*) FROM jayrun.{table}").fetchone() == (0,)


def test_people_get_a_line_for_each_check(jayrun: Jayrun, host_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAYRUN_HOEM", "/tmp")
    done = jayrun("doctor")
    *lines, last = done.out.splitlines()
    assert [line[9:21].strip() for line in lines] == list(CHECKS)
    assert {line.split()[0] for line in lines} <= {"ok", "skipped", "warning", "failed"}
    [line] = [line for line in lines if line.startswith("warning  settings")]
    assert "perhaps JAYRUN_HOME is meant" in line
    assert line.endswith("-> unset JAYRUN_HOEM")
    assert "took" in last
    assert done.code == 0
    assert jayrun("doctor", "--strict").code == 1


def test_a_server_that_does_not_run(examine: Examine, jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("JAYRUN_DATABASE_URL", f"postgresql://me:geheim@127.0.0.1:{port}/book?password=geheim")
    found = examine()
    state, words = told(found, "database")
    assert state == "failed"
    assert "refused" in words
    assert "check JAYRUN_DATABASE_URL" in words
    assert {found[check]["state"] for check in ("server", "listener", "schema", "host", "devices")} == {"skipped"}
    assert found["order"]["state"] == "ok"
    assert "geheim" not in jayrun("doctor").out


def test_a_url_that_is_none(examine: Examine, jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAYRUN_DATABASE_URL", "mysql://me:geheim@localhost/book")
    assert told(examine(), "database")[0] == "failed"
    assert "geheim" not in jayrun("doctor").out


def test_a_server_that_never_answers_holds_nothing_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(database_url=f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/book?connect_timeout=2")
        started = time.monotonic()
        found = {each.check: each for each in doctor.examine(settings, check_seconds=0.5)}
        assert time.monotonic() - started < 10
    assert found["database"].state == "failed"
    assert found["server"].state == "skipped"
    assert found["processes"].state != "skipped"


def test_a_check_that_hangs_is_left_to_itself(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    released = threading.Event()
    monkeypatch.setattr(nvml, "read", lambda **_: released.wait() and Reading())
    found = {each.check: each for each in doctor.examine(Settings(database_url=url), check_seconds=0.5)}
    released.set()
    assert (found["driver"].state, found["driver"].detail) == ("failed", "there was no answer within 0.5 s")
    assert found["devices"].state == "warning"
    assert found["masks"].state == "ok"


def test_a_table_that_is_locked(examine: Examine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STATEMENT_SECONDS", 0.3)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE jayrun.hosts IN ACCESS EXCLUSIVE MODE")
        found = examine()
    state, words = told(found, "host")
    assert state == "failed"
    assert "did not answer within 0.3 s" in words
    assert found["schema"]["state"] == "ok"
    assert found["devices"]["state"] == "skipped"


def test_a_check_that_breaks_hides_no_other(examine: Examine, host_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("postgresql://me:geheim@host/book fell over")

    monkeypatch.setattr(health.Patient, "clock", broken)
    found = examine()
    assert told(found, "clock")[0] == "failed"
    assert "RuntimeError" in found["clock"]["detail"]
    assert "geheim" not in found["clock"]["detail"]
    assert found["devices"]["state"] == "ok"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, jayrun: Jayrun) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="jayrun-test-", dir="/tmp"))  # tmp_path is closed to the server's account
    folder.chmod(0o755)
    monkeypatch.setenv("JAYRUN_HOME", str(folder / "home"))
    monkeypatch.delenv("JAYRUN_DATABASE_URL")
    yield folder / "home"
    embedded.down(Settings(home=folder / "home"))
    shutil.rmtree(folder)


def test_a_server_of_our_own(examine: Examine, jayrun: Jayrun, home: Path) -> None:
    found = examine()
    assert told(found, "database") == (
        "ok",
        f"the server of JAYRUN_HOME in {home} is not running: the first program that needs it starts it -> None",
    )
    assert found["server"]["state"] == "skipped"
    assert not home.exists()

    embedded.ensure(Settings(home=home))
    found = examine()
    assert (found["database"]["state"], found["schema"]["state"]) == ("ok", "ok")
    assert found["schema"]["detail"] == "there is none yet: the first program makes it"
    assert found["host"]["state"] == "skipped"
    assert found["server"] == {"check": "server", "state": "ok", "detail": found["server"]["detail"], "next": None}

    jayrun("db", "down")
    found = examine()
    assert told(found, "database")[0] == "failed"
    assert found["database"]["next"] == "jayrun db up"
    assert not embedded.locate(Settings(home=home)).running


@needs_root
def test_a_server_of_another_user(jayrun: Jayrun, home: Path) -> None:
    embedded.ensure(Settings(home=home))
    schema.upgrade(embedded.locate(Settings(home=home)).url)

    def as_nobody() -> dict[str, tuple[str, str]]:
        environment = child_environment({"JAYRUN_HOME": str(home)})
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return {check: (state, words) for check, state, words in json.loads(done.stdout)}

    found = as_nobody()
    assert found["rights"] == ("ok", "role jayrun_worker may lease -> None")
    assert found["schema"][0] == "ok"
    assert found["folders"][0] == "warning"
    jayrun("db", "down")
    assert as_nobody()["database"] == (
        "failed",
        f"the server in {home} is not running -> `jayrun db up`, run by its owner or root",
    )


def test_a_home_that_cannot_be(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAYRUN_DATABASE_URL")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAYRUN_HOME", str(tmp_path / "file" / "home"))
    found = examine()
    assert told(found, "folders")[0] == "failed"
    assert told(found, "database")[0] == "failed"
    assert "is a file where a folder is expected" in found["database"]["detail"]


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ("SELECT", "no jayrun book yet -> run `jayrun db upgrade`"),
        ("9999", "schema 9999, which is newer than this jayrun (0001) -> install the newer jayrun-leases"),
    ],
)
def test_another_schema(
    examine: Examine,
    server: Throwaway,
    sql: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    statements: str,
    words: str,
) -> None:
    if statements.isdigit():
        made = "CREATE SCHEMA jayrun CREATE TABLE schema_revision (version_num text)"
        statements = f"{made}; INSERT INTO jayrun.schema_revision VALUES ('{statements}')"
    with database_of(server, sql, statements) as other:
        monkeypatch.setenv("JAYRUN_DATABASE_URL", other)
        found = examine()
    state, all_words = told(found, "schema")
    assert state == "failed"
    assert all_words.endswith(words)
    assert {found[check]["state"] for check in ("host", "holders", "devices")} == {"skipped"}
    assert found["listener"]["state"] == "ok"


def test_a_role_that_may_nothing(
    examine: Examine, url: str, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_role(url, sql, "nobody_here") as theirs:
        monkeypatch.setenv("JAYRUN_DATABASE_URL", theirs)
        found = examine()
    state, words = told(found, "rights")
    assert state == "failed"
    assert "role nobody_here may not even look" in words
    assert "GRANT jayrun_worker TO nobody_here" in words
    assert found["schema"]["state"] == found["host"]["state"] == "skipped"


def test_a_role_that_may_only_look(
    examine: Examine, url: str, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants = "GRANT USAGE ON SCHEMA jayrun, jayrun_audit TO onlooker"
    grants += "; GRANT SELECT ON ALL TABLES IN SCHEMA jayrun, jayrun_audit TO onlooker"
    with of_role(url, sql, "onlooker", grants) as theirs:
        monkeypatch.setenv("JAYRUN_DATABASE_URL", theirs)
        found = examine()
    state, words = told(found, "rights")
    assert state == "warning"
    assert "may look, but not lease" in words
    assert "on jayrun." in words
    assert found["schema"]["state"] == "ok"


def test_the_role_of_other_users_of_the_host_may_lease(
    examine: Examine, url: str, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_role(url, sql, "colleague", "GRANT jayrun_worker TO colleague") as theirs:
        monkeypatch.setenv("JAYRUN_DATABASE_URL", theirs)
        assert told(examine(), "rights") == ("ok", "role colleague may lease -> None")


def test_a_server_that_takes_no_writes(
    examine: Examine, url: str, sql: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "-cdefault_transaction_read_only%3Don%20-csynchronous_commit%3Doff%20-cTimeZone"
    monkeypatch.setenv("JAYRUN_DATABASE_URL", url.replace("-cTimeZone", options))
    found = examine()
    assert found["database"]["state"] == "ok"
    state, words = told(found, "server")
    assert state == "failed"
    assert "it takes no writes" in words
    assert "synchronous_commit is off" in words
    assert found["schema"]["state"] == "ok"


@pytest.mark.slow
def test_a_standby(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_throwaway(tmp_path, settings=Settings()) as primary:
        schema.upgrade(primary.url)
        with standby_of(primary) as pair:
            monkeypatch.setenv("JAYRUN_DATABASE_URL", pair.standby.url)
            found = examine()
            monkeypatch.setenv("JAYRUN_DATABASE_URL", pair.url)
            both = examine()
    state, words = told(found, "server")
    assert state == "failed"
    assert words.startswith("it is a standby and takes no writes; PostgreSQL")
    assert words.endswith("-> let JAYRUN_DATABASE_URL name the primary, or both of them")
    assert found["listener"]["detail"] == "a standby sends no notifications"
    assert (found["schema"]["state"], found["host"]["state"]) == ("ok", "ok")
    assert "standby" not in both["server"]["detail"]


@needs_pgbouncer
@pytest.mark.parametrize(("mode", "state"), [("transaction", "warning"), ("session", "ok")])
def test_a_pooler(
    examine: Examine, server: Throwaway, host_id: int, monkeypatch: pytest.MonkeyPatch, mode: str, state: str
) -> None:
    with pooler(server, mode=mode, size=4) as pooled:
        monkeypatch.setenv("JAYRUN_DATABASE_URL", pooled)
        found = examine()
    assert told(found, "pooler") == ("ok", "one stands before the server -> None")
    assert told(found, "listener")[0] == state
    assert found["devices"]["state"] == "ok"


# --- this host -------------------------------------------------------------------------------------------------------


def test_two_machines_that_pass_for_one(examine: Examine, host_id: int, sql: psycopg.Connection) -> None:
    sql.execute("UPDATE jayrun.hosts SET boot_id = 'another', seen_at = clock_timestamp()")
    state, words = told(examine(), "host")
    assert state == "warning"
    assert "before its last restart" in words

    over = threading.Event()

    def speak() -> None:
        with psycopg.connect(sql.info.dsn, autocommit=True) as other:
            while not over.wait(0.05):
                other.execute("UPDATE jayrun.hosts SET seen_at = clock_timestamp()")

    speaking = threading.Thread(target=speak)
    speaking.start()
    try:
        state, words = told(examine(), "host")
    finally:
        over.set()
        speaking.join()
    assert state == "failed"
    assert "another machine speaks" in words
    assert "JAYRUN_HOST_ID" in words


def test_one_machine_that_passes_for_two(
    examine: Examine, host_id: int, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = holders.attest_host(book, "second")
    devices.declare(book, second, gpus(1))
    state, words = told(examine(), "host")
    assert state == "failed"
    assert "is in the book as second too" in words
    monkeypatch.setenv("JAYRUN_HOST_ID", "second")
    assert told(examine(), "host")[0] == "failed"


def test_a_dead_holder(examine: Examine, host_id: int, hold: Callable[..., Holder], sql: psycopg.Connection) -> None:
    only = hold("only one", 5).wait_until_held()
    assert told(examine(), "holders") == ("ok", "1 alive in the book -> None")
    only.kill()
    state, words = told(examine(), "holders")
    assert state == "warning"
    assert "1 of them are dead" in words
    assert sql.execute("SELECT state FROM jayrun.holders").fetchall() == [("alive",)]


def test_devices_that_do_not_serve(examine: Examine, jayrun: Jayrun, host_id: int, sql: psycopg.Connection) -> None:
    jayrun("devices", "drain", "0")
    sql.execute("UPDATE jayrun.devices SET fault = 'it has fallen off the bus' WHERE host_index = 1")
    state, words = told(examine(), "devices")
    assert state == "warning"
    assert "gpu 0 is draining" in words
    assert "jayrun devices resume 0" in words
    assert "gpu 1 is at fault: it has fallen off the bus" in words


# --- the hardware and this shell -------------------------------------------------------------------------------------


def discovered(sql: psycopg.Connection, count: int) -> None:
    for number in range(count):
        sql.execute("UPDATE jayrun.devices SET device_uuid = %s WHERE host_index = %s", (uuid(number), number))


def test_the_driver_shows_what_the_book_has(examine: Examine, host_id: int, sql: psycopg.Connection) -> None:
    discovered(sql, 2)
    with standing_in(machine(2)):
        found = examine()
    assert told(found, "driver") == ("ok", "NVIDIA 580.65.06, CUDA 13.0: 2 GPU(s) -> None")
    assert told(found, "hardware") == ("ok", "2 device(s) are in the book and shown by the driver -> None")


def test_the_driver_shows_something_else(examine: Examine, host_id: int, sql: psycopg.Connection) -> None:
    discovered(sql, 2)
    shown = machine(3)
    shown.gpus[0].fails["memory"] = 15
    shown.gpus[2].slots, shown.gpus[2].slices = 7, [Slice(0, "MIG-one"), Slice(3, "MIG-two")]
    with standing_in(shown):
        found = examine()
    state, words = told(found, "driver")
    assert state == "warning"
    assert "GPU 0" in words
    assert "fallen off the bus" in words
    assert "3 GPU(s), 2 MIG slice(s)" in words
    state, words = told(found, "hardware")
    assert state == "warning"
    assert words.startswith("not in the book: MIG-one, MIG-two; 2 device(s) are in the book")
    assert words.endswith("-> jayrun devices discover")


def test_a_driver_that_was_replaced(examine: Examine, host_id: int, sql: psycopg.Connection) -> None:
    discovered(sql, 1)
    shown = machine(2)
    shown.fails["init"] = 18
    with standing_in(shown):
        found = examine()
    state, words = told(found, "driver")
    assert state == "failed"
    assert "was replaced while an older one is loaded" in words
    assert "restart the machine" in words
    assert "the book has 1 device(s)" in words
    assert found["hardware"]["state"] == "skipped"
    assert found["masks"]["state"] == "ok"


@pytest.mark.parametrize(
    ("mask", "state", "words"),
    [
        ("1", "ok", "sees 1 of the 2 cuda devices of the book: 1"),
        ("", "warning", "sees 0 of the 2 cuda devices"),
        ("GPU-of-nobody", "warning", "the book does not know GPU-of-nobody"),
        ("0,7", "warning", "the book does not know 7"),
    ],
)
def test_a_mask(
    examine: Examine, host_id: int, monkeypatch: pytest.MonkeyPatch, mask: str, state: str, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    found = told(examine(), "masks")
    assert found[0] == state
    assert words in found[1]


def test_another_order_than_ours(examine: Examine, host_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORDER_VARIABLE, "FASTEST_FIRST")
    assert told(examine(), "order")[0] == "warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    state, words = told(examine(), "masks")
    assert state == "warning"
    assert "is read in PCI order" in words


def test_settings_that_cancel_each_other(examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAYRUN_HOME", str(tmp_path))
    monkeypatch.setenv("JAYRUN_PG_BINDIR", str(tmp_path))
    state, words = told(examine(), "settings")
    assert state == "failed"
    assert "JAYRUN_HOME has no effect" in words
    assert f"JAYRUN_PG_BINDIR is {tmp_path}, which has no initdb" in words


def test_another_distribution_of_that_name(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = tmp_path / "jayrun-9.9.dist-info"
    rival.mkdir()
    (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: jayrun\nVersion: 9.9\n")
    (rival / "RECORD").write_text("jayrun/__init__.py,,\njayrun-9.9.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    state, words = told(examine(), "jayrun")
    assert state == "failed"
    assert "another distribution installs the module `jayrun` here too: jayrun 9.9" in words
    assert "pip uninstall -y jayrun" in words


def test_another_module_in_this_folder(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(examine(), "jayrun")[0] == "ok"
    (tmp_path / "jayrun").mkdir()
    (tmp_path / "jayrun/__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    state, words = told(examine(), "jayrun")
    assert state == "warning"
    assert f"programs in this folder import {tmp_path}/jayrun/__init__.py instead" in words


def test_a_command_of_another_environment(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jayrun").write_text("#!/bin/sh\n")
    (tmp_path / "jayrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    state, words = told(examine(), "jayrun")
    assert state == "warning"
    assert f"the command `jayrun` on PATH is {tmp_path}/jayrun, of another environment" in words


def test_what_is_seen_of_other_processes(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    is_first = kernel.sees_the_drivers_pids() and kernel.sees_other_users()
    assert told(examine(), "processes")[0] == ("ok" if is_first else "warning")
    monkeypatch.setattr(kernel, "sees_the_drivers_pids", lambda: False)
    state, words = told(examine(), "processes")
    assert state == "warning"
    assert "--pid=host" in words
