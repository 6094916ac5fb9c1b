"""`jayrun can`: whether a request would be granted now, without asking for it."""

from __future__ import annotations

from contextlib import closing
from typing import assert_never

import typer

from jayrun.domain.devices import Backend
from jayrun.domain.explanation import outlook_text
from jayrun.domain.why import Later, Never, Now
from jayrun.settings import Settings
from jayrun.store import devices, holders
from jayrun.store.explain import forecast

from .book import open_book
from .exits import IMPOSSIBLE, TIMED_OUT, checked_arguments
from .options import (
    AsJson,
    DeviceId,
    Exclusive,
    Gpus,
    HostName,
    MemoryGb,
    Priority,
    TotalMemoryGb,
    UsedBy,
    check_priority,
    request_of,
)
from .render import to_json
from .why import outlook_row


def can(
    gpus: Gpus = "1",
    memory_gb: MemoryGb = None,
    total_memory_gb: TotalMemoryGb = None,
    exclusive: Exclusive = False,
    device_id: DeviceId = None,
    backend: UsedBy = Backend.CUDA,
    priority: Priority = 0,
    host: HostName = None,
    as_json: AsJson = False,
) -> None:
    """Say whether GPUs would be granted now; writes nothing.

    Exit code: 0 now, with the devices; 4 not before leases have ended, with the fewest of them and who holds them; 3
    never, with the numbers of each device.
    """
    with checked_arguments():
        request = request_of(gpus, memory_gb, exclusive, device_id, total_memory_gb=total_memory_gb, backend=backend)
        check_priority(priority)
    settings = Settings.load()
    with closing(open_book(settings)) as book:
        own = holders.find_own_host(book, settings.host_id)
        host_id = own if host is None else devices.find_host(book, host)
        outlook = forecast(book, host_id, request, priority=priority, judged=host_id == own)
    if as_json:
        typer.echo(to_json({"asks": request.describe(), **outlook_row(outlook)}))
    else:
        typer.echo("\n".join(outlook_text(outlook, (request,))))
    match outlook:
        case Now():
            return
        case Later():
            raise typer.Exit(TIMED_OUT)
        case Never():
            raise typer.Exit(IMPOSSIBLE)
        case _:
            assert_never(outlook)
