"""What happens when an execution fails: how often it is tried again, and what its failure does to the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from jayrun.domain.checks import whole_number
from jayrun.errors import (
    PlacementCancelled,
    PlacementImpossible,
    PlacementSignalSwallowed,
    PlacementTimeout,
    RequestSequenceChanged,
)

# These end an execution whatever its policy says: trying again could only repeat them, or was not wanted.
_TERMINAL = (RequestSequenceChanged, PlacementSignalSwallowed, PlacementTimeout, PlacementCancelled)


class FailureMode(StrEnum):
    """What a failed execution does to its Runtime."""

    CONTINUE = "continue"
    FAIL_FAST = "fail_fast"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an execution is attempted, and after which exceptions. Waiting is no attempt and uses none.

    `max_attempts`: 1 means no retry. `retry_on`: exception classes; an impossible placement is retried only when
    `PlacementImpossible` itself is named. Raises TypeError and ValueError for anything else.
    """

    max_attempts: int = 1
    retry_on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        named: object = self.retry_on
        object.__setattr__(self, "max_attempts", whole_number(self.max_attempts, "max_attempts", minimum=1))
        if isinstance(named, str) or not isinstance(named, Iterable):
            raise TypeError(f"retry_on must be a tuple of exception classes, not {named!r}")
        classes = tuple(named)
        for each in classes:
            if not (isinstance(each, type) and issubclass(each, Exception)):
                raise TypeError(f"retry_on must name exception classes, not {each!r}")
        object.__setattr__(self, "retry_on", classes)

    def allows(self, error: BaseException, attempt: int) -> bool:
        """Whether an execution whose attempt of that number raised `error` is tried once more."""
        if attempt >= self.max_attempts or isinstance(error, _TERMINAL) or not isinstance(error, self.retry_on):
            return False
        return not isinstance(error, PlacementImpossible) or any(
            issubclass(each, PlacementImpossible) for each in self.retry_on
        )
