"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from jayrun.domain.checks import MAX_INDEX, whole_number
from jayrun.domain.devices import Backend, Device
from jayrun.domain.requests import MAX_DEVICES, Request
from jayrun.domain.units import gigabytes_to_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: exact values, keyed by the columns of the views.")]
HostName = Annotated[
    str | None, typer.Option("--host", metavar="NAME", help="Another host of the book, by name or identity.")
]
Gpus = Annotated[str, typer.Option(metavar="N|MIN-MAX", help="How many GPUs, all of them or none.")]
MemoryGb = Annotated[
    float | None, typer.Option(help="Decimal gigabytes on each GPU. Without it the GPUs are exclusive.")
]
TotalMemoryGb = Annotated[
    float | None, typer.Option(help="Decimal gigabytes divided among the GPUs, on top of --memory-gb.")
]
UsedBy = Annotated[Backend, typer.Option(metavar="|".join(Backend), help="Software that the GPUs must be used by.")]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="No other lease on these GPUs.")]
DeviceId = Annotated[int | None, typer.Option(help="This GPU of the host and no other (one GPU only).")]
Priority = Annotated[int, typer.Option(help="Higher is served first.")]


def check_priority(priority: int) -> int:
    """`priority` as the book can hold it. Raises ValueError."""
    return whole_number(priority, "--priority", minimum=-MAX_INDEX - 1)


def request_of(
    gpus: str,
    memory_gb: float | None,
    exclusive: bool,
    device_id: int | None,
    *,
    total_memory_gb: float | None = None,
    backend: Backend = Backend.CUDA,
) -> Request:
    """The request that the options mean; `total_memory_gb` are divided among the GPUs. Raises ValueError naming the
    option."""
    counts = re.fullmatch(r"(\d+)(?:-(\d+))?", gpus)
    if counts is None:
        raise ValueError(f"--gpus must be a number or MIN-MAX, but is {gpus!r}")
    fewest, most = (
        whole_number(int(count), "--gpus", minimum=1, maximum=MAX_DEVICES)
        for count in (counts[1], counts[2] or counts[1])
    )
    if fewest > most:
        raise ValueError(f"--gpus {gpus}: the first number is larger")
    for name, gigabytes in (("--memory-gb", memory_gb), ("--total-memory-gb", total_memory_gb)):
        if gigabytes is not None and not gigabytes_to_bytes(gigabytes, name) and not exclusive:
            raise ValueError(f"{name} must be positive without --exclusive")
    if device_id is not None:
        whole_number(device_id, "--device-id")
    alone = exclusive or (memory_gb is None and total_memory_gb is None)
    if most == 1 and fewest == 1 and total_memory_gb is None:
        return Request.single(
            device=Device.GPU, backend=backend, memory_gb=memory_gb or 0, exclusive=alone, device_id=device_id
        )
    if device_id is not None:
        several = f"--gpus is {gpus}" if most > 1 else "--total-memory-gb is for several"
        raise ValueError(f"--device-id names one GPU, but {several}")
    return Request.of_group(
        device=Device.GPU,
        backend=backend,
        group_memory_gb=total_memory_gb or 0,
        per_device_memory_gb=memory_gb or 0,
        min_devices=fewest,
        max_devices=most,
        prefer_max_devices=most > fewest,
        exclusive=alone,
    )
