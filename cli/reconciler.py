"""`jayrun reconciler`: the loop that ends what the dead left behind, as a service of the host."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from types import FrameType
from typing import Annotated

import typer

from jayrun import kernel
from jayrun.errors import BookError, HostClash
from jayrun.runtime.hardware import Lookout
from jayrun.runtime.reconciler import Pass, run_pass
from jayrun.settings import Settings
from jayrun.store import holders
from jayrun.store.transactions import Book

from .book import open_book
from .options import AsJson

PATIENCE_SECONDS = 1.0  # a server that restarts within this is not an outage
LOOK_SECONDS = 30.0  # a driver may take so long to answer, or it is not waited for


def reconciler(
    once: Annotated[bool, typer.Option("--once", help="Make one pass, say what it did, and end.")] = False,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.05, max=3600, help="Seconds between passes; default: the book's setting."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """End what dead processes of this host left behind.

    Reclaims what they held, gives back grants that nobody fetched, admits who waits, and looks at the hardware. Every
    running program does the same on the side; this one also does it while none runs. Any number of them may run at
    once. Ends with SIGTERM or Ctrl-C.
    """
    settings = Settings.load()
    with closing(open_book(settings, role="reconciler", start=True, patience_seconds=PATIENCE_SECONDS)) as book:
        if once:
            host_id, did = _pass(book, settings)
            lookout = Lookout(book)
            lookout.tick(host_id)
            lookout.stop(LOOK_SECONDS)
            _tell(did, as_json=as_json)
            return
        _loop(book, settings, _ending_by_signal(), every=every, as_json=as_json)


def _ending_by_signal() -> threading.Event:
    """Set by the first SIGTERM or SIGINT, which lets the pass end; a second one ends the process at once."""
    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        ending.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return ending


def _loop(book: Book, settings: Settings, ending: threading.Event, *, every: float | None, as_json: bool) -> None:
    seconds = every or book.tick_seconds()
    typer.echo(f"watching host {kernel.host_name()} every {seconds:g} s; Ctrl-C ends it", err=True)
    outage_since: float | None = None
    lookout = Lookout(book)
    while not ending.is_set():
        try:
            host_id, did = _pass(book, settings)
            lookout.tick(host_id)
            seconds = every or book.tick_seconds()
        except HostClash:
            raise
        except BookError as error:
            if outage_since is None:
                outage_since = time.monotonic()
                typer.echo(f"the book is out of reach, trying on: {str(error).splitlines()[0]}", err=True)
        else:
            if outage_since is not None:
                typer.echo(f"the book is back after {time.monotonic() - outage_since:.0f} s", err=True)
                outage_since = None
            if did != Pass(0, 0, 0, 0, 0):
                _tell(did, as_json=as_json)
        ending.wait(seconds)
    lookout.stop(PATIENCE_SECONDS)


def _pass(book: Book, settings: Settings) -> tuple[int, Pass]:
    """One pass for this host, which is thereby told to live."""
    host_id = holders.attest_host(book, settings.host_id)
    return host_id, run_pass(book, host_id)


def _tell(did: Pass, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(did)))
    else:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        typer.echo(
            f"{now} reclaimed from {did.reclaimed} dead, took back {did.returned} unclaimed, admitted {did.admitted}, "
            f"flagged {did.flagged} idle, failed {did.failed} in a circle"
        )
