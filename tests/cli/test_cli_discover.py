"""`jayrun devices discover`, and what it makes of the host: cards of a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gpus
import pytest
from cli_helpers import COMMAND, Holder, Outcome
from gpus import GB, LOST, Slice, Stub, machine, stub_environment, uuid
from processes import until

from jayrun.settings import child_environment

Run = Callable[..., Outcome]


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return stub_environment(tmp_path, machine(4))


@pytest.fixture
def jayrun(url: str, stub: Stub) -> Run:
    """`jayrun("devices", "list")` in a process of its own, which finds the stand-in."""

    def run(*arguments: str, **environment: str) -> Outcome:
        told = {"JAYRUN_DATABASE_URL": url, **stub.environment, **environment}
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=child_environment(told, without=("JAYRUN_",)),
            check=False,
            capture_output=True,
            text=True,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def test_discovering_says_what_it_did_and_what_changed(jayrun: Run, stub: Stub) -> None:
    tried = jayrun("devices", "discover", "--dry-run")
    told = jayrun("devices", "discover")
    assert tried == told
    assert (told.code, told.err) == (0, "")
    assert told.out.splitlines() == [
        "found 4 GPU(s) with driver 580.65.06, CUDA 13.0",
        "gpu 0-3 added: NVIDIA H100 80GB HBM3, 79 GB",
    ]
    assert jayrun("devices", "discover").out.splitlines()[1:] == ["nothing has changed"]

    shown = machine(4)
    shown.gpus[2].fails = {"*": LOST}
    shown.gpus[3].slots, shown.gpus[3].slices = 7, [Slice(0, "MIG-a"), Slice(1, "MIG-b")]
    stub.show(shown)
    told = jayrun("devices", "discover")
    assert told.code == 0
    assert "found 4 GPU(s) and 2 MIG slice(s)" in told.out
    assert "gpu 2 offline: lost" in told.out
    assert "gpu 3 offline: MIG is on" in told.out
    assert "gpu 4-5 added: NVIDIA H100 MIG, 20 GB" in told.out
    table = jayrun("devices", "list").out
    for words in ("UUID", "SLICE OF", "FAULT", uuid(0), "MIG-b", "lost: it has fallen off the bus"):
        assert words in table

    stub.show(machine(4))
    told = jayrun("devices", "discover", "--json")
    assert [(each["device_id"], each["changes"]) for each in told.json["changes"]] == [
        (2, ["is there again"]),
        (3, ["is there again"]),
        (4, ["offline: MIG is off on its GPU, which is leased as a whole"]),
        (5, ["offline: MIG is off on its GPU, which is leased as a whole"]),
    ]
    assert (told.json["driver"], told.json["cuda"], told.json["problem"]) == ("580.65.06", "13.0", None)
    assert [(row["device_id"], row["state"]) for row in told.json["devices"]][2:] == [
        *((2, "online"), (3, "online"), (4, "offline"), (5, "offline"))
    ]


def test_a_dry_run_writes_nothing(jayrun: Run) -> None:
    told = jayrun("devices", "discover", "--dry-run", "--json")
    assert [each["device_uuid"] for each in told.json["changes"]] == [uuid(number) for number in range(4)]
    assert told.json["devices"] == []
    assert "jayrun devices discover" in jayrun("devices", "list").out


def test_a_dry_run_needs_no_book(stub: Stub, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "devices", "discover", "--dry-run"],
        env=child_environment({"JAYRUN_HOME": str(tmp_path / "home"), **stub.environment}, without=("JAYRUN_DATA",)),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu 0-3 added" in done.stdout
    assert not (tmp_path / "home").exists()


def test_without_a_driver_it_says_what_to_do_and_changes_nothing(jayrun: Run, stub: Stub) -> None:
    jayrun("devices", "discover")
    before = jayrun("devices", "list", "--json").json
    told = jayrun("devices", "discover", LD_LIBRARY_PATH=os.devnull)
    assert told.code == 1
    assert "libnvidia-ml.so.1 is not found" in told.err
    assert "jayrun devices declare" in told.err
    shown = machine(4)
    shown.fails = {"init": gpus.VERSION_MISMATCH}
    stub.show(shown)
    told = jayrun("devices", "discover", "--json")
    assert told.code == 1
    assert "restart the machine" in told.json["problem"]
    assert jayrun("devices", "list", "--json").json == before


def test_without_a_driver_no_server_is_started(tmp_path: Path) -> None:
    home = {"JAYRUN_HOME": str(tmp_path / "home"), "LD_LIBRARY_PATH": os.devnull}
    done = subprocess.run(
        [*COMMAND, "devices", "discover"], env=child_environment(home), check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "`jayrun devices declare --help`" in done.stderr
    assert not (tmp_path / "home").exists()


def test_what_is_left_to_others(jayrun: Run) -> None:
    jayrun("devices", "discover")
    told = jayrun("devices", "reserve", "0", "1", "--gb", "9.5")
    assert (told.code, told.out) == (0, "9.5 GB of gpu 0-1 are left to others\n")
    listed = jayrun("devices", "list", "--json").json
    assert [row["capacity_bytes"] for row in listed] == [69_500_000_000] * 2 + [79 * GB] * 2
    assert [row["reserve_bytes"] for row in listed] == [9_500_000_000] * 2 + [0] * 2
    assert jayrun("devices", "discover").out.splitlines()[1:] == ["nothing has changed"]
    assert jayrun("devices", "reserve", "0", "--gb", "80").code == 1
    assert jayrun("devices", "reserve", "0", "--gb", "-1").code == 2


def test_draining_is_told_to_who_waits_and_removing_waits_for_leases(jayrun: Run, hold: Callable[..., Holder]) -> None:
    jayrun("devices", "discover")
    holder = hold("train", 70).wait_until_held()
    for number in ("1", "2", "3"):
        jayrun("devices", "drain", number)
    holder.ask(70)
    [waiting] = until_some(lambda: jayrun("queue", "--json").json)
    for number, words in enumerate(("9 of 79 GB free", "draining", "draining", "draining")):
        assert f"gpu {number}: {words}" in waiting["reason"]
    assert jayrun("why", waiting["execution_id"]).out.count("draining") == 3
    told = jayrun("devices", "remove", "0")
    assert told.code == 1
    assert "still carries 1 lease(s): `jayrun devices drain 0`" in told.err
    assert jayrun("devices", "remove", "1", "2").code == 0
    jayrun("devices", "resume", "3")
    until(lambda: not jayrun("queue", "--json").json)
    assert {row["device_id"]: row["leases"] for row in jayrun("devices", "list", "--json").json} == {0: 1, 3: 1}


def until_some(rows: Callable[[], list[dict[str, str]]]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    until(lambda: found.extend(rows()) or found)
    return found


def test_a_reconciler_looks_by_itself(jayrun: Run, stub: Stub) -> None:
    jayrun("devices", "discover")
    shown = machine(5)
    shown.gpus[1].fails = {"memory": LOST, "memory_v2": LOST}
    stub.show(shown)
    told = jayrun("reconciler", "--once")
    assert told.code == 0
    assert "gpu 1: offline: lost" in told.err
    assert "gpu 4" not in told.err, "what works is no warning"
    assert [row["state"] for row in jayrun("devices", "list", "--json").json] == [
        *("online", "offline", "online", "online", "online")
    ]
    stub.show(machine(5))
    assert jayrun("reconciler", "--once").err == "", "one look in look_seconds"


def test_where_only_commands_run_a_lost_card_is_seen_and_waited_for(jayrun: Run, stub: Stub, url: str) -> None:
    jayrun("devices", "discover")
    jayrun("settings", "set", "look_seconds", "0.2")
    environment = child_environment({"JAYRUN_DATABASE_URL": url, **stub.environment}, without=("JAYRUN_",))
    run = [*COMMAND, "run", "--device-id", "1", "--memory-gb", "50", "--"]
    with subprocess.Popen([*run, "cat"], env=environment, stdin=subprocess.PIPE) as first:
        until(lambda: jayrun("leases", "list", "--json").json)
        shown = machine(4)
        shown.gpus[1].fails = {"*": LOST}
        stub.show(shown)
        until(lambda: any(row["fault"] for row in jayrun("devices", "list", "--json").json))
    with subprocess.Popen([*run, "true"], env=environment) as waiting:
        [asked] = until_some(lambda: jayrun("queue", "--json").json)
        assert "gpu 1: offline: lost" in asked["reason"]
        stub.show(machine(4))
        assert waiting.wait() == 0
    assert first.returncode == 0


def test_one_of_several_numbers_that_is_wrong_changes_none(jayrun: Run) -> None:
    jayrun("devices", "discover")
    before = jayrun("devices", "list", "--json").json
    for change in (("drain",), ("remove",), ("reserve", "--gb", "1"), ("ignore", "--below-gb", "1")):
        told = jayrun("devices", *change, "0", "9")
        assert (told.code, "no device gpu 9" in told.err) == (2, True)
    assert jayrun("devices", "list", "--json").json == before


def test_a_program_without_a_name_is_not_passed_over(jayrun: Run) -> None:
    told = jayrun("devices", "ignore", "0", "--command", "")
    assert (told.code, "--command must name a program" in told.err) == (2, True)


def test_declaring_by_hand_names_every_backend(jayrun: Run, tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    kinds = (("gpu", "rocm", 0), ("gpu", "xpu", 1), ("gpu", "mps", 2), ("tpu", "xla", 0))
    file.write_text(
        "".join(
            f'[[device]]\ndevice = "{kind}"\nbackends = ["{backend}"]\ndevice_id = {number}\nmemory_limit_gb = 16\n'
            for kind, backend, number in kinds
        )
    )
    assert jayrun("devices", "declare", "--file", str(file)).code == 0
    assert jayrun("devices", "discover").code == 0
    listed = sorted(jayrun("devices", "list", "--json").json, key=lambda row: not row["declared"])
    listed[:4] = sorted(listed[:4], key=lambda row: row["device"])
    assert [(row["device"], row["device_id"], row["backends"]) for row in listed[:4]] == [
        ("gpu", 0, ["rocm"]), ("gpu", 1, ["xpu"]), ("gpu", 2, ["mps"]), ("tpu", 0, ["xla"]),
    ]  # fmt: skip
    assert [row["device_id"] for row in listed if row["device_uuid"]] == [3, 4, 5, 6]


def test_several_devices_are_changed_together_or_not_at_all(jayrun: Run, hold: Callable[..., Holder]) -> None:
    jayrun("devices", "declare", "--simulate", "4x24GB")
    hold("train", 24).wait_until_held()  # number 0
    told = jayrun("devices", "remove", "3", "0")
    assert (told.code, "device gpu 0 still carries 1 lease" in told.err) == (1, True), told.err
    assert [row["state"] for row in jayrun("devices", "list", "--json").json] == ["online"] * 4
    told = jayrun("devices", "drain", "1-2,3", "2", "--json")
    assert [(row["device_id"], row["state"]) for row in told.json] == [(number, "draining") for number in (1, 2, 3)]


@pytest.mark.parametrize("numbers", ["2-1", "x", "-1", "1,", "0-", "0-99999999"])
def test_what_is_no_number_of_a_device_is_told_by_what_is(jayrun: Run, numbers: str) -> None:
    told = jayrun("devices", "drain", "--", numbers)
    assert (told.code, f"several as 0-2 and 0,2, but is {numbers.rpartition(',')[2]!r}" in told.err) == (2, True)
