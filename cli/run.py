"""`jayrun run`: give a command its turn on the devices of this host."""

from __future__ import annotations

import errno
from typing import Annotated, Any
from uuid import UUID

import typer
from typer.core import TyperCommand

from jayrun import probes
from jayrun.devices.visible import Mask
from jayrun.domain.devices import Backend
from jayrun.domain.requests import Request
from jayrun.domain.units import format_bytes
from jayrun.errors import JayrunError
from jayrun.runtime.leftovers import OnExit
from jayrun.runtime.saying import say
from jayrun.settings import Settings
from jayrun.store.transactions import Book

from .exits import USAGE, exit_code
from .options import DeviceId, Exclusive, Gpus, MemoryGb, Priority, TotalMemoryGb, UsedBy, check_priority, request_of

PATIENCE_SECONDS = 3.0
"""How long a lost connection is tried again before it is said; a wait, and the command, go on all the same."""
OWN_FAILURE = 120
"""Added to the exit code of a failure of jayrun's own, so that it is told apart from the command's."""


class RunCommand(TyperCommand):
    """Mistakes in the options get an exit code of their own, which no command's code 2 is mistaken for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer exports no base class of its usage errors; their exit code tells them
            if getattr(error, "exit_code", None) == 2:
                error.exit_code = OWN_FAILURE + 2  # type: ignore[attr-defined]
            raise


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGUMENTS]", help="The command, after `--`.")],
    gpus: Gpus = "1",
    memory_gb: MemoryGb = None,
    total_memory_gb: TotalMemoryGb = None,
    exclusive: Exclusive = False,
    device_id: DeviceId = None,
    backend: UsedBy = Backend.CUDA,
    priority: Priority = 0,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds of waiting.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Give up at once when nothing is free.")] = False,
    label: Annotated[str, typer.Option(help="Free text shown beside the lease.")] = "",
    on_exit: Annotated[
        OnExit,
        typer.Option(help="What becomes of processes that COMMAND leaves running: waited for, or ended."),
    ] = OnExit.WAIT,
    mask: Annotated[
        Mask, typer.Option(help="How COMMAND is told its devices: by UUID where all are known, or by number.")
    ] = Mask.UUID,
    print_docker_flags: Annotated[
        bool,
        typer.Option(
            "--print-docker-flags",
            help="Give COMMAND the options for `docker run` in JAYRUN_DOCKER_FLAGS, and print them on standard error.",
        ),
    ] = False,
) -> None:
    """Run COMMAND on GPUs of this host when they are free.

    It sees them, and no others, by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; with --backend rocm by
    ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES, with xpu by ZE_AFFINITY_MASK. Where these are set already, only the
    devices that they name are given, and --device-id counts within them. The lease lives as long as the command and all
    that it started, also when jayrun itself is killed.

    Ctrl-C, SIGTERM and SIGHUP reach COMMAND, which answers them. When COMMAND has ended and left processes running,
    jayrun waits for them: then Ctrl-C or SIGTERM sends them SIGTERM, a second one SIGKILL, and SIGHUP is passed on.
    With --on-exit=kill they get SIGTERM at once, and SIGKILL after 10 seconds.

    Inside another `jayrun run` (JAYRUN_LEASE is set) COMMAND gets devices of that one's lease, at once or never.

    Exit code: the command's own (128 +
    signal); 120 + jayrun's code for failures of jayrun (122 usage, 123 impossible, 124 timed out waiting, 125 database
    not reachable, 121 other); 126 and 127 when the command cannot be executed.
    """
    from jayrun.runtime.command import Terms, run_command
    from jayrun.runtime.numbering import look, typed
    from jayrun.runtime.order import misread_order
    from jayrun.runtime.paused import CannotExecute, PausedChild
    from jayrun.runtime.within import surrounding
    from jayrun.store import devices

    try:
        request = request_of(gpus, memory_gb, exclusive, device_id, total_memory_gb=total_memory_gb, backend=backend)
        check_priority(priority)
        seconds = _seconds(timeout, no_wait)
    except (TypeError, ValueError) as error:
        raise _failure(error, USAGE) from None
    settings = Settings.load()
    probes.arm_from_settings(settings.probes)
    child: PausedChild | None = None
    try:
        child = PausedChild(command)  # forked before any connection or thread exists
        book, host_id = _open_book(settings)
        if (told := misread_order(settings.masks)) is not None:
            say(f"jayrun: {told}")
        numbering = look(devices.names(book, host_id), settings.masks, one_slice=False)
        try:
            request = typed(request, numbering)
        except ValueError as error:
            raise _failure(error, USAGE) from None
        terms = Terms(
            request=request,
            priority=priority,
            timeout_seconds=seconds,
            label=label or settings.label,
            on_exit=on_exit,
            mask=mask,
            docker=print_docker_flags,
        )
        code = run_command(
            child,
            book,
            host_id,
            terms,
            numbering=numbering,
            command=command,
            waiting=_Progress(book, request),
            around=surrounding(book, host_id, settings.lease, numbering.visible),
        )
    except CannotExecute as error:
        say(f"jayrun: {error}")
        raise typer.Exit(127 if error.number == errno.ENOENT else 126) from None
    except JayrunError as error:
        raise _failure(error, exit_code(error)) from None
    finally:
        if child is not None:
            child.dismiss()
    raise typer.Exit(code)


def _seconds(timeout: float | None, no_wait: bool) -> float | None:
    if no_wait and timeout is not None:
        raise ValueError(f"--no-wait and --timeout {timeout:g} exclude each other")
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"--timeout must be 0 or more seconds, but is {timeout}")
    return 0 if no_wait else timeout


def _open_book(settings: Settings) -> tuple[Book, int]:
    from jayrun.store.holders import attest_host

    from .book import open_book

    book = open_book(settings, start=True)
    host_id = attest_host(book, settings.host_id)
    book.patience_seconds = PATIENCE_SECONDS
    return book, host_id


def _failure(error: BaseException, code: int) -> typer.Exit:
    say(f"error: {error}")
    return typer.Exit(OWN_FAILURE + code)


class _Progress:
    """Says on standard error, when it has changed, at which place the command waits and who holds what."""

    def __init__(self, book: Book, request: Request) -> None:
        self._book = book
        self._request = request
        self._said = ""

    def __call__(self, execution_id: UUID) -> None:
        from jayrun.store import audit

        queue = audit.queue(self._book)
        mine = next((row for row in queue if row["execution_id"] == execution_id), None)
        if mine is None:
            return
        behind = [row for row in queue if row["host_id"] == mine["host_id"]]
        held = [_held(row) for row in audit.leases(self._book) if self._is_in_the_way(row, mine)]
        shown = held[:5] + ([f"and {len(held) - 5} more"] if len(held) > 5 else [])
        waits_for = f"held: {'; '.join(shown)}" if shown else str(mine["reason"])
        text = f"jayrun: waiting for {mine['asks']}, place {mine['position']} of {len(behind)}; {waits_for}"
        if text != self._said:
            say(text)
            self._said = text

    def _is_in_the_way(self, row: dict[str, Any], mine: dict[str, Any]) -> bool:
        wanted = self._request.device_id
        return row["host_id"] == mine["host_id"] and (wanted is None or wanted in row["device_ids"])


def _held(row: dict[str, object]) -> str:
    devices = row["device_ids"]
    names = ",".join(map(str, devices)) if isinstance(devices, list) else "?"
    amount = "exclusive" if row["exclusive"] else format_bytes(int(str(row["memory_bytes"])))
    return f"gpu {names} {amount} by {row['user']} (pid {row['pid']}, {row['execution']})"
