"""Every exception a user may catch, each saying who must act.

Bad arguments stay `TypeError` and `ValueError`; everything below derives from `JayrunError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID


class JayrunError(Exception):
    """The root of jayrun's own exceptions."""


# --- asking for capacity ---------------------------------------------------------------------------------------------


class PlacementError(JayrunError):
    """A placement request ended without a placement."""


class PlacementImpossible(PlacementError):
    """No combination of the declared devices, were they empty, could ever satisfy the recorded sequence.

    The message carries the numbers per device. Ask for less, or declare more devices.
    """


class PlacementTimeout(PlacementError):
    """The execution's waits together took longer than its `timeout`; nothing of it is left in the book."""


class PlacementDeadlock(PlacementError):
    """Everyone who could make room only waits in turn, in a circle that would never end; the message shows it.

    Drop data before asking for more, or ask for everything in one execution.
    """


class PlacementCancelled(PlacementError):
    """The execution was cancelled while it waited or before it could ask again."""


class PlacementSignalSwallowed(PlacementError):
    """User code caught the internal signal that ends a waiting invocation, and went on without a lease."""


class RequestSequenceChanged(PlacementError):
    """An invocation issued other requests than the recorded sequence; the message shows both side by side."""


class ConcurrentRequests(PlacementError):
    """Two threads or tasks of one invocation asked for a placement at once; requests need one order."""


class PlacementUnavailableHere(PlacementError):
    """`self.placement` was used where no invocation runs: outside `execute()`/`setup()`, or in a forked child; or a
    placement was unpickled on another host than its lease's."""


class LeaseLost(PlacementError):
    """This process lost a lease though it is alive, or came too late for one: the capacity may be somebody else's now.

    `lease_id` and `epoch` name it. Stop using the device, drop the data, and ask anew.
    """

    def __init__(self, message: str = "", lease_id: UUID | None = None, epoch: int | None = None) -> None:
        super().__init__(message)
        self.lease_id = lease_id
        self.epoch = epoch


class ExecutionFailed(JayrunError):
    """A submitted execution has failed; `failure` is what the book has of it (type, message, traceback, attempt, host,
    pid, at)."""

    def __init__(self, message: str = "", failure: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failure = dict(failure or {})


class RuntimeClosed(JayrunError):
    """The Runtime was closed, or failed fast, and takes no new work."""


# --- the book and its server -----------------------------------------------------------------------------------------


class BookError(JayrunError):
    """The database could not do what was asked."""


class BookUnreachable(BookError):
    """No connection to the database; the message says which address, why, and what to run."""


class BookDenied(BookError):
    """The database does not let this user do it; the message says who can change that."""


class BookBusy(BookError):
    """A transaction was refused again and again (serialization, deadlock) until its retry budget was used up, or its
    statements were cut off all the time, by `lock_timeout` or `statement_timeout`; the message names the limit."""


class SchemaMismatch(BookError):
    """The book's schema is older or newer than this jayrun; the message says what to run."""


class UnknownDevice(BookError):
    """No such device in the book; the message says which exist."""


class UnknownHost(BookError):
    """No such host in the book; the message says which exist."""


class HostClash(BookError):
    """Two machines that run both have one identity in the book; the message names them and says what to set."""


class StillAlive(BookError):
    """A host or holder that shows life was not declared gone; the message says what forcing it would risk."""


class UnknownId(BookError):
    """No lease, execution or holder has this id; the message says how to list those that exist."""


class KeyTaken(BookError):
    """Something else was submitted with the same key; the message shows both. Choose another key."""


class NotRetryable(BookError):
    """The execution cannot be run again: it lived in a process and ended with it, or it has succeeded."""


class DeviceInUse(BookError):
    """A device that still carries leases cannot be removed; drain it first."""


class NothingReserved(BookError):
    """No memory of this device can be left to others: its capacity is declared, or all of it would go."""


class DeviceFileError(JayrunError):
    """A device file has a mistake; the message names file, line and key."""


class ServerError(JayrunError):
    """The PostgreSQL server that jayrun runs itself could not be started, stopped or reached."""
