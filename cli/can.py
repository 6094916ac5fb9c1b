"""`jayrun can`: whether a request would be granted now, without asking for it."""

from __future__ import annotations

from contextlib import closing
from typing import assert_never

import typer

from jayrun import kernel
from jayrun.domain.devices import Backend, Share
from jayrun.domain.explanation import outlook_text
from jayrun.domain.requests import Request
from jayrun.domain.why import Later, Never, Now, Outlook
from jayrun.errors import PlacementImpossible
from jayrun.runtime.numbering import look, typed
from jayrun.runtime.within import surrounding
from jayrun.settings import Settings
from jayrun.store import devices, holders
from jayrun.store.explain import forecast
from jayrun.store.transactions import Book

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
    """Say whether `jayrun run` would be given GPUs now.

    Takes and writes nothing. As there, CUDA_VISIBLE_DEVICES and its like limit what is given, and inside another
    `jayrun run` (JAYRUN_LEASE) it is given of that one's lease. With --host neither counts.

    Exit code: 0 now, with the devices; 4 not before leases have ended, with the fewest of them and who holds them; 3
    never, with the numbers of each device.
    """
    with checked_arguments():
        request = request_of(gpus, memory_gb, exclusive, device_id, total_memory_gb=total_memory_gb, backend=backend)
        check_priority(priority)
    settings = Settings.load()
    with closing(open_book(settings)) as book:
        own = holders.find_own_host(book, settings.host_id)
        if host is None and own is not None:
            request, outlook = _here(book, own, request, priority, settings)
        else:
            host_id = None if host is None else devices.find_host(book, host)
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


def _here(book: Book, host_id: int, request: Request, priority: int, settings: Settings) -> tuple[Request, Outlook]:
    """What a command of this shell may expect, and the request with the number of its device on the host."""
    numbering = look(devices.names(book, host_id), settings.masks, one_slice=False)
    with checked_arguments():
        request = typed(request, numbering)
    around = surrounding(book, host_id, settings.lease, numbering.visible)
    if around is None:
        return request, forecast(book, host_id, request, priority=priority, judged=True, visible=numbering.visible)
    try:
        shares = around.choose(request)
    except PlacementImpossible as error:
        return request, Never(str(error))
    plan = (tuple(Share(each.device_key, each.host_index, each.memory_bytes, each.exclusive) for each in shares),)
    return request, Now(host_id, kernel.host_name(), plan)
