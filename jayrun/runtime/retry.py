"""What happens when an execution fails: how often it is tried again, and what its failure does to the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from jayrun.domain.checks import MAX_BACKOFF, MAX_PAUSE_SECONDS, number, whole_number
from jayrun.errors import (
    PlacementCancelled,
    PlacementDeadlock,
    PlacementImpossible,
    PlacementSignalSwallowed,
    PlacementTimeout,
    RequestSequenceChanged,
)

# These end an execution whatever its policy says: trying again could only repeat them, or was not wanted.
_TERMINAL = (RequestSequenceChanged, PlacementSignalSwallowed, PlacementTimeout, PlacementDeadlock, PlacementCancelled)


class FailureMode(StrEnum):
    """What a failed execution does to its Runtime."""

    CONTINUE = "continue"
    FAIL_FAST = "fail_fast"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an execution is attempted, and after which exceptions. Waiting is no attempt and uses none.

    `max_attempts`: 1 means no retry. `retry_on`: exception classes; an impossible placement is retried only when
    `PlacementImpossible` itself is named. Before attempt n+1 it pauses for `delay_seconds` times `backoff` to the power
    of n-1, at most 30 days. Raises TypeError and ValueError for anything else.
    """

    max_attempts: int = 1
    retry_on: tuple[type[Exception], ...] = (Exception,)
    delay_seconds: float = 0.0
    backoff: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "delay_seconds", number(self.delay_seconds, "delay_seconds", minimum=0, maximum=MAX_PAUSE_SECONDS)
        )
        object.__setattr__(self, "backoff", number(self.backoff, "backoff", minimum=1, maximum=MAX_BACKOFF))
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

    def pause_seconds(self, attempt: int) -> float:
        """How long to pause after the failure of the attempt of that number."""
        growth = math.exp(min(math.log(self.backoff) * (attempt - 1), 40))  # as the book does it
        return min(self.delay_seconds * growth, MAX_PAUSE_SECONDS)

    def names(self) -> tuple[str, ...]:
        """The names of the exception classes, by which other processes know them."""
        return tuple(each.__name__ for each in self.retry_on)


def allows_by_name(error: BaseException, retry_on: Iterable[str]) -> bool:
    """`RetryPolicy.allows` where the policy came as names from the book: whether `error`, by the name of its class or
    of one that it derives from, is retried."""
    if isinstance(error, _TERMINAL) or not isinstance(error, Exception):
        return False
    named = set(retry_on)
    if isinstance(error, PlacementImpossible):
        return PlacementImpossible.__name__ in named
    return any(each.__name__ in named for each in type(error).__mro__)
