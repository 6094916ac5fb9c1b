"""`jayrun devices`: which accelerators may be leased."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from jayrun.devices import nvml
from jayrun.devices.declared import load_devices
from jayrun.domain.checks import whole_number
from jayrun.domain.devices import Backend, Device, DeviceState, RuntimeDevice
from jayrun.domain.units import format_bytes, gigabytes_to_bytes
from jayrun.errors import BookUnreachable
from jayrun.runtime import hardware
from jayrun.runtime.hardware import Look
from jayrun.settings import Settings
from jayrun.store import admission, audit, holders
from jayrun.store import devices as booked
from jayrun.store.transactions import Book

from .book import open_book, open_judged
from .exits import FAILED, checked_arguments
from .options import AsJson, HostName
from .render import Column, Row, printable, ranges, show_rows, to_json

devices = typer.Typer(help="Show and change which accelerators may be leased.", no_args_is_help=True)

MOST_SIMULATED = 1024
COLUMNS = (
    Column("HOST", lambda row: row["host"], spare=1),
    Column("DEVICE", lambda row: f"{row['device']} {row['device_id']}"),
    Column("STATE", lambda row: row["state"]),
    Column("MEMORY", lambda row: format_bytes(row["capacity_bytes"]), number=True),
    Column("RESERVED", lambda row: format_bytes(row["reserved_bytes"]), number=True),
    Column("FREE", lambda row: format_bytes(row["free_bytes"]), number=True),
    Column("LEASES", lambda row: str(row["leases"]), number=True),
    Column("EXCLUSIVE", lambda row: "now" if row["exclusively_leased"] else "always" if row["exclusive_only"] else "-"),
    Column("BACKENDS", lambda row: ",".join(row["backends"]), folds=True, spare=2),
    Column("NAME", lambda row: row["name"] or "-", folds=True, spare=3),
    Column("WITHHELD", lambda row: _withheld(row), folds=True, below=True),
)
# What only discovered devices have, each where one has it.
DISCOVERED = {
    "device_uuid": Column("UUID", lambda row: row["device_uuid"] or "-", spare=4),
    "parent_uuid": Column("SLICE OF", lambda row: row["parent_uuid"] or "-", spare=5),
    "fault": Column("FAULT", lambda row: row["fault"] or "-", folds=True, below=True),
}

Kind = Annotated[Literal["gpu", "tpu"], typer.Option("--device", help="The kind of the devices.")]
Numbers = Annotated[
    list[str], typer.Argument(metavar="DEVICE_ID...", help="Numbers of devices on their host; also as 0-3 and 0,2.")
]


def _numbers(texts: list[str]) -> list[int]:
    """The numbers that `3`, `0-2` and `0,2` name, each once."""
    found: list[int] = []
    for part in (part for text in texts for part in text.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + MOST_SIMULATED:
            raise typer.BadParameter(f"DEVICE_ID must be a number as 3, or several as 0-2 and 0,2, but is {part!r}")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _withheld(row: Row) -> str:
    return f"{format_bytes(row['withheld_bytes'])}: {row['withheld_for']}" if row["withheld_bytes"] else "-"


@devices.command("list")
def list_(as_json: AsJson = False) -> None:
    """List every device of every host.

    Its state, its memory, and what could be leased of it now.
    """
    with closing(open_judged(Settings.load())) as book:
        rows = audit.capacity(book)
    columns = (*COLUMNS, *(column for key, column in DISCOVERED.items() if any(row[key] for row in rows)))
    nothing = "no devices: `jayrun devices discover` finds NVIDIA GPUs, `jayrun devices declare` adds any others"
    show_rows(rows, columns, as_json=as_json, nothing=nothing)


@devices.command()
def discover(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be entered.")] = False,
    as_json: AsJson = False,
) -> None:
    """Enter the NVIDIA GPUs of this host as the driver shows them.

    Adds those that the book does not have, MIG slices too, and marks what does not work. Leases stay, and so does a
    declared capacity. From then on programs on this host look again by themselves. Exit code 1 when the driver cannot
    be asked.
    """
    seen, rows = _look(Settings.load(), dry_run=dry_run)
    reading, outcome = seen.reading, seen.outcome
    if as_json:
        found = {"driver": reading.driver, "cuda": reading.cuda, "problem": reading.problem, "sees_all": seen.sees_all}
        changed = [asdict(change) for change in outcome.changes]
        typer.echo(to_json({**found, "changes": changed, "notes": list(outcome.notes), "devices": rows}))
    else:
        for line in _told(seen):
            typer.echo(line)
        for note in outcome.notes:
            typer.echo(f"note: {note}", err=True)
    if reading.problem is not None:
        typer.echo(f"error: {reading.problem}. Other devices are declared: `jayrun devices declare --help`", err=True)
        raise typer.Exit(FAILED)


def _look(settings: Settings, *, dry_run: bool) -> tuple[Look, list[Row]]:
    """What is seen and entered, and the devices of this host after that."""
    try:
        opened = open_book(settings, start=not dry_run and nvml.is_installed())
    except BookUnreachable:
        if not dry_run and nvml.is_installed():
            raise
        return hardware.preview(None, None), []  # nothing to enter, or not now
    with closing(opened) as book:
        if dry_run:
            host_id = holders.find_own_host(book, settings.host_id)
            seen = hardware.preview(book, host_id)
        else:
            host_id = holders.attest_host(book, settings.host_id)
            seen = hardware.look(book, host_id, adds=True)
        return seen, [row for row in audit.capacity(book) if row["host_id"] == host_id]


def _told(seen: Look) -> Iterator[str]:
    reading = seen.reading
    if reading.problem is None:
        slices = sum(each.parent_uuid is not None for each in reading.devices)
        found = [f"{len(reading.devices) - slices} GPU(s)", *([f"{slices} MIG slice(s)"] if slices else [])]
        with_ = f" with driver {reading.driver or 'of unknown version'}, CUDA {reading.cuda or 'unknown'}"
        yield f"found {' and '.join(found)}{with_}" + ("" if seen.sees_all else "; others may be hidden from here")
    alike: dict[tuple[str, str], list[int]] = {}
    for change in seen.outcome.changes:
        for what in change.changes:
            alike.setdefault((change.device, what), []).append(change.device_id)
    for (kind, what), numbers in alike.items():
        yield f"{kind} {ranges(numbers)} {printable(what)}"
    if not alike and reading.problem is None:
        yield "nothing has changed"


@devices.command()
def reserve(
    numbers: Numbers,
    gb: Annotated[float, typer.Option("--gb", metavar="GB", help="Decimal gigabytes of each; 0: nothing.")],
    device: Kind = "gpu",
    host: HostName = None,
    as_json: AsJson = False,
) -> None:
    """Leave some memory of discovered devices to others.

    So much of what the driver reports is not leased: for a desktop, say, or for programs that do not ask jayrun.
    """
    with checked_arguments():
        reserve_bytes = gigabytes_to_bytes(gb, "--gb")
    chosen = _numbers(numbers)

    def change(book: Book, host_id: int) -> None:
        booked.set_reserve(book, host_id, kind=device, host_indexes=chosen, reserve_bytes=reserve_bytes)
        admission.combine(book, host_id)

    only = {(str(device), number) for number in chosen}
    done = f"{format_bytes(reserve_bytes)} of {device} {ranges(chosen)} are left to others"
    _change(change, host=host, as_json=as_json, done=done, only=only)


@devices.command()
def declare(
    device: Kind = "gpu",
    backend: Annotated[
        list[Backend] | None,
        typer.Option(
            metavar="|".join(Backend),
            help="Software that the device is used by; again for more. Default for a gpu: cuda.",
        ),
    ] = None,
    device_id: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="The device's number on its host; again for more of the same kind."),
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="Decimal gigabytes that may be leased of each device.")
    ] = None,
    exclusive_only: Annotated[bool, typer.Option("--exclusive-only", help="One lease at a time.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NxMGB", help="N CUDA GPUs of M gigabytes, numbered from 0, such as 8x80GB, to try things out."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="DEVICES.TOML", help="A file with a [[device]] table for each device.")
    ] = None,
    host: HostName = None,
    as_json: AsJson = False,
) -> None:
    """Declare devices of this host.

    In one of three ways: by --device-id and --memory-gb, from a file, or simulated. Declaring again updates.
    Leases stay, also where a device gets smaller than what is leased of it.
    """
    by_options = bool(device_id) or memory_gb is not None
    if by_options + (simulate is not None) + (file is not None) != 1:
        raise typer.BadParameter("give either --device-id and --memory-gb, or --simulate, or --file")
    if not by_options and (backend or exclusive_only or device != "gpu"):
        raise typer.BadParameter("--device, --backend and --exclusive-only go with --device-id, not with the others")
    if file is not None:
        declared = load_devices(file)
    elif simulate is not None:
        declared = _simulated(simulate)
    elif not device_id or memory_gb is None:
        raise typer.BadParameter("--device-id and --memory-gb go together")
    else:
        if len(set(device_id)) < len(device_id):
            raise typer.BadParameter("the same --device-id is given twice")
        if device != "gpu" and not backend:
            raise typer.BadParameter(f"a {device} needs --backend, for example {Backend.XLA}")
        kind, backends = Device(device), backend or [Backend.CUDA]
        with checked_arguments():
            for number in device_id:
                whole_number(number, "--device-id")
            _check_memory(memory_gb, "--memory-gb")
            declared = [RuntimeDevice(kind, backends, number, memory_gb, exclusive_only) for number in device_id]

    def change(book: Book, host_id: int) -> None:
        booked.declare(book, host_id, declared)
        admission.combine(book, host_id)

    only = {(each.device.value, each.device_id) for each in declared}
    _change(change, host=host, as_json=as_json, done=f"declared {_summary(declared)}", start=True, only=only)


@devices.command()
def drain(numbers: Numbers, device: Kind = "gpu", host: HostName = None, as_json: AsJson = False) -> None:
    """Give devices no new leases.

    Those that they carry stay until they end.
    """
    _set_state(numbers, device, DeviceState.DRAINING, host=host, as_json=as_json, verb="draining")


@devices.command()
def resume(numbers: Numbers, device: Kind = "gpu", host: HostName = None, as_json: AsJson = False) -> None:
    """Let drained devices take leases again."""
    _set_state(numbers, device, DeviceState.ONLINE, host=host, as_json=as_json, verb="online:")


@devices.command()
def ignore(
    numbers: Numbers,
    below_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="What a process may use beside its lease, and others without one together."),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A program that may use them without a lease; again for more. Replaces all."),
    ] = None,
    no_commands: Annotated[bool, typer.Option("--no-commands", help="No program may.")] = False,
    device: Kind = "gpu",
    host: HostName = None,
    as_json: AsJson = False,
) -> None:
    """Say what `jayrun audit` passes over.

    That is what a desktop's windows use, and what a program takes beside the memory that it asks for.
    """
    if below_gb is None and not command and not no_commands:
        raise typer.BadParameter("give --below-gb, --command or --no-commands")
    if command and no_commands:
        raise typer.BadParameter("--command and --no-commands exclude each other")
    with checked_arguments():
        below_bytes = None if below_gb is None else gigabytes_to_bytes(below_gb, "--below-gb")
        if command and "" in command:
            raise ValueError("--command must name a program, but is empty")
    names = [] if no_commands else command
    chosen = _numbers(numbers)

    def change(book: Book, host_id: int) -> None:
        booked.ignore(book, host_id, kind=device, host_indexes=chosen, below_bytes=below_bytes, commands=names)

    only = {(str(device), number) for number in chosen}
    _change(change, host=host, as_json=as_json, done=f"the audit of {device} {ranges(chosen)} is changed", only=only)


@devices.command()
def remove(numbers: Numbers, device: Kind = "gpu", host: HostName = None, as_json: AsJson = False) -> None:
    """Take devices that carry no leases out of the book.

    All of them or none; their history stays.
    """
    chosen = _numbers(numbers)

    def change(book: Book, host_id: int) -> None:
        booked.remove(book, host_id, kind=device, host_indexes=chosen)
        admission.combine(book, host_id)

    _change(change, host=host, as_json=as_json, done=f"removed {device} {ranges(chosen)}")


def _set_state(
    numbers: list[str], device: str, state: DeviceState, *, host: str | None, as_json: bool, verb: str
) -> None:
    chosen = _numbers(numbers)

    def change(book: Book, host_id: int) -> None:
        booked.set_state(book, host_id, kind=device, host_indexes=chosen, state=state)
        admission.combine(book, host_id)

    only = {(str(device), number) for number in chosen}
    _change(change, host=host, as_json=as_json, done=f"{verb} {device} {ranges(chosen)}", only=only)


def _change(
    change: Callable[[Book, int], None],
    *,
    host: str | None,
    as_json: bool,
    done: str,
    start: bool = False,
    only: set[tuple[str, int]] | None = None,
) -> None:
    """Change the devices of one host, and say what was done, or with JSON what there is now (`only` these)."""
    settings = Settings.load()
    with closing(open_book(settings, start=start)) as book:
        host_id = holders.attest_host(book, settings.host_id) if host is None else booked.find_host(book, host)
        change(book, host_id)
        rows = [
            row
            for row in audit.capacity(book)
            if row["host_id"] == host_id and (only is None or (row["device"], row["device_id"]) in only)
        ]
    if as_json:
        show_rows(rows, COLUMNS, as_json=True, nothing="")
    else:
        typer.echo(done)


def _simulated(text: str) -> list[RuntimeDevice]:
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?) ?GB", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"--simulate must be NxMGB, such as 8x80GB, but is {text!r}")
    with checked_arguments():
        count = whole_number(int(found[1]), "the N of --simulate NxMGB", minimum=1, maximum=MOST_SIMULATED)
        size = float(found[2])
        _check_memory(size, "the M of --simulate NxMGB")
        return [RuntimeDevice(Device.GPU, [Backend.CUDA], number, size) for number in range(count)]


def _check_memory(memory_gb: float, name: str) -> None:
    if gigabytes_to_bytes(memory_gb, name) == 0:
        raise ValueError(f"{name} must be positive, but is {memory_gb:g}")


def _summary(declared: list[RuntimeDevice]) -> str:
    """`gpu 0-7: 80 GB, cuda; tpu 0: 16 GB, xla, exclusive only`."""
    alike: dict[tuple[str, str], list[int]] = {}
    for each in declared:
        what = f"{format_bytes(each.memory_bytes)}, {'+'.join(each.backends)}"
        what += ", exclusive only" if each.exclusive_only else ""
        alike.setdefault((each.device.value, what), []).append(each.device_id)
    return "; ".join(f"{kind} {ranges(numbers)}: {what}" for (kind, what), numbers in alike.items())
