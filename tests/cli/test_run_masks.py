"""The masks of `jayrun run`: those that it inherits limit what it may give, and those that it sets tell the command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from fleet import gpus
from processes import PATIENCE, until
from run_helpers import JAYRUN, nothing_left

from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.settings import MASKS, child_environment
from jayrun.store import audit, devices, holders
from jayrun.store.transactions import Book

Sql = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., "tuple[int, dict[str, str], str]"]
TOLD = ("JAYRUN_LEASE", "JAYRUN_DOCKER_FLAGS", "CUDA_DEVICE_ORDER", *MASKS)


@pytest.fixture
def host_id(book: Book, sql: Sql) -> int:
    """A host with four GPUs of 24 GB."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    key = holders.attest_host(book, None)
    devices.declare(book, key, gpus(4))
    return key


@pytest.fixture
def named(sql: Sql, host_id: int) -> int:
    """The same host, whose GPUs have UUIDs; the last one is a MIG slice of the first."""
    sql.execute("UPDATE jayrun.devices SET device_uuid = 'GPU-' || chr(97 + host_index) || '000'")
    return host_id


@pytest.fixture
def run(url: str) -> Run:
    """`run("--gpus", "2", CUDA_VISIBLE_DEVICES="0,1")`: exit code, the masks of the command, and standard error."""

    def start(*arguments: str, command: tuple[str, ...] = ("env",), **environment: str) -> tuple[int, Any, str]:
        ended = subprocess.run(
            [sys.executable, "-c", JAYRUN, "run", *arguments, "--", *command],
            env=child_environment({"JAYRUN_DATABASE_URL": url, **environment}, without=("JAYRUN_", "CUDA_", *MASKS)),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return ended.returncode, masks_of(ended.stdout), ended.stderr

    return start


def masks_of(printed: str) -> dict[str, str]:
    """What `env` printed of the variables that tell a command its devices, but for the lease's id."""
    found = dict(line.partition("=")[::2] for line in printed.splitlines() if line.partition("=")[0] in TOLD)
    assert not found or len(found.pop("JAYRUN_LEASE")) == 36
    return found


def cuda(devices: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("inherited", "arguments", "expected"),
    [
        (None, "--gpus 2", "GPU-a000,GPU-b000"),
        (None, "--gpus 2 --mask index", "0,1"),
        (None, "--device-id 3", "GPU-d000"),
        ("3", "", "GPU-d000"),
        ("3,1", "--gpus 2", "GPU-b000,GPU-d000"),
        ("3,1", "--device-id 0", "GPU-d000"),  # in the caller's numbering
        ("3,1", "--device-id 1 --mask index", "1"),
        ("GPU-c", "--mask index", "2"),
        ("GPU-c,GPU-a000", "--gpus 1-3", "GPU-a000,GPU-c000"),
        ("2,-1,0", "--gpus 1-4", "GPU-c000"),
    ],
)
def test_under_a_cuda_mask(
    run: Run, book: Book, named: int, inherited: str | None, arguments: str, expected: str
) -> None:
    masks = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    assert run(*arguments.split(), **masks) == (0, cuda(expected), "")
    nothing_left(book, named)


def test_numbers_are_given_where_a_uuid_is_not_known(run: Run, sql: Sql, named: int) -> None:
    sql.execute("UPDATE jayrun.devices SET device_uuid = NULL WHERE host_index = 1")
    assert run("--gpus", "2", CUDA_VISIBLE_DEVICES="1,2")[1] == cuda("1,2")
    assert run(CUDA_VISIBLE_DEVICES="GPU-c")[1] == cuda("GPU-c000")


@pytest.mark.parametrize(
    ("inherited", "arguments", "code", "message"),
    [
        ("", "", 123, "Impossible"),
        ("nonsense", "", 123, "Impossible"),
        ("3", "--gpus 2", 123, "Impossible"),
        ("0,0", "", 123, "Impossible"),
        ("3,1", "--device-id 2", 122, "device_id is 2, but this process sees 2 cuda devices, 0 to 1"),
        ("GPU-elsewhere", "--device-id 0", 122, "`jayrun devices discover`"),
    ],
)
def test_what_the_mask_leaves_out_is_not_given(
    run: Run, book: Book, named: int, inherited: str, arguments: str, code: int, message: str
) -> None:
    found, told, err = run(*arguments.split(), CUDA_VISIBLE_DEVICES=inherited)
    assert (found, told) == (code, {}), err
    assert message == "Impossible" or message in err, err
    nothing_left(book, named)


def test_it_waits_for_what_its_mask_names_though_others_are_free(run: Run, url: str, book: Book, named: int) -> None:
    holding = subprocess.Popen(
        [sys.executable, "-c", JAYRUN, "run", "--", "sleep", "1000"],
        env=child_environment({"JAYRUN_DATABASE_URL": url, "CUDA_VISIBLE_DEVICES": "2"}, without=("JAYRUN_", "CUDA_")),
    )
    try:
        until(lambda: audit.leases(book))
        assert run("--no-wait", CUDA_VISIBLE_DEVICES="GPU-c")[0] == 124
        assert run("--no-wait", CUDA_VISIBLE_DEVICES="2,3")[1] == cuda("GPU-d000")
    finally:
        holding.terminate()
        holding.wait(PATIENCE)


@pytest.fixture
def sliced(sql: Sql, named: int) -> int:
    """GPU 0 is split into the two slices that have the numbers 2 and 3."""
    sql.execute(
        "UPDATE jayrun.devices SET device_uuid = 'MIG-' || host_index, parent_uuid = 'GPU-a000' WHERE host_index > 1"
    )
    sql.execute("UPDATE jayrun.devices SET state = 'offline' WHERE host_index = 0")
    return named


@pytest.mark.parametrize(
    ("inherited", "arguments", "expected"),
    [
        (None, "--device-id 3", "MIG-3"),
        (None, "--device-id 3 --mask index", "MIG-3"),  # it has no other name
        ("MIG-3,MIG-2", "--device-id 0", "MIG-3"),
        ("MIG-3", "", "MIG-3"),
        ("0", "--device-id 1", "MIG-3"),  # the GPU that is split stands for its slices
        ("GPU-b000", "", "GPU-b000"),
    ],
)
def test_slices(run: Run, sliced: int, inherited: str | None, arguments: str, expected: str) -> None:
    masks = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    assert run(*arguments.split(), **masks) == (0, cuda(expected), "")


def test_one_slice_after_the_other_is_given_out_of_a_mask(run: Run, url: str, book: Book, sliced: int) -> None:
    script = f"{sys.executable} -c {shlex.quote(JAYRUN)} run --no-wait -- env"
    code, inner, err = run("--device-id", "0", command=("sh", "-c", script), CUDA_VISIBLE_DEVICES="MIG-2,MIG-3")
    assert (code, inner) == (0, cuda("MIG-2")), err  # inside, what is asked for is of the command's own slice
    beside = f"env -u JAYRUN_LEASE CUDA_VISIBLE_DEVICES=MIG-2,MIG-3 {script}"
    code, other, err = run("--device-id", "0", command=("sh", "-c", beside), CUDA_VISIBLE_DEVICES="MIG-2,MIG-3")
    assert (code, other) == (0, cuda("MIG-3")), err


@pytest.mark.parametrize(
    ("backend", "inherited", "arguments", "expected"),
    [
        ("rocm", {}, "--gpus 2", {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}),
        ("rocm", {}, "--device-id 2", {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0"}),
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"},
            "",
            {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"},
        ),
        (
            "rocm",
            {"CUDA_VISIBLE_DEVICES": "2"},
            "",
            {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"},
        ),
        ("xpu", {}, "--gpus 2", {"ZE_AFFINITY_MASK": "0,1"}),
        ("xpu", {"ZE_AFFINITY_MASK": "3.0,1"}, "--gpus 2", {"ZE_AFFINITY_MASK": "1,3"}),
        ("xpu", {"ZE_AFFINITY_MASK": "3,1"}, "--device-id 1", {"ZE_AFFINITY_MASK": "3"}),
        ("opencl", {}, "", {}),
    ],
)
def test_other_backends(
    run: Run,
    book: Book,
    host_id: int,
    backend: str,
    inherited: dict[str, str],
    arguments: str,
    expected: dict[str, str],
) -> None:
    devices.declare(book, host_id, [RuntimeDevice(Device.GPU, [Backend(backend)], index, 24) for index in range(4)])
    assert run("--backend", backend, *arguments.split(), **inherited) == (0, expected, "")


def test_beside_gpus_of_another_vendor_each_counts_its_own(run: Run, book: Book, host_id: int) -> None:
    kinds = [Backend.CUDA, Backend.ROCM, Backend.CUDA, Backend.ROCM]
    devices.declare(book, host_id, [RuntimeDevice(Device.GPU, [kind], index, 24) for index, kind in enumerate(kinds)])
    assert run("--gpus", "2")[1] == cuda("0,1")
    assert run("--gpus", "2", "--backend", "rocm")[1] == {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}
    assert run("--device-id", "3", "--backend", "rocm")[1]["ROCR_VISIBLE_DEVICES"] == "1"
    assert run("--device-id", "3")[0] == 123
    for index in (0, 1):  # they stay in the machine, each for its own vendor
        devices.remove(book, host_id, kind="gpu", host_indexes=[index])
    assert run("--device-id", "2")[1] == cuda("1")
    assert run("--device-id", "3", "--backend", "rocm")[1]["ROCR_VISIBLE_DEVICES"] == "1"


def test_memory_is_divided_among_the_gpus(run: Run, book: Book, host_id: int, url: str) -> None:
    script = f"{sys.executable} -c {shlex.quote(JAYRUN)} leases list --json"
    options = ("--gpus", "2-4", "--total-memory-gb", "40", "--memory-gb", "1")
    ended = subprocess.run(
        [sys.executable, "-c", JAYRUN, "run", *options, "--", "sh", "-c", script],
        env=child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_", "CUDA_", *MASKS)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert '"memory_bytes": 44000000000' in ended.stdout
    assert '"exclusive": false' in ended.stdout


def test_a_command_inside_sees_only_what_the_outer_one_was_given(run: Run, named: int) -> None:
    inner = f"{sys.executable} -c {shlex.quote(JAYRUN)} run --memory-gb 2 --gpus 1-4 -- env"
    outer = ("--memory-gb", "2", "--gpus", "2")
    code, told, err = run(*outer, command=("sh", "-c", inner), CUDA_VISIBLE_DEVICES="3,1,0")
    assert (code, told) == (0, cuda("GPU-a000,GPU-b000")), err
    inner = inner.replace("--gpus 1-4", "--device-id 1")
    assert run(*outer, command=("sh", "-c", inner), CUDA_VISIBLE_DEVICES="3,1")[1] == cuda("GPU-d000")


def test_the_order_is_set_for_the_command_whatever_it_was(run: Run, host_id: int) -> None:
    code, told, err = run(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert (code, told) == (0, cuda("1"))
    assert "CUDA_VISIBLE_DEVICES='1' is read in PCI order, though CUDA_DEVICE_ORDER is FASTEST_FIRST" in err
    assert run(CUDA_DEVICE_ORDER="FASTEST_FIRST")[1:] == (cuda("0"), "")


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("", ["--gpus", "device=GPU-a000"]),
        ("--gpus 2", ["--gpus", '"device=GPU-a000,GPU-b000"']),
        ("--gpus 2 --mask index", ["--gpus", '"device=GPU-a000,GPU-b000"']),
    ],
)
def test_flags_for_docker_survive_being_split_into_words(
    run: Run, url: str, named: int, arguments: str, flags: list[str]
) -> None:
    script = 'for word in $JAYRUN_DOCKER_FLAGS; do echo "$word"; done; echo "$JAYRUN_LEASE"'
    ended = subprocess.run(
        [sys.executable, "-c", JAYRUN, "run", "--print-docker-flags", *arguments.split(), "--", "sh", "-c", script],
        env=child_environment({"JAYRUN_DATABASE_URL": url}, without=("JAYRUN_", "CUDA_", *MASKS)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    *words, lease = ended.stdout.splitlines()
    assert words == [*flags, "-e", f"JAYRUN_LEASE={lease}", "-e", "CUDA_DEVICE_ORDER=PCI_BUS_ID"]
    assert ended.stderr == f"jayrun: JAYRUN_DOCKER_FLAGS: {' '.join(words)}\n"


def test_flags_for_docker_without_uuids_and_for_other_backends(run: Run, book: Book, host_id: int) -> None:
    assert run("--print-docker-flags", "--device-id", "2")[1]["JAYRUN_DOCKER_FLAGS"].startswith("--gpus device=2 -e ")
    assert "JAYRUN_DOCKER_FLAGS" not in run()[1]
    devices.declare(book, host_id, [RuntimeDevice(Device.GPU, [Backend.ROCM], index, 24) for index in range(4)])
    flags = run("--print-docker-flags", "--backend", "rocm", "--device-id", "2")[1]["JAYRUN_DOCKER_FLAGS"]
    assert flags.startswith("--device /dev/kfd --device /dev/dri -e JAYRUN_LEASE=")
    assert flags.endswith(" -e ROCR_VISIBLE_DEVICES=2 -e HIP_VISIBLE_DEVICES=0")


def test_a_command_inside_has_no_flags_for_the_devices_of_another(run: Run, named: int) -> None:
    inner = f"{sys.executable} -c {shlex.quote(JAYRUN)} run --memory-gb 2 --device-id 1"
    outer = ("--memory-gb", "2", "--gpus", "2", "--print-docker-flags")
    code, told, err = run(*outer, command=("sh", "-c", f"{inner} -- env"))
    assert (code, told) == (0, cuda("GPU-b000")), err
    told = run(*outer, command=("sh", "-c", f"{inner} --print-docker-flags -- env"))[1]
    assert told["JAYRUN_DOCKER_FLAGS"].startswith("--gpus device=GPU-b000 -e ")


def test_bad_words_are_refused_with_what_there_is(run: Run, host_id: int) -> None:
    for arguments, message in [
        (("--mask", "name"), "uuid"),
        (("--backend", "cpu"), "rocm"),
        (("--total-memory-gb", "0"), "--total-memory-gb must be positive"),
        (("--total-memory-gb", "4", "--device-id", "0"), "--device-id names one GPU"),
    ]:
        code, _, err = run(*arguments)
        assert (code, message in err) == (122, True), err
