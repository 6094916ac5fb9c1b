"""Exit codes: what the shell is told about each kind of failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from jayrun.embedded import NotADatabaseUrl
from jayrun.errors import (
    BookUnreachable,
    DeviceFileError,
    ExecutionFailed,
    JayrunError,
    PlacementImpossible,
    PlacementTimeout,
    UnknownDevice,
    UnknownHost,
    UnknownId,
)

FAILED = 1
USAGE = 2
IMPOSSIBLE = 3
TIMED_OUT = 4
UNREACHABLE = 5
INTERRUPTED = 130


def exit_code(error: JayrunError) -> int:
    """The code of a command that `error` ended."""
    match error:
        case BookUnreachable():
            return UNREACHABLE
        case PlacementImpossible():
            return IMPOSSIBLE
        case ExecutionFailed(failure={"type": "PlacementImpossible"}):
            return IMPOSSIBLE
        case PlacementTimeout():
            return TIMED_OUT
        case UnknownHost() | UnknownDevice() | UnknownId() | DeviceFileError() | NotADatabaseUrl():
            return USAGE
        case _:
            return FAILED


@contextmanager
def checked_arguments() -> Iterator[None]:
    """Around the place where arguments become values: a TypeError or ValueError there is the caller's mistake.

    Anywhere else they are ours, and keep their traceback.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
