"""`jayrun db`: what it prints, and that looking starts nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jayrun import embedded
from jayrun.cli.db import db
from jayrun.errors import BookUnreachable, ServerError
from jayrun.settings import Settings


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="jayrun-test-", dir="/tmp"))  # tmp_path is closed to the server's account
    folder.chmod(0o755)
    monkeypatch.setenv("JAYRUN_HOME", str(folder / "home"))
    monkeypatch.delenv("JAYRUN_DATABASE_URL", raising=False)
    yield folder / "home"
    monkeypatch.delenv("JAYRUN_DATABASE_URL", raising=False)
    embedded.down(Settings.load())
    shutil.rmtree(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(db, arguments)


def test_a_day_in_the_life_of_a_server(home: Path) -> None:
    looked = run("status", "--json")
    assert looked.exit_code == 5
    assert json.loads(looked.stdout)["running"] is False
    assert run("url").stdout.startswith("postgresql://jayrun@/jayrun?host=")
    assert run("down").stdout == "not running\n"
    assert not home.exists()  # none of these made anything

    started = run("up")
    assert started.exit_code == 0, started.exception
    assert "starting PostgreSQL" in started.stderr
    assert "starting PostgreSQL" not in started.stdout
    again = run("up")
    assert again.exit_code == 0
    assert again.stderr == ""

    facts = json.loads(run("status", "--json").stdout)
    assert facts["kind"] == "home"
    assert facts["running"] is True
    assert facts["held_down"] is False
    assert facts["folder"] == str(home)
    assert facts["data_folder"] == str(home / "data")
    assert isinstance(facts["pid"], int)
    told = run("status")
    assert told.exit_code == 0
    assert "server version" in told.stdout

    upgraded = run("upgrade")
    assert upgraded.exit_code == 0
    assert "nothing to do" in upgraded.stdout

    assert run("down").stdout.startswith("stopped")
    held = run("upgrade")
    assert isinstance(held.exception, BookUnreachable)
    assert run("status").exit_code == 5
    assert run("up").exit_code == 0


def test_a_url_of_somebody_elses_server_is_shown_without_its_password(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAYRUN_DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/book")
    looked = run("status")
    assert looked.exit_code == 5
    assert "postgresql://me:***@127.0.0.1:1/book" in looked.stdout
    assert "secret" not in looked.stdout
    assert run("url").stdout == "postgresql://me:secret@127.0.0.1:1/book\n"  # for programs
    for command in ("up", "upgrade"):
        started = run(command)
        assert isinstance(started.exception, BookUnreachable)
        assert "postgresql://me:***@127.0.0.1:1/book" in str(started.exception)
        assert "db up" not in str(started.exception)
        assert started.stderr == ""
    assert isinstance(run("down").exception, ServerError)


def test_a_file_instead_of_a_folder_is_told(home: Path) -> None:
    home.write_text("")
    told = run("up")
    assert f"{home} is a file" in str(told.exception)
    assert told.stderr == ""
    assert run("status").exit_code == 5
    home.unlink()


def test_a_private_server_from_before_the_hosts_is_not_forgotten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = home.parent / "jayrun"
    monkeypatch.setenv("JAYRUN_HOME", str(private))
    embedded.up(Settings.load())
    try:
        monkeypatch.delenv("JAYRUN_HOME")
        monkeypatch.setenv("XDG_DATA_HOME", str(home.parent))
        monkeypatch.setenv("JAYRUN_STATE_ROOT", str(home))
        monkeypatch.setenv("JAYRUN_RUN_ROOT", str(home))
        (home / "data").mkdir(parents=True)  # root has started the host's server once
        looked = run("status", "--json")
        assert json.loads(looked.stdout)["kind"] == "host"
        assert f"`JAYRUN_HOME={private} jayrun db down` ends it" in looked.stderr
    finally:
        monkeypatch.setenv("JAYRUN_HOME", str(private))
        assert run("down").stdout.startswith("stopped")
    monkeypatch.delenv("JAYRUN_HOME")
    assert run("status").stderr == ""
    shutil.rmtree(home)
    monkeypatch.setenv("JAYRUN_HOME", str(home))


@pytest.mark.parametrize("command", ["up", "down", "status", "url", "upgrade"])
def test_every_command_has_help(command: str) -> None:
    helped = run(command, "--help")
    assert helped.exit_code == 0
    assert "Usage" in helped.stdout


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("sideways").exit_code == 2
