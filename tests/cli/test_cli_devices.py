"""`jayrun devices`: what it declares and changes in the book, and what it refuses."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from cli_helpers import Holder, Jayrun, in_terminal

from jayrun import embedded
from jayrun.settings import Settings

GB = 10**9


@pytest.fixture
def another_host(sql: psycopg.Connection) -> str:
    sql.execute("INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES ('another-id', 'another', 'its-boot')")
    return "another"


def devices(jayrun: Jayrun) -> dict[str, tuple[object, ...]]:
    rows = jayrun("devices", "list", "--json").json
    return {
        f"{row['device']} {row['device_id']}": (
            row["capacity_bytes"],
            row["state"],
            row["exclusive_only"],
            row["backends"],
        )
        for row in rows
    }


def test_declaring_by_options(jayrun: Jayrun) -> None:
    assert "`jayrun devices declare`" in jayrun("devices", "list").out
    told = jayrun("devices", "declare", "--device-id", "0", "--device-id", "1", "--memory-gb", "24")
    assert (told.code, told.out) == (0, "declared gpu 0-1: 24 GB, cuda\n")
    told = jayrun("devices", "declare", "--device-id", "1", "--memory-gb", "79.5", "--exclusive-only",
                  "--backend", "opencl", "--backend", "cuda")  # fmt: skip
    assert told.out == "declared gpu 1: 79.5 GB, cuda+opencl, exclusive only\n"
    told = jayrun("devices", "declare", "--device", "tpu", "--backend", "xla", "--device-id", "0", "--memory-gb", "16")
    assert told.out == "declared tpu 0: 16 GB, xla\n"
    assert devices(jayrun) == {
        "gpu 0": (24 * GB, "online", False, ["cuda"]),
        "gpu 1": (79_500_000_000, "online", True, ["cuda", "opencl"]),
        "tpu 0": (16 * GB, "online", False, ["xla"]),
    }
    table = jayrun("devices", "list").out.splitlines()
    assert re.split(" {2,}", table[0])[:4] == ["HOST", "DEVICE", "STATE", "MEMORY"]
    assert re.split(" {2,}", table[2])[1:] == [
        *("gpu 1", "online", "79.5 GB", "0 GB", "79.5 GB", "0", "always", "cuda,opencl", "-", "-")
    ]


def test_declaring_from_a_file(jayrun: Jayrun, tmp_path: Path) -> None:
    table = '[[device]]\ndevice = "gpu"\nbackends = ["cuda"]\ndevice_id = {}\nmemory_limit_gb = 24\n'
    file = tmp_path / "devices.toml"
    file.write_text(table.format(0) + table.format(3))
    told = jayrun("devices", "declare", "--file", str(file), "--json")
    assert told.code == 0
    assert [row["device_id"] for row in told.json] == [0, 3]
    told = jayrun("devices", "declare", "--device-id", "7", "--memory-gb", "1", "--json")
    assert [row["device_id"] for row in told.json] == [7]

    file.write_text(table.format("'x'"))
    told = jayrun("devices", "declare", "--file", str(file))
    assert told.code == 2
    assert f"error: {file}, line 4: device_id must be a whole number" in told.err


def test_declaring_what_is_only_simulated(jayrun: Jayrun) -> None:
    told = jayrun("devices", "declare", "--simulate", "8x80GB")
    assert told.out == "declared gpu 0-7: 80 GB, cuda\n"
    assert devices(jayrun) == {f"gpu {number}": (80 * GB, "online", False, ["cuda"]) for number in range(8)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give either"),
        ("--memory-gb 24", "go together"),
        ("--device-id 0", "go together"),
        ("--simulate 2x8GB --device-id 0 --memory-gb 8", "give either"),
        ("--simulate 2x8GB --file x.toml", "give either"),
        ("--simulate 2x8GB --exclusive-only", "go with --device-id"),
        ("--simulate 2x8GB --backend rocm", "go with --device-id"),
        ("--file x.toml --device tpu", "go with --device-id"),
        ("--file x.toml", "cannot be read"),
        ("--simulate 2x", "--simulate must be NxMGB, such as 8x80GB, but is '2x'"),
        ("--simulate 0x80GB", "--simulate NxMGB must be at least 1, but is 0"),
        ("--simulate 9999x80GB", "--simulate NxMGB must be at most 1024"),
        ("--simulate -1x80GB", "8x80GB"),
        ("--simulate 8x0GB", "positive"),
        ("--device-id 0 --device-id 0 --memory-gb 8", "twice"),
        ("--device-id -1 --memory-gb 8", "--device-id must be at least 0"),
        ("--device-id 0 --memory-gb 0", "--memory-gb must be positive, but is 0"),
        ("--device-id 0 --memory-gb -8", "--memory-gb must not be negative"),
        ("--device-id 0 --memory-gb nan", "--memory-gb must be finite"),
        ("--device-id 0 --memory-gb 1e20", "--memory-gb must be at most"),
        ("--device-id x --memory-gb 8", "integer"),
        ("--device-id 0 --memory-gb 8 --backend vulkan", "vulkan"),
        ("--device-id 0 --memory-gb 8 --device cpu", "'cpu' is not one of 'gpu', 'tpu'"),
        ("--device-id 0 --memory-gb 8 --device tpu", "a tpu needs --backend, for example xla"),
    ],
)
def test_declarations_that_are_none(jayrun: Jayrun, arguments: str, words: str) -> None:
    told = jayrun("devices", "declare", *arguments.split())
    assert told.code == 2
    assert words in told.err
    assert told.out == ""
    assert devices(jayrun) == {}


def test_a_device_is_drained_resumed_and_removed(jayrun: Jayrun) -> None:
    jayrun("devices", "declare", "--simulate", "3x8GB")
    assert jayrun("devices", "drain", "0", "2").out == "draining gpu 0,2\n"
    assert [state for _, state, *_ in devices(jayrun).values()] == ["draining", "online", "draining"]
    assert [row["free_bytes"] for row in jayrun("devices", "list", "--json").json] == [0, 8 * GB, 0]
    assert jayrun("devices", "resume", "0").out == "online: gpu 0\n"
    told = jayrun("devices", "remove", "2", "1", "--json")
    assert [row["device_id"] for row in told.json] == [0]
    assert jayrun("devices", "remove", "0").out == "removed gpu 0\n"
    assert devices(jayrun) == {}
    assert jayrun("devices", "declare", "--simulate", "1x9GB").code == 0
    assert devices(jayrun) == {"gpu 0": (9 * GB, "online", False, ["cuda"])}


@pytest.mark.parametrize("verb", ["drain", "resume", "remove"])
def test_devices_that_do_not_exist(jayrun: Jayrun, verb: str) -> None:
    jayrun("devices", "declare", "--simulate", "2x8GB")
    told = jayrun("devices", verb, "7")
    assert told.code == 2
    assert "no device gpu 7" in told.err
    assert "gpu 0, gpu 1" in told.err
    assert jayrun("devices", verb, "0", "--device", "tpu").code == 2
    assert jayrun("devices", verb, "x").code == 2
    assert jayrun("devices", verb).code == 2


def test_another_host_of_the_book(jayrun: Jayrun, another_host: str) -> None:
    jayrun("devices", "declare", "--simulate", "1x8GB")
    assert jayrun("devices", "declare", "--simulate", "2x16GB", "--host", another_host).code == 0
    told = jayrun("devices", "drain", "1", "--host", "another-id", "--json")
    assert [(row["host"], row["device_id"], row["state"]) for row in told.json] == [("another", 1, "draining")]
    assert len(jayrun("devices", "list", "--json").json) == 3
    told = jayrun("devices", "drain", "0", "--host", "nowhere")
    assert told.code == 2
    assert "another (another-id)" in told.err


def test_a_device_in_use_stays_and_a_change_judges_every_waiter_again(
    jayrun: Jayrun, sql: psycopg.Connection, hold: Callable[..., Holder]
) -> None:
    # Nobody but the change admits.
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 600, holder_ttl_seconds = 36000")
    jayrun("devices", "declare", "--simulate", "1x8GB")
    hold("first", 5).wait_until_held()
    told = jayrun("devices", "remove", "0")
    assert told.code == 1
    assert "still carries 1 lease(s)" in told.err

    assert jayrun("devices", "declare", "--device-id", "1", "--memory-gb", "8").code == 0
    assert jayrun("devices", "drain", "1").code == 0
    second = hold("second", 6)
    while not (waiting := jayrun("queue", "--json").json):
        assert second.process.poll() is None
    assert waiting[0]["label"] == "second"
    assert jayrun("devices", "resume", "1").code == 0
    second.wait_until_held()
    assert jayrun("queue", "--json").json == []


def test_a_terminal_gets_what_fits_it(jayrun: Jayrun, url: str) -> None:
    jayrun("devices", "declare", "--simulate", "2x80GB")
    plain = jayrun("devices", "list").out
    wide = in_terminal("devices", "list", columns=150, env={"JAYRUN_DATABASE_URL": url})
    assert wide[0] == 0
    assert "\x1b[1m" in wide[1]
    sober = in_terminal("devices", "list", columns=150, env={"JAYRUN_DATABASE_URL": url, "NO_COLOR": "1"})
    assert sober == (0, plain.replace("\n", "\r\n"))
    code, narrow = in_terminal("devices", "list", columns=70, env={"JAYRUN_DATABASE_URL": url, "NO_COLOR": "1"})
    assert code == 0
    assert all(len(line) <= 70 for line in narrow.splitlines())
    assert "NAME" not in narrow
    assert "gpu 1   online   80 GB      0 GB  80 GB" in narrow


@pytest.fixture
def home(jayrun: Jayrun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="jayrun-test-", dir="/tmp"))  # tmp_path is closed to the server's account
    folder.chmod(0o755)
    monkeypatch.delenv("JAYRUN_DATABASE_URL")
    monkeypatch.setenv("JAYRUN_HOME", str(folder / "home"))
    yield folder / "home"
    embedded.down(Settings.load())
    shutil.rmtree(folder)


def test_declaring_starts_a_server_and_makes_the_book(jayrun: Jayrun, home: Path) -> None:
    told = jayrun("devices", "declare", "--simulate", "2x8GB")
    assert told.code == 0, told.err
    assert home.exists()
    assert len(devices(jayrun)) == 2
    assert jayrun("db", "down").code == 0
    told = jayrun("devices", "declare", "--simulate", "2x8GB")  # it was stopped on purpose
    assert told.code == 5
    assert "`jayrun db up`" in told.err
