"""`jayrun` itself: exit codes, usage, and what it does when nobody listens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from subprocess import Popen

import pytest
from cli_helpers import Jayrun

from jayrun import errors
from jayrun.cli import leases
from jayrun.cli.exits import exit_code
from jayrun.embedded import NotADatabaseUrl
from jayrun.settings import child_environment

LISTINGS = [("devices", "list"), ("leases", "list"), ("queue",), ("holders", "list"), ("hosts", "list")]


def test_the_version(jayrun: Jayrun) -> None:
    told = jayrun("--version")
    assert (told.code, told.out) == (0, f"jayrun {version('jayrun-leases')}\n")


@pytest.mark.parametrize("group", [(), ("devices",), ("leases",), ("holders",), ("hosts",), ("db",)])
def test_a_group_alone_shows_its_help(jayrun: Jayrun, group: tuple[str, ...]) -> None:
    told = jayrun(*group)
    assert told.code == 2
    assert "Usage: jayrun" in told.err
    assert "Commands:" in told.err


@pytest.mark.parametrize(
    "command",
    [
        *("devices declare", "devices drain", "leases show", "queue", "why", "can", "reconciler", "doctor", "demo"),
        *("devices list", "leases list", "holders list", "holders end", "hosts list", "hosts forget"),
        *("devices discover", "devices reserve", "devices ignore", "audit", "settings list", "settings set"),
    ],
)
def test_every_command_has_help(jayrun: Jayrun, command: str) -> None:
    told = jayrun(*command.split(), "--help")
    assert told.code == 0
    assert told.out.startswith(f"Usage: jayrun {command}")


@pytest.mark.parametrize("group", ["", "devices", "leases", "holders", "hosts", "settings", "db"])
def test_summaries_fit_a_terminal(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = jayrun(*group.split(), "--help").out
    assert "..." not in told.partition("Commands:")[2]
    assert all(len(line) <= 80 for line in told.splitlines())


def test_the_commands_come_in_the_order_one_gets_to_know_them(jayrun: Jayrun) -> None:
    commands = jayrun("--help").out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in commands] == [
        *("run", "can", "devices", "leases", "queue", "why", "executions", "worker", "holders", "hosts"),
        *("audit", "settings", "db", "reconciler", "doctor", "demo"),
    ]


@pytest.mark.parametrize(
    "arguments", [("sideways",), ("queue", "--sideways"), ("leases", "show"), ("queue", "extra"), ("why",)]
)
def test_usage_errors(jayrun: Jayrun, arguments: tuple[str, ...]) -> None:
    told = jayrun(*arguments)
    assert told.code == 2
    assert "Error: " in told.err
    assert told.out == ""


def test_every_error_has_its_code() -> None:
    codes = {
        errors.PlacementImpossible: 3,
        errors.PlacementTimeout: 4,
        errors.BookUnreachable: 5,
        errors.UnknownId: 2,
        errors.UnknownHost: 2,
        errors.UnknownDevice: 2,
        errors.DeviceFileError: 2,
    }
    assert exit_code(NotADatabaseUrl()) == 2
    every = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.JayrunError)]
    assert len(every) > len(codes)
    assert {each: exit_code(each()) for each in every} == {each: codes.get(each, 1) for each in every}


@pytest.mark.parametrize(
    ("error", "code"), [(errors.PlacementImpossible, 3), (errors.PlacementTimeout, 4), (errors.BookBusy, 1)]
)
def test_an_error_is_one_message_and_its_code(
    jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, error: type[errors.JayrunError], code: int
) -> None:
    def fail(*_: object) -> None:
        raise error("such and such")

    monkeypatch.setattr(leases, "open_judged", fail)
    told = jayrun("leases", "list")
    assert (told.code, told.out, told.err) == (code, "", "error: such and such\n")


def test_an_interrupt_is_130(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(leases, "open_judged", interrupt)
    assert jayrun("leases", "list").code == 130


@pytest.mark.parametrize("listing", LISTINGS)
def test_listings_say_where_nobody_answers(
    jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, listing: tuple[str, ...]
) -> None:
    monkeypatch.setenv("JAYRUN_DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/book")
    told = jayrun(*listing)
    assert told.code == 5
    assert "postgresql://me:***@127.0.0.1:1/book" in told.err
    assert "JAYRUN_DATABASE_URL" in told.err
    assert "db up" not in told.err


@pytest.mark.parametrize("listing", [*LISTINGS, ("leases", "show", "0000"), ("why", "0000"), ("can",)])
def test_listings_start_no_server(
    jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listing: tuple[str, ...]
) -> None:
    monkeypatch.delenv("JAYRUN_DATABASE_URL")
    monkeypatch.setenv("JAYRUN_HOME", str(tmp_path / "home"))
    told = jayrun(*listing)
    assert told.code == 5
    assert str(tmp_path / "home") in told.err
    assert "`jayrun db up`" in told.err
    assert "JAYRUN_DATABASE_URL" not in told.err
    assert not (tmp_path / "home").exists()


def test_a_database_without_a_book_is_told_apart(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("JAYRUN_DATABASE_URL", url.replace("/jayrun?", "/postgres?"))
    for arguments in (("queue",), ("devices", "declare", "--simulate", "1x8GB")):
        told = jayrun(*arguments)
        assert told.code == 1
        assert "`jayrun db upgrade`" in told.err


def test_an_address_that_is_none(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("mysql://me:secret@somewhere/else", "postgresql://me:secret@here:x/y", "host=here password=secret"):
        monkeypatch.setenv("JAYRUN_DATABASE_URL", url)
        for arguments in (("queue",), ("db", "up"), ("db", "upgrade"), ("db", "status")):
            told = jayrun(*arguments)
            assert told.code == 2
            assert "must look like postgresql://" in told.err
            assert repr(url.replace("secret", "***")) in told.err


def test_a_server_that_is_not_ours_and_refuses_is_not_ours_to_start(
    jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("JAYRUN_DATABASE_URL", url.replace("/jayrun?", "/no-such-database?"))
    told = jayrun("queue")
    assert told.code == 5
    assert "no-such-database" in told.err
    assert "JAYRUN_DATABASE_URL" in told.err
    assert "db up" not in told.err


def test_nobody_reads_what_is_printed(command: Callable[..., Popen[str]]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = command("devices", "list", "--json", stdout=writer)
    os.close(writer)
    _, said = process.communicate(timeout=20)
    assert said == ""


def test_a_listing_imports_little(url: str) -> None:
    script = "import sys\nfrom jayrun.cli.app import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script, "leases", "list", "--json"],
        env=child_environment({"JAYRUN_DATABASE_URL": url}),
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(ended.stdout.split())
    assert "jayrun.cli.leases" in imported
    assert not imported & {"alembic", "rich", "multiprocessing.forkserver"}
