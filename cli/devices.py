"""`jayrun devices`: which accelerators may be leased."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from jayrun.devices.declared import load_devices
from jayrun.domain.devices import Backend, Device, DeviceState, RuntimeDevice
from jayrun.domain.units import format_bytes
from jayrun.settings import Settings
from jayrun.store import admission, audit, holders
from jayrun.store import devices as booked
from jayrun.store.transactions import Book

from .book import open_book
from .exits import checked_arguments
from .options import AsJson
from .render import Column, ranges, show_rows

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
    Column("NAME", lambda row: row["name"] or row["device_uuid"] or "-", folds=True, spare=3),
)

Host = Annotated[
    str | None, typer.Option("--host", metavar="NAME", help="Another host of the book, by name or identity.")
]
Kind = Annotated[Device, typer.Option("--device", help="The kind of the devices.")]
Numbers = Annotated[list[int], typer.Argument(metavar="DEVICE_ID...", help="Numbers of devices on their host.")]


@devices.command("list")
def list_(as_json: AsJson = False) -> None:
    """List every declared device of every host: its state, its memory, and what could be leased now."""
    with closing(open_book(Settings.load())) as book:
        rows = audit.capacity(book)
    show_rows(rows, COLUMNS, as_json=as_json, nothing="no devices: `jayrun devices declare` adds some")


@devices.command()
def declare(
    device: Kind = Device.GPU,
    backend: Annotated[
        list[Backend] | None,
        typer.Option(
            metavar="|".join(Backend),
            help="Software that the device is used by; again for more. Default for a GPU: cuda.",
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
    host: Host = None,
    as_json: AsJson = False,
) -> None:
    """Declare devices of this host, in one of three ways: by options, from a file, or simulated.

    Declaring again updates. Leases stay, also where a device gets smaller than what is leased of it.
    """
    by_options = bool(device_id) or memory_gb is not None
    if by_options + (simulate is not None) + (file is not None) != 1:
        raise typer.BadParameter("give either --device-id and --memory-gb, or --simulate, or --file")
    if not by_options and (backend or exclusive_only or device is not Device.GPU):
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
        backends = backend or ([Backend.CUDA] if device is Device.GPU else [])
        with checked_arguments():
            declared = [RuntimeDevice(device, backends, number, memory_gb, exclusive_only) for number in device_id]

    def change(book: Book, host_id: int) -> None:
        booked.declare(book, host_id, declared)
        admission.combine(book, host_id)

    _change(change, host=host, as_json=as_json, done=f"declared {_summary(declared)}", start=True)


@devices.command()
def drain(numbers: Numbers, device: Kind = Device.GPU, host: Host = None, as_json: AsJson = False) -> None:
    """Give devices no new leases; those that they carry stay until they end."""
    _set_state(numbers, device, DeviceState.DRAINING, host=host, as_json=as_json, verb="draining")


@devices.command()
def resume(numbers: Numbers, device: Kind = Device.GPU, host: Host = None, as_json: AsJson = False) -> None:
    """Let drained devices take leases again."""
    _set_state(numbers, device, DeviceState.ONLINE, host=host, as_json=as_json, verb="online:")


@devices.command()
def remove(numbers: Numbers, device: Kind = Device.GPU, host: Host = None, as_json: AsJson = False) -> None:
    """Take devices that carry no leases out of the book; their history stays."""

    def change(book: Book, host_id: int) -> None:
        for number in numbers:
            booked.remove(book, host_id, kind=device.value, host_index=number)
            admission.combine(book, host_id)

    _change(change, host=host, as_json=as_json, done=f"removed {device} {ranges(numbers)}")


def _set_state(
    numbers: list[int], device: Device, state: DeviceState, *, host: str | None, as_json: bool, verb: str
) -> None:
    def change(book: Book, host_id: int) -> None:
        for number in numbers:
            booked.set_state(book, host_id, kind=device.value, host_index=number, state=state)
            admission.combine(book, host_id)

    _change(change, host=host, as_json=as_json, done=f"{verb} {device} {ranges(numbers)}")


def _change(
    change: Callable[[Book, int], None], *, host: str | None, as_json: bool, done: str, start: bool = False
) -> None:
    """Change the devices of one host, and say what was done, or with JSON what there is now."""
    settings = Settings.load()
    with closing(open_book(settings, start=start)) as book:
        host_id = holders.attest_host(book, settings.host_id) if host is None else booked.find_host(book, host)
        change(book, host_id)
        rows = [row for row in audit.capacity(book) if row["host_id"] == host_id]
    if as_json:
        show_rows(rows, COLUMNS, as_json=True, nothing="")
    else:
        typer.echo(done)


def _simulated(text: str) -> list[RuntimeDevice]:
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?) ?GB", text, re.IGNORECASE)
    if found is None or not 1 <= int(found[1]) <= MOST_SIMULATED:
        raise typer.BadParameter(
            f"--simulate must be up to {MOST_SIMULATED} devices and their size, such as 8x80GB, not {text!r}"
        )
    with checked_arguments():
        size = float(found[2])
        return [RuntimeDevice(Device.GPU, [Backend.CUDA], number, size) for number in range(int(found[1]))]


def _summary(declared: list[RuntimeDevice]) -> str:
    """`gpu 0-7: 80 GB, cuda; tpu 0: 16 GB, xla, exclusive only`."""
    alike: dict[tuple[str, str], list[int]] = {}
    for each in declared:
        what = f"{format_bytes(each.memory_bytes)}, {'+'.join(each.backends)}"
        what += ", exclusive only" if each.exclusive_only else ""
        alike.setdefault((each.device.value, what), []).append(each.device_id)
    return "; ".join(f"{kind} {ranges(numbers)}: {what}" for (kind, what), numbers in alike.items())
