"""jayrun: a durable lease manager for accelerator capacity, on PostgreSQL."""

from __future__ import annotations

from jayrun import errors, placement
from jayrun.domain.devices import RuntimeDevice
from jayrun.runtime.data import Data
from jayrun.runtime.operator import Operator, Resource
from jayrun.runtime.retry import FailureMode, RetryPolicy
from jayrun.runtime.runtime import Runtime
from jayrun.runtime.ticket import Ticket

__all__ = [
    "Data",
    "FailureMode",
    "Operator",
    "Resource",
    "RetryPolicy",
    "Runtime",
    "RuntimeDevice",
    "Ticket",
    "errors",
    "placement",
]
