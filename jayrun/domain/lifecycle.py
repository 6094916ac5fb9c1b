"""The words for what becomes of executions and leases, and the moves between them that are legal."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ExecutionState(StrEnum):
    """Where an execution stands."""

    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    ADMITTED = "admitted"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(StrEnum):
    """Why a lease ended: let go by its last holder, taken from a dead one, or given back without ever being used."""

    RELEASED = "released"
    RECLAIMED = "reclaimed"
    RETURNED = "returned"


class EventKind(StrEnum):
    """What the book's log tells: of leases (the three ends bear the names of `EndReason`), and what an administrator
    declared."""

    PARKED = "parked"
    GRANTED = "granted"
    JOINED = "joined"
    LEFT = "left"
    RELEASED = "released"
    RECLAIMED = "reclaimed"
    RETURNED = "returned"
    DECLARED = "declared"


_READY, _RUNNING, _WAITING, _ADMITTED, _SUCCEEDED, _FAILED, _CANCELLED = ExecutionState

TERMINAL: frozenset[ExecutionState] = frozenset({_SUCCEEDED, _FAILED, _CANCELLED})
"""The states in which an execution has ended."""

EXECUTION_MOVES: Mapping[ExecutionState, frozenset[ExecutionState]] = MappingProxyType(
    {
        _READY: frozenset({_RUNNING, _CANCELLED}),
        _RUNNING: frozenset({_WAITING, _READY, _SUCCEEDED, _FAILED, _CANCELLED}),
        _WAITING: frozenset({_ADMITTED, _READY, _CANCELLED, _FAILED}),
        _ADMITTED: frozenset({_RUNNING, _WAITING, _CANCELLED, _FAILED}),
        _SUCCEEDED: frozenset(),
        # What failed or was cancelled starts again only when a person asks for it.
        _FAILED: frozenset({_READY}),
        _CANCELLED: frozenset({_READY}),
    }
)
"""For each state, the states that may follow it."""
